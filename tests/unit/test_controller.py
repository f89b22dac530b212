"""How long to draft."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.controller import Controller
from paceline.engine.record import DraftTimes, Outcome, Pace, Tally, foregone
from paceline.engine.step_cost import StepCost
from paceline.types import NO_DRAFT, Draft


def draft(confidence: list[float]) -> Draft:
    return Draft(torch.arange(len(confidence)), confidence=confidence)


def measured(base: float, slope: float) -> StepCost:
    fit = StepCost()
    for rows in (1, 4, 16, 1, 8, 32, 2, 64) * 60:
        fit.learn(rows, base + slope * (rows - 1))
    return fit


def test_a_line_is_found() -> None:
    fit = measured(0.05, 0.004)
    assert fit.seconds(1) == pytest.approx(0.05, rel=0.05)
    assert fit.seconds(20) == pytest.approx(0.05 + 19 * 0.004, rel=0.05)


def test_a_curve_is_found() -> None:
    """Flat to four rows, then dear: what a kernel that pads to four gives."""
    fit = StepCost()
    for rows in (1, 2, 4, 8, 16) * 60:
        fit.learn(rows, 0.05 + 0.01 * max(rows - 4, 0))
    assert fit.seconds(4) == pytest.approx(fit.seconds(1), rel=0.03)
    assert fit.seconds(8) == pytest.approx(0.09, rel=0.05)
    assert fit.seconds(12) == pytest.approx(0.13, rel=0.05)


def test_equal_steps_leave_the_prior_slope() -> None:
    fit = StepCost(prior_slope=0.1)
    for _ in range(50):
        fit.learn(1, 0.02)
    assert fit.seconds(11) == pytest.approx(0.04, rel=0.05)


def test_a_slower_machine_raises_the_level_and_keeps_the_shape() -> None:
    fit = measured(0.05, 0.004)
    before = fit.relative(16)
    for rows in (1, 1, 16, 1) * 10:
        fit.learn(rows, 2 * (0.05 + 0.004 * (rows - 1)))
    assert fit.seconds(1) == pytest.approx(0.1, rel=0.1)
    assert fit.relative(16) == pytest.approx(before, rel=0.15)


def test_one_outlier_changes_little() -> None:
    fit = measured(0.05, 0.004)
    before = fit.seconds(8)
    fit.learn(8, 5.0)
    assert fit.seconds(8) < 1.2 * before


def best_length(rate: float, fit: StepCost, cost: float, pace: float | None = None) -> int:
    """Of a method that was accepted at this rate, on a request that runs at `pace` tokens a second."""
    controller = Controller(target=fit)
    controller.record("draft").times.learn(1, cost)
    controller.record("draft").everywhere = Tally(0.99, 1e6 * rate, 1e6)
    if pace is not None:
        controller.paces[0] = Pace(1e6 * pace, 1e6)
    return controller.expectation("draft", 0)[1]


def test_free_rows_draft_all_and_dear_rows_none() -> None:
    assert best_length(0.9, measured(0.05, 1e-9), 0.0) > 30
    assert best_length(0.5, measured(0.05, 0.05), 0.0) == 0


def test_surer_drafts_are_longer() -> None:
    fit = measured(0.05, 0.004)
    lengths = [best_length(rate, fit, 0.0) for rate in (0.02, 0.5, 0.8, 0.95, 0.995)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] > 30


def test_the_best_length_gains_more_than_every_other() -> None:
    fit = measured(0.05, 0.004)

    def gain(n: int) -> float:
        return sum(0.8**i for i in range(n + 1)) - 40 * (fit.seconds(1 + n) + n * 0.005)

    best = best_length(0.8, fit, 0.005, pace=40)
    assert best > 0
    assert gain(best) == pytest.approx(max(gain(n) for n in range(65)), abs=0.01)


def test_a_request_that_runs_fast_has_no_time_for_slow_drafts() -> None:
    """At 60 tokens a second a second of drafting costs 60 tokens: quicker steps will come."""
    fit = measured(0.07, 0.004)
    assert best_length(0.9, fit, 0.02) > 5
    assert best_length(0.9, fit, 0.02, pace=60) == 0


def test_trim_keeps_the_prefix_that_pays_and_never_touches_sampled_drafts() -> None:
    controller = Controller(target=measured(0.05, 0.02))
    assert controller.trim([draft([0.95, 0.9, 0.02, 0.9])])[0].size == 2
    sampled = Draft(torch.arange(2), draw="iid", q=torch.ones(2, 3) / 3, confidence=[0.0, 0.0])
    assert controller.trim([sampled])[0] is sampled


def test_trim_spends_the_rows_of_a_batch_on_its_surest_nodes() -> None:
    controller = Controller(target=measured(0.05, 0.012))
    sure, unsure = draft([0.95] * 4), draft([0.15] * 4)
    assert [kept.size for kept in controller.trim([unsure, sure, unsure])] == [0, 4, 0]


def test_trim_cuts_the_weak_branches_of_a_tree() -> None:
    controller = Controller(target=measured(0.05, 0.02))
    tree = Draft(torch.tensor([10, 11, 12, 13]), (-1, -1, 0, 1), confidence=[0.8, 0.15, 0.9, 0.9])
    kept = controller.trim([tree])[0]
    assert kept.tokens.tolist() == [10, 12]
    assert kept.parents == (-1, 0)
    assert kept.original([0, 1]) == (0, 2)


def test_a_fixed_length_is_left_alone() -> None:
    controller = Controller(fixed=5, target=measured(0.05, 0.5))
    assert controller.budget("draft", 0).depth == 5
    assert controller.trim([draft([0.01] * 5)])[0].size == 5


def learn(controller: Controller, drafted: int, accepted: int, target_seconds: float, draft_seconds: float) -> None:
    outcome = Outcome(0, "draft", draft([0.5] * drafted), accepted, drafted)
    controller.observe([outcome], target_seconds, draft_seconds)


def plain(controller: Controller) -> None:
    controller.observe([Outcome(0, "none", NO_DRAFT, 0, 0)], 0.05, 0.0)


def test_the_first_step_is_plain_and_others_are_now_and_then_where_drafts_hardly_pay() -> None:
    """T(1) is only known from plain steps: a controller that never takes one can believe in any gain."""

    def plain_steps(accepted: int) -> int:
        controller, found = Controller(), 0
        for _ in range(1000):
            if controller.budget("ngram", 0).depth == 0:
                found += 1
                plain(controller)
            else:
                controller.observe([Outcome(0, "ngram", draft([0.5] * 10), accepted, 10)], 0.05, 1e-6)
        return found

    assert 20 < plain_steps(0) < 70
    assert plain_steps(1) < 25
    assert 1 <= plain_steps(10) <= 3


def test_a_batch_is_judged_as_a_batch() -> None:
    """Rows that are free for one sequence are dear when sixteen draft together."""
    controller = Controller()
    plain(controller)
    for rows in (1, 4, 8, 16, 32, 64, 128) * 60:
        controller.target.learn(rows, 0.05 + 0.004 * max(rows - 16, 0))
    assert controller.expectation("draft", 0)[1] >= 3
    controller.present = range(16)
    assert controller.expectation("draft", 0)[1] == 0


def test_poor_acceptance_shortens_what_is_asked_of_a_draft_model() -> None:
    def budget_after(accepted: int) -> int:
        controller = Controller()
        plain(controller)
        for _ in range(40):
            learn(controller, 5, accepted, 0.05, 0.06)
        return controller.budget("draft", 0).depth

    assert budget_after(0) == 0
    assert budget_after(5) > budget_after(2)


def test_a_method_that_does_not_pay_is_tried_again_now_and_then() -> None:
    controller = Controller()
    plain(controller)
    for _ in range(40):
        learn(controller, 5, 0, 0.05, 0.06)
    asked = 0
    for _ in range(320):
        asked += controller.budget("draft", 0).depth
        controller.observe([Outcome(0, "none", NO_DRAFT, 0, 0)], 0.05, 0.0)
    assert 12 <= asked <= 14
    for _ in range(60):
        learn(controller, 1, 1, 0.05, 0.01)
    assert controller.budget("draft", 0).depth > 1


def test_a_draft_that_had_to_read_first_says_nothing_of_the_cost() -> None:
    controller = Controller()
    plain(controller)
    for _ in range(10):
        learn(controller, 1, 0, 0.05, 0.01)
    before = controller.record("draft").draft_seconds
    for _ in range(10):
        controller.observe([Outcome(0, "draft", draft([0.5]), 0, 1, read=30)], 0.05, 0.03)
    assert controller.record("draft").draft_seconds == before
    controller.observe([Outcome(0, "draft", draft([0.5]), 0, 1, read=1)], 0.05, 0.02)
    assert controller.record("draft").draft_seconds > before  # type: ignore[operator]


def test_a_token_that_was_trimmed_is_judged_by_its_chance() -> None:
    offered = draft([0.9, 0.1, 0.1])
    kept, nothing = offered.keep([0]), offered.keep([])
    assert foregone(offered, kept) == 0.1
    assert foregone(offered, nothing) == 0.9
    assert foregone(offered, offered) is None
    assert foregone(Draft(torch.tensor([1, 2]), (-1, -1), confidence=[0.8, 0.1]), nothing) is None  # no chain
    assert Outcome(0, "draft", kept, 1, 3, foregone=0.1).judged == (1.1, 2)
    assert Outcome(0, "draft", kept, 0, 3, foregone=0.1).judged == (0, 1)  # nobody came as far
    assert Outcome(0, "draft", nothing, 0, 3, foregone=0.05).judged == (0.05, 1)
    assert Outcome(0, "draft", offered, 3, 3).judged == (3, 3)


def test_a_method_whose_drafts_are_all_trimmed_is_not_asked_for_long() -> None:
    """What is verified of it alone may all be accepted: the few times that it is sure."""
    controller = Controller()
    plain(controller)
    unsure = draft([0.05])
    for step in range(60):
        sure = step % 10 == 0
        kept = unsure if sure else unsure.keep([])
        outcome = Outcome(0, "draft", kept, int(sure), 1, foregone(unsure, kept))
        controller.observe([outcome], 0.05, 0.01)
    assert controller.expectation("draft", 0)[1] == 0


def test_a_draft_goes_on_while_a_token_earns_its_time() -> None:
    controller = Controller()
    assert controller.break_even("draft") == 0.4
    for _ in range(60):
        learn(controller, 4, 4, 0.1, 0.04)  # five tokens in 0.14 s; a token costs 0.01 s and a row
    row = controller.target.seconds(2) - controller.target.seconds(1)
    assert controller.pace(0) == pytest.approx(5 / 0.14, rel=0.15)
    assert controller.break_even("draft") == pytest.approx(controller.pace(0) * (0.01 + row), rel=0.05)
    assert Controller(fixed=3).break_even("draft") == 0


def test_what_a_draft_costs_is_told_apart_from_what_its_levels_do() -> None:
    times = DraftTimes()
    for levels in (1, 3, 2, 5, 1, 4):
        times.learn(levels, 0.5 + 0.2 * levels)
    assert times.line() == pytest.approx((0.5, 0.2))


def test_drafts_that_were_all_as_deep_charge_their_levels() -> None:
    times = DraftTimes()
    for _ in range(5):
        times.learn(4, 2.0)
    assert times.line() == pytest.approx((0.0, 0.5))


def test_a_draft_that_was_held_up_counts_as_twice_what_it_should_take() -> None:
    held, plain = DraftTimes(), DraftTimes()
    for times, last in ((held, 1000.0), (plain, 2 * 0.9)):
        for levels in (1, 2, 1, 2):
            times.learn(levels, 0.5 + 0.2 * levels)
        times.learn(2, last)
    assert held.line() == pytest.approx(plain.line())


def test_a_draft_that_takes_long_to_begin_has_to_promise_more() -> None:
    """The same levels at the same price: what is paid before the first one is lost at the request's pace."""
    gains = []
    for begin in (0.0, 0.01):
        controller = Controller(target=measured(0.05, 0.004))
        for levels in (1, 3, 2, 5):
            controller.record("draft").times.learn(levels, begin + 0.004 * levels)
        gains.append(controller.expectation("draft", 0)[0])
    assert gains[0] - gains[1] == pytest.approx(0.01 / 0.05, rel=0.02)
