"""Draft trees as lists of parents. Pure functions.

`parents[i]` is the node that node i follows, -1 where it follows the last token; a parent stands before its children,
siblings stand in the order in which they were drawn. A chain is (-1, 0, 1, ..).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

Parents = tuple[int, ...]


@lru_cache(maxsize=1024)
def chain(count: int) -> Parents:
    return tuple(range(-1, count - 1))


def is_chain(parents: Parents) -> bool:
    return parents == chain(len(parents))


def is_tree(parents: Parents) -> bool:
    return all(-1 <= parent < node for node, parent in enumerate(parents))


@lru_cache(maxsize=1024)
def depths(parents: Parents) -> tuple[int, ...]:
    """Distance of each node from the last token: 1 for its children."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return tuple(found)


@lru_cache(maxsize=1024)
def paths(parents: Parents) -> tuple[tuple[int, ...], ...]:
    """The nodes from the root down to each node, itself included."""
    found: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        found.append((node,) if parent < 0 else (*found[parent], node))
    return tuple(found)


@lru_cache(maxsize=1024)
def ranks(parents: Parents) -> tuple[int, ...]:
    """Place of each node among its siblings, 0 for the first drawn."""
    seen: dict[int, int] = {}
    found = []
    for parent in parents:
        found.append(seen.get(parent, 0))
        seen[parent] = found[-1] + 1
    return tuple(found)


@lru_cache(maxsize=256)
def ancestry(parents: Parents) -> Tensor:
    """bool [n, n]: row i sees node j, which is i itself or above it."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


@lru_cache(maxsize=256)
def branches(parents: Parents) -> tuple[tuple[int, ...], ...]:
    """The tree cut into downward runs, depth first: each begins at a later sibling and follows first children.

    Written over one another by depth in this order, a run always finds its ancestors in place above it.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    runs: list[tuple[int, ...]] = []
    starts = children.get(-1, [])[::-1]
    while starts:
        run = [starts.pop()]
        while below := children.get(run[-1]):
            starts += below[:0:-1]
            run.append(below[0])
        runs.append(tuple(run))
    return tuple(runs)


def subtree(parents: Parents, kept: Sequence[int]) -> Parents:
    """Parents of the nodes `kept` (ascending, closed under parents), renumbered."""
    number = {-1: -1} | {node: i for i, node in enumerate(kept)}
    return tuple(number[parents[node]] for node in kept)


def from_paths(choices: Iterable[Sequence[int]]) -> tuple[Parents, tuple[int, ...]]:
    """A static tree given as paths of child ranks, as Medusa's papers list them: (parents, rank taken by each node).

    Sorted by depth and rank; every path's own beginnings must be among the paths (ValueError names one that is not).
    """
    ordered = sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))
    number: dict[tuple[int, ...], int] = {(): -1}
    for path in ordered:
        if path[:-1] not in number:
            raise ValueError(f"path {path} of the tree lacks its beginning {path[:-1]}")
        number[path] = len(number) - 1
    return tuple(number[path[:-1]] for path in ordered), tuple(path[-1] for path in ordered)
