"""What a proposer's confidence has been worth: stated chances against outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BINS = 10  # as many as native/src/chain.cpp takes
WEIGHT = 6.0  # outcomes that a stated chance counts for
FADING = 0.98


@dataclass
class Calibration:
    """Per group (for example where a draft came from) and tenth of stated chance: how often tokens were accepted.

    prior: what a stated chance is taken to be worth before there are outcomes.
    """

    prior: Callable[[float], float] = lambda stated: stated
    _counts: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)

    def adjust(self, group: str, stated: float) -> float:
        accepted, tried = self._counts.get((group, tenth(stated)), (0.0, 0.0))
        return (accepted + WEIGHT * self.prior(stated)) / (tried + WEIGHT)

    def worth(self, group: str) -> list[float]:
        """Of each tenth of stated chance, at its middle."""
        return [self.adjust(group, (i + 0.5) / BINS) for i in range(BINS)]

    def learn(self, group: str, stated: Sequence[float], accepted: int) -> None:
        """A chain whose first `accepted` tokens were taken; the next was refused, those behind were never judged."""
        for i, chance in enumerate(stated[: accepted + 1]):
            taken, tried = self._counts.get((group, tenth(chance)), (0.0, 0.0))
            self._counts[group, tenth(chance)] = (FADING * taken + (i < accepted), FADING * tried + 1)


def tenth(chance: float) -> int:
    """Which tenth of stated chance it lies in, 0 to 9."""
    return min(int(chance * BINS), BINS - 1)


def of_shared_noise(stated: float) -> float:
    """What the probability of a coupled draw is worth, before it has shown: the target sees the same noise, so even an
    unlikely token often is its choice, too, and a likely one less often than that. Roughly what the head of
    smollm2-135m showed at temperature 0.8 (0.2 at 0.03, 0.36 at 0.36, 0.85 at 0.95)."""
    return 0.2 + 0.55 * stated
