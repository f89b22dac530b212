"""The choice among methods, anew for every request and step, from measured acceptance and measured cost.

Light methods (suffix, n-gram) cost next to nothing and are always asked; each says what it has found and how sure it
is. The heavy one (a head or a draft model) costs time before it says anything, so it is judged by what it has shown on
this request, and asked only if it promises more. Both are weighed in tokens gained on the request's present pace;
drafting nothing is among the choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.engine.controller import Controller
from paceline.propose.base import NOTHING, Budget, Proposer
from paceline.propose.calibration import Calibration
from paceline.types import Committed, Draft, View

HYSTERESIS = 0.05  # tokens that another method has to promise beyond the one in use, against flapping


@dataclass
class Choice:
    """Which method a request's draft came from in this step and in the last one that drafted, what it stated, and what
    such statements have been worth on this request."""

    source: str = ""
    settled: str = ""
    stated: Sequence[float] = ()
    calibration: Calibration = field(default_factory=Calibration)


class AutoProposer(Proposer):
    name = "auto"

    def __init__(self, light: Sequence[Proposer], heavy: Proposer | None, controller: Controller) -> None:
        self.light, self.heavy, self.controller = light, heavy, controller
        self.all = [*light, *([heavy] if heavy is not None else [])]
        if heavy is not None:
            self.needs = heavy.needs
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
        for proposer in self.all:
            proposer.observe(view, committed if proposer.name == source else replace(committed, verdict=None))

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        offers = [self._light_offers(proposer, views, budgets) for proposer in self.light]
        best = [max(each, key=lambda offer: offer[0]) for each in zip(*offers, strict=True)]
        drafts = [draft for _, draft, _ in best]
        if self.heavy is not None:
            worth = [gain for gain, _, _ in best]
            asked = [self._heavy_budget(*each) for each in zip(views, budgets, worth, strict=True)]
            drafted = self.heavy.propose(views, asked)
            drafts = [
                replace(heavy, source=self.heavy.name) if heavy.size else light
                for heavy, light in zip(drafted, drafts, strict=True)
            ]
        for view, draft, (_, light, stated) in zip(views, drafts, best, strict=True):
            choice = self._choices[view.id]
            choice.source = draft.source if draft.size else ""
            choice.stated = stated if draft is light else ()
            choice.settled = choice.source or choice.settled
        return drafts

    def _light_offers(
        self, proposer: Proposer, views: Sequence[View], budgets: Sequence[Budget]
    ) -> list[tuple[float, Draft, Sequence[float]]]:
        """(tokens gained on the present pace, draft, chances as stated) of one light method for each sequence."""
        offers = []
        for view, draft in zip(views, proposer.propose(views, budgets), strict=True):
            stated, calibration = draft.confidence or (), self._choices[view.id].calibration
            worth = [calibration.adjust(proposer.name, chance) for chance in stated]
            draft = replace(draft, source=proposer.name, confidence=worth or None)
            offers.append((self._favoured(view, proposer, self.controller.promise(draft, view.id)), draft, stated))
        return offers

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
