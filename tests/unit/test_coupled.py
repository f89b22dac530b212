"""Coupled verdicts: the branch that equals what was chosen, and one token more."""

from __future__ import annotations

import pytest

from paceline.cache.tree import Parents, chain
from paceline.verify.coupled import follow

FORK: Parents = (-1, -1, 0, 1, 1)  # two children, one grandchild behind the first, two behind the second


@pytest.mark.parametrize(
    ("parents", "drafted", "chosen", "path", "emitted"),
    [
        ((), [], [7], (), [7]),
        (chain(3), [1, 2, 3], [1, 2, 3, 4], (0, 1, 2), [1, 2, 3, 4]),
        (chain(3), [1, 2, 3], [1, 9, 3, 4], (0,), [1, 9]),
        (chain(3), [1, 2, 3], [9, 2, 3, 4], (), [9]),  # what follows a refused token is no branch of the answer
        (FORK, [1, 2, 5, 5, 6], [2, 0, 6, 0, 0, 8], (1, 4), [2, 6, 8]),
        (FORK, [1, 2, 5, 5, 6], [1, 5, 5, 8, 0, 0], (0, 2), [1, 5, 8]),
        (FORK, [1, 2, 9, 5, 6], [1, 5, 0, 0, 8, 0], (0,), [1, 5]),  # node 3 says 5, but behind another parent
        (FORK, [1, 2, 5, 5, 6], [3, 5, 5, 5, 5, 5], (), [3]),
        ((-1, -1), [4, 4], [4, 1, 2], (0,), [4, 1]),  # of equal siblings the first
    ],
)
def test_the_branch_that_was_chosen_is_followed(
    parents: Parents, drafted: list[int], chosen: list[int], path: tuple[int, ...], emitted: list[int]
) -> None:
    assert follow(parents, drafted, chosen) == (path, emitted)
