"""The statistics of a benchmark: medians, paired ratios, the bootstrap interval."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.bench.speedup import speedup, typical, values


def test_the_typical_rate_is_a_median_of_medians() -> None:
    measured = values([[1, 2, 90], [10, 11, 12], [5, 5, 50]])  # medians 2, 11, 5; the median of all nine is 10
    assert typical(measured) == 5


def test_ratios_pair_runs_of_the_same_repeat() -> None:
    plain = values([[10, 20, 40]])  # the machine sped up between repeats
    gain = speedup(values([[30, 20, 44]]), plain)  # ratios 3, 1, 1.1; the ratio of medians is 1.5
    assert gain is not None
    assert gain.median == pytest.approx(1.1)


def test_ratios_pair_runs_of_the_same_prompt() -> None:
    plain = values([[10, 10], [100, 100], [1000, 1000]])
    rates = values([[40, 40], [100, 100], [2000, 2000]])  # ratios 4, 1, 2; the ratio of medians is 1
    gain = speedup(rates, plain)
    assert gain is not None
    assert gain.median == 2


def test_the_interval_brackets_the_median_and_the_truth() -> None:
    chance = np.random.default_rng(7)
    plain = chance.uniform(20, 60, size=(40, 5))
    rates = plain * 1.5 * chance.lognormal(0, 0.1, size=(40, 5))
    gain = speedup(rates, plain)
    assert gain is not None
    assert gain.low < gain.median < gain.high
    assert gain.low < 1.5 < gain.high
    assert gain.high - gain.low < 0.2


def test_the_interval_narrows_with_more_prompts() -> None:
    chance = np.random.default_rng(8)
    noise = chance.lognormal(0, 0.3, size=(200, 5))
    few, many = speedup(noise[:10], np.ones((10, 5))), speedup(noise, np.ones((200, 5)))
    assert few is not None
    assert many is not None
    assert many.high - many.low < (few.high - few.low) / 2


def test_the_interval_of_one_prompt_comes_from_its_repeats() -> None:
    gain = speedup(values([[10, 20, 30, 40, 50]]), values([[10, 10, 10, 10, 10]]))
    assert gain is not None
    assert 1 <= gain.low < 3 < gain.high <= 5


def test_the_interval_is_the_same_each_time() -> None:
    chance = np.random.default_rng(9)
    rates, plain = chance.uniform(20, 60, size=(2, 30, 5))
    assert speedup(rates, plain) == speedup(rates, plain)
    assert speedup(rates, plain, seed=1) != speedup(rates, plain, seed=2)


def test_constant_ratios_leave_no_interval() -> None:
    gain = speedup(values([[20, 40], [60, 80]]), values([[10, 20], [30, 40]]))
    assert gain is not None
    assert (gain.low, gain.median, gain.high) == (2, 2, 2)


def test_runs_without_a_decode_rate_are_left_out() -> None:
    plain = values([[10, 10], [0, 0], [10, 0]])
    rates = values([[20, 20], [50, 50], [40, 90]])  # of the third prompt only the first pair counts
    gain = speedup(rates, plain)
    assert gain is not None
    assert gain.median == 3
    assert gain.low >= 2
    assert gain.high <= 4
    assert typical(plain) == 10


def test_nothing_timed_gives_no_figure() -> None:
    nothing = values([[0, 0]])
    assert typical(nothing) is None
    assert speedup(nothing, values([[10, 10]])) is None
    assert speedup(values([[10, 10]]), nothing) is None


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 1)])
def test_small_shapes_have_finite_intervals(shape: tuple[int, int]) -> None:
    gain = speedup(np.full(shape, 3.0), np.full(shape, 2.0))
    assert gain is not None
    assert (gain.low, gain.median, gain.high) == (1.5, 1.5, 1.5)
