"""Multi-token prediction: the blocks a model was trained with draft for it (DeepSeek-V3, section 2.2).

One depth is applied again and again, its own output in place of the target's hidden state, and drafts as EAGLE's heads
do. Several independently trained depths are chained: depth k turns h^{k-1}_t and x_{t+k} into h^k_t, which predicts
x_{t+k+1}, and attends to rows of its own depth. With tokens known to position n - 1, depth k has final rows for
t < n - k; the rows n - k .. n - 2 depend on drafted tokens and are computed for each node along its path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool, CacheFull, SequenceCache
from paceline.device import send
from paceline.heads.block import Rows
from paceline.heads.mtp import MtpHead
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.linear import Linear
from paceline.propose.base import Budget, Needs, Proposer
from paceline.propose.rollout import CHAIN, ROOT, Growth, Level, Rollout, Shape
from paceline.types import NO_DRAFT, Committed, Draft, View


@dataclass
class RepeatedDepth:
    """A head of one depth in the shape in which `EagleProposer` takes heads."""

    head: MtpHead
    target_ids: Tensor | None = None

    @property
    def config(self) -> ModelConfig:
        return self.head.config

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.taps

    def embed(self, tokens: Tensor, target_embed: Rows) -> Tensor:
        return self.head.embed(tokens, target_embed)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        return taps[0].to(self.head.dtype)

    def forward(self, embeds: Tensor, features: Tensor, spans: Sequence[Span], pool: BlockPool) -> Tensor:
        return self.head.forward(0, embeds, features, spans, pool)

    def logits(self, features: Tensor, target_output: Linear) -> Tensor:
        return self.head.logits(features, target_output)


@dataclass
class State:
    """One sequence. `caches[d]`: rows of depth d + 1, slot s being position `offset + s`.

    waiting[d] [n, H]: hidden states of depth d (0: the target's) whose next token is not known yet. outputs: for each
    node the states of its level's rows, the last of which predicts.
    """

    caches: list[SequenceCache]
    waiting: list[Tensor]
    offset: int
    outputs: dict[int, Tensor] = field(default_factory=dict)


class MtpProposer(Proposer):
    """Several depths. `shape`: a chain or a dynamic tree, never deeper than there are depths. A prefix hit starts cold:
    the rows before it are missing, which costs acceptance."""

    name = "mtp"

    def __init__(
        self, head: MtpHead, target: Decoder, pool: BlockPool, *, vocab_size: int, stop_below: Callable[[], float],
        shape: Shape = CHAIN,
    ) -> None:  # fmt: skip
        self.head, self.target, self.pool = head, target, pool
        self.needs = Needs(taps=head.taps, trees=shape.width > 1)
        self.shape = replace(shape, depth=min(shape.depth, len(head.depths)))
        looks = target.device.type == "cpu"
        self.rollout = Rollout(
            vocab_size=vocab_size, width=target.config.vocab_size, stop_below=stop_below, looks=looks
        )
        self.cold_starts = 0
        self._states: dict[int, State] = {}

    def open(self, view: View) -> int:
        caches: list[SequenceCache] = []
        try:
            for _ in self.head.depths:
                caches.append(self.pool.open((), view.room))
        except CacheFull:
            for cache in caches:
                cache.free()
            return view.committed
        self.cold_starts += view.committed > 0
        nothing = torch.empty(0, self.target.config.hidden_size, dtype=self.head.dtype, device=self.target.device)
        self._states[view.id] = State(caches, [nothing] * len(caches), view.committed)
        return view.committed

    def observe(self, view: View, committed: Committed) -> None:
        state = self._states.get(view.id)
        if state is not None:
            (tap,) = self.head.taps
            state.waiting[0] = torch.cat((state.waiting[0], committed.taps[tap].to(self.head.dtype)))

    def close(self, view: View) -> None:
        state = self._states.pop(view.id, None)
        for cache in state.caches if state is not None else ():
            cache.free()

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        known = [view for view in views if view.id in self._states]
        for depth in range(len(self.head.depths)):
            self._feed_committed(depth, known)
        growths = [self._start(view, budget) for view, budget in zip(views, budgets, strict=True)]
        growing = [growth for growth in growths if growth is not None]
        if growing:
            last = torch.stack([self._states[growth.view.id].outputs[ROOT][-1] for growth in growing])
            self.rollout.run(growing, self.head.logits(last, self.target.head), self._feed_level)
        return [NO_DRAFT if growth is None else growth.finish() for growth in growths]

    def _start(self, view: View, budget: Budget) -> Growth | None:
        """Drafts wait until every depth has its rows: for the first few tokens of a sequence there are none."""
        state = self._states.get(view.id)
        if state is None or budget.depth == 0 or not state.outputs or any(len(rows) != 1 for rows in state.waiting[1:]):
            return None
        levels = min(budget.depth, self.shape.depth)
        try:  # room for the rows of all nodes that get children
            for depth, cache in enumerate(state.caches[1:levels], start=1):
                cache.append(self.shape.width * depth)
        except CacheFull:
            return None
        return Growth(view, Budget(levels, budget.nodes), self.shape)

    def _feed_committed(self, depth: int, views: Sequence[View]) -> None:
        """Rows of one depth that have become final, for all sequences; what they give waits for the next depth."""
        spans: list[Span] = []
        tokens: list[int] = []
        hidden: list[Tensor] = []
        fed: list[State] = []
        for view in views:
            state = self._states[view.id]
            cache, waiting = state.caches[depth], state.waiting[depth]
            begin = state.offset + cache.length
            count = min(waiting.shape[0], len(view.tokens) - begin - depth - 1)
            if count <= 0:
                continue
            cache.append(count)
            spans.append(Span(cache, len(tokens), count, cache.length))
            tokens += view.tokens[begin + depth + 1 : begin + depth + 1 + count]
            hidden.append(waiting[:count])
            fed.append(state)
        if not fed:
            return
        out = self._forward(depth, spans, torch.tensor(tokens), torch.cat(hidden))
        for state, span in zip(fed, spans, strict=True):
            span.cache.commit(range(span.count), ())
            state.waiting[depth] = state.waiting[depth][span.count :]
            rows = out[span.start : span.start + span.count]
            if depth == 0:
                state.outputs = {ROOT: rows[-1:]}
            if depth + 1 < len(state.caches):
                state.waiting[depth + 1] = torch.cat((state.waiting[depth + 1], rows))

    def _feed_level(self, level: Level) -> Tensor:
        """Nodes of level k go through depth k + 1: for each the k rows that depend on its path."""
        depth = level[0][0].depth(level[0][1][0])
        spans: list[Span] = []
        tokens: list[Tensor] = []
        hidden: list[Tensor] = []
        for growth, nodes in level:
            state = self._states[growth.view.id]
            cache, first = state.caches[depth], len(tokens)
            for node in nodes:
                tokens += [growth.tokens[step] for step in growth.path(node)]
                # The oldest of these rows follows from committed tokens; the parent's level gave the later ones.
                before = state.outputs[growth.parents[node]] if depth > 1 else state.waiting[1][:0]
                hidden += [state.waiting[depth], before]
            parents = tuple(-1 if row % depth == 0 else row - 1 for row in range(depth * len(nodes)))
            spans.append(Span(cache, first, len(parents), cache.length, parents))
        out = self._forward(depth, spans, torch.stack(tokens), torch.cat(hidden))
        for (growth, nodes), span in zip(level, spans, strict=True):
            rows = out[span.start : span.start + span.count].view(len(nodes), depth, -1)
            self._states[growth.view.id].outputs.update(zip(nodes, rows, strict=True))
        return self.head.logits(out[depth - 1 :: depth], self.target.head)

    def _forward(self, depth: int, spans: Sequence[Span], tokens: Tensor, hidden: Tensor) -> Tensor:
        device = self.target.device
        embeds = self.head.embed(send(tokens, device), self.target.embed)
        return self.head.forward(depth, embeds, hidden, spans, self.pool)
