"""Telling how much processor time others took."""

from __future__ import annotations

import pytest

from paceline.bench.noise import CpuClock, noise_warning, other_cores


def test_our_own_time_does_not_count_as_others() -> None:
    start, end = CpuClock(wall=100, busy=50, own=20), CpuClock(wall=110, busy=75, own=40)
    assert other_cores(start, end) == pytest.approx(0.5)  # 25 busy, 20 of them ours, in 10 seconds


def test_coarse_ticks_never_give_less_than_nothing() -> None:
    assert other_cores(CpuClock(0, 0, 0), CpuClock(10, 19.9, 20)) == 0
    assert other_cores(CpuClock(5, 0, 0), CpuClock(5, 1, 0)) == 0


def test_a_reading_counts_our_own_work_as_busy() -> None:
    start = CpuClock.read()
    end = CpuClock.read()
    while end.own - start.own < 0.1:
        end = CpuClock.read()
    assert end.wall - start.wall >= 0.05
    assert end.busy - start.busy >= 0.05


def test_only_more_than_a_twentieth_of_a_core_warns() -> None:
    assert noise_warning(0.05) is None
    warning = noise_warning(0.12)
    assert warning is not None
    assert "12% of a core" in warning
