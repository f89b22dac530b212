"""Drafts for `verify --bitwise`: trees of every shape, grown around the right answer and wrong at random."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from paceline.propose.base import Budget, Needs, Proposer
from paceline.types import NO_DRAFT, Draft, View

ROOT = -1
LEANINGS = (0.0, 0.2, 0.5, 0.8, 1.0)  # chances by which a tree's nodes are placed and filled
RANKS = (0, 0, 1, 3)  # siblings that come before a right token
SIZES = (4, 12, 64)  # small drafts are frequent, as they are in practice: kernels differ most between few rows


@dataclass(frozen=True)
class KnownAnswer:
    """What plain decoding says: prompt and answer in one. seed: None for a greedy request."""

    seed: int | None
    tokens: Sequence[int]

    def of(self, view: View) -> bool:
        seed = None if view.params.greedy else view.seed
        return self.seed == seed and list(self.tokens[: len(view.tokens)]) == list(view.tokens)


@dataclass
class _Tree:
    """A draft in the making. right[n]: the node and all above it are what plain decoding says."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    def add(self, parent: int, token: int, right: bool) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depth(parent) + 1)
        self.right.append(right)

    def depth(self, node: int) -> int:
        return 0 if node == ROOT else self.depths[node]

    def is_right(self, node: int) -> bool:
        return node == ROOT or self.right[node]


class AdversaryProposer(Proposer):
    """Knows the answer and mixes it with random tokens, so that any branch of any tree may be the one to accept.

    Right tokens come at any place among their siblings, twice now and then, with wrong subtrees beside and below them;
    some drafts are empty, some plain chains, some as wide as they are large. Drafts follow from `seed` and the tokens
    so far: not from the batch, nor from the steps that led there.
    """

    name = "adversary"
    needs = Needs(trees=True)

    def __init__(self, answers: Iterable[KnownAnswer], vocab_size: int, seed: int = 0) -> None:
        self.answers, self.vocab_size, self.seed = list(answers), vocab_size, seed
        self._known: dict[int, Sequence[int]] = {}

    def open(self, view: View) -> int:
        self._known[view.id] = next((answer.tokens for answer in self.answers if answer.of(view)), ())
        return view.committed

    def close(self, view: View) -> None:
        del self._known[view.id]

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._draft(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _draft(self, view: View, budget: Budget) -> Draft:
        if budget.depth == 0 or budget.nodes == 0:
            return NO_DRAFT
        random = Random(f"{self.seed} {len(view.tokens)} {view.tokens[-1]} {view.params.seed}")
        ahead = self._known[view.id][len(view.tokens) :][: budget.depth]
        most = min(random.choice(SIZES), budget.nodes)
        tree = self._grow(random, random.randint(0, most), budget.depth, ahead)
        return Draft(torch.tensor(tree.tokens, dtype=torch.int64), tuple(tree.parents))

    def _grow(self, random: Random, size: int, depth: int, ahead: Sequence[int]) -> _Tree:
        """`size` nodes, each below the one before it, beside it, or anywhere. ahead: the right tokens from here on."""
        tree, rank = _Tree(), random.choice(RANKS)
        downward, beside, honest = (random.choice(LEANINGS) for _ in range(3))
        for node in range(size):
            if random.random() < downward:
                parent = node - 1
            else:
                parent = tree.parents[-1] if node and random.random() < beside else random.randrange(ROOT, node)
            if tree.depth(parent) == depth:
                parent = ROOT
            known = tree.depth(parent) < len(ahead) and tree.is_right(parent)
            truth = ahead[tree.depth(parent)] if known else None
            tells = tree.parents.count(parent) >= rank and random.random() < honest
            token = truth if truth is not None and tells else random.randrange(self.vocab_size)
            tree.add(parent, token, right=token == truth)
        return tree
