"""What a target step costs by its number of rows, learned while serving."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PRIOR_SLOPE = 0.06  # what a row is taken to cost, in first rows, before it was measured
OUTLIER = 1.6  # a step that differs more than this from what was expected counts as if it differed by this


@dataclass
class StepCost:
    """Seconds of a forward as level * shape(rows), with shape(1) = 1 and straight lines between `KNOTS`.

    The level follows the machine's speed of the moment, the shape changes slowly: drift does not bend the curve. One
    row is the plain step; where none was timed lately, the prior shape says what it would take.
    """

    prior_slope: float = PRIOR_SLOPE
    level: float | None = None
    shape: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shape = [1 + self.prior_slope * (knot - 1) for knot in KNOTS]

    def learn(self, rows: int, seconds: float) -> None:
        if self.level is None:
            self.level = seconds / self.relative(rows)
        expected = self.relative(rows)
        seen = min(max(seconds / self.level, expected / OUTLIER), expected * OUTLIER)
        left, share = _between(rows)
        for knot, weight in ((left, 1 - share), (left + 1, share)):
            if knot > 0:
                self.shape[knot] = max(self.shape[knot] + 0.15 * weight * (seen - expected), self.shape[knot - 1])
        self.level *= 0.9 + 0.1 * seen / self.relative(rows)

    def seconds(self, rows: int) -> float:
        """Predicted seconds; in units of the first row before anything was measured."""
        return (1.0 if self.level is None else self.level) * self.relative(rows)

    def relative(self, rows: int) -> float:
        """Cost of `rows` in first rows; past the last knot it goes on as between the last two."""
        left, share = _between(rows)
        return self.shape[left] + share * (self.shape[left + 1] - self.shape[left])


def _between(rows: int) -> tuple[int, float]:
    """The knot at or below `rows`, and how far on the way to the next it is."""
    left = min(bisect_right(KNOTS, rows), len(KNOTS) - 1) - 1
    return left, (rows - KNOTS[left]) / (KNOTS[left + 1] - KNOTS[left])
