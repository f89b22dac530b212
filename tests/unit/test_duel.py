"""Drafting against plain decoding, by the clock."""

from __future__ import annotations

import pytest

from paceline.engine.controller import Controller
from paceline.engine.duel import LONGEST, LONGEST_REST, REGRET, TRY, Duel, stretch
from paceline.engine.record import Outcome, Pace, Tally
from paceline.propose.base import NOTHING
from paceline.types import NO_DRAFT

PLAIN, DRAFTING = 0.003, 0.005  # seconds of a step


def run(duel: Duel, steps: int, gain: float, request: int = 0, catching_up: float = 0.0) -> list[bool]:
    """Steps of a request on which drafting emits `gain` times as many tokens a second; whether each rested.

    `catching_up`: seconds that the first drafting step behind a rest takes more.
    """
    rested: list[bool] = []
    for _ in range(steps):
        resting = duel.rests(request)
        late = catching_up if rested and rested[-1] and not resting else 0.0
        duel.learn(request, 1 if resting else gain * DRAFTING / PLAIN, PLAIN if resting else DRAFTING + late)
        rested.append(resting)
    return rested


def rate(rested: list[bool], gain: float) -> float:
    """Tokens a second of these steps over those of plain decoding."""
    plain, drafting = PLAIN * rested.count(True), DRAFTING * rested.count(False)
    return (plain + gain * drafting) / (plain + drafting)


@pytest.mark.parametrize("gain", [0.6, 0.8, 0.9])
def test_where_drafting_loses_it_is_given_up_and_seldom_tried(gain: float) -> None:
    duel = Duel()
    run(duel, 200, gain)
    rested = run(duel, 20_000, gain)
    assert rested.count(False) > 0
    assert rate(rested, gain) > 1 - 2 * REGRET


@pytest.mark.parametrize("gain", [1.05, 1.5, 4.0])
def test_where_drafting_wins_it_stays_and_plain_steps_are_few(gain: float) -> None:
    duel = Duel()
    run(duel, 200, gain)
    rested = run(duel, 20_000, gain)
    assert rested.count(True) > 0
    assert rate(rested, gain) > (1 - 2 * REGRET) * gain


def test_drafting_that_is_as_fast_is_not_given_up() -> None:
    duel = Duel()
    rested = run(duel, 5_000, 1.0)
    assert rested.count(False) > 0.5 * len(rested)


def test_what_changes_is_noticed() -> None:
    duel = Duel()
    assert run(duel, 2_000, 0.7)[-100:].count(True) > 50
    later = run(duel, 1_200, 4.0)
    assert later[-200:].count(True) < 60
    assert run(duel, 3_000, 0.7)[-1000:].count(False) < 200


def test_what_a_head_reads_behind_a_rest_does_not_count_against_it() -> None:
    duel = Duel()
    rested = run(duel, 20_000, 1.3, catching_up=5.0)
    assert rested.count(True) < 0.1 * len(rested)


def test_short_requests_do_not_each_try_both() -> None:
    duel = Duel()
    run(duel, 500, 0.8)
    rested = [step for request in range(1, 200) for step in run(duel, 30, 0.8, request)]
    assert 0 < rested.count(False) < 0.1 * len(rested)


def test_a_request_of_another_kind_is_judged_by_itself() -> None:
    """Requests before it lost by drafting; this one, once it was tried, goes on with it."""
    duel = Duel()
    run(duel, 2_000, 0.8)
    rested = run(duel, 3_000, 4.0, request=1)
    assert rested[-500:].count(True) < 60


def test_the_stretch_of_the_faster_makes_a_try_of_the_slower_cheap() -> None:
    assert stretch(1.0) == 4 * TRY
    assert stretch(0.9) == pytest.approx(TRY * 0.1 / REGRET)
    assert stretch(2.0) == pytest.approx(TRY * 0.5 / REGRET)
    assert stretch(1.5) < stretch(2.0) < stretch(4.0) <= LONGEST
    assert stretch(0.1) == LONGEST_REST


@pytest.mark.parametrize("stall", [0.5, 5.0, 60.0])
def test_a_step_that_was_held_up_does_not_decide(stall: float) -> None:
    duel = Duel()
    run(duel, 30, 2.0)
    duel.rests(0)
    duel.learn(0, 3, stall)
    assert run(duel, 1_000, 2.0).count(True) < 200


def test_a_rest_that_one_request_earned_is_not_the_next_one_s() -> None:
    duel = Duel(resting=True, left=900, request=1)
    duel.everywhere.drafting, duel.everywhere.plain = Pace(970.0, 1.0), Pace(1000.0, 1.0)
    assert duel.rests(1)
    assert duel.left == 900
    assert duel.rests(2)
    assert duel.left == 4 * TRY


def test_a_resting_request_gets_no_budget_and_one_in_company_does() -> None:
    controller = Controller()
    controller.since_plain = 0  # no plain step is due
    assert controller.budget("ngram", 7) != NOTHING
    controller.duel.resting, controller.duel.request = True, 0
    assert controller.budget("ngram", 0) == NOTHING
    controller.alone = False
    assert controller.budget("ngram", 0) != NOTHING
    assert Controller(fixed=3).budget("ngram", 0).depth == 3


def test_what_methods_have_shown_keeps_while_nobody_is_asked() -> None:
    controller = Controller()
    controller.record("ngram").everywhere = Tally(0.99, 50.0, 100.0)
    controller.duel.resting, controller.duel.request = True, 0
    for _ in range(100):
        controller.observe([Outcome(0, "none", NO_DRAFT, 0, 0)], PLAIN, 0.0)
    assert controller.record("ngram").everywhere.tried == 100.0
    controller.duel.resting = False
    controller.observe([Outcome(0, "none", NO_DRAFT, 0, 0)], PLAIN, 0.0)
    assert controller.record("ngram").everywhere.tried < 100.0
