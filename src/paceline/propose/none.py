"""Plain decoding: the loop with an empty draft."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.propose.base import Budget, Proposer
from paceline.types import NO_DRAFT, Draft, View


class NoProposer(Proposer):
    name = "none"

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        return [NO_DRAFT for _ in views]
