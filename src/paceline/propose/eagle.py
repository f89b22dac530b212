"""EAGLE heads draft for the target they were trained on (Li et al. 2024, 2024b, 2025).

The head's row at position t holds the token x_{t+1} and the target's feature f_t, and predicts x_{t+2}. Drafting goes
on with the head's own outputs in place of features; accepted tokens are fed again with the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool, CacheFull
from paceline.device import send
from paceline.heads.block import Rows
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.linear import Linear
from paceline.native.chain import NativeChain
from paceline.propose.base import Budget, Needs, Proposer
from paceline.propose.calibration import Calibration, of_shared_noise, tenth
from paceline.propose.eagle_state import State
from paceline.propose.pairs import Pairs
from paceline.propose.rollout import CHAIN, ROOT, Growth, Level, Rollout, Shape
from paceline.sampling.noise import Purpose, key
from paceline.types import NO_DRAFT, Committed, Draft, View

MANY = 32  # rows that are fed although nothing is drafted


class FeatureHead(Protocol):
    """A head whose rows take a token and a feature and give the next feature: `heads/eagle.py` says what each is."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def target_ids(self) -> Tensor | None: ...
    def embed(self, tokens: Tensor, target_embed: Rows) -> Tensor: ...
    def fuse(self, taps: Sequence[Tensor]) -> Tensor: ...
    def forward(self, embeds: Tensor, features: Tensor, spans: Sequence[Span], pool: BlockPool) -> Tensor: ...
    def logits(self, features: Tensor, target_output: Linear) -> Tensor: ...


class EagleProposer(Proposer):
    """`name`: eagle or mtp. `vocab_size`, `width`, `stop_below`: see `Rollout`; `shape`: a chain or a dynamic tree.
    `chain`: the same head's chains in one call, if it can be had.

    The head's cache advances on committed tokens only, a long prompt's chunk by chunk with the target's own prefill,
    later rows when there is something to draft.
    """

    def __init__(
        self, head: FeatureHead, target: Decoder, pool: BlockPool, *, vocab_size: int, stop_below: Callable[[], float],
        shape: Shape = CHAIN, name: str = "eagle", chain: NativeChain | None = None,
    ) -> None:  # fmt: skip
        self.chain = chain if shape.width == 1 else None
        self.name, self.needs = name, Needs(taps=head.taps, trees=shape.width > 1)
        self.head, self.target, self.pool, self.shape = head, target, pool, shape
        self.rollout = Rollout(
            vocab_size=vocab_size,
            width=target.config.vocab_size,
            stop_below=stop_below,
            looks=target.device.type == "cpu",
            ids=head.target_ids,
        )
        self.calibration = Calibration(of_shared_noise)
        self.cold_starts = 0
        self._states: dict[int, State] = {}

    def open(self, view: View) -> int:
        """A prefix hit brings the head's rows along where they are still there.

        The last block's last row depends on the token behind it, so the head may be short of one block: the target
        then computes it again. Short of more, the head starts cold; without room the sequence decodes plainly.
        """
        if view.committed:  # what was computed in the last step may be a part of this prompt
            self._feed_committed(self._states.values())
        try:
            state = self._open(view)
        except CacheFull:
            return view.committed
        self._states[view.id] = state
        self.cold_starts += state.offset > 0
        return state.position

    def _open(self, view: View) -> State:
        cache = self.pool.open(Pairs([*view.tokens, 0]), view.room)  # the last pair, not known yet, is never looked up
        if view.committed - cache.length > self.pool.block_size:
            cache.free()
            return State(view, self.pool.open((), view.room), offset=view.committed)
        cache.truncate(min(cache.length, view.committed))
        try:  # shared blocks that will be written are copied now, while there is a choice
            cache.append(view.room - cache.length)
        except CacheFull:
            cache.free()
            raise
        return State(view, cache)

    def observe(self, view: View, committed: Committed) -> None:
        state = self._states.get(view.id)
        if state is None:
            return
        state.fresh.append([committed.taps[tap] for tap in self.head.taps])
        if (verdict := committed.verdict) is not None and self._understated(view):
            self.calibration.learn(self.name, state.stated[: verdict.depth], verdict.accepted)

    @torch.inference_mode()
    def close(self, view: View) -> None:
        """Rows that still wait and fill a block are left behind, too: other prompts may begin with them."""
        state = self._states.pop(view.id, None)
        if state is None:
            return
        held, size = state.cache.length, self.pool.block_size
        if (held + state.pending) // size > held // size:
            self._feed_committed([state])
        state.cache.free()

    def behind(self, view: View) -> int:
        state = self._states.get(view.id)
        return 0 if state is None else max(state.pending - 1, 0)  # one row is what every draft begins with

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        """Rows wait until a draft needs them, or until there are many: one forward for several costs little more."""
        states = [self._states.get(view.id) for view in views]
        asked = zip(states, budgets, strict=True)
        drafting = [i for i, budget in enumerate(budgets) if budget.depth > 0]
        if len(drafting) == 1 and (draft := self._alone(views[drafting[0]], budgets[drafting[0]])) is not None:
            self._feed_committed([state for state in states if state is not None and state.pending >= MANY])
            return [draft if i == drafting[0] else NO_DRAFT for i in range(len(views))]
        waited = [self.behind(view) for view in views]
        self._feed_committed([s for s, budget in asked if s is not None and (budget.depth > 0 or s.pending >= MANY)])
        growths = [self._start(view, budget) for view, budget in zip(views, budgets, strict=True)]
        growing = [growth for growth in growths if growth is not None]
        if growing:
            last = torch.stack([self._states[growth.view.id].outputs[ROOT] for growth in growing])
            self.rollout.run(growing, self.head.logits(last, self.target.head), self._feed_level)
        for growth in growing:
            self._states[growth.view.id].stated = growth.stated
        return [
            NO_DRAFT if growth is None else replace(growth.finish(), read=rows)
            for growth, rows in zip(growths, waited, strict=True)
        ]

    def _worth(self, view: View) -> Sequence[float] | None:
        """What this head's probabilities have been worth; None where they are taken as they are."""
        return self.calibration.worth(self.name) if self._understated(view) else None

    def _understated(self, view: View) -> bool:
        """Probabilities say little of coupled draws (see `of_shared_noise`); chains alone learn what they are worth."""
        return self.shape.width == 1 and view.params.coupled and not view.params.greedy

    def _alone(self, view: View, budget: Budget) -> Draft | None:
        """The chain of the only sequence that drafts, where the kernels grow it whole: with likeliest or coupled tokens
        of the head's own distribution at most heated (what cuts it, or looks at what came before, is `Rollout`'s)."""
        state, params = self._states.get(view.id), view.params
        if self.chain is None or state is None or not state.fresh or not params.coupled or params.reshapes:
            return None
        rows, begin, depth = state.pending, state.position, min(budget.depth, self.shape.depth)
        if begin + rows != len(view.tokens) - 1:
            return None
        try:
            state.cache.append(rows + depth - 1)
        except CacheFull:
            return None
        span = Span(state.cache, 0, rows + depth - 1, state.cache.length)
        noise, worth = [] if params.greedy else range(depth), self._worth(view)
        tokens, chances = self.chain.draft(
            state.states(), view.tokens[begin + 1 :], span, self.pool,
            depth=depth, stop_below=self.rollout.stop_below(), temperature=params.temperature, worth=worth,
            keys=[key(view.seed, len(view.tokens) + at, Purpose.SAMPLE) for at in noise],
        )  # fmt: skip
        self._fed(state, rows, {})
        state.stated = [0.0 if chance != chance else chance for chance in chances]  # NaN: no token was allowed
        confidence = state.stated if worth is None else [worth[tenth(chance)] for chance in state.stated]
        return Draft(torch.tensor(tokens), confidence=confidence, read=rows - 1)

    def _start(self, view: View, budget: Budget) -> Growth | None:
        state = self._states.get(view.id)
        if state is None or budget.depth == 0 or not state.outputs or state.position != len(view.tokens) - 1:
            return None
        levels = min(budget.depth, self.shape.depth)
        try:  # room for all nodes that get children
            state.cache.append((levels - 1) * self.shape.width)
        except CacheFull:
            return None
        return Growth(view, Budget(levels, budget.nodes), self.shape, worth=self._worth(view))

    def _feed_committed(self, states: Iterable[State]) -> None:
        """One forward for all rows that the target has just computed, each with the token that follows it."""
        fed = [state for state in states if state.fresh]
        if not fed:
            return
        spans: list[Span] = []
        tokens: list[int] = []
        features: list[Tensor] = []
        for state in fed:
            rows = self.head.fuse(state.states())
            begin, count = state.position, rows.shape[0]
            state.cache.append(count)
            spans.append(Span(state.cache, len(tokens), count, state.cache.length))
            tokens += state.view.tokens[begin + 1 : begin + 1 + count]
            features.append(rows)
        out = self._forward(spans, torch.tensor(tokens), torch.cat(features))
        for state, span in zip(fed, spans, strict=True):
            self._fed(state, span.count, {ROOT: out[span.start + span.count - 1]})

    @staticmethod
    def _fed(state: State, rows: int, outputs: dict[int, Tensor]) -> None:
        state.cache.commit(range(rows), Pairs(state.view.tokens) if state.offset == 0 else ())
        state.fresh, state.outputs = [], outputs

    def _feed_level(self, level: Level) -> Tensor:
        """A drafted token goes with the output of its parent's row."""
        spans: list[Span] = []
        tokens: list[Tensor] = []
        features: list[Tensor] = []
        for growth, nodes in level:
            state = self._states[growth.view.id]
            spans.append(growth.span(state.cache, len(tokens), nodes))
            tokens += [growth.tokens[node] for node in nodes]
            features += [state.outputs[growth.parents[node]] for node in nodes]
        out = self._forward(spans, torch.stack(tokens), torch.stack(features))
        rows = out.unbind()
        for (growth, nodes), span in zip(level, spans, strict=True):
            own = rows[span.start : span.start + span.count]
            self._states[growth.view.id].outputs.update(zip(nodes, own, strict=True))
        return self.head.logits(out, self.target.head)

    def _forward(self, spans: Sequence[Span], tokens: Tensor, features: Tensor) -> Tensor:
        device = self.target.device
        embeds = self.head.embed(send(tokens, device), self.target.embed)
        return self.head.forward(embeds, features, spans, self.pool)
