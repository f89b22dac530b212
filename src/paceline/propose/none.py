"""Plain decoding: the loop with an empty draft."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.types import NO_DRAFT, Draft, Verdict, View


class NoProposer:
    name = "none"

    def open(self, view: View) -> None:
        pass

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Draft]:
        return [NO_DRAFT for _ in views]

    def observe(self, view: View, verdict: Verdict) -> None:
        pass

    def close(self, view: View) -> None:
        pass
