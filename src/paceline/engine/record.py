"""What drafting has shown so far: outcomes, acceptance, costs, the pace of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.cache.tree import is_chain
from paceline.types import Draft


@dataclass(frozen=True)
class Outcome:
    """What one request drafted in a step, by which method; `levels` deep before it was trimmed to `draft`.

    foregone: the chance of the first token that was trimmed off a chain; None where none was. read: as in `Draft`.
    """

    request: int
    source: str
    draft: Draft
    accepted: int
    levels: int
    foregone: float | None = None
    read: int = 0

    @property
    def judged(self) -> tuple[float, int]:
        """(accepted, tried). A token that was trimmed for its small chance behind accepted ones counts as tried and as
        accepted by that chance: what is verified alone are a method's best guesses, and says too much for it."""
        reached = min(self.draft.depth, self.accepted + 1)
        if self.foregone is None or self.accepted < self.draft.depth:
            return self.accepted, reached
        return self.accepted + self.foregone, reached + 1


def foregone(offered: Draft, kept: Draft) -> float | None:
    """Of a chain that was trimmed, and says how sure it is."""
    if offered.confidence is None or kept.size == offered.size or not is_chain(offered.parents):
        return None
    return min(offered.confidence[kept.size], 1.0)


@dataclass
class Tally:
    """Drafted tokens that were tried, and those of them that were accepted; old ones fade."""

    fading: float
    accepted: float = 0.0
    tried: float = 0.0

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        judged = [outcome.judged for outcome in outcomes]
        self.accepted = self.fading * self.accepted + sum(accepted for accepted, _ in judged)
        self.tried = self.fading * self.tried + sum(tried for _, tried in judged)

    def rest(self, fading: float) -> None:
        """Nothing was tried: what was seen slowly loses its weight."""
        self.accepted, self.tried = fading * self.accepted, fading * self.tried

    def rate(self, prior: float, weight: float) -> float:
        return (self.accepted + weight * prior) / (self.tried + weight)


FADING = 0.95  # of what a draft took, from one to the next


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
        self.weight = FADING * self.weight + 1.0
        self.levels = FADING * self.levels + levels
        self.seconds = FADING * self.seconds + seconds
        self.squares = FADING * self.squares + levels**2
        self.products = FADING * self.products + levels * seconds

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

    times: DraftTimes = field(default_factory=DraftTimes)  # for the whole batch
    asked_at: int = 0  # the step in which it was last asked to draft
    probes: int = 0  # steps still to come in which it is tried
    everywhere: Tally = field(default_factory=lambda: Tally(0.99))
    requests: dict[int, Tally] = field(default_factory=dict)

    def acceptance(self, request: int) -> float:
        """On one request: what it was elsewhere, until the request's own outcomes say otherwise."""
        elsewhere = self.everywhere.rate(prior=0.75, weight=4.0)
        return self.requests.get(request, NOTHING_TRIED).rate(prior=elsewhere, weight=4.0)

    @property
    def draft_seconds(self) -> float | None:
        """Of a level of a draft; None as long as nothing was timed."""
        return self.times.line()[1] if self.times.weight else None

    @property
    def begin_seconds(self) -> float:
        """Of a draft, however deep."""
        return self.times.line()[0] if self.times.weight else 0.0

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

    def learn(self, tokens: float, seconds: float) -> None:
        self.tokens, self.seconds = self.fading * self.tokens + tokens, self.fading * self.seconds + seconds


NO_STEPS = Pace()
