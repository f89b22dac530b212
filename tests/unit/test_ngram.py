"""Prompt lookup."""

from __future__ import annotations

import random
from array import array

import pytest
from views import Text, accepted, budget

from paceline.native.library import library
from paceline.propose import ngram
from paceline.propose.ngram import NgramProposer, longest_match


def match(tokens: list[int], n_min: int = 1, n_max: int = 8) -> tuple[int, int] | None:
    found, plain = longest_match(array("q", tokens), n_min, n_max), ngram.search(array("q", tokens), n_min, n_max)
    assert found == plain
    return found


@pytest.mark.skipif(library() is None, reason="no kernels")
@pytest.mark.parametrize("alphabet", [1, 2, 6, 30])
def test_the_kernels_find_what_python_finds(alphabet: int) -> None:
    rng, found_something = random.Random(alphabet), 0
    for _ in range(400):
        tokens = [rng.randrange(alphabet) for _ in range(rng.randint(1, 80))]
        found_something += match(tokens, n_min=rng.randint(1, 3), n_max=rng.randint(3, 16)) is not None
    assert found_something > 80


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    assert match([1, 2, 3, 9, 3, 8, 1, 2, 3]) == (3, 3)


def test_the_most_recent_of_equally_long_matches_wins() -> None:
    assert match([4, 5, 0, 4, 5, 1, 4, 5]) == (5, 2)


def test_a_match_must_have_the_least_length_and_at_most_the_greatest() -> None:
    assert match([7, 1, 3, 1], n_min=2) is None
    assert match([1, 2, 3, 4, 0, 3, 4, 0, 1, 2, 3, 4], n_max=2) == (7, 2)


def test_overlapping_occurrences_count() -> None:
    assert match([6, 6, 6, 6]) == (3, 3)


def test_a_loop_of_any_period_is_followed_past_the_end_of_the_text() -> None:
    proposer, text = NgramProposer(growth=3), Text([9, 1, 2, 1, 2, 1, 2])
    proposer.open(text)
    assert proposer.propose([text], [budget(9)])[0].tokens.tolist() == [1, 2, 1, 2, 1, 2, 1, 2, 1]


def test_no_earlier_occurrence_is_no_match() -> None:
    assert match([1, 2, 3]) is None
    assert match([1]) is None


def test_the_draft_is_what_followed_and_respects_the_budget() -> None:
    proposer, text = NgramProposer(growth=10), Text([1, 2, 3, 4, 5, 6, 7, 1, 2])
    proposer.open(text)
    assert proposer.propose([text], [budget(3)])[0].tokens.tolist() == [3, 4, 5]
    assert proposer.propose([text], [budget(0)])[0].size == 0


def test_the_draft_grows_with_success_and_shrinks_after_failure() -> None:
    text = Text([*range(100), 0, 1])
    proposer = NgramProposer(growth=2)
    proposer.open(text)

    def propose() -> int:
        return proposer.propose([text], [budget(64)])[0].size

    assert propose() == 4
    proposer.observe(text, accepted(4, 4))
    text.tokens += [2, 3, 4, 5, 6]
    assert propose() == 14  # twice the match of seven
    text.tokens = [*range(100), 0, 1]
    proposer.open(text)
    proposer.observe(text, accepted(20, 20))
    assert propose() == 40
    proposer.observe(text, accepted(40, 40))
    assert propose() == 64
    proposer.observe(text, accepted(0, 64))
    assert propose() == 4


def test_confidence_follows_what_was_accepted() -> None:
    proposer, text = NgramProposer(), Text([1, 2, 3, 1, 2])
    proposer.open(text)
    before = proposer.propose([text], [budget(4)])[0].confidence
    for _ in range(20):
        proposer.propose([text], [budget(4)])
        proposer.observe(text, accepted(0, 1))
    after = proposer.propose([text], [budget(4)])[0].confidence
    assert before is not None
    assert after is not None
    assert after[0] < 0.1 < before[0]
