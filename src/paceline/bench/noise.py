"""How much processor time other processes took while we were timing."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

TOLERATED = 0.05  # of one core


@dataclass(frozen=True)
class CpuClock:
    """Seconds since some fixed moment: on the wall, of all processors while busy, and of this process's share of it."""

    wall: float
    busy: float
    own: float

    @classmethod
    def read(cls) -> CpuClock:
        system = psutil.cpu_times()._asdict()
        # `guest` is counted in `user` already; time that the hypervisor gave to others counts as theirs.
        idle = ("idle", "iowait", "guest", "guest_nice")
        busy = sum(seconds for name, seconds in system.items() if name not in idle)
        own = psutil.Process().cpu_times()
        return cls(time.perf_counter(), busy, own.user + own.system)


def other_cores(start: CpuClock, end: CpuClock) -> float:
    """Cores that others kept busy between two readings: 0.5 is half of one core. Ticks are coarse, so never under 0."""
    seconds = (end.busy - start.busy) - (end.own - start.own)
    wall = end.wall - start.wall
    return max(0.0, seconds / wall) if wall > 0 else 0.0


def noise_warning(cores: float) -> str | None:
    if cores <= TOLERATED:
        return None
    return f"other processes used {cores:.0%} of a core while timing; run on a quiet machine for figures to keep"
