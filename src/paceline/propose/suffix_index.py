"""Past text, indexed so that what followed the longest suffix of a context is found at once.

SuffixDecoding (2411.04975) keeps a suffix tree with a count at every node. This index answers the same question from
flat arrays: the tokens in a ring, and for a few lengths the places where each n-gram occurred, most recent first (as
LZ77 match finders do). About 85 bytes a token; the newest takes the place of the oldest, and nothing is ever rebuilt.

What is approximate: of the places where the context's ending occurred, only the `recent` most recent count. With
`ANCHORS` 1, 2, 4, 8, 16 a match of 11 tokens is found if it is among the `recent` most recent occurrences of the
context's last 8 tokens; frequencies are frequencies among these. Everything within that bound is exact.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from operator import itemgetter
from threading import Lock

from paceline.errors import PacelineError
from paceline.native.library import library
from paceline.native.lookup import SuffixLookup
from paceline.propose.continuation import Continuation, nothing, vote
from paceline.propose.ngram_chains import NgramChains
from paceline.propose.token_ring import BREAK_BYTES, TokenRing

ANCHORS = (1, 2, 4, 8, 16)  # lengths whose occurrences are chained
ENOUGH = 4  # occurrences after which a shorter match is not tried: they would only be less alike
AT_ONCE = 256  # tokens appended before another thread gets its turn
RENUMBER_AT = 2**30  # positions are 32-bit numbers

Found = tuple[list[int], list[float], int]  # ids, their chances, length of the match
Occurrence = tuple[int, bytes]  # tokens that agree with the context's ending, tokens that followed (32-bit ids)


class SuffixIndex:
    """The last `max_tokens` token ids (below 2**31) of any number of streams, which may grow at the same time.

    A stream that grows while others do takes up to `max_match` + 2 extra places each time it goes on after another, so
    an index in which many grow wants passages, not single tokens. Thread-safe.
    `max_match`: tokens of the context that are compared. `recent`: occurrences that count.
    """

    def __init__(self, max_tokens: int = 1_000_000, *, max_match: int = 32, recent: int = 16) -> None:
        if not 4 * max_match <= max_tokens <= RENUMBER_AT // 2:
            raise PacelineError(
                f"max_tokens={max_tokens}: a suffix index holds {4 * max_match} to {RENUMBER_AT // 2} tokens"
            )
        self.max_tokens, self.max_match, self.recent = max_tokens, max_match, recent
        self._ring = TokenRing(max_tokens, max_match)
        self._chains = [NgramChains(length, max_tokens) for length in ANCHORS if length <= max_match]
        lengths = [chains.length for chains in self._chains]
        self._kernels = None if library() is None else SuffixLookup(self._ring, lengths, recent)
        self._lock = Lock()

    def __len__(self) -> int:
        """Places in use."""
        return min(max(0, self._ring.next - self.max_match), self.max_tokens)

    def extend(self, stream: Hashable, tokens: Sequence[int]) -> None:
        """Append to a stream, which begins with its first tokens. Each token can be found as soon as it is in."""
        new = array("i", tokens)
        for start in range(0, len(new), AT_ONCE):
            with self._lock:
                self._extend(stream, new[start : start + AT_ONCE])

    def end(self, stream: Hashable) -> None:
        """The stream grows no more; its text stays. The same name begins a new stream."""
        with self._lock:
            self._ring.end(stream)

    def speculate(
        self, context_tail: Sequence[int], max_tokens: int, *, factor: float = 2.0, min_probability: float = 0.1
    ) -> Continuation:
        """What followed the context's ending, at most `factor` times the match and `max_tokens` long.

        Match lengths are tried from the longest down, until one has `ENOUGH` occurrences; the one with the highest
        expected number of accepted tokens wins (the paper's score), the longer on a tie. A continuation ends before
        the product of its confidences falls below `min_probability`. Empty where nothing was found.
        """
        if max_tokens < 1:
            return nothing()
        tail = array("i", context_tail[-self.max_match :])
        with self._lock:
            look_up = self._search if self._kernels is None else self._search_by_kernels
            return Continuation(*look_up(tail, max_tokens, factor, min_probability))

    def _search_by_kernels(self, tail: array[int], most: int, factor: float, floor: float) -> Found:
        assert self._kernels is not None
        text, chains = tail.tobytes(), [each for each in self._chains if each.length <= len(tail)]
        keys = [_key(text[-4 * each.length :]) for each in chains]
        return self._kernels(tail, [each.place for each in chains], keys, most, factor, floor)

    def _search(self, tail: array[int], most_tokens: int, factor: float, floor: float) -> Found:
        text = tail.tobytes()
        best: tuple[bytes, list[float], int] = (b"", [], 0)
        score, most = 0.0, 0
        anchors, longest = self._anchors(text)
        for chains, position in reversed(anchors):
            limit = min(most_tokens, int(factor * longest))
            if limit <= score or most >= ENOUGH:
                break
            found = self._occurrences(chains, position, text[-4 * longest :], limit)
            for matched, count, followings in levels(found, most):
                limit, most = min(most_tokens, int(factor * matched)), count
                expected, path, confidence = vote(followings, matched, limit, floor)
                if expected > score:
                    best, score = (path, confidence, matched), expected
            longest = chains.length - 1
        path, confidence, matched = best
        return array("i", path).tolist(), confidence, matched

    def _extend(self, stream: Hashable, new: array[int]) -> None:
        if self._ring.next > RENUMBER_AT:
            shift = self._ring.renumber()
            for chains in self._chains:
                chains.renumber(shift)
        positions, text = self._ring.extend(stream, new)
        oldest, before = self._ring.oldest, len(text) // 4 - len(new)
        for chains in self._chains:
            chains.grow(len(self._ring.tokens))
            length = chains.length
            for end, position in enumerate(positions, before + 1):
                if end >= length:
                    chains.add(position, _key(text[4 * (end - length) : 4 * end]), oldest)

    def _anchors(self, tail: bytes) -> tuple[list[tuple[NgramChains, int]], int]:
        """The lengths whose n-gram at the tail's end occurs, and where last; and what no match can be longer than."""
        oldest, longest = self._ring.oldest, len(tail) // 4
        anchors: list[tuple[NgramChains, int]] = []
        for chains in self._chains:
            if chains.length > longest:
                break
            position = chains.latest(_key(tail[-4 * chains.length :]), oldest)
            if position < oldest:
                return anchors, chains.length - 1
            anchors.append((chains, position))
        return anchors, longest

    def _occurrences(self, chains: NgramChains, position: int, tail: bytes, limit: int) -> list[Occurrence]:
        """Those from `position` back, most recent first, that agree in n tokens and that something followed.

        Two runs of tokens are compared as whole numbers: the highest bit of their difference says how many agree.
        A break is no id, so no match reaches across one.
        """
        tokens, older, capacity, oldest = self._ring.tokens, chains.older, self.max_tokens, self._ring.oldest
        ends: list[int] = []
        while position >= oldest and len(ends) < self.recent:
            slot = position % capacity
            ends.append(slot + 1)
            position = older[slot]
        reach, whole = len(tail) // 4, int.from_bytes
        context = whole(tail, "little")
        differences = [whole(tokens[end - reach : end].tobytes(), "little") ^ context for end in ends]
        followings = [tokens[end : end + limit].tobytes() for end in ends]
        if BREAK_BYTES in b"".join(followings):
            after = self._ring.after
            followings = [after(e, limit) if BREAK_BYTES in f else f for e, f in zip(ends, followings, strict=True)]
        matches = [reach - (difference.bit_length() + 31) // 32 for difference in differences]
        return [pair for pair in zip(matches, followings, strict=True) if pair[0] >= chains.length and pair[1]]


def _key(ngram: bytes) -> int:
    """31 bits for an n-gram. Python's hash of bytes is salted: no text can be made to collide."""
    return hash(ngram) & 0x7FFFFFFF


def levels(found: list[Occurrence], most: int) -> Iterator[tuple[int, int, dict[bytes, int]]]:
    """Match lengths worth a vote, longest first: (length, occurrences that match at least so far, what followed them).

    Worth it is a length with twice the occurrences of the last one, which had `most`; none is after `ENOUGH`.
    """
    followings: dict[bytes, int] = {}
    found.sort(key=itemgetter(0), reverse=True)  # stable: the most recent of a length stays first
    for count, (matched, following) in enumerate(found, 1):
        followings[following] = followings.get(following, 0) + 1
        if count >= max(1, 2 * most) and (count == len(found) or found[count][0] < matched):
            yield matched, count, followings
            most = count
            if most >= ENOUGH:
                return


class SuffixHistory:
    """One index a tenant, who never sees another's text. Past `max_tenants`, the longest unused one is dropped."""

    def __init__(self, max_tokens: int = 1_000_000, max_tenants: int = 16) -> None:
        if max_tenants < 1:
            raise PacelineError(f"max_tenants={max_tenants}: a history keeps at least one tenant")
        self.max_tokens, self.max_tenants = max_tokens, max_tenants
        self._indexes: OrderedDict[Hashable, SuffixIndex] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        """Tenants held."""
        return len(self._indexes)

    def index(self, tenant: Hashable) -> SuffixIndex:
        """The tenant's index, an empty one at first. Whoever holds a dropped one may go on using it."""
        with self._lock:
            if tenant not in self._indexes:
                self._indexes[tenant] = SuffixIndex(self.max_tokens)
            self._indexes.move_to_end(tenant)
            while len(self._indexes) > self.max_tenants:
                self._indexes.popitem(last=False)
            return self._indexes[tenant]
