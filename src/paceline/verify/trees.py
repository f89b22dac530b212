"""How a step's draft trees line up for one batched verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from paceline.cache.tree import Parents, ancestry, ranks
from paceline.device import send


@dataclass(frozen=True)
class Trees:
    """B trees padded to N nodes. Column 0 stands for the last token, column i + 1 for node i.

    row [B, N + 1]: score row of each column. tokens [B, N]: drafted ids, -1 past the end. parent [B, N]: column of each
    node's parent. above [B, N, N]: node j is node i or above it. elder
    [B, N, N]: node j is an earlier sibling of node i. children [B, N + 1, M]: nodes by rank, -1 where there is none.
    shapes: the trees' parents, on the host.
    """

    row: Tensor
    tokens: Tensor
    parent: Tensor
    above: Tensor
    elder: Tensor
    children: Tensor
    shapes: Sequence[Parents]

    def of_rank(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """(tree, column of the parent, node) of all nodes that are their parent's child number `rank`, each [S].

        From the host's copy: asking the device which there are would stall the step.
        """
        found = [
            (b, parent + 1, node)
            for b, parents in enumerate(self.shapes)
            for node, (parent, own) in enumerate(zip(parents, ranks(parents), strict=True))
            if own == rank
        ]
        batch, column, node = send(torch.tensor(found, dtype=torch.int64).view(-1, 3).T, self.row.device)
        return batch, column, node

    @property
    def widest(self) -> int:
        """Most children of one node, M."""
        return int(self.children.shape[2])

    def walk(self, accept: Tensor) -> Tensor:
        """Column [B] of the deepest node reached: at every node the first accepted child is taken (accept [B, N])."""
        taken = accept & ~(self.elder & accept[:, None, :]).any(dim=2)
        reached = (taken[:, None, :] | ~self.above).all(dim=2) & (self.tokens >= 0)
        # A parent stands before its children, so the deepest node reached is the last one.
        columns = torch.arange(1, accept.shape[1] + 1, device=accept.device)
        return torch.where(reached, columns, 0).amax(dim=1) if accept.shape[1] else columns.new_zeros(accept.shape[0])


def line_up(starts: Sequence[int], tokens: Sequence[Tensor], parents: Sequence[Parents], device: torch.device) -> Trees:
    """Tree b has drafted ids `tokens[b]` [n_b]; its rows begin at `starts[b]`: the last token's, then its nodes'."""
    shapes = [_shape(each) for each in parents]
    batch, size = len(shapes), max((len(each) for each in parents), default=0)
    widest = max((shape.children.shape[1] for shape in shapes), default=0)
    row = torch.tensor(starts)[:, None].expand(batch, size + 1).clone()
    parent = torch.zeros(batch, size, dtype=torch.int64)
    above, elder = (torch.zeros(batch, size, size, dtype=torch.bool) for _ in range(2))
    children = torch.full((batch, size + 1, widest), -1)
    drafted = torch.full((batch, size), -1, dtype=torch.int64, device=device)
    for b, shape in enumerate(shapes):
        n = shape.parent.shape[0]
        row[b, 1 : n + 1] += torch.arange(1, n + 1)
        parent[b, :n] = shape.parent
        above[b, :n, :n], elder[b, :n, :n] = shape.above, shape.elder
        children[b, : n + 1, : shape.children.shape[1]] = shape.children
        drafted[b, :n] = tokens[b]
    row, parent, above, elder, children = (send(each, device) for each in (row, parent, above, elder, children))
    return Trees(row, drafted, parent, above, elder, children, parents)


@dataclass(frozen=True)
class _Shape:
    parent: Tensor
    above: Tensor
    elder: Tensor
    children: Tensor


@lru_cache(maxsize=256)
def _shape(parents: Parents) -> _Shape:
    parent, rank = torch.tensor(parents, dtype=torch.int64) + 1, torch.tensor(ranks(parents), dtype=torch.int64)
    elder = (parent[:, None] == parent) & (rank < rank[:, None])
    children = torch.full((len(parents) + 1, int(rank.max()) + 1 if parents else 0), -1)
    children[parent, rank] = torch.arange(len(parents))
    return _Shape(parent, ancestry(parents), elder, children)
