"""A small model of the same vocabulary drafts for the target (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool, CacheFull, SequenceCache
from paceline.device import send
from paceline.model.attention import Span
from paceline.model.decoder import Batch
from paceline.propose.base import Budget, Needs, Proposer
from paceline.propose.rollout import CHAIN, Growth, Level, Rollout, Shape
from paceline.types import NO_DRAFT, Committed, Draft, View
from paceline.weights.load import LoadedModel


@dataclass
class State:
    """The draft's side of one sequence. Behind `cache.length` lie the rows of the draft that is being verified."""

    cache: SequenceCache
    growth: Growth | None = None


class DraftModelProposer(Proposer):
    """Drafts level by level, one batched forward each, from its own cache.

    The cache follows the target's tokens: what was drafted and accepted is already there, so each proposal feeds one
    new token (two after a full acceptance). `vocab_size`, `width`, `stop_below`: see `Rollout`.
    """

    name = "draft"
    catch_up_rows = 512

    def __init__(
        self, model: LoadedModel, pool: BlockPool, *, vocab_size: int, width: int,
        stop_below: Callable[[], float], shape: Shape = CHAIN, prefill_chunk: int = 256,
    ) -> None:  # fmt: skip
        self.decoder, self.pool, self.shape = model.decoder, pool, shape
        self.needs = Needs(trees=shape.width > 1)
        looks = self.decoder.device.type == "cpu"
        self.rollout = Rollout(
            vocab_size=vocab_size, width=width, stop_below=stop_below, looks=looks, ids=self.decoder.head_ids
        )
        self.prefill_chunk = prefill_chunk
        self._states: dict[int, State] = {}

    def context(self, view: View) -> Sequence[int]:
        """The sequence so far in the draft's own ids: the same as the target's."""
        return view.tokens

    def room(self, view: View) -> int:
        """Most ids that `context` is expected to come to."""
        return view.room

    def growth(self, view: View, budget: Budget) -> Growth:
        return Growth(view, budget, self.shape)

    def open(self, view: View) -> int:
        """Start from the longest prefix in the draft's own cache; without room there the sequence decodes plainly."""
        tokens = self.context(view)
        room = min(self.room(view), self.decoder.config.max_positions)
        if len(tokens) < room:
            with suppress(CacheFull):
                self._states[view.id] = State(self.pool.open(tokens, room))
        return view.committed

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        self._catch_up(views, budgets)
        started = [self._start(view, budget) for view, budget in zip(views, budgets, strict=True)]
        growths = [growth for growth in started if growth is not None]
        if growths:
            self.rollout.run(growths, self.decoder.logits(self._feed_new_tokens(growths)), self._feed_level)
        return [NO_DRAFT if growth is None else growth.finish() for growth in started]

    def observe(self, view: View, committed: Committed) -> None:
        state = self._states.get(view.id)
        if state is None or state.growth is None or committed.verdict is None:
            return
        kept = state.growth.accepted_slots(committed.verdict.path)
        state.cache.commit(kept, view.tokens[: state.cache.length + len(kept)])
        state.growth = None

    def close(self, view: View) -> None:
        state = self._states.pop(view.id, None)
        if state is not None:
            state.cache.free()

    def _start(self, view: View, budget: Budget) -> Growth | None:
        """A draft to grow, once the cache has caught up and where the draft's context allows."""
        state = self._states.get(view.id)
        if state is None or budget.depth == 0:
            return None
        tokens = self.context(view)
        left = self.decoder.config.max_positions - len(tokens)
        if left <= 0:
            return None
        # A step that failed after drafting left rows behind, and perhaps no token to feed.
        state.growth = None
        state.cache.truncate(min(state.cache.length, len(tokens) - 1))
        if len(tokens) - state.cache.length > self.prefill_chunk:
            return None
        growth = self.growth(view, Budget(min(budget.depth, left), budget.nodes))
        levels = min(growth.budget.depth, growth.shape.depth)
        try:  # room for the tokens that are new here and for all nodes that get children
            state.cache.append(len(tokens) - state.cache.length + (levels - 1) * growth.shape.width)
        except CacheFull:
            return None
        state.growth = growth
        return growth

    def behind(self, view: View) -> int:
        state = self._states.get(view.id)
        return 0 if state is None else max(len(self.context(view)) - 1 - state.cache.length, 0)

    def _catch_up(self, views: Sequence[View], budgets: Sequence[Budget]) -> None:
        """One forward for all that are far behind: each by at most a chunk, together by at most `catch_up_rows`.

        It runs in the steps of the target's own prefill, so that no decoding step pays for a prompt. What was emitted
        since without this method's help is read when it is asked to draft again, in one forward with the last token.
        """
        spans: list[Span] = []
        fed: list[int] = []
        for view, budget in zip(views, budgets, strict=True):
            state = self._states.get(view.id)
            in_prompt = view.committed < len(view.tokens) - 1
            if state is None or not (in_prompt or budget.depth):
                continue
            tokens, begin = self.context(view), state.cache.length
            chunk_end = (begin // self.prefill_chunk + 1) * self.prefill_chunk
            end = min(chunk_end, len(tokens) - 1, self.decoder.config.max_positions)
            behind = len(tokens) - begin > (1 if in_prompt else self.prefill_chunk)
            if end <= begin or not behind or (fed and len(fed) + end - begin > self.catch_up_rows):
                continue
            with suppress(CacheFull):
                state.cache.append(end - begin)
                spans.append(Span(state.cache, len(fed), end - begin, begin))
                fed += tokens[begin:end]
        if spans:
            self._forward(spans, torch.tensor(fed))
        by_cache = {id(state.cache): view for view in views if (state := self._states.get(view.id))}
        for span in spans:
            span.cache.commit(range(span.count), self.context(by_cache[id(span.cache)]))

    def _feed_new_tokens(self, growths: Sequence[Growth]) -> Tensor:
        """Forward what the target emitted since; hidden states [B, H] of each sequence's last token."""
        spans: list[Span] = []
        fed: list[int] = []
        for growth in growths:
            cache, tokens = self._states[growth.view.id].cache, self.context(growth.view)
            spans.append(Span(cache, len(fed), len(tokens) - cache.length, cache.length))
            fed.extend(tokens[cache.length :])
        hidden = self._forward(spans, torch.tensor(fed))
        for growth, span in zip(growths, spans, strict=True):
            span.cache.commit(range(span.count), self.context(growth.view))
        return hidden[send(torch.tensor([span.start + span.count - 1 for span in spans]), hidden.device)]

    def _feed_level(self, level: Level) -> Tensor:
        spans, tokens = self._rows(level)
        return self.decoder.logits(self._forward(spans, tokens))

    def _rows(self, level: Level) -> tuple[list[Span], Tensor]:
        """Where the nodes of a level go, and their tokens [R]."""
        spans: list[Span] = []
        tokens: list[Tensor] = []
        for growth, nodes in level:
            spans.append(growth.span(self._states[growth.view.id].cache, len(tokens), nodes))
            tokens += [growth.tokens[node] for node in nodes]
        return spans, torch.stack(tokens)

    def _forward(self, spans: Sequence[Span], tokens: Tensor) -> Tensor:
        return self.decoder.forward(Batch(send(tokens, self.decoder.device), spans, self.pool))[0]
