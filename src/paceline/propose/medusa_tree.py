"""The tree that Medusa's candidates fill, laid out once from how right heads can be expected to be."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from paceline.cache.tree import Parents, depths, from_paths
from paceline.errors import PacelineError
from paceline.propose.rollout import Shape

SPARSE = Shape(width=8, nodes=26)

# How right a head is taken to be when the tree is laid out: about what the authors report for their first head, with
# later heads judged given that the tokens before were right.
FIRST, FURTHER, LATER_RANK = 0.6, 0.85, 0.3

Path = tuple[int, ...]
"""The rank of each token among its head's candidates, from the first head down."""


def likely_paths(heads: int, shape: Shape = SPARSE) -> list[Path]:
    """The `shape.nodes` likeliest paths of ranks, if rank r of head k is right with chance 0.6 * 0.85^(k-1) * 0.3^r.

    At most `shape.width` ranks a head and `shape.depth` heads; width 1 is the chain of first ranks.
    """
    deepest = min(heads, shape.depth)
    paths: list[Path] = []
    waiting: list[tuple[float, Path]] = [(-FIRST, (0,))]
    while waiting and len(paths) < shape.nodes:
        chance, path = heapq.heappop(waiting)
        paths.append(path)
        if path[-1] + 1 < shape.width:
            heapq.heappush(waiting, (chance * LATER_RANK, (*path[:-1], path[-1] + 1)))
        if len(path) < deepest:
            below = FIRST * FURTHER ** len(path)
            heapq.heappush(waiting, (chance * below, (*path, 0)))
    return paths


def lay_out(paths: Iterable[Sequence[int]], heads: int) -> tuple[Parents, tuple[int, ...]]:
    """(parents, rank of each node) of the tree that `paths` make, for so many heads. Raises PacelineError."""
    try:
        parents, ranks = from_paths(paths)
    except ValueError as error:
        raise PacelineError(f"Medusa's tree has a gap: {error}; add it") from None
    if not parents:
        raise PacelineError("Medusa's tree is empty; give at least the path [0]")
    if min(ranks) < 0:
        raise PacelineError(f"Medusa's tree has rank {min(ranks)}; ranks count from 0")
    if (deepest := max(depths(parents))) > heads:
        raise PacelineError(f"Medusa's tree is {deepest} tokens deep where there are {heads} heads; shorten its paths")
    return parents, ranks
