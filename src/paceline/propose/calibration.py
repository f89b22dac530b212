"""What a proposer's confidence has been worth: stated chances against outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

BINS = 10
WEIGHT = 6.0  # outcomes that a stated chance counts for
FADING = 0.98


@dataclass
class Calibration:
    """Per group (for example where a draft came from) and tenth of stated chance: how often tokens were accepted."""

    _counts: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)

    def adjust(self, group: str, stated: float) -> float:
        accepted, tried = self._counts.get((group, _bin(stated)), (0.0, 0.0))
        return (accepted + WEIGHT * stated) / (tried + WEIGHT)

    def learn(self, group: str, stated: Sequence[float], accepted: int) -> None:
        """A chain whose first `accepted` tokens were taken; the next was refused, those behind were never judged."""
        for i, chance in enumerate(stated[: accepted + 1]):
            taken, tried = self._counts.get((group, _bin(chance)), (0.0, 0.0))
            self._counts[group, _bin(chance)] = (FADING * taken + (i < accepted), FADING * tried + 1)


def _bin(chance: float) -> int:
    return min(int(chance * BINS), BINS - 1)
