"""Proposers whose drafts are trees from a rule: no model, every kind of draw."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.cache.tree import Parents, depths
from paceline.propose.base import Budget, Needs, Proposer
from paceline.types import NO_DRAFT, Draft, Draw, View

TREES: dict[str, Parents] = {
    "chain": (-1, 0, 1),
    "siblings": (-1, -1, -1),
    "two levels": (-1, -1, 0, 0, 1, 1, 1),
    "uneven": (-1, 0, -1, 0, 2, 1, -1, 4, 4),
}


class RuleTree(Proposer):
    """Trees of one shape. `draw` and `law` say how tokens come; `law(tokens before)` is their distribution [V].

    point: the tokens follow from the context alone (siblings may repeat). iid, without_replacement: drawn from `law`.
    """

    name = "rule"
    needs = Needs(trees=True)

    def __init__(self, parents: Parents, draw: Draw, vocab: int, seed: int = 0, *, skew: float = 1.5) -> None:
        self.parents, self.draw, self.vocab, self.skew = parents, draw, vocab, skew
        self.chance = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        return [self.tree(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def tree(self, view: View, budget: Budget) -> Draft:
        deep = [node for node, depth in enumerate(depths(self.parents)) if depth <= budget.depth][: budget.nodes]
        if not deep:
            return NO_DRAFT
        tokens: list[int] = []
        rows: dict[int, Tensor] = {}
        left: dict[int, Tensor] = {}
        for node, parent in enumerate(self.parents):
            before = [*view.tokens, *(tokens[at] for at in self._path(parent))]
            if parent not in rows:
                rows[parent] = left[parent] = self.law(before)
            if self.draw == "point":
                tokens.append((before[-1] * 5 + 3 * node + before[-2]) % self.vocab)
                continue
            tokens.append(int(torch.multinomial(left[parent], 1, generator=self.generator)))
            if self.draw == "without_replacement":
                left[parent] = left[parent].index_fill(0, torch.tensor(tokens[-1]), 0.0)
        q = torch.stack([rows.get(p, rows[-1]) for p in range(-1, max(self.parents) + 1)])
        draft = Draft(
            torch.tensor(tokens),
            self.parents,
            self.draw,
            None if self.draw == "point" else q,
        )
        return self.cut(draft.keep(deep))

    def cut(self, draft: Draft) -> Draft:
        return draft

    def law(self, before: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(sum(before[-2:]) * 31 + before[-1])
        return (torch.randn(self.vocab, generator=generator) * self.skew).softmax(dim=0)

    def _path(self, node: int) -> list[int]:
        return [] if node < 0 else [*self._path(self.parents[node]), node]


class DropsWeakNodes(RuleTree):
    """The planted bug: a drawn node is not verified because its own probability is low."""

    def cut(self, draft: Draft) -> Draft:
        assert draft.q is not None
        kept: list[int] = []
        for node, parent in enumerate(draft.parents):
            weak = float(draft.q[parent + 1][draft.tokens[node]]) < 0.3
            if not weak and (parent < 0 or parent in kept):
                kept.append(node)
        return draft.keep(kept) if kept else NO_DRAFT


class ReportsAnotherLaw(RuleTree):
    """The planted bug: tokens are drawn from one distribution and another is reported."""

    def cut(self, draft: Draft) -> Draft:
        assert draft.q is not None
        return Draft(draft.tokens, draft.parents, draft.draw, (draft.q.log() * 2).softmax(dim=1))
