"""Drafting against plain decoding, by the clock."""

from __future__ import annotations

import pytest

from paceline.engine.controller import Controller
from paceline.engine.duel import LONGEST, REGRET, TRY, Duel, stretch
from paceline.propose.base import NOTHING

PLAIN = 0.003  # seconds of a plain step


def run(duel: Duel, steps: int, gain: float, request: int = 0, catching_up: float = 0.0) -> list[bool]:
    """Steps of a request on which drafting emits `gain` times as much in the same time; whether each rested.

    `catching_up`: seconds that the first drafting step behind a rest takes more.
    """
    rested: list[bool] = []
    for _ in range(steps):
        resting = duel.rests(request)
        late = catching_up if rested and rested[-1] and not resting else 0.0
        duel.learn(request, 3, (3 * PLAIN if resting else 3 * PLAIN / gain) + late)
        rested.append(resting)
    return rested


def time(rested: list[bool], gain: float) -> float:
    """In plain steps, for as many tokens."""
    return sum(1.0 if resting else 1 / gain for resting in rested)


@pytest.mark.parametrize("gain", [0.5, 0.8, 0.9])
def test_where_drafting_loses_it_is_given_up_and_seldom_tried(gain: float) -> None:
    duel = Duel()
    run(duel, 200, gain)
    rested = run(duel, 20_000, gain)
    assert 0 < rested.count(False) < 0.25 * len(rested)
    assert time(rested, gain) < (1 + 3 * REGRET) * len(rested)


@pytest.mark.parametrize("gain", [1.05, 1.5, 4.0])
def test_where_drafting_wins_it_stays_and_plain_steps_are_few(gain: float) -> None:
    duel = Duel()
    run(duel, 200, gain)
    rested = run(duel, 20_000, gain)
    assert rested.count(True) > 0
    assert time(rested, gain) < (1 + 3 * REGRET) * len(rested) / gain


def test_drafting_that_is_as_fast_is_not_given_up() -> None:
    duel = Duel()
    rested = run(duel, 5_000, 1.0)
    assert rested.count(False) > 0.5 * len(rested)


def test_what_changes_is_noticed() -> None:
    duel = Duel()
    assert run(duel, 2_000, 0.7)[-100:].count(True) > 50
    later = run(duel, 3_000, 2.0)
    assert later[-1000:].count(True) < 60
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
    assert stretch(0.5) == pytest.approx(TRY * 0.5 / REGRET)
    assert stretch(1.5) < stretch(2.0) < stretch(1000.0) == LONGEST


def test_a_resting_request_gets_no_budget_and_one_of_a_batch_does() -> None:
    controller = Controller()
    controller.since_plain = 0  # no plain step is due
    assert controller.budget("ngram", 7) != NOTHING
    controller.duel.resting, controller.duel.request = True, 0
    assert controller.budget("ngram", 0) == NOTHING
    controller.present = (0, 1)
    assert controller.budget("ngram", 0) != NOTHING
    assert Controller(fixed=3).budget("ngram", 0).depth == 3
