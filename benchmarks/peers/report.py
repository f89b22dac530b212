"""The figures as Markdown and as JSON, with where they come from."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import OURS, Engine
from benchmarks.peers.fleet import Fleet
from benchmarks.peers.ratios import Ratio, against_best, geometric_mean, kind_rows, rates
from benchmarks.peers.timing import PREFILL, Run

from paceline.bench.noise import TOLERATED, noise_warning
from paceline.bench.provenance import git_commit, processor_model
from paceline.bench.run import ENOUGH_REPEATS
from paceline.bench.speedup import Speedup, Values

ALL = "geometric mean"
StepCosts = Mapping[str, Mapping[int, float]]
"""Median seconds by engine and rows."""


def as_json(runs: Sequence[Run], costs: StepCosts, provenance: Mapping[str, Any]) -> dict[str, Any]:
    by_kind = rates(runs)
    return {
        "provenance": dict(provenance),
        "ratios": {name: [asdict(each) for each in rows] for name, rows in _comparisons(by_kind).items()},
        "kinds": [asdict(row) for row in kind_rows(runs)],
        "prefill_tokens_per_second": _prefill(runs),
        "step_seconds": costs,
        "runs": [run.as_json() for run in runs],
    }


def as_markdown(runs: Sequence[Run], costs: StepCosts, provenance: Mapping[str, Any]) -> str:
    by_kind = rates(runs)
    parts = [_kinds_table(runs)]
    for name, ratios in _comparisons(by_kind).items():
        parts.append(f"{name}:\n\n{_ratios_table(ratios)}")
    if prefill := _prefill(runs):
        rows = [[label, f"{rate:.0f}"] for label, rate in prefill.items()]
        parts.append(_table(["prefill", "tokens/s"], rows))
    if costs:
        parts.append(_costs_table(costs))
    notes = [f"{name}: {', '.join(f'{k} {v}' for k, v in each.items())}" for name, each in _versions(provenance)]
    parts.append("    " + provenance["command"])
    parts.append("\n".join(f"- {note}" for note in [*provenance["warnings"], provenance["processor"], *notes]))
    return "\n\n".join(parts)


def provenance(
    command: Sequence[str], engines: Sequence[Engine], fleet: Fleet, repeats: int, max_tokens: int
) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "benchmarks.peers.run", *map(_without_folder, command)]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git_commit(Path(__file__)),
        "processor": processor_model(),
        "platform": platform.platform(),
        "threads": engines[0].settings.threads,
        "repeats": repeats,
        "max_tokens": max_tokens,
        "versions": fleet.versions,
        "idle_cores": {name: round(cores, 3) for name, cores in fleet.idle_cores.items()},
        "other_processes_cores": round(fleet.stranger_cores, 4),
        "warnings": warnings(fleet, repeats),
    }


def warnings(fleet: Fleet, repeats: int) -> list[str]:
    """Why these figures should not be quoted, if so."""
    found = [
        f"{name} used {cores:.0%} of a core while another engine was timed"
        for name, cores in fleet.idle_cores.items()
        if cores > TOLERATED
    ]
    if repeats < ENOUGH_REPEATS:
        found.append(f"{repeats} repeats are too few for figures to keep; use {ENOUGH_REPEATS} or more")
    noise = noise_warning(fleet.stranger_cores)
    return found if noise is None else [*found, noise]


def _comparisons(by_kind: Mapping[str, Mapping[str, Values]]) -> dict[str, list[Ratio]]:
    """Our best mode of each kind, which is chosen after the fact, and `auto`, which a user gets without choosing."""
    named = {"our best mode over the peers' best": None, "auto over the peers' best": f"{OURS}:auto"}
    found = {}
    for name, label in named.items():
        ratios = against_best(by_kind, label)
        mean = geometric_mean(by_kind, ratios)
        if mean is not None:
            found[name] = [*ratios, Ratio(ALL, "", "", mean)]
    return found


def _prefill(runs: Sequence[Run]) -> dict[str, float]:
    """Median tokens of the prompt a second, by plain mode."""
    found: dict[str, list[float]] = {run.label: [] for run in runs}
    for run in runs:
        if run.task.kind == PREFILL:
            found[run.label].append(len(run.task.prompt) / run.answer.prefill_seconds)
    return {label: statistics.median(rate) for label, rate in found.items() if rate}


def _kinds_table(runs: Sequence[Run]) -> str:
    rows = [
        [row.kind, row.label, _or_dash(row.tokens_per_second, ".1f"), *_interval(row.ours_over_it),
         _or_dash(row.like_ours, ".0%")]
        for row in kind_rows(runs)
    ]  # fmt: skip
    return _table(["kind", "mode", "tokens/s", "our best over it", "95% interval", "answers like ours"], rows)


def _ratios_table(ratios: Sequence[Ratio]) -> str:
    rows = [[each.kind, each.ours, each.theirs, *_interval(each.ratio)] for each in ratios]
    return _table(["kind", "ours", "theirs", "ratio", "95% interval"], rows)


def _costs_table(costs: StepCosts) -> str:
    counts = sorted({count for each in costs.values() for count in each})
    rows = [
        [name, *(f"{each[count] * 1e3:.1f}" if count in each else "-" for count in counts)]
        for name, each in costs.items()
    ]
    return _table(["step, ms, by rows", *map(str, counts)], rows)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(ratio: Speedup | None) -> tuple[str, str]:
    if ratio is None:
        return "-", "-"
    return f"{ratio.median:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _versions(provenance: Mapping[str, Any]) -> list[tuple[str, Mapping[str, str]]]:
    return list(provenance["versions"].items())


def _without_folder(argument: str) -> str:
    return Path(argument).name if os.sep in argument else argument
