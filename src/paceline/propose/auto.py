"""The choice among methods, anew for every request and step, from measured acceptance and measured cost.

Light methods (suffix, n-gram) cost next to nothing; each says what it has found and how sure it is. One is asked in
every step, or in every fourth where what it finds, beyond those before it, does not pay for the asking: next to nothing
is some hundredths of a small model's step.
The heavy one (a head or a draft model) costs time before it says anything, so it is judged by what it has shown on
this request, and asked only if it promises more. Both are weighed in tokens gained on the request's present pace;
drafting nothing is among the choices.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.engine.controller import Controller
from paceline.propose.base import NOTHING, Budget, Proposer
from paceline.propose.calibration import Calibration
from paceline.types import NO_DRAFT, Committed, Draft, View

HYSTERESIS = 0.05  # tokens that another method has to promise beyond the one in use, against flapping
REST = 3  # steps in which light methods are not asked, where asking costs more than what they find


@dataclass
class Asking:
    """Whether a light method is worth asking on a request. found: tokens that asking it has promised to gain beyond
    those asked before it, fading average; rest: steps to come in which it is not asked."""

    found: float = 1.0
    rest: int = 0

    def learn(self, gain: float, cost: float) -> None:
        """`cost`: the tokens that the time of asking is worth."""
        self.found = 0.8 * self.found + 0.2 * gain
        self.rest = REST if self.found < cost else 0

    def due(self) -> bool:
        self.rest, due = max(self.rest - 1, 0), self.rest == 0
        return due


@dataclass
class Choice:
    """Which method a request's draft came from in this step and in the last one that drafted, what it stated, and what
    such statements have been worth on this request. light: by method."""

    source: str = ""
    settled: str = ""
    stated: Sequence[float] = ()
    calibration: Calibration = field(default_factory=Calibration)
    light: dict[str, Asking] = field(default_factory=dict)


@dataclass(frozen=True)
class Offer:
    """What the light methods have for a sequence. gain: tokens beyond the present pace; stated: chances before they
    were adjusted to what such chances have been worth."""

    gain: float
    draft: Draft = NO_DRAFT
    stated: Sequence[float] = ()


class AutoProposer(Proposer):
    name = "auto"

    def __init__(self, light: Sequence[Proposer], heavy: Proposer | None, controller: Controller) -> None:
        self.light, self.heavy, self.controller = light, heavy, controller
        self.all = [*light, *([heavy] if heavy is not None else [])]
        if heavy is not None:
            self.needs = heavy.needs
        self.asking_seconds: dict[str, float] = {}  # of a light method for one sequence, fading average
        self._choices: dict[int, Choice] = {}

    def open(self, view: View) -> int:
        self._choices[view.id] = Choice()
        return min(proposer.open(view) for proposer in self.all)

    def close(self, view: View) -> None:
        del self._choices[view.id]
        for proposer in self.all:
            proposer.close(view)

    def observe(self, view: View, committed: Committed) -> None:
        """Every method sees the rows; only the one that drafted is told the verdict."""
        choice = self._choices[view.id]
        source, verdict = choice.source, committed.verdict
        if verdict is not None and choice.stated:
            choice.calibration.learn(source, choice.stated[: verdict.depth], verdict.accepted)
        unjudged = committed if verdict is None else replace(committed, verdict=None)
        for proposer in self.all:
            proposer.observe(view, committed if proposer.name == source else unjudged)

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        if not any(budget.depth for budget in budgets):
            return self._nothing(views, budgets)
        offers = self._light_offers(views, budgets)
        drafts = [offer.draft for offer in offers]
        if self.heavy is not None:
            worth = [offer.gain for offer in offers]
            asked = [self._heavy_budget(*each) for each in zip(views, budgets, worth, strict=True)]
            began = time.perf_counter()
            drafted = self.heavy.propose(views, asked)
            if any(draft.size for draft in drafted):
                self.controller.timed = self.heavy.name, time.perf_counter() - began
            drafts = [
                replace(heavy, source=self.heavy.name) if heavy.size else light
                for heavy, light in zip(drafted, drafts, strict=True)
            ]
        for view, draft, offer in zip(views, drafts, offers, strict=True):
            choice = self._choices[view.id]
            choice.source = draft.source if draft.size else ""
            choice.stated = offer.stated if draft is offer.draft else ()
            choice.settled = choice.source or choice.settled
        return drafts

    def _nothing(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        for view in views:
            choice = self._choices[view.id]
            choice.source, choice.stated = "", ()
        if self.heavy is None:
            return [NO_DRAFT for _ in views]
        return self.heavy.propose(views, budgets)  # it may have to catch up

    def _light_offers(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Offer]:
        """The best of each sequence, as far as the methods are worth asking."""
        best = [Offer(self.controller.promise(NO_DRAFT, view.id)) for view in views]
        most = [offer.gain for offer in best]
        for proposer in self.light:
            lent = [self._lent(proposer, *each) for each in zip(views, budgets, strict=True)]
            due = [i for i, budget in enumerate(lent) if budget.depth > 0]
            if not due:
                continue
            began = time.perf_counter()
            drafts = proposer.propose(views, lent)
            found = {i: self._offer(proposer, views[i], drafts[i]) for i in due}
            price = self._price(proposer, (time.perf_counter() - began) / len(due))
            for i, offer in found.items():
                view = views[i]
                asking = self._choices[view.id].light[proposer.name]
                asking.learn(max(offer.gain - most[i], 0.0), price * self.controller.pace(view.id))
                most[i] = max(most[i], offer.gain)
                favoured = replace(offer, gain=self._favoured(view, proposer, offer.gain))
                if offer.draft.size and (favoured.gain > best[i].gain or not best[i].draft.size):
                    best[i] = favoured
        return best

    def _offer(self, proposer: Proposer, view: View, draft: Draft) -> Offer:
        draft, stated = self._adjusted(proposer.name, view, draft)
        return Offer(self.controller.promise(draft, view.id), draft, stated)

    def _price(self, proposer: Proposer, seconds: float) -> float:
        """A step can be held up, never hurried: what takes more than twice the usual counts as twice."""
        usual = self.asking_seconds.get(proposer.name, seconds)
        self.asking_seconds[proposer.name] = price = 0.95 * usual + 0.05 * min(seconds, 2 * usual)
        return price

    def _lent(self, proposer: Proposer, view: View, budget: Budget) -> Budget:
        """What a light method gets of a budget."""
        if budget.depth == 0:
            return NOTHING
        return budget if self._choices[view.id].light.setdefault(proposer.name, Asking()).due() else NOTHING

    def _adjusted(self, source: str, view: View, draft: Draft) -> tuple[Draft, Sequence[float]]:
        stated, calibration = draft.confidence or (), self._choices[view.id].calibration
        worth = [calibration.adjust(source, chance) for chance in stated]
        return replace(draft, source=source, confidence=worth or None), stated

    def _heavy_budget(self, view: View, budget: Budget, light_gain: float) -> Budget:
        assert self.heavy is not None
        if budget.depth == 0:
            return NOTHING
        gain, depth = self.controller.expectation(self.heavy.name, view.id, self.heavy.behind(view))
        if depth == 0 or self._favoured(view, self.heavy, gain) <= light_gain:
            return self.controller.probe(self.heavy.name)
        allowed = self.controller.allowance(depth)
        return Budget(min(budget.depth, allowed.depth), min(budget.nodes, allowed.nodes))

    def _favoured(self, view: View, proposer: Proposer, gain: float) -> float:
        return gain + HYSTERESIS if self._choices[view.id].settled == proposer.name else gain
