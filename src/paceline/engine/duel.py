"""Whether drafting pays as a whole, by the clock: stretches of steps that may draft against stretches that do not.

The controller weighs every draft by what drafting and verifying are timed to take. Around them there is more: methods
that are asked and find nothing, and that they have to be kept up to date; and a longer step finds fewer of the weights
in the processor's caches, so that even the plain steps among drafts take longer than plain steps among their like.
Where drafts gain little that is what loses to plain decoding.

So both are tried on a request that decodes alone, and the one that emits more tokens a second stays. The other gets
stretches so short beside its own that trying it costs a hundredth. In a batch, where what is said above is shared by
all its requests, the controller's own sums decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine.record import Pace

TRY = 24  # steps of a stretch that is only tried
SETTLE = 4  # first steps of a stretch, which say little: a head reads what was said meanwhile, caches are another's
CLOSE = 0.98  # drafting may lose by so much: the two are not told apart closer than that
REGRET = 0.01  # what trying the slower of the two may cost
LONGEST, LONGEST_REST = 4096, 1024  # steps of a stretch: at rest much may be missed
HELD_UP = 2.0  # a step can be held up, never hurried: what takes more than this times the usual counts as so much
PRIOR_STEPS = 64  # plain steps' worth of time that other requests count for on a new one


@dataclass
class Sides:
    """Tokens and seconds of steps with drafting and without; old ones fade, and half as fast those of the side that is
    not in use: what it showed is less and less true."""

    fading: float
    drafting: Pace = field(init=False)
    plain: Pace = field(init=False)

    def __post_init__(self) -> None:
        self.drafting, self.plain = Pace(fading=self.fading), Pace(fading=self.fading)

    def learn(self, resting: bool, tokens: float, seconds: float) -> None:
        used, idle = (self.plain, self.drafting) if resting else (self.drafting, self.plain)
        used.learn(tokens, seconds)
        idle.tokens, idle.seconds = idle.tokens * self.fading**0.5, idle.seconds * self.fading**0.5


@dataclass
class Duel:
    """Of requests that decode alone, one behind the other. `resting`: nothing is drafted in this stretch."""

    resting: bool = False
    left: int = 2 * TRY  # steps of this stretch still to come
    settling: int = SETTLE
    usual: float | None = None  # seconds of a step, fading average
    request: int | None = None
    own: Sides = field(default_factory=lambda: Sides(0.99))
    everywhere: Sides = field(default_factory=lambda: Sides(0.998))

    def rests(self, request: int) -> bool:
        """Whether this request, the only one of the step, is not to draft now."""
        if request != self.request:
            self._begin(request)
        return self.resting

    def learn(self, request: int, tokens: float, seconds: float) -> None:
        """`seconds`: of the whole step, all that is done between target and draft included."""
        if request != self.request:
            self._begin(request)
        seconds = self._not_held_up(seconds)
        if self.settling > 0:
            self.settling -= 1
            return
        for sides in (self.own, self.everywhere):
            sides.learn(self.resting, tokens, seconds)
        self.left -= 1
        if self.left <= 0:
            self._turn()

    def ratio(self) -> float | None:
        """Tokens a second of drafting over those of plain decoding, on this request; None before both were tried."""
        everywhere = self.everywhere
        if not everywhere.plain.seconds or not everywhere.drafting.seconds:
            return None
        usual = everywhere.plain.tokens / everywhere.plain.seconds
        return _rate(self.own.drafting, everywhere.drafting, usual) / _rate(self.own.plain, everywhere.plain, usual)

    def _not_held_up(self, seconds: float) -> float:
        usual = seconds if self.usual is None else self.usual
        seconds = min(seconds, HELD_UP * usual)
        self.usual = 0.9 * usual + 0.1 * seconds
        return seconds

    def _begin(self, request: int) -> None:
        """The stretch goes on: to try both anew on each of many short requests would cost more than a hundredth. Only a
        rest that the request before had earned is cut to what all have."""
        self.request, self.own, self.settling = request, Sides(self.own.fading), SETTLE
        if self.resting and (ratio := self.ratio()) is not None:
            self.left = min(self.left, stretch(ratio))

    def _go(self, resting: bool, steps: int) -> None:
        self.resting, self.left, self.settling = resting, steps, SETTLE

    def _turn(self) -> None:
        ratio = self.ratio()
        if ratio is not None and self.resting == (ratio > CLOSE):  # the slower: it was only tried, or has come to be
            self._go(not self.resting, stretch(ratio))
        else:
            self._go(not self.resting, TRY)


def stretch(ratio: float) -> int:
    """Steps of the faster side beside which `TRY` steps of the other cost about `REGRET`. `ratio`: see `Duel.ratio`."""
    longest = LONGEST_REST if ratio < 1 else LONGEST
    return min(max(round(TRY * (1 - min(ratio, 1 / ratio)) / REGRET), 4 * TRY), longest)


def _rate(own: Pace, usual: Pace, plain: float) -> float:
    """Tokens a second of one side on this request: those of other requests at first. `plain`: usual plain rate."""
    weight = PRIOR_STEPS / plain
    return (weight * usual.tokens / usual.seconds + own.tokens) / (weight + own.seconds)
