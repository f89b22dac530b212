"""How many drafted tokens would be accepted, counted without drafting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """length: mean acceptance length (tokens a target forward). by_depth: of the drafts that were right so far, the
    share whose next token is, too."""

    length: float
    by_depth: list[float]


def walk(agrees: Sequence[Tensor]) -> Acceptance:
    """Walk each passage as greedy decoding with a chain would. agrees: bool [rows, depth] for every row of a passage
    from which a draft can begin."""
    tokens = steps = 0
    reached = [0] * (agrees[0].shape[1] if agrees else 0)
    right = [0] * len(reached)
    for each in agrees:
        accepted = each.long().cumprod(dim=1).sum(dim=1).tolist()
        row = 0
        while row < len(accepted):
            steps, tokens = steps + 1, tokens + accepted[row] + 1
            for depth in range(len(reached)):
                reached[depth] += accepted[row] >= depth
                right[depth] += accepted[row] > depth
            row += accepted[row] + 1
    by_depth = [hits / max(tries, 1) for hits, tries in zip(right, reached, strict=True)]
    return Acceptance(tokens / max(steps, 1), by_depth)
