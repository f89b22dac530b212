"""What drafting has shown so far: outcomes, acceptance, costs, the pace of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.types import Draft


@dataclass(frozen=True)
class Outcome:
    """What one request drafted in a step, by which method; `levels` deep before it was trimmed to `draft`."""

    request: int
    source: str
    draft: Draft
    accepted: int
    levels: int


@dataclass
class Tally:
    """Drafted tokens that verification reached, and those of them that it accepted; old ones fade."""

    fading: float
    accepted: float = 0.0
    tried: float = 0.0

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        self.accepted = self.fading * self.accepted + sum(outcome.accepted for outcome in outcomes)
        reached = sum(min(outcome.draft.depth, outcome.accepted + 1) for outcome in outcomes)
        self.tried = self.fading * self.tried + reached

    def rest(self, fading: float) -> None:
        """Nothing was tried: what was seen slowly loses its weight."""
        self.accepted, self.tried = fading * self.accepted, fading * self.tried

    def rate(self, prior: float, weight: float) -> float:
        return (self.accepted + weight * prior) / (self.tried + weight)


@dataclass
class Record:
    """What one method has shown: its cost, its rate, its acceptance over all requests and on those under way."""

    draft_seconds: float | None = None  # per level of a draft, for the whole batch
    asked_at: int = 0  # the step in which it was last asked to draft
    everywhere: Tally = field(default_factory=lambda: Tally(0.99))
    requests: dict[int, Tally] = field(default_factory=dict)

    def acceptance(self, request: int) -> float:
        """On one request: what it was elsewhere, until the request's own outcomes say otherwise."""
        elsewhere = self.everywhere.rate(prior=0.75, weight=4.0)
        return self.requests.get(request, NOTHING_TRIED).rate(prior=elsewhere, weight=4.0)

    def learn_cost(self, seconds: float) -> None:
        """Seconds of one level. A step can be held up but never hurried, so what is quicker counts more."""
        old = self.draft_seconds
        if old is None:
            self.draft_seconds = seconds
        else:
            self.draft_seconds = 0.7 * old + 0.3 * seconds if seconds < old else 0.9 * old + 0.1 * min(seconds, 2 * old)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        self.everywhere.learn(outcomes)
        for outcome in outcomes:
            self.requests.setdefault(outcome.request, Tally(0.9)).learn([outcome])


NOTHING_TRIED = Tally(1.0)


@dataclass
class Pace:
    """Tokens and seconds of one request's latest steps; old ones fade."""

    tokens: float = 0.0
    seconds: float = 0.0
    fading: float = 0.95

    def learn(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = self.fading * self.tokens + tokens, self.fading * self.seconds + seconds


NO_STEPS = Pace()
