"""What a target step costs by its number of rows, learned while serving."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PRIOR_SLOPE = 0.06  # what a row is taken to cost, in first rows, before it was measured
OUTLIER = 1.6  # a step that differs more than this from what was expected counts as if it differed by this


@dataclass
class StepCost:
    """Seconds of a forward as level * shape(rows), with shape(1) = 1 and straight lines between `KNOTS`.

    The level follows the machine's speed of the moment, the shape changes slowly: drift does not bend the curve. What
    is learned of a knot moves the dearer ones with it, so the curve never falls and unseen sizes keep their distance.
    """

    prior_slope: float = PRIOR_SLOPE
    level: float | None = None
    rises: list[float] = field(init=False)  # of the shape from each knot to the next
    shape: list[float] = field(init=False)  # at each knot

    def __post_init__(self) -> None:
        self.rises = [self.prior_slope * (b - a) for a, b in pairwise(KNOTS)]
        self._add_up()

    def learn(self, rows: int, seconds: float) -> None:
        if self.level is None:
            self.level = seconds / self.relative(rows)
        expected = self.relative(rows)
        seen = min(max(seconds / self.level, expected / OUTLIER), expected * OUTLIER)
        segment, share = _segment(rows)
        error = 0.15 * (seen - expected)
        if segment > 0:
            self.rises[segment - 1] = max(self.rises[segment - 1] + error * (1 - min(share, 1.0)), 0.0)
        self.rises[segment] = max(self.rises[segment] + error * min(share, 1.0), 0.0)
        self._add_up()
        self.level *= 0.9 + 0.1 * seen / self.relative(rows)

    def seconds(self, rows: int) -> float:
        """Predicted seconds; in units of the first row before anything was measured."""
        return (1.0 if self.level is None else self.level) * self.relative(rows)

    def relative(self, rows: int) -> float:
        """Cost of `rows` in first rows; past the last knot it goes on as between the last two."""
        segment, share = _segment(rows)
        return self.shape[segment] + share * self.rises[segment]

    def _add_up(self) -> None:
        self.shape = list(accumulate(self.rises, initial=1.0))


def _segment(rows: int) -> tuple[int, float]:
    """The segment between two knots that `rows` lies in, and how far along it."""
    left = min(bisect_right(KNOTS, rows), len(KNOTS) - 1) - 1
    return left, (rows - KNOTS[left]) / (KNOTS[left + 1] - KNOTS[left])
