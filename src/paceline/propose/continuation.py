"""A drafted continuation with a confidence for each token, and the vote that chooses one (SuffixDecoding)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

ESCAPE, ALIKE = 96.0, 64.0  # the weight of the unseen after L agreeing tokens is ESCAPE / (ALIKE + L * L)


@dataclass(frozen=True)
class Continuation:
    """`tokens[n]`; `confidence[n]`: chance of each, given those before it; `matched`: length of the match behind it."""

    tokens: list[int]
    confidence: list[float]
    matched: int

    @property
    def expected(self) -> float:
        """Tokens that should be accepted: the sum of the path products (the paper's score of a tree)."""
        total: float = sum(accumulate(self.confidence, mul))
        return total


def nothing() -> Continuation:
    """No draft."""
    return Continuation([], [], 0)


def vote(followings: Mapping[bytes, int], matched: int, limit: int, floor: float) -> tuple[float, bytes, list[float]]:
    """Expand greedily by frequency: at each depth the commonest token after the occurrences that agree so far.

    `followings`: what came after the occurrences (32-bit ids) and how often, best first (the first wins a tie).
    Returns (expected accepted tokens, ids, confidence). Ends at `limit` tokens, where nothing followed, and before the
    token that takes the path's product below `floor`. An occurrence that ends at a node is not counted there.

    Confidence is count(child) / (count(node) + distinct children * escape): the paper's ratio with room for a token
    never seen here before (Witten and Bell 1991), less of it the longer the text that agrees. Fitted to source code:
    one occurrence is worth 0.40 after 1 token, 0.57 after 8, 0.92 after 32; four that agree 0.73, 0.84 and 0.98.
    """
    live = list(followings.items())
    path = b""
    confidence: list[float] = []
    expected, product = 0.0, 1.0
    while live:
        run, count, total, distinct = commonest(live, len(path))
        unseen, agreeing = distinct * ESCAPE, matched + len(confidence)
        for length in range(agreeing, min(agreeing + len(run) // 4, matched + limit)):
            chance = count / (total + unseen / (ALIKE + length * length))
            product *= chance
            if product < floor:
                return expected, (path + run)[: 4 * len(confidence)], confidence
            expected += product
            confidence.append(chance)
        path += run
        if len(confidence) >= limit:
            break
        live = [item for item in live if item[0].startswith(path) and len(item[0]) > len(path)]
    return expected, path[: 4 * limit], confidence


def commonest(live: list[tuple[bytes, int]], at: int) -> tuple[bytes, int, int, int]:
    """What comes at byte `at`: the run of ids in which all agree, or else the commonest next id.

    Returns (ids, count of those that have them, count of all, distinct next ids).
    """
    if len(live) == 1:
        run, count = live[0]
        return run[at:], count, count, 1
    votes: dict[bytes, int] = {}
    for following, count in live:
        token = following[at : at + 4]
        votes[token] = votes.get(token, 0) + count
    total = sum(votes.values())
    if len(votes) == 1:  # what the first and the last in order share, all share
        lowest, highest = min(live)[0][at:], max(live)[0][at:]
        return lowest[: shared(lowest, highest)], total, total, 1
    token = max(votes, key=votes.__getitem__)
    return token, votes[token], total, len(votes)


def shared(left: bytes, right: bytes) -> int:
    """Bytes of the 32-bit ids that both begin with: the lowest bit in which the two, as numbers, differ says it."""
    width = min(len(left), len(right))
    difference = int.from_bytes(left[:width], "little") ^ int.from_bytes(right[:width], "little")
    return ((difference & -difference).bit_length() - 1) // 32 * 4 if difference else width
