"""How much to draft, by which method, and what of it to verify: whatever gains most for its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.engine.duel import Duel
from paceline.engine.record import NO_STEPS, Outcome, Pace, Record
from paceline.engine.step_cost import StepCost
from paceline.propose.base import NOTHING, Budget
from paceline.types import Draft

# Drafting has to promise this many tokens more than plain decoding: estimates err, and a lost step is lost.
WORTHWHILE = 0.05
PROBE_EVERY, PROBES = 48, 2  # steps after which a method that does not pay is tried again, and how often in a row
BACKLOG = 4  # rows that waited; a draft that had to read more says nothing of what the next would take
ANCHOR_EVERY = 16  # see `Controller.observe`
PRIOR_STEPS = 2.0  # plain steps' worth of time that the pace of other requests counts for on a new one
UNSTATED = 0.5  # chance of a token of which its proposer says nothing
UNKNOWN_COST = 0.25  # of a target step: what a draft's level is taken to cost before it was timed


@dataclass
class Controller:
    """Budgets and trims drafts by what they gain at the present pace, from measured cost and acceptance.

    Of all ways to spend a step, the one with the most expected tokens beyond pace * seconds is best for tokens a second
    in the long run (the marginal value theorem, Charnov 1976; Dinkelbach 1967). The step with the best ratio of its own
    is not: a slow draft of many tokens can keep a request from quicker steps behind it.

    `fixed` is the user's own draft length: then nothing is adapted. `longest` bounds every branch, `nodes` every tree.
    `looks`: methods read their confidences as they draft and stop by `break_even` themselves.
    """

    fixed: int | None = None
    longest: int = 64
    nodes: int = 64
    looks: bool = False
    target: StepCost = field(default_factory=StepCost)
    records: dict[str, Record] = field(default_factory=dict)
    present: Sequence[int] = (0,)  # the requests that decode in this step
    alone: bool = True  # one of them, nobody's prompt beside it, and a method that can be judged
    paces: dict[int, Pace] = field(default_factory=dict)
    everywhere: Pace = field(default_factory=lambda: Pace(fading=0.998))
    duel: Duel = field(default_factory=Duel)
    steps: int = 0
    emitted: float = 1.0  # tokens of a sequence in a step that drafted, fading average
    since_plain: int = ANCHOR_EVERY  # steps since one without drafts: the first of all is one
    timed: tuple[str, float] | None = (
        None  # a method that others were asked before in this step, and what it took itself
    )

    def record(self, source: str) -> Record:
        return self.records.setdefault(source, Record())

    def break_even(self, source: str) -> float:
        """Least chance of being emitted at which a token's successor pays for its time.

        The successor costs a draft step and a row of verification, must earn at least the present rate, and is less
        likely than the token by the method's acceptance.
        """
        if self.fixed is not None:
            return 0.0
        record = self.record(source)
        if record.draft_seconds is None:
            return 0.4
        pace = sum(self.pace(request) for request in self.present) / self.sequences
        worth = pace * (record.draft_seconds + self._row())
        return min(0.95, worth / record.everywhere.rate(prior=0.75, weight=4.0))

    def budget(self, source: str, request: int) -> Budget:
        """The most that is of use to ask of a method for one sequence; `trim` decides what of it is verified."""
        if self.fixed is not None:
            return Budget(self.fixed, self.nodes)
        if self._plain_due() or (self.alone and self.duel.rests(request)):
            return NOTHING
        cost = self.record(source).draft_seconds
        if cost is None or cost < self._row() / 10:
            return Budget(self.longest, self.nodes)  # drafts that cost next to nothing are cut by their own confidence
        length = self.expectation(source, request)[1]
        return self.allowance(length) if length > 0 else self.probe(source)

    def allowance(self, length: int) -> Budget:
        """What to allow where `length` is best on average: a method that sees its own chances may go on while all is
        well, and stops sooner where it is not."""
        if self.fixed is not None or not self.looks:
            return Budget(length, self.nodes)
        return Budget(min(3 * length + 1, self.longest), self.nodes)

    def probe(self, source: str) -> Budget:
        """A method that does not pay now drafts one token now and then, or it could never show that it would. Twice in
        a row: the first time a head reads all that has been said since the last, and takes long for it."""
        record = self.record(source)
        if self.steps - record.asked_at >= PROBE_EVERY:
            record.probes = PROBES
        if record.probes == 0:
            return NOTHING
        record.probes, record.asked_at = record.probes - 1, self.steps
        return Budget(1, 1)

    @property
    def sequences(self) -> int:
        return max(len(self.present), 1)

    def pace(self, request: int) -> float:
        """Tokens a second of one request: at first that of requests before it, never less than the plain pace."""
        plain, own = self.target.seconds(self.sequences), self.paces.get(request, NO_STEPS)
        usual = self.everywhere.tokens / self.everywhere.seconds if self.everywhere.seconds else 0.0
        weight = PRIOR_STEPS * plain
        return max((weight * max(usual, 1 / plain) + own.tokens) / (weight + own.seconds), 1 / plain)

    def promise(self, draft: Draft, request: int) -> float:
        """Tokens that verifying the best part of a draft gains on the present pace (of nothing: a plain step's)."""
        best, emitted = self._gain(request, 1.0, 0, 0.0), 1.0
        for count, chance in enumerate(sorted(survivals(draft), reverse=True), start=1):
            emitted += chance
            best = max(best, self._gain(request, emitted, count, 0.0))
        return best

    def expectation(self, source: str, request: int, behind: int = 0) -> tuple[float, int]:
        """Tokens that drafting with this method at its best length gains on the present pace, and that length.

        `behind`: tokens it has to read first. Rows are taken to cost a draft what they cost the target, relatively.
        """
        record = self.record(source)
        cost = UNKNOWN_COST * self.target.seconds(1) if record.draft_seconds is None else record.draft_seconds
        rate = record.acceptance(request)
        reading = record.begin_seconds + cost * (self.target.relative(1 + behind) - 1)
        pace, plain = self.pace(request), self.target.seconds(self.sequences)
        best, length, emitted, chance = 1.0 - pace * plain + WORTHWHILE, 0, 1.0, 1.0
        for n in range(1, (self.fixed or self.longest) + 1):
            chance *= rate
            emitted += chance
            seconds = self.target.seconds(self.sequences * (1 + n)) + n * cost + reading
            gain = emitted - pace * seconds
            if gain > best or n == self.fixed:
                best, length = gain, n
            still_to_come = chance * rate / (1 - rate) if rate < 1 else self.longest
            if self.fixed is None and gain + still_to_come <= best:
                break
        return best, length

    def forget(self, request: int) -> None:
        """The request has ended."""
        self.paces.pop(request, None)
        for record in self.records.values():
            record.requests.pop(request, None)

    def trim(self, drafts: Sequence[Draft]) -> list[Draft]:
        """What is worth verifying of the whole step: nodes in decreasing order of their chance of being emitted, while
        they gain on the present pace. Tokens that were drawn at random are never cut: that would bias the answer."""
        if self.fixed is not None:
            return list(drafts)
        cut = [b for b, draft in enumerate(drafts) if draft.confidence is not None and draft.draw == "point"]
        chances = sorted(
            ((-chance, b, node) for b in cut for node, chance in enumerate(survivals(drafts[b]))), key=lambda c: c[0]
        )
        rows = len(drafts) + sum(draft.size for b, draft in enumerate(drafts) if b not in cut)
        pace = sum(self.pace(request) for request in self.present)
        best, best_gain, emitted = 0, WORTHWHILE - pace * self.target.seconds(rows), 0.0
        for count, (chance, _, _) in enumerate(chances, start=1):
            emitted -= chance
            gain = emitted - pace * self.target.seconds(rows + count)
            if gain > best_gain:
                best, best_gain = count, gain
        kept: dict[int, list[int]] = {b: [] for b in cut}
        for _, b, node in chances[:best]:
            kept[b].append(node)
        return [draft.keep(sorted(kept[b])) if b in kept else draft for b, draft in enumerate(drafts)]

    def observe(self, outcomes: Sequence[Outcome], target_seconds: float, draft_seconds: float) -> None:
        """Learn from one decoding step: what each sequence drafted and accepted, and the step's times.

        What a plain step takes is only known from plain steps, so one is taken now and then: seldom where drafts bring
        many tokens, where no error about it could matter, and more often where speculation hardly pays.
        """
        self.steps += 1
        self.target.learn(len(outcomes) + sum(outcome.draft.size for outcome in outcomes), target_seconds)
        drafted = [outcome for outcome in outcomes if outcome.draft.size]
        self.since_plain = self.since_plain + 1 if drafted else 0
        if drafted:
            self.emitted = _fade(self.emitted, 1 + sum(outcome.accepted for outcome in drafted) / len(drafted))
        asked = [outcome for outcome in outcomes if outcome.levels]
        self._learn_cost(asked, draft_seconds)
        for source in dict.fromkeys(outcome.source for outcome in asked):
            self.record(source).learn([outcome for outcome in asked if outcome.source == source])
        for outcome in outcomes:
            pace = self.paces.setdefault(outcome.request, Pace())
            for learner in (pace, self.everywhere):
                learner.learn(1 + outcome.accepted, target_seconds + draft_seconds)
        if not (self.alone and self.duel.resting):  # nobody was asked: that says nothing of anyone
            self._rest(outcomes)

    def clock(self, request: int, tokens: int, seconds: float) -> None:
        """What a step of a request that decodes alone took as a whole, and emitted."""
        self.duel.learn(request, tokens, seconds)

    def _learn_cost(self, asked: Sequence[Outcome], draft_seconds: float) -> None:
        """Where methods share a step, the time is that of the dearest; the others cost next to nothing."""
        sources = dict.fromkeys(outcome.source for outcome in asked)
        timed, self.timed = self.timed, None
        for source in sources:
            self.record(source).asked_at = self.steps
        if not sources:
            return
        if timed is not None and timed[0] in sources:
            dearest, draft_seconds = timed
        else:
            dearest = max(sources, key=lambda source: self.record(source).draft_seconds or 0.0)
            if len(sources) > 1 and self.record(dearest).draft_seconds is None:
                return
        drafted, times = [outcome for outcome in asked if outcome.source == dearest], self.record(dearest).times
        if max(outcome.read for outcome in drafted) <= BACKLOG or not times.weight:
            times.learn(max(outcome.levels for outcome in drafted), draft_seconds)

    def _rest(self, outcomes: Sequence[Outcome]) -> None:
        """Methods that were not in use are judged less and less by what they showed when they were."""
        for source, record in self.records.items():
            used = {outcome.request for outcome in outcomes if outcome.levels and outcome.source == source}
            if not used:
                record.everywhere.rest(0.998)
            for outcome in outcomes:
                if outcome.request in record.requests and outcome.request not in used:
                    record.requests[outcome.request].rest(0.97)

    def _plain_due(self) -> bool:
        return self.since_plain >= ANCHOR_EVERY * self.emitted**2

    def _gain(self, request: int, emitted: float, length: int, draft_seconds: float) -> float:
        """`emitted` tokens less what the request's pace brings in the time of a step in which all draft `length`."""
        seconds = self.target.seconds(self.sequences * (1 + length)) + draft_seconds
        return emitted - self.pace(request) * seconds

    def _row(self) -> float:
        """Seconds that one more row of every sequence costs."""
        return self.target.seconds(2 * self.sequences) - self.target.seconds(self.sequences)


def survivals(draft: Draft) -> list[float]:
    """Chance that each node is emitted: the product of confidences on its path, so never above its parent's."""
    found: list[float] = []
    stated = draft.confidence or [UNSTATED] * draft.size
    for parent, confidence in zip(draft.parents, stated, strict=True):
        found.append(min(confidence, 1.0) * (1.0 if parent < 0 else found[parent]))
    return found


def _fade(old: float, new: float) -> float:
    return 0.9 * old + 0.1 * new
