"""Drafting from an answer that the request itself expects, such as a file before an edit (OpenAI's predicted outputs).

The output is followed through the prediction like a difference is read: while they agree, what comes next is drafted.
After a difference the place is found again, first by guess (a token replaced, or some left out), then by the output's
last tokens, which have to occur in the prediction; of several places the nearest after the last sure one is taken.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from paceline.propose.continuation import Continuation, nothing

LONGEST, SHORTEST = 8, 2  # tokens of the output that are looked for in the prediction
CANDIDATES = 16  # places compared before the expected one, and after it
NEAR = 8  # tokens left out that a guess sees across
GUESSES = 2  # places guessed after a difference, until one has proved right
PROVEN = 2  # tokens that agree before a place is believed
START = 4  # agreeing tokens that the request's word for its prediction is worth
PRIORS = (0.4, 0.5, 0.65, 0.8, 0.9, 0.95)  # acceptance after 0, 1, 2-3, 4-7, 8-15, 16 and more agreeing tokens
WEIGHT = 4.0  # tokens that a prior counts as


class Prediction:
    """`tokens[n]`: the expected answer. One request's own; `follow` is called with its growing output.

    `position`: where the output goes on in the prediction, None while that is unknown. A call costs time for the new
    tokens and for at most 2 * CANDIDATES places, whatever the lengths of output and prediction. Each place that proves
    wrong makes the next one harder to find, so a prediction that never fits falls silent.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = array("i", tokens)
        self.position: int | None = 0
        self._home = 0  # where the output would go on if nothing had been changed since it last agreed
        self._run = START  # tokens that agree up to the position, those that it was found by included
        self._agreed = PROVEN  # tokens that have agreed since it was found
        self._guessed = 0  # guesses since a place was proven
        self._refuted = 0  # places found by their tokens, and wrong at once, since a place was proven
        self._read = 0  # tokens of the output so far
        self._accepted = [prior * WEIGHT for prior in PRIORS]
        self._tried = [WEIGHT] * len(PRIORS)
        self._pairs, self._places = pairs(self.tokens)

    def follow(self, output: Sequence[int], max_tokens: int) -> Continuation:
        """What the prediction says comes after `output`: the tokens of the last call and any number more."""
        for at in range(self._read, len(output)):
            self._step(output[at], output[max(0, at + 1 - LONGEST) : at + 1])
        self._read = len(output)
        if self.position is None:
            return nothing()
        tokens = self.tokens[self.position : self.position + max_tokens].tolist()
        return Continuation(tokens, [self.confidence(self._run + i) for i in range(len(tokens))], self._run)

    def confidence(self, run: int) -> float:
        """Chance that the next token agrees after `run` that did: (accepted + prior) / (tried + prior), per bucket."""
        return self._accepted[bucket(run)] / self._tried[bucket(run)]

    def _step(self, token: int, ending: Sequence[int]) -> None:
        """One token of output, the last of `ending`: it agrees, or its place is looked for."""
        position = self.position
        if position is not None and position < len(self.tokens):
            agrees = self.tokens[position] == token
            self._tried[bucket(self._run)] += 1
            self._accepted[bucket(self._run)] += agrees
            if agrees:
                self._advance(position + 1)
                return
            self._refuted += self._agreed == 0 and self._run > 0
        self._find(token, ending)

    def _advance(self, position: int) -> None:
        self.position = self._home = position
        self._run += 1
        self._agreed += 1
        if self._agreed >= PROVEN:
            self._guessed = self._refuted = 0

    def _find(self, token: int, ending: Sequence[int]) -> None:
        """Where the output goes on: by its last tokens, else by guess. More of them are asked for after each error."""
        length, place = self._nearest(ending)
        if length >= min(LONGEST, SHORTEST + self._refuted):
            self.position, self._run = place, length
        elif self._guessed < GUESSES:
            self.position, self._run = self._guess(token), 0
            self._guessed += self.position is not None
        else:
            self.position = None
        self._agreed = 0

    def _guess(self, token: int) -> int | None:
        """The place after `token` if it is near: what lies between was left out. Else the token replaced one."""
        near = self.tokens[self._home : self._home + NEAR + 1]
        if token in near:
            return self._home + near.index(token) + 1
        return self._home + 1 if near and not self._guessed else None

    def _nearest(self, ending: Sequence[int]) -> tuple[int, int]:
        """(tokens that agree, place after them) of the place that most of the output's last tokens lead to.

        Of several, the nearest after the expected place, or before it if there is none after. (0, 0): no place.
        """
        if len(ending) < SHORTEST:
            return 0, 0
        pair = ending[-2] << 32 | ending[-1]
        first, last = bisect_left(self._pairs, pair), bisect_right(self._pairs, pair)
        expected = bisect_left(self._places, self._home, first, last)
        candidates = self._places[max(first, expected - CANDIDATES) : min(last, expected + CANDIDATES)]
        best = (0, False, 0, 0)
        for place in candidates:
            length = self._agreeing(place, ending)
            best = max(best, (length, place >= self._home, -abs(place - self._home), place))
        return best[0], best[3]

    def _agreeing(self, place: int, ending: Sequence[int]) -> int:
        """How many of the ending's tokens stand before `place`, counted backwards; its last two do."""
        count = SHORTEST
        while count < min(place, len(ending)) and ending[-1 - count] == self.tokens[place - 1 - count]:
            count += 1
        return count


def bucket(run: int) -> int:
    """Which prior and record belong to a run of agreeing tokens."""
    return min(run.bit_length(), len(PRIORS) - 1)


def pairs(tokens: array[int]) -> tuple[array[int], array[int]]:
    """Every two neighbouring tokens as one number, in order, and the place after each; equal pairs by place."""
    ids = np.asarray(tokens, dtype=np.int64)
    numbers = ids[:-1] << 32 | ids[1:]
    order = np.argsort(numbers, kind="stable")
    return array("q", numbers[order].tobytes()), array("i", (order + 2).astype(np.int32).tobytes())
