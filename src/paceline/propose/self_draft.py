"""The target drafts for itself: a part of its layers over its own committed cache, in scratch.

A drafted token's keys and values go behind the committed rows and are forgotten; the verification that follows computes
every layer anew for the same slots. So nothing is copied, and the numbers are those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.cache.pool import CacheFull, SequenceCache
from paceline.device import send
from paceline.model.attention import Span
from paceline.model.decoder import Batch, Decoder, Sublayer
from paceline.model.sublayers import Norm
from paceline.propose.base import Budget
from paceline.propose.rollout import CHAIN, Growth, Level, Rollout, Shape
from paceline.types import NO_DRAFT, Draft, View


@dataclass(frozen=True)
class Part:
    """What of the target drafts: `layers` (None: all) without the sublayers `skip`, then `norm` (None: the target's
    final norm) and the output head."""

    layers: range | None = None
    skip: frozenset[Sublayer] = frozenset()
    norm: Norm | None = None

    def logits(self, decoder: Decoder, spans: Sequence[Span], tokens: Tensor) -> Tensor:
        """fp32 logits [T, V] of `tokens` [T] in `spans`; writes the keys and values of the layers that run."""
        pool = spans[0].cache.pool
        batch = Batch(send(tokens, decoder.device), spans, pool, layers=self.layers, skip=self.skip)
        hidden, _ = decoder.forward(batch)
        return decoder.logits(hidden) if self.norm is None else decoder.head(self.norm(hidden)).float()


class SelfDraft:
    """Drafts with a `Part` of the target, one forward for all sequences at each level.

    `vocab_size`, `width`, `stop_below`: see `Rollout`.
    """

    def __init__(
        self, decoder: Decoder, *, vocab_size: int, width: int, stop_below: Callable[[], float], shape: Shape = CHAIN
    ) -> None:
        self.decoder, self.shape = decoder, shape
        looks = decoder.device.type == "cpu"
        self.rollout = Rollout(vocab_size=vocab_size, width=width, stop_below=stop_below, looks=looks)

    def draft(self, views: Sequence[View], budgets: Sequence[Budget], part: Part) -> list[Draft]:
        """One draft each. Afterwards every cache is as long as before, and its committed rows are untouched."""
        with ExitStack() as scratch:
            started = [self._start(view, budget, scratch) for view, budget in zip(views, budgets, strict=True)]
            growths = [growth for growth in started if growth is not None]
            if growths:
                self.rollout.run(growths, self._feed_last(part, growths), partial(self._feed_level, part))
            return [NO_DRAFT if growth is None else growth.finish() for growth in started]

    def _start(self, view: View, budget: Budget, scratch: ExitStack) -> Growth | None:
        """A draft to grow, where there is room for the last token and for all nodes that get children."""
        if budget.depth == 0:
            return None
        levels = min(budget.depth, self.shape.depth)
        try:
            scratch.enter_context(cache_of(view).scratch(1 + (levels - 1) * self.shape.width))
        except CacheFull:
            return None
        return Growth(view, budget, self.shape, lead=1)

    def _feed_last(self, part: Part, growths: Sequence[Growth]) -> Tensor:
        """Each sequence's last token, which the target has not computed yet, in the first slot behind its cache."""
        caches = [cache_of(growth.view) for growth in growths]
        spans = [Span(cache, row, 1, cache.length) for row, cache in enumerate(caches)]
        return part.logits(self.decoder, spans, torch.tensor([growth.view.tokens[-1] for growth in growths]))

    def _feed_level(self, part: Part, level: Level) -> Tensor:
        spans: list[Span] = []
        tokens: list[Tensor] = []
        for growth, nodes in level:
            spans.append(growth.span(cache_of(growth.view), len(tokens), nodes))
            tokens += [growth.tokens[node] for node in nodes]
        return part.logits(self.decoder, spans, torch.stack(tokens))


def cache_of(view: View) -> SequenceCache:
    """The target's cache of a sequence that decodes."""
    assert view.cache is not None
    return view.cache
