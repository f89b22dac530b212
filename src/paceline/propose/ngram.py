"""Prompt lookup: what followed the longest earlier occurrence of the text's own ending (Saxena 2023)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import numpy as np
import torch

from paceline.native import lookup as by_kernels
from paceline.native.library import library
from paceline.propose.base import Budget, Proposer
from paceline.types import NO_DRAFT, Committed, Draft, Verdict, View

BUCKETS = (2, 3, 4, 6, 8, 12, 16)  # match lengths whose acceptance is learned apart


@dataclass
class Record:
    """How often tokens drafted after matches of one length were accepted; the prior counts as `weight` tokens."""

    accepted: float
    seen: float

    def rate(self) -> float:
        return self.accepted / self.seen

    def learn(self, verdict: Verdict, fading: float) -> None:
        self.accepted = self.accepted * fading + verdict.accepted
        self.seen = self.seen * fading + min(verdict.drafted, verdict.accepted + 1)


@dataclass
class Lookup:
    """One sequence: its ids, what was matched last, and how matching has gone here."""

    ids: array[int] = field(default_factory=lambda: array("q"))
    matched: int = 0
    run: int = 0  # drafted tokens accepted since one was last rejected


class NgramProposer(Proposer):
    """`n_min` to `n_max`: lengths of the ending that is looked for, longest first, most recent occurrence first.

    A draft is at most `max_draft` tokens and at most `growth` times the longer of the match and of the run of tokens
    accepted lately, so it starts short and grows with success. Confidence is learned per match length.
    """

    name = "ngram"

    def __init__(self, *, n_min: int = 2, n_max: int = 16, max_draft: int = 64, growth: float = 2.0) -> None:
        self.n_min, self.n_max, self.max_draft, self.growth = n_min, n_max, max_draft, growth
        self._lookups: dict[int, Lookup] = {}
        self._records = {n: Record(accepted=4 * prior(n), seen=4.0) for n in BUCKETS}

    def open(self, view: View) -> int:
        self._lookups[view.id] = Lookup()
        return view.committed

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._draft(view, budget.depth) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, view: View, committed: Committed) -> None:
        verdict, lookup = committed.verdict, self._lookups[view.id]
        if verdict is None:
            return
        lookup.run = lookup.run + verdict.accepted if verdict.accepted == verdict.drafted else verdict.accepted
        if verdict.drafted:
            self._records[bucket(lookup.matched)].learn(verdict, fading=0.95)

    def close(self, view: View) -> None:
        del self._lookups[view.id]

    def _draft(self, view: View, budget: int) -> Draft:
        lookup = self._lookups[view.id]
        if budget == 0:
            return NO_DRAFT
        ids = lookup.ids
        ids.extend(view.tokens[len(ids) :])
        found = longest_match(ids, self.n_min, self.n_max)
        if found is None:
            return NO_DRAFT
        end, lookup.matched = found
        wanted = min(budget, int(self.growth * max(lookup.matched, lookup.run)), self.max_draft)
        # Past the end of the text the draft goes on with itself: a loop of any period is followed.
        tokens = list(islice(cycle(ids[end : end + wanted]), wanted))
        rate = self._records[bucket(lookup.matched)].rate()
        return Draft(torch.tensor(tokens), confidence=[rate] * wanted)


def longest_match(ids: array[int], n_min: int, n_max: int) -> tuple[int, int] | None:
    """(position after the match, its length) of the most recent among the longest earlier matches of the ending."""
    return search(ids, n_min, n_max) if library() is None else by_kernels.longest_match(ids, n_min, n_max)


def search(ids: array[int], n_min: int, n_max: int) -> tuple[int, int] | None:
    """The same without the kernels."""
    text, last = np.frombuffer(ids, dtype=np.int64), len(ids) - 1
    ends = np.flatnonzero(text[:last] == text[last])
    best, length = ends, 1
    while len(ends) and length < n_max:
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == text[last - length]]
        if len(ends):
            best, length = ends, length + 1
    if length < n_min or not len(best):
        return None
    return int(best[-1]) + 1, length


def bucket(matched: int) -> int:
    """The longest length in `BUCKETS` that is not over `matched`."""
    return max((n for n in BUCKETS if n <= matched), default=BUCKETS[0])


def prior(matched: int) -> float:
    """Acceptance to expect before anything was seen: long matches seldom fail."""
    return 1 - 1 / matched
