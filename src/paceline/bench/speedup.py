"""Speed-up from paired runs, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
"""Rates or seconds [prompts, repeats]; 0 or NaN where there was nothing to time."""

RESAMPLES = 2000


@dataclass(frozen=True)
class Speedup:
    """A median ratio, and the bounds that hold 95% of the bootstrap's."""

    median: float
    low: float
    high: float


def typical(measured: Values) -> float | None:
    """Median over prompts of each prompt's median over repeats; None when nothing was timed."""
    medians = _row_medians(timed(measured))
    return float(np.median(medians)) if len(medians) else None


def speedup(rates: Values, plain: Values, *, seed: int = 0) -> Speedup | None:
    """Median over prompts of the median over repeats of rate / plain rate; None when there is no pair.

    Each ratio is of two runs of one prompt in one repeat, so that slow drift of the machine cancels. The interval
    resamples prompts, and within each its repeats.
    """
    ratios = timed(rates) / timed(plain)
    ratios = ratios[~np.isnan(ratios).all(axis=1)]
    if not len(ratios):
        return None
    low, high = np.quantile(resampled_medians(ratios, seed), (0.025, 0.975))
    return Speedup(float(np.median(_row_medians(ratios))), float(low), float(high))


def values(rows: Sequence[Sequence[float]]) -> Values:
    return np.array(rows, dtype=np.float64)


def resampled_medians(ratios: Values, seed: int) -> Values:
    """Medians [RESAMPLES], one resample at a time: prompts by repeats by resamples would not fit for a large file."""
    chance = np.random.default_rng(seed)
    prompts, repeats = ratios.shape
    ordered = np.sort(ratios, axis=1)  # NaN last, so that the first `timed` of a row are ratios
    timed = (~np.isnan(ordered)).sum(axis=1)
    medians = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        rows = chance.integers(prompts, size=(prompts, 1))
        columns = (chance.random((prompts, repeats)) * timed[rows]).astype(np.int64)
        medians[i] = np.median(np.median(ordered[rows, columns], axis=1))
    return medians


def timed(measured: Values) -> Values:
    return np.where(measured > 0, measured, np.nan)


def _row_medians(measured: Values) -> Values:
    kept = measured[~np.isnan(measured).all(axis=1)]
    medians: Values = np.nanmedian(kept, axis=1) if len(kept) else np.empty(0)
    return medians
