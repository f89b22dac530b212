"""The loop. Plain decoding is this same step with an empty draft.

propose -> forward -> transform -> verify -> truncate -> commit -> observe
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.device import send
from paceline.engine.controller import Controller
from paceline.engine.output import TokenLogprobs
from paceline.engine.scheduler import Work
from paceline.engine.verification import Candidate, verify
from paceline.model.attention import Span
from paceline.model.decoder import Batch, Decoder
from paceline.propose.base import Proposer
from paceline.sampling.transform import NEVER, RowSpan, transform
from paceline.types import Draft, Sequence, Verdict


@dataclass
class Stepper:
    """What a step needs. `vocab_size`: ids the tokenizer knows; padded output rows get probability 0.

    `reuse_decoded`: blocks that decoding filled may serve later prompts. Only where a row's bits do not depend on its
    company do they hold what a prefill would give; elsewhere the prompt's own blocks alone are shared.
    """

    target: Decoder
    pool: BlockPool
    proposer: Proposer
    controller: Controller
    vocab_size: int
    reuse_decoded: bool = True

    def step(self, work: Seq[Work]) -> list[Sequence]:
        """Advance every sequence of `work`; returns those that finished. They keep their cache until released."""
        started = time.perf_counter()
        drafts = self.propose(work)
        drafted = time.perf_counter()
        logits, candidates = self.forward(work, drafts)
        scores = transform(logits, [c.span for c in candidates])
        accepted, tokens = verify(scores, candidates) if candidates else (torch.empty(0), torch.empty(0))
        emitted = read(candidates, accepted, tokens)
        verified = time.perf_counter()
        finished = self.commit(work, candidates, emitted, logits)
        self.account(work, candidates, emitted, started, drafted, verified)
        return finished

    def propose(self, work: Seq[Work]) -> list[Draft]:
        """Drafts for the sequences that decode; those still in their prompt get a budget of 0."""
        budgets = [self._budget(item) for item in work]
        drafts = self.proposer.propose([item.sequence for item in work], budgets)
        return [self.controller.trim(draft, len(work) - 1).on(self.target.device) for draft in drafts]

    def forward(self, work: Seq[Work], drafts: Seq[Draft]) -> tuple[Tensor, list[Candidate]]:
        """One target forward of every pending token and draft; logits [R, V] of the rows that are sampled."""
        spans, fed, positions = [], [], []
        sampled: list[int] = []
        candidates: list[Candidate] = []
        start = 0
        for item, draft in zip(work, drafts, strict=True):
            sequence, begin = item.sequence, item.sequence.committed
            assert sequence.cache is not None
            count = item.count + draft.size
            sequence.cache.append(count)
            spans.append(Span(sequence.cache, start, count, begin))
            fed += [send(torch.tensor(sequence.tokens[begin : begin + item.count]), self.target.device), draft.tokens]
            positions.append(torch.arange(begin, begin + count))
            if item.samples:
                rows = draft.size + 1
                span = RowSpan(
                    sequence.params, sequence.tokens, sequence.prompt_length, draft.tokens, len(sampled), rows
                )
                candidates.append(Candidate(sequence, draft, span))
                sampled += range(start + count - rows, start + count)
            start += count
        batch = Batch(torch.cat(fed), send(torch.cat(positions), self.target.device), spans, self.pool)
        hidden, _ = self.target.forward(batch)
        if not candidates:
            return hidden.new_empty(0, self.vocab_size), candidates
        logits = self.target.logits(hidden[send(torch.tensor(sampled), self.target.device)])
        logits[:, self.vocab_size :] = NEVER
        return logits, candidates

    def commit(
        self, work: Seq[Work], candidates: Seq[Candidate], emitted: Seq[list[int]], logits: Tensor
    ) -> list[Sequence]:
        """Truncate at the first end, then commit: what lies past a stop reaches no cache and no proposer."""
        finished = []
        for item in work:
            if not item.samples:
                cache = item.sequence.cache
                assert cache is not None
                cache.commit(range(item.count), item.sequence.tokens)
        for candidate, tokens in zip(candidates, emitted, strict=True):
            sequence = candidate.sequence
            assert sequence.cache is not None
            pending = sequence.pending
            kept = truncate(sequence, tokens)
            record_logprobs(candidate, kept, logits)
            known = sequence.tokens if self.reuse_decoded else sequence.tokens[: sequence.prompt_length]
            sequence.cache.commit(range(pending + len(kept) - 1), known)
            verdict = Verdict(candidate.draft.size, min(len(tokens) - 1, len(kept)))
            sequence.stats.record(verdict.drafted, verdict.accepted)
            self.proposer.observe(sequence, verdict)
            if sequence.finish_reason is not None:
                finished.append(sequence)
        return finished

    def account(
        self, work: Seq[Work], candidates: Seq[Candidate], emitted: Seq[list[int]],
        started: float, drafted: float, verified: float,
    ) -> None:  # fmt: skip
        """Times to the requests and to the controller (which learns from decoding steps alone)."""
        ended = time.perf_counter()
        sampling = {id(c.sequence): c for c in candidates}
        for item in work:
            stats = item.sequence.stats
            stats.draft_seconds += drafted - started
            stats.target_seconds += verified - drafted
            stats.other_seconds += ended - verified
            if id(item.sequence) in sampling:
                stats.target_forwards += 1
                if item.sequence.first_token_at:
                    stats.decode_seconds = ended - item.sequence.first_token_at
                else:
                    item.sequence.first_token_at = ended
                    stats.first_step_tokens = stats.generated_tokens
                    stats.first_token_seconds = ended - item.sequence.admitted_at
        if all(item.samples and item.count == 1 for item in work):
            sizes = sum(c.draft.size for c in candidates)
            hits = sum(len(tokens) - 1 for tokens in emitted)
            self.controller.observe(len(work) + sizes, verified - drafted, sizes, hits, drafted - started)

    def _budget(self, item: Work) -> int:
        """Tokens still wanted beyond the one that every step yields."""
        sequence = item.sequence
        if not item.samples or item.count > 1:
            return 0
        return max(0, min(self.controller.budget(), sequence.room - len(sequence.tokens) - 1))


def read(candidates: Seq[Candidate], accepted: Tensor, tokens: Tensor) -> list[list[int]]:
    """The step's one read from the device: each sequence's accepted drafts and next token."""
    if not candidates:
        return []
    flat = torch.cat([accepted, tokens, *(c.draft.tokens for c in candidates)]).tolist()
    batch = len(candidates)
    emitted, at = [], 2 * batch
    for b, candidate in enumerate(candidates):
        emitted.append(flat[at : at + flat[b]] + [flat[batch + b]])
        at += candidate.draft.size
    return emitted


def truncate(sequence: Sequence, tokens: Seq[int]) -> list[int]:
    """Append `tokens` up to the first that ends the request; returns those that were kept."""
    kept = []
    limit = sequence.room - sequence.prompt_length
    for token in tokens:
        sequence.tokens.append(token)
        kept.append(token)
        sequence.stats.generated_tokens += 1
        sequence.finish_reason = sequence.output.push(token, sequence.stats.generated_tokens, limit)
        if sequence.finish_reason is not None:
            break
    return kept


def record_logprobs(candidate: Candidate, kept: Seq[int], logits: Tensor) -> None:
    """Raw log-softmax of the kept tokens and of the likeliest, for requests that ask for them."""
    wanted = candidate.sequence.params.logprobs
    if wanted is None:
        return
    start = candidate.span.start
    rows = logits[start : start + len(kept)].log_softmax(dim=1)
    own = rows.gather(1, send(torch.tensor(kept), rows.device)[:, None])
    top = rows.topk(wanted, dim=1)
    # One read: float64 holds ids exactly.
    read = torch.cat((own.double(), top.values.double(), top.indices.double()), dim=1).tolist()
    for token, (logprob, *rest) in zip(kept, read, strict=True):
        best = {int(i): value for value, i in zip(rest[:wanted], rest[wanted:], strict=True)}
        candidate.sequence.output.logprobs.append(TokenLogprobs(token, logprob, best))
