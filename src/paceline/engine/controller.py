"""How long to draft: as long as one more token is expected to pay for the time it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.types import Draft

# Drafting has to promise this much more than plain decoding: estimates err, and a lost step is lost.
WORTHWHILE = 1.05


@dataclass
class LineFit:
    """Seconds of a forward as base + slope * rows, least squares over recent steps (older ones fade).

    Before there is data, rows are taken to cost `prior_slope` of the first one.
    """

    prior_slope: float = 0.06
    fading: float = 0.98
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # n, x, xx, y, xy

    def learn(self, rows: int, seconds: float) -> None:
        x = float(rows - 1)
        for i, value in enumerate((1.0, x, x * x, seconds, x * seconds)):
            self._sums[i] = self._sums[i] * self.fading + value

    def seconds(self, rows: int) -> float:
        """Predicted seconds; in units of the first row before anything was measured."""
        n, x, xx, y, xy = self._sums
        if n == 0:
            return 1 + self.prior_slope * (rows - 1)
        mean = y / n
        # The prior stands for a few observations far from row 1, so that equal steps do not leave the slope open.
        weight = 2 * 8.0**2
        base_guess = max(mean - self.prior_slope * mean * x / n, 1e-9)
        spread = xx - x * x / n
        slope = (xy - x * y / n + weight * self.prior_slope * base_guess) / (spread + weight)
        return max(mean + slope * (rows - 1 - x / n), 1e-9)


@dataclass
class Controller:
    """Budgets and trims drafts by expected tokens per second (goodput), from measured cost and acceptance.

    `fixed` is the user's own draft length: then nothing is adapted. `longest` bounds every draft.
    """

    fixed: int | None = None
    longest: int = 64
    target: LineFit = field(default_factory=LineFit)
    draft_seconds: float | None = None  # per drafted token
    accepted: float = 3.0  # fading counts of drafted tokens that were reached by verification; the prior is 3 of 4
    tried: float = 4.0
    tokens_per_second: float | None = None  # of one sequence in steps that drafted, fading average

    @property
    def acceptance(self) -> float:
        return self.accepted / self.tried

    def break_even(self) -> float:
        """Least chance of being emitted at which one more token of a draft model pays for its time.

        A token costs its own draft step and a row of verification; it must earn at least the present rate.
        """
        if self.fixed is not None:
            return 0.0
        if self.draft_seconds is None or self.tokens_per_second is None:
            return 0.4
        row = self.target.seconds(2) - self.target.seconds(1)
        return min(0.95, self.tokens_per_second * (self.draft_seconds + row))

    def budget(self) -> int:
        """The most tokens to ask of a proposer for one sequence; `trim` decides how many of them are verified."""
        if self.fixed is not None:
            return self.fixed
        row = self.target.seconds(2) - self.target.seconds(1)
        if self.draft_seconds is None or self.draft_seconds < row / 10:
            return self.longest  # drafts that cost next to nothing are cut by their own confidence, in `trim`
        return max(1, best_length([self.acceptance] * self.longest, self.target, 1, self.draft_seconds))

    def trim(self, draft: Draft, other_rows: int) -> Draft:
        """The prefix worth verifying beside `other_rows` rows of the batch: cut by the confidences alone."""
        if self.fixed is not None or draft.confidence is None or draft.q is not None:
            return draft
        return draft.head(best_length(draft.confidence, self.target, 1 + other_rows, 0.0))

    def observe(self, rows: int, target_seconds: float, drafted: int, accepted: int, draft_seconds: float) -> None:
        """Learn from one decoding step: its rows, its times, what it drafted and accepted in all."""
        self.target.learn(rows, target_seconds)
        if drafted == 0:
            return
        sequences = rows - drafted
        rate = (accepted + sequences) / sequences / (target_seconds + draft_seconds)
        self.draft_seconds = _fade(self.draft_seconds, draft_seconds / drafted)
        self.tokens_per_second = _fade(self.tokens_per_second, rate)
        self.accepted = 0.9 * self.accepted + accepted
        self.tried = 0.9 * self.tried + min(drafted, accepted + sequences)


def _fade(old: float | None, new: float) -> float:
    return new if old is None else 0.9 * old + 0.1 * new


def best_length(rates: Sequence[float], target: LineFit, rows: int, draft_seconds: float) -> int:
    """Draft length n that maximises (1 + s_1 + .. + s_n) / (T(rows + n) + n * draft_seconds), s_j the survival."""
    best, best_rate = 0, WORTHWHILE / target.seconds(rows)
    emitted, survival = 1.0, 1.0
    for n, rate in enumerate(rates, start=1):
        survival *= rate
        emitted += survival
        goodput = emitted / (target.seconds(rows + n) + n * draft_seconds)
        if goodput > best_rate:
            best, best_rate = n, goodput
    return best
