"""Drafts from text that repeats, each in one call of the kernels (native/src/lookup.cpp): what they find is what the
Python of `propose/suffix_index.py` and `propose/ngram.py` finds, to the bit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import byref, c_int32
from typing import Protocol

from paceline.native import interface
from paceline.native.interface import kernels


class Ring(Protocol):
    """Where the text lies: see `propose/token_ring.py`."""

    capacity: int
    tokens: array[int]

    @property
    def oldest(self) -> int: ...


class SuffixLookup:
    """Of one index. `places` of its chains go in as they are at the time of a call: they grow, and then they move."""

    def __init__(self, ring: Ring, lengths: Sequence[int], recent: int) -> None:
        self._ring = ring
        self._asked = interface.Lookup(capacity=ring.capacity, recent=recent)
        self._chains = (interface.Chains * len(lengths))(*(interface.Chains(length=length) for length in lengths))
        self._matched, self._library = c_int32(), kernels()

    def __call__(
        self, tail: array[int], places: Sequence[tuple[int, ...]], keys: Sequence[int], most: int, factor: float,
        floor: float,
    ) -> tuple[list[int], list[float], int]:  # fmt: skip
        """Ids, their chances, and the length of the match. keys: of the tail's n-grams of each length that it has."""
        asked, tokens = self._asked, self._ring.tokens
        asked.tokens, asked.slots = tokens.buffer_info()
        asked.oldest, asked.most, asked.factor, asked.floor = self._ring.oldest, most, factor, floor
        asked.tail, asked.count = tail.buffer_info()
        for chains, place, key in zip(self._chains, places, keys, strict=False):
            chains.key = key
            chains.buckets, chains.mask, chains.bucket, chains.keys, chains.beside, chains.older = place
        path, confidence = array("i", bytes(4 * most)), array("d", bytes(8 * most))
        count = self._library.pl_suffix_lookup(
            byref(asked), self._chains, len(keys), path.buffer_info()[0], confidence.buffer_info()[0],
            byref(self._matched),
        )  # fmt: skip
        return path[:count].tolist(), confidence[:count].tolist(), self._matched.value


def longest_match(ids: array[int], shortest: int, longest: int) -> tuple[int, int] | None:
    """(place behind the match, its length) of the most recent of the longest earlier matches of the ending, ids "q"."""
    matched = c_int32()
    end = kernels().pl_longest_match(ids.buffer_info()[0], len(ids), shortest, longest, byref(matched))
    return None if end < 0 else (end, matched.value)
