"""What a drafting method has to be. It can slow a request down; it can never change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.types import Draft, Verdict, View


class Proposer(Protocol):
    """One small file per method. Called in this order: open, (propose, observe)*, close.

    `propose` gets every sequence of the step at once and a budget each: the most tokens that are of use, 0 for one
    that does not draft now (a proposer with a cache of its own may catch up on its prompt meanwhile). It returns one
    `Draft` each, no longer than the budget. `observe` only records.
    """

    name: str

    def open(self, view: View) -> None: ...

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Draft]: ...

    def observe(self, view: View, verdict: Verdict) -> None: ...

    def close(self, view: View) -> None: ...
