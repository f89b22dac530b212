"""The loop. Plain decoding is this same step with an empty draft.

propose -> forward -> transform -> verify -> truncate -> commit -> observe
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.cache.tree import is_chain
from paceline.device import send
from paceline.engine.controller import Controller
from paceline.engine.output import TokenLogprobs
from paceline.engine.record import Outcome, foregone
from paceline.engine.scheduler import Work
from paceline.engine.trace import record_step
from paceline.engine.verification import Candidate, Walked, verify
from paceline.model.attention import Span
from paceline.model.decoder import Batch, Decoder
from paceline.propose.base import NOTHING, Budget, Proposer, check_draft
from paceline.sampling.transform import NEVER, transform
from paceline.types import Committed, Draft, Sequence, Verdict


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
        offered = self.propose(work)
        drafts = self.controller.trim(offered)
        drafted = time.perf_counter()
        logits, taps, candidates = self.forward(work, drafts)
        scores = transform(logits, [c.span for c in candidates])
        walked = verify(scores, candidates) if candidates else []
        verified = time.perf_counter()
        finished = self.commit(work, candidates, walked, logits, taps)
        self.account(work, candidates, walked, started, drafted, verified)
        self.learn(work, offered, candidates, walked, started, drafted, verified)
        return finished

    def propose(self, work: Seq[Work]) -> list[Draft]:
        """Drafts for the sequences that decode; those still in their prompt get a budget of 0."""
        self.controller.present = [item.sequence.id for item in work if item.samples]
        self.controller.alone = len(work) == 1 and self.proposer.settled
        budgets = [self._budget(item) for item in work]
        drafts = self.proposer.propose([item.sequence for item in work], budgets)
        for draft, budget in zip(drafts, budgets, strict=True):
            check_draft(self.proposer.name, draft, budget, self.vocab_size)
        return [draft.on(self.target.device) for draft in drafts]

    def forward(self, work: Seq[Work], drafts: Seq[Draft]) -> tuple[Tensor, dict[int, Tensor], list[Candidate]]:
        """One target forward of every pending token and draft: logits [R, V] of the rows that are sampled, the taps
        [T, H] that the proposer needs, and who samples."""
        spans, fed = [], []
        sampled: list[int] = []
        candidates: list[Candidate] = []
        start = 0
        for item, draft in zip(work, drafts, strict=True):
            sequence, begin = item.sequence, item.sequence.committed
            assert sequence.cache is not None
            count = item.count + draft.size
            sequence.cache.append(count)
            parents = None if is_chain(draft.parents) else (-1, *(parent + 1 for parent in draft.parents))
            spans.append(Span(sequence.cache, start, count, begin, parents))
            fed += [send(torch.tensor(sequence.tokens[begin : begin + item.count]), self.target.device), draft.tokens]
            if item.samples:
                candidates.append(Candidate(sequence, draft, len(sampled)))
                sampled += range(start + item.count - 1, start + count)
            start += count
        batch = Batch(torch.cat(fed), spans, self.pool, taps=self.proposer.needs.taps)
        hidden, taps = self.target.forward(batch)
        if not candidates:
            return hidden.new_empty(0, self.vocab_size), taps, candidates
        if len(sampled) < hidden.shape[0]:
            hidden = hidden[send(torch.tensor(sampled), self.target.device)]
        logits = self.target.logits(hidden)
        if self.vocab_size < logits.shape[1]:
            logits[:, self.vocab_size :] = NEVER
        return logits, taps, candidates

    def commit(
        self, work: Seq[Work], candidates: Seq[Candidate], walked: Seq[Walked], logits: Tensor,
        taps: Mapping[int, Tensor],
    ) -> list[Sequence]:  # fmt: skip
        """Truncate at the first end, then commit: what lies past a stop reaches no cache and no proposer."""
        finished = []
        found = {id(c.sequence): (c, w) for c, w in zip(candidates, walked, strict=True)}
        start = 0
        for item in work:
            sequence = item.sequence
            assert sequence.cache is not None
            rows, known, verdict, size = list(range(item.count)), sequence.tokens, None, 0
            if item.samples:
                candidate, (path, tokens) = found[id(sequence)]
                kept = truncate(sequence, tokens)
                record_logprobs(candidate, path, kept, logits)
                draft, size = candidate.draft, candidate.draft.size
                rows += [item.count + node for node in path[: len(kept) - 1]]
                verdict = Verdict(size, draft.original(path[: len(kept)]), draft.depth, len(kept))
                sequence.stats.record(verdict, draft.source or self.proposer.name)
                if not self.reuse_decoded:
                    known = sequence.tokens[: sequence.prompt_length]
            position = sequence.cache.length
            sequence.cache.commit(rows, known)
            own = {tap: select(states, start, rows) for tap, states in taps.items()}
            self.proposer.observe(sequence, Committed(position, len(rows), own, verdict))
            start += item.count + size
            if sequence.finish_reason is not None:
                finished.append(sequence)
        return finished

    def account(
        self, work: Seq[Work], candidates: Seq[Candidate], walked: Seq[Walked],
        started: float, drafted: float, verified: float,
    ) -> None:  # fmt: skip
        """Times and traces to the requests."""
        ended = time.perf_counter()
        sampling = {id(c.sequence) for c in candidates}
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
        for candidate, (path, tokens) in zip(candidates, walked, strict=True):
            if candidate.sequence.trace is not None:
                record_step(candidate, path, tokens, self.proposer.name, drafted - started, verified - drafted)

    def learn(
        self, work: Seq[Work], offered: Seq[Draft], candidates: Seq[Candidate], walked: Seq[Walked],
        started: float, drafted: float, verified: float,
    ) -> None:  # fmt: skip
        """Tell the controller what drafts cost and what became of them; it learns from decoding steps alone."""
        if not all(item.samples and item.count == 1 for item in work):
            return
        outcomes = [
            Outcome(
                c.sequence.id, offer.source or self.proposer.name, c.draft, len(path), offer.depth,
                foregone(offer, c.draft), offer.read,
            )
            for offer, c, (path, _) in zip(offered, candidates, walked, strict=True)
        ]  # fmt: skip
        self.controller.observe(outcomes, verified - drafted, drafted - started)
        if self.controller.alone:
            self.controller.clock(outcomes[0].request, 1 + outcomes[0].accepted, time.perf_counter() - started)

    def _budget(self, item: Work) -> Budget:
        """Tokens still wanted beyond the one that every step yields."""
        sequence = item.sequence
        left = sequence.room - len(sequence.tokens) - 1
        if not item.samples or item.count > 1 or left <= 0:
            return NOTHING
        budget = self.controller.budget(self.proposer.name, sequence.id)
        depth = min(budget.depth, left)
        if depth == 0:
            return NOTHING
        if not self.proposer.needs.trees:
            return Budget(depth, depth)
        # Reserved is what a chain can come to; a wide tree near the end of its room may need more, if there is any.
        assert sequence.cache is not None
        return Budget(depth, sequence.cache.spare(max(depth, budget.nodes)))


def select(states: Tensor, start: int, rows: Seq[int]) -> Tensor:
    """Rows `start + rows` of a tap [T, H]."""
    if rows[-1] == len(rows) - 1:
        return states[start : start + len(rows)]
    return states[send(torch.tensor(rows), states.device) + start]


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


def record_logprobs(candidate: Candidate, path: Seq[int], kept: Seq[int], logits: Tensor) -> None:
    """Raw log-softmax of the kept tokens and of the likeliest, for requests that ask for them."""
    wanted = candidate.sequence.params.logprobs
    if wanted is None:
        return
    wanted = min(wanted, logits.shape[1])
    index = [candidate.start, *(candidate.start + 1 + node for node in path)][: len(kept)]
    rows = logits[send(torch.tensor(index), logits.device)].log_softmax(dim=1)
    own = rows.gather(1, send(torch.tensor(kept), rows.device)[:, None])
    top = rows.topk(wanted, dim=1)
    # One read: float64 holds ids exactly.
    read = torch.cat((own.double(), top.values.double(), top.indices.double()), dim=1).tolist()
    for token, (logprob, *rest) in zip(kept, read, strict=True):
        best = {int(i): value for value, i in zip(rest[:wanted], rest[wanted:], strict=True)}
        candidate.sequence.output.logprobs.append(TokenLogprobs(token, logprob, best))
