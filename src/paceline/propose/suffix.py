"""Suffix decoding (Oliaro et al. 2024): what followed the text's ending before, here or in past answers, by frequency.

A request that brings its own likely answer (OpenAI's predicted outputs) is drafted from that first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.propose.base import Budget, Proposer
from paceline.propose.calibration import Calibration
from paceline.propose.continuation import Continuation, nothing
from paceline.propose.prediction import Prediction
from paceline.propose.suffix_index import SuffixHistory, SuffixIndex
from paceline.types import NO_DRAFT, Committed, Draft, View

CONTEXT = 32  # tokens of the ending that are looked for


@dataclass
class Request:
    """One sequence: its own text so far, what it predicts, and what was drafted last from where."""

    own: SuffixIndex
    prediction: Prediction | None
    indexed: int = 0
    source: str = ""
    stated: list[float] = field(default_factory=list)

    def read(self, tokens: Sequence[int]) -> None:
        self.own.extend(0, tokens[self.indexed :])
        self.indexed = len(tokens)


class SuffixProposer(Proposer):
    """`history`: past answers, kept apart by tenant; None remembers nothing. `factor`: length of a draft for each token
    that matched; `floor`: a draft ends before its chance of being accepted as a whole falls under this."""

    name = "suffix"

    def __init__(self, history: SuffixHistory | None, *, factor: float = 4.0, floor: float = 0.1) -> None:
        self.history, self.factor, self.floor = history, factor, floor
        self.calibration = Calibration()
        self._requests: dict[int, Request] = {}

    def open(self, view: View) -> int:
        prediction = Prediction(view.prediction) if view.prediction else None
        self._requests[view.id] = Request(SuffixIndex(max(4 * CONTEXT, 2 * view.room)), prediction)
        return view.committed

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._draft(view, budget.depth) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, view: View, committed: Committed) -> None:
        request = self._requests[view.id]
        end = committed.position + committed.count
        if end <= view.prompt_length:  # a prompt is read chunk by chunk, so that no step waits for all of it
            request.read(view.tokens[:end])
        if request.stated and committed.verdict is not None:
            drafted = committed.verdict.depth  # the controller may have verified less than was drafted
            self.calibration.learn(request.source, request.stated[:drafted], committed.verdict.accepted)
        request.stated = []

    def close(self, view: View) -> None:
        """The answer becomes history, with as much of its prompt as is needed to find its beginning."""
        del self._requests[view.id]
        if self.history is not None and len(view.tokens) > view.prompt_length:
            index = self.history.index(view.tenant)
            index.extend(view.id, view.tokens[max(0, view.prompt_length - CONTEXT) :])
            index.end(view.id)

    def _draft(self, view: View, most: int) -> Draft:
        request = self._requests[view.id]
        if most == 0:
            return NO_DRAFT
        request.read(view.tokens)
        best, best_expected = nothing(), 0.0
        for source, found in self._continuations(request, view, most).items():
            stated = found.confidence
            found = Continuation(found.tokens, [self.calibration.adjust(source, c) for c in stated], found.matched)
            if found.expected > best_expected:
                best, best_expected = found, found.expected
                request.source, request.stated = source, stated
        if not best.tokens:
            return NO_DRAFT
        return Draft(torch.tensor(best.tokens), confidence=best.confidence)

    def _continuations(self, request: Request, view: View, most: int) -> dict[str, Continuation]:
        ending = view.tokens[-CONTEXT:]
        settings = {"factor": self.factor, "min_probability": self.floor}
        found = {"request": request.own.speculate(ending, most, **settings)}
        if self.history is not None:
            found["history"] = self.history.index(view.tenant).speculate(ending, most, **settings)
        if request.prediction is not None:
            found["prediction"] = request.prediction.follow(view.tokens[view.prompt_length :], most)
        return found
