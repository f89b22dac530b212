"""Two answers to one request, compared token by token and bit by bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.engine.output import TokenLogprobs

Answer = Sequence[TokenLogprobs]


@dataclass(frozen=True)
class Difference:
    """Where two answers part. position: token of the answer, from 0. plain, other: the values, in hex and decimal."""

    position: int
    what: str
    plain: str
    other: str


@dataclass(frozen=True)
class Comparison:
    """tokens: positions that were compared, all those at which both had read the same tokens. gap: the largest
    difference of a log probability among them (inf: not a number, or no token in common)."""

    tokens: int
    same_ids: bool
    gap: float
    difference: Difference | None

    @property
    def equal(self) -> bool:
        return self.difference is None


def compare(plain: Answer, other: Answer) -> Comparison:
    """Ids, log probabilities of the emitted tokens and of the likeliest, in bits; never within a tolerance."""
    pairs = list(_same_context(plain, other))
    differences = (found for at, (a, b) in enumerate(pairs) if (found := _differ(at, a, b)) is not None)
    difference = next(differences, None)
    same_ids = [entry.token_id for entry in plain] == [entry.token_id for entry in other]
    if difference is None and not same_ids:
        difference = Difference(len(pairs), "length", f"{len(plain)} tokens", f"{len(other)} tokens")
    return Comparison(len(pairs), same_ids, max((_gap(a, b) for a, b in pairs), default=0.0), difference)


def same_bits(a: float, b: float) -> bool:
    """Zeros of either sign differ, and a value that is not a number equals nothing: it would hide what it replaced."""
    return not math.isnan(a) and struct.pack("<d", a) == struct.pack("<d", b)


def show(value: float) -> str:
    """Every bit in hexadecimal, and as many digits as tell one fp32 from the next."""
    return f"{value.hex()} ({value:.9g})"


def _same_context(plain: Answer, other: Answer) -> Iterator[tuple[TokenLogprobs, TokenLogprobs]]:
    """Positions up to and with the first where another token was emitted."""
    for a, b in zip(plain, other, strict=False):
        yield a, b
        if a.token_id != b.token_id:
            return


def _differ(at: int, a: TokenLogprobs, b: TokenLogprobs) -> Difference | None:
    if a.token_id != b.token_id:
        return Difference(at, "token", _entry(a.token_id, a.logprob), _entry(b.token_id, b.logprob))
    if not same_bits(a.logprob, b.logprob):
        return Difference(at, f"log probability of token {a.token_id}", show(a.logprob), show(b.logprob))
    for rank, ((token, mine), (rival, theirs)) in enumerate(zip(a.top.items(), b.top.items(), strict=True), start=1):
        if token != rival or not same_bits(mine, theirs):
            return Difference(at, f"number {rank} of the likeliest", _entry(token, mine), _entry(rival, theirs))
    return None


def _entry(token: int, logprob: float) -> str:
    return f"{token} at {show(logprob)}"


def _gap(a: TokenLogprobs, b: TokenLogprobs) -> float:
    """Largest difference over the tokens that both report."""
    mine, theirs = {**a.top, a.token_id: a.logprob}, {**b.top, b.token_id: b.logprob}
    gaps = [0.0 if mine[token] == theirs[token] else abs(mine[token] - theirs[token]) for token in mine.keys() & theirs]
    return math.inf if not gaps or any(map(math.isnan, gaps)) else max(gaps)
