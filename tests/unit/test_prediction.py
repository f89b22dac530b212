"""Following a request's expected answer: drafts while they agree, after a difference, and when nothing fits."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from paceline.propose.continuation import Continuation
from paceline.propose.prediction import GUESSES, LONGEST, NEAR, SHORTEST, Prediction

TEXT = list(range(100, 400))  # every token once, so that each place is certain


def decode(prediction: Prediction, answer: Sequence[int], most: int = 8) -> list[Continuation]:
    """What is drafted at every step of decoding `answer` speculatively."""
    output: list[int] = []
    drafts = []
    while len(output) < len(answer):
        draft = prediction.follow(output, most)
        drafts.append(draft)
        accepted = 0
        for token, actual in zip(draft.tokens, answer[len(output) :], strict=False):
            if token != actual:
                break
            accepted += 1
        output += answer[len(output) : len(output) + accepted + 1]
    return drafts


def drafted_after(answer: Sequence[int], prediction: Sequence[int] = TEXT) -> list[int]:
    """The draft after `answer`, read one token at a time."""
    following = Prediction(prediction)
    draft = following.follow([], 4)
    for count in range(1, len(answer) + 1):
        draft = following.follow(answer[:count], 4)
    return draft.tokens


def test_the_prediction_is_drafted_from_its_start_at_once() -> None:
    assert Prediction(TEXT).follow([], 5).tokens == TEXT[:5]


def test_an_answer_as_predicted_takes_one_step_for_each_draft() -> None:
    drafts = decode(Prediction(TEXT), TEXT, most=9)
    assert len(drafts) == len(TEXT) / 10
    assert drafts[-1].tokens == TEXT[-10:][:9]


def test_nothing_is_drafted_past_the_end_of_the_prediction() -> None:
    prediction = Prediction(TEXT[:10])
    assert prediction.follow(TEXT[:8], 5).tokens == TEXT[8:10]
    assert prediction.follow(TEXT[:10], 5).tokens == []
    assert prediction.follow(TEXT[:11], 5).tokens == []
    assert Prediction([]).follow([], 5).tokens == []
    assert Prediction([7]).follow([8, 9, 7], 5).tokens == []


def test_a_replaced_token_is_passed_over_at_once() -> None:
    assert drafted_after(TEXT[:20] + [1]) == TEXT[21:25]


def test_nothing_is_guessed_from_a_second_new_token() -> None:
    assert drafted_after(TEXT[:20] + [1, 1]) == []


def test_every_difference_is_met_like_the_first() -> None:
    answer = [1 if at % 10 == 0 else token for at, token in enumerate(TEXT[:51])]
    assert drafted_after(answer) == TEXT[51:55]


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_replaced_tokens_cost_two_steps_at_most(count: int) -> None:
    answer = TEXT[:20] + [1] * count + TEXT[20 + count :]
    assert drafted_after(answer[: 20 + count + 2]) == TEXT[22 + count : 26 + count]


@pytest.mark.parametrize("count", [1, NEAR])
def test_tokens_left_out_are_passed_over_with_the_first_that_follows(count: int) -> None:
    assert drafted_after(TEXT[:20] + TEXT[20 + count : 21 + count]) == TEXT[21 + count : 25 + count]


def test_many_tokens_left_out_are_passed_over_once_two_that_follow_are_there() -> None:
    assert drafted_after(TEXT[:20] + TEXT[120:122]) == TEXT[122:126]


@pytest.mark.parametrize("count", [1, 2, 3, 30])
def test_after_inserted_tokens_the_place_is_found_again(count: int) -> None:
    answer = TEXT[:20] + [1] * count + TEXT[20:]
    assert drafted_after(answer[: 20 + count + 2]) == TEXT[22:26]


def test_a_jump_back_is_followed() -> None:
    assert drafted_after(TEXT[:200] + TEXT[30:32]) == TEXT[32:36]


def test_of_several_places_the_next_one_is_taken_though_the_last_is_nearer() -> None:
    prediction = [50, 51, 5, 6, 52, 53, *TEXT, 5, 6, 54, 55]
    assert drafted_after([50, 51, 5, 6, 52, 1, 2, 5, 6], prediction) == [54, 55]
    assert drafted_after([50, 51, 5, 6, 52, *TEXT, 5, 6, 54, 55, 1, 2, 5, 6], prediction) == [54, 55]


def test_the_longest_agreement_decides_before_the_nearest() -> None:
    prediction = [1, 2, 3, 4, 5, 6, 50, 60, 5, 6, 70, 80]
    assert drafted_after([9, 9, 9, 3, 4, 5, 6], prediction) == [50, 60, 5, 6]


def test_confidence_is_lower_after_a_difference_and_grows_along_a_draft() -> None:
    prediction = Prediction(TEXT)
    sure = prediction.follow(TEXT[:50], 6).confidence
    changed = TEXT[:50] + [1]
    after = prediction.follow(changed, 6).confidence
    assert after[0] < 0.7 < 0.9 < sure[0]
    assert after == sorted(after)
    assert sure == sorted(sure)


def test_confidence_is_learned_from_this_requests_own_record() -> None:
    rng = random.Random(0)
    good, bad = Prediction(TEXT), Prediction(TEXT)
    good.follow(TEXT[:200], 1)
    bad.follow([token if rng.random() < 0.5 else 1 for token in TEXT[:200]], 1)
    assert good.confidence(4) == Prediction(TEXT).confidence(4) * 4 / 8 + 4 / 8  # four tokens more, all as predicted
    for run in (2, 4):
        assert bad.confidence(run) < good.confidence(run)


def test_a_prediction_that_never_fits_falls_silent_after_its_first_drafts() -> None:
    drafts = decode(Prediction(TEXT), list(range(1_000, 2_000)))
    assert [bool(draft.tokens) for draft in drafts[:2]] == [True, True]
    assert not any(draft.tokens for draft in drafts[GUESSES + 1 :])


def test_chance_agreements_of_a_few_tokens_are_not_followed_for_ever() -> None:
    """Every place proves wrong at once: each error asks for one more token that agrees."""
    rng = random.Random(0)
    prediction = [rng.randrange(6) for _ in range(2_000)]
    answer = [rng.randrange(6) for _ in range(600)]
    following = Prediction(prediction)
    drafts = [following.follow(answer[:count], 4) for count in range(len(answer))]
    assert sum(bool(draft.tokens) for draft in drafts[:20]) > 4
    assert sum(bool(draft.tokens) for draft in drafts) < 40


def test_tokens_may_come_one_or_many_at_a_time() -> None:
    answer = TEXT[:30] + [1, 2] + TEXT[40:60] + [3] + TEXT[10:30]
    slow, fast = Prediction(TEXT), Prediction(TEXT)
    for count in range(len(answer)):
        slow.follow(answer[:count], 4)
    assert slow.follow(answer, 4) == fast.follow(answer, 4)


def test_a_step_costs_no_more_in_a_long_output() -> None:
    """Counted in tokens read, not in time: a step reads the new tokens and a few before them."""

    class Counting(list[int]):
        read = 0

        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            Counting.read += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
            return super().__getitem__(at)

    output = Counting(TEXT * 30)
    prediction = Prediction(TEXT)
    prediction.follow(output, 4)
    Counting.read = 0
    output.extend([100, 101, 102])
    prediction.follow(output, 4)
    assert Counting.read <= 3 * (LONGEST + 1)


def test_the_worst_step_in_a_long_prediction_stays_under_a_hundred_microseconds() -> None:
    """Ten thousand tokens of which every two occur everywhere: the most places that there are to compare."""
    prediction = Prediction([1, 2] * 5_000)
    output = [9] * (SHORTEST + 2)
    fastest = 1.0
    for token in [1, 2, 3] * 30:
        output.append(token)
        started = time.perf_counter()
        prediction.follow(output, 16)
        fastest = min(fastest, time.perf_counter() - started) if token == 2 else fastest
    assert fastest < 100e-6
