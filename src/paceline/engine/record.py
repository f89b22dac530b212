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
class DraftTimes:
    """Seconds of drafts as a line over their levels, by least squares; old ones fade.

    Where all were equally deep the levels are charged with everything. A step can be held up but never hurried, so what
    takes more than twice what it should counts as twice.
    """

    weight: float = 0.0
    levels: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def learn(self, levels: int, seconds: float) -> None:
        if self.weight:
            begin, level = self.line()
            seconds = min(seconds, 2 * (begin + level * levels))
        for name, value in (
            ("weight", 1.0), ("levels", levels), ("seconds", seconds), ("squares", levels**2),
            ("products", levels * seconds),
        ):  # fmt: skip
            setattr(self, name, 0.95 * getattr(self, name) + value)

    def line(self) -> tuple[float, float]:
        """(seconds that every draft takes, seconds of a level)."""
        everything = self.seconds / self.levels
        spread = self.squares - self.levels**2 / self.weight
        if spread < 0.05 * self.weight:
            return 0.0, everything
        slope = (self.products - self.levels * self.seconds / self.weight) / spread
        level = min(max(slope, everything / 5), everything)
        return (self.seconds - level * self.levels) / self.weight, level


@dataclass
class Record:
    """What one method has shown: its cost, its rate, its acceptance over all requests and on those under way."""

    draft_seconds: float | None = None  # per level of a draft, for the whole batch
    begin_seconds: float = 0.0  # of a draft, however deep
    times: DraftTimes = field(default_factory=DraftTimes)
    asked_at: int = 0  # the step in which it was last asked to draft
    everywhere: Tally = field(default_factory=lambda: Tally(0.99))
    requests: dict[int, Tally] = field(default_factory=dict)

    def acceptance(self, request: int) -> float:
        """On one request: what it was elsewhere, until the request's own outcomes say otherwise."""
        elsewhere = self.everywhere.rate(prior=0.75, weight=4.0)
        return self.requests.get(request, NOTHING_TRIED).rate(prior=elsewhere, weight=4.0)

    def learn_cost(self, levels: int, seconds: float) -> None:
        self.times.learn(levels, seconds)
        self.begin_seconds, self.draft_seconds = self.times.line()

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
