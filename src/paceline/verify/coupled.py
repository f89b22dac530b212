"""Coupled verification: follow the branch that equals what plain decoding samples (Gumbel coupling)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.cache.tree import Parents
from paceline.sampling.best import likeliest
from paceline.sampling.noise import sample


def choose(scores: Tensor, keys: Tensor | None) -> Tensor:
    """What plain decoding emits at each row [R]: argmax of scores [R, V] plus the row's SAMPLE noise, if any."""
    return likeliest(scores) if keys is None else sample(scores, keys)


def follow(parents: Parents, drafted: Sequence[int], chosen: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
    """(accepted nodes, emitted tokens) of one draft: the branch that equals what was chosen.

    drafted [n]: the nodes' tokens. chosen [n + 1]: of the last token's row and of each node's. What is emitted is
    `chosen` along the branch whatever the draft was, and one token more than the branch is long: the target's own where
    no child equals it, the bonus token at a leaf. So the output cannot depend on the draft.
    """
    path: list[int] = []
    last, token = -1, chosen[0]
    emitted = [token]
    for node, (parent, child) in enumerate(zip(parents, drafted, strict=True)):  # parents stand before their children
        if parent == last and child == token:
            path.append(node)
            last, token = node, chosen[node + 1]
            emitted.append(token)
    return tuple(path), emitted
