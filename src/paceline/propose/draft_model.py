"""A small model of the same vocabulary drafts for the target (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.pool import BlockPool, CacheFull, SequenceCache
from paceline.device import send
from paceline.model.attention import Span
from paceline.model.decoder import Batch
from paceline.sampling.noise import Purpose, key, sample
from paceline.sampling.transform import NEVER, RowSpan, transform
from paceline.types import NO_DRAFT, Draft, Verdict, View
from paceline.weights.load import LoadedModel

FEW = 4  # more new tokens than a step brings: the draft is behind and catches up first


@dataclass
class State:
    """The draft's side of one sequence. Rows behind `cache.length` hold `written` drafted tokens until verified."""

    cache: SequenceCache
    written: int = 0


@dataclass
class Chain:
    """A draft in the making."""

    view: View
    state: State
    budget: int
    tokens: list[Tensor] = field(default_factory=list)  # each a scalar on the device
    q: list[Tensor] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    survival: float = 1.0

    @property
    def wants_more(self) -> bool:
        return len(self.tokens) < self.budget

    @property
    def drafted(self) -> Tensor:
        if not self.tokens:
            return send(NO_DRAFT.tokens, self.state.cache.pool.device)
        return torch.stack(self.tokens)

    def noise_key(self) -> tuple[int, int]:
        """Coupled drafts share the noise of the position. Others draw anew in every step: a draw that was rejected must
        not come back at the same position, since by then it has had its say in how long drafts are."""
        step, position = len(self.view.tokens), len(self.view.tokens) + len(self.tokens)
        if self.view.params.coupled:
            return key(self.view.seed, position, Purpose.SAMPLE)
        return key(self.view.seed, step << 32 | position, Purpose.DRAFT)

    def trust(self, confidence: float, stop_below: float) -> None:
        """Note the draft's own probability of the token just drawn; end here if the whole chain became unlikely."""
        self.confidence.append(confidence)
        self.survival *= confidence
        if self.survival < stop_below:
            self.budget = len(self.tokens)

    def finish(self) -> Draft:
        if not self.tokens:
            return NO_DRAFT
        q = torch.stack(self.q) if self.q else None
        return Draft(self.drafted, q, self.confidence or None)


class DraftModelProposer:
    """Drafts token by token, one batched forward per depth, from its own cache.

    The cache follows the target's tokens: what was drafted and accepted is already there, so each proposal feeds one
    new token (two after a full acceptance). `stop_below()`: stop after a token that brings the product of the
    draft's own probabilities under this (0: never); the weak token itself stays, so that what is verified never
    depends on what was drawn. `vocab_size`: ids the target's tokenizer knows; the draft proposes no others. `width`:
    the target's output rows.
    """

    name = "draft"
    catch_up_rows = 512

    def __init__(
        self, model: LoadedModel, pool: BlockPool, *, vocab_size: int, width: int,
        stop_below: Callable[[], float], prefill_chunk: int = 256,
    ) -> None:  # fmt: skip
        self.model, self.decoder, self.pool = model, model.decoder, pool
        self.vocab_size, self.width = vocab_size, width
        # Looking at a confidence means waiting for it: worth it on a CPU, a stall on an accelerator.
        self.looks = self.decoder.device.type == "cpu"
        self.stop_below = stop_below
        self.prefill_chunk = prefill_chunk
        self._states: dict[int, State] = {}

    def open(self, view: View) -> None:
        """Start from the longest prefix in the draft's own cache; without room there the sequence decodes plainly."""
        room = min(view.room, self.decoder.config.max_positions)
        if len(view.tokens) >= room:
            return
        try:
            self._states[view.id] = State(self.pool.open(view.tokens, room))
        except CacheFull:
            return

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Draft]:
        self._catch_up(views)
        chains = [self._start(view, budget) for view, budget in zip(views, budgets, strict=True)]
        self._extend([chain for chain in chains if chain is not None and chain.budget > 0])
        return [NO_DRAFT if chain is None else chain.finish() for chain in chains]

    def observe(self, view: View, verdict: Verdict) -> None:
        state = self._states.get(view.id)
        if state is not None:
            kept = min(verdict.accepted, state.written)
            state.cache.commit(range(kept), view.tokens[: state.cache.length + kept])
            state.written = 0

    def close(self, view: View) -> None:
        state = self._states.pop(view.id, None)
        if state is not None:
            state.cache.free()

    def _start(self, view: View, budget: int) -> Chain | None:
        """A chain to extend, once the draft has caught up and where its context allows."""
        state = self._states.get(view.id)
        if state is None or len(view.tokens) >= self.decoder.config.max_positions:
            return None
        # A step that failed after drafting left rows behind, and perhaps no token to feed.
        state.written = 0
        state.cache.truncate(min(state.cache.length, len(view.tokens) - 1))
        if len(view.tokens) - state.cache.length > FEW:
            return None
        context = min(view.room, self.decoder.config.max_positions)
        return Chain(view, state, min(budget, context - len(view.tokens)))

    def _catch_up(self, views: Sequence[View]) -> None:
        """One forward for all that are behind: each by at most a chunk, together by at most `catch_up_rows`.

        It runs in the steps of the target's own prefill, so that no decoding step pays for a prompt.
        """
        spans: list[Span] = []
        fed: list[int] = []
        for view in views:
            state = self._states.get(view.id)
            if state is None:
                continue
            begin = state.cache.length
            chunk_end = (begin // self.prefill_chunk + 1) * self.prefill_chunk
            end = min(chunk_end, len(view.tokens) - 1, self.decoder.config.max_positions)
            behind = len(view.tokens) - begin > FEW and end > begin
            if not behind or (fed and len(fed) + end - begin > self.catch_up_rows):
                continue
            state.cache.append(end - begin)
            spans.append(Span(state.cache, len(fed), end - begin, begin))
            fed += view.tokens[begin:end]
        if spans:
            self._forward(spans, torch.tensor(fed))
        by_cache = {id(state.cache): view for view in views if (state := self._states.get(view.id))}
        for span in spans:
            span.cache.commit(range(span.count), by_cache[id(span.cache)].tokens)

    def _extend(self, chains: list[Chain]) -> None:
        if not chains:
            return
        for chain in chains:
            # Room for the tokens that are new to this cache and for all drafts but the last, which is never fed.
            chain.state.cache.append(len(chain.view.tokens) - chain.state.cache.length + chain.budget - 1)
        rows = self._feed_new_tokens(chains)
        self._draw(chains, self._scores(chains, rows))
        while chains := [chain for chain in chains if chain.wants_more]:
            rows = self._feed_last_drafts(chains)
            self._draw(chains, self._scores(chains, rows))

    def _feed_new_tokens(self, chains: list[Chain]) -> Tensor:
        """Forward what the target emitted since; hidden states [B, H] of each chain's last token."""
        spans: list[Span] = []
        fed: list[int] = []
        for chain in chains:
            cache, tokens = chain.state.cache, chain.view.tokens
            spans.append(Span(cache, len(fed), len(tokens) - cache.length, cache.length))
            fed.extend(tokens[cache.length :])
        hidden = self._forward(spans, torch.tensor(fed))
        for chain, span in zip(chains, spans, strict=True):
            chain.state.cache.commit(range(span.count), chain.view.tokens)
        return hidden[send(torch.tensor([span.start + span.count - 1 for span in spans]), hidden.device)]

    def _feed_last_drafts(self, chains: list[Chain]) -> Tensor:
        spans = []
        for row, chain in enumerate(chains):
            spans.append(Span(chain.state.cache, row, 1, chain.state.cache.length + chain.state.written))
            chain.state.written += 1
        return self._forward(spans, torch.stack([chain.tokens[-1] for chain in chains]))

    def _forward(self, spans: list[Span], tokens: Tensor) -> Tensor:
        device = self.decoder.device
        positions = torch.cat([torch.arange(s.position, s.position + s.count) for s in spans])
        batch = Batch(send(tokens, device), send(positions, device), spans, self.pool)
        return self.decoder.forward(batch)[0]

    def _scores(self, chains: list[Chain], hidden: Tensor) -> Tensor:
        """Scores [B, V] after each request's own chain; [B, len(head_ids)] where a reduced vocabulary can stay so."""
        logits = self.decoder.logits(hidden)
        params = [chain.view.params for chain in chains]
        plain = all(p.plain_argmax for p in params)
        if self.decoder.head_ids is not None:
            if plain:
                return logits
            logits = logits.new_full((len(chains), self.width), NEVER).index_copy_(1, self.decoder.head_ids, logits)
        if logits.shape[1] < self.width:
            logits = F.pad(logits, (0, self.width - logits.shape[1]))
        logits[:, self.vocab_size :] = NEVER
        if plain:
            return logits[:, : self.width]
        return transform(
            logits[:, : self.width],
            [
                RowSpan(p, c.view.tokens, c.view.prompt_length, c.drafted, b, 1)
                for b, (p, c) in enumerate(zip(params, chains, strict=True))
            ],
        )

    def _draw(self, chains: list[Chain], scores: Tensor) -> None:
        """One token for every chain from its row of scores."""
        picked = self._choose(chains, scores)
        reduced = scores.shape[1] < self.width and self.decoder.head_ids is not None
        tokens = self.decoder.head_ids[picked] if reduced and self.decoder.head_ids is not None else picked
        q = None if all(chain.view.params.coupled for chain in chains) else scores.softmax(dim=1)
        for b, chain in enumerate(chains):
            chain.tokens.append(tokens[b])
            if q is not None and not chain.view.params.coupled:
                chain.q.append(q[b])
        threshold = self.stop_below() if self.looks else 0.0
        if threshold > 0:
            own = scores.gather(1, picked[:, None]).squeeze(1) - scores.logsumexp(dim=1)
            for chain, confidence in zip(chains, own.exp().tolist(), strict=True):
                chain.trust(confidence, threshold)

    def _choose(self, chains: list[Chain], scores: Tensor) -> Tensor:
        """Coupled drafts share the target's noise, which makes them agree; rejection needs noise of its own."""
        tokens = scores.argmax(dim=1)
        sampled = [b for b, chain in enumerate(chains) if not chain.view.params.greedy]
        if sampled:
            words = send(torch.tensor([chains[b].noise_key() for b in sampled]), scores.device)
            rows = send(torch.tensor(sampled), scores.device)
            tokens[rows] = sample(scores[rows], words)
        return tokens
