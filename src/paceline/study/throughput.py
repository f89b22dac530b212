"""Tokens a second of the target with each draft in the real engine, interleaved with plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.bench.methods import WITH_DRAFT
from paceline.bench.rows import ALL, build_rows
from paceline.bench.run import ENOUGH_REPEATS, PLAIN, BenchConfig, run_bench


@dataclass(frozen=True)
class Rate:
    """At draft length `k`. speedup: over plain decoding, with a 95% interval; accepted: tokens a target forward."""

    k: int
    tokens_per_second: float
    speedup: float
    low: float
    high: float
    accepted: float
    identical: bool | None


def time_drafts(
    config: BenchConfig, k: int, drafts: Mapping[str, Path], moved: Callable[[int, int], None]
) -> dict[str, Any]:
    """Rates by name, those of plain decoding under `none`, and what makes them doubtful. Raises PacelineError."""
    methods = {name: f"{WITH_DRAFT}{folder}" for name, folder in drafts.items()}
    bench = replace(config, options=replace(config.options, k=k), methods=tuple(methods.values()))
    outcome = run_bench(bench, lambda done, total, _: moved(done, total))
    rows = {row.method: row for row in build_rows(outcome) if row.kind == ALL}
    rates = {}
    for name, method in {PLAIN: PLAIN, **methods}.items():
        row = rows[method]
        speedup, low, high = row.speedup or 0.0, row.speedup_low or 0.0, row.speedup_high or 0.0
        accepted = row.mean_acceptance_length or 0.0
        rates[name] = vars(Rate(k, row.tokens_per_second or 0.0, speedup, low, high, accepted, row.identical))
    return {"rates": rates, "precision": outcome.precision, "warnings": _warnings(config)}


def _warnings(config: BenchConfig) -> list[str]:
    """How busy others were is told of every step of the study."""
    if config.repeats >= ENOUGH_REPEATS:
        return []
    return [f"{config.repeats} repeats are too few for figures to keep; use {ENOUGH_REPEATS} or more"]


def best(rates: Sequence[Rate]) -> Rate:
    """The draft length that pays best."""
    return max(rates, key=lambda rate: rate.speedup)
