"""A benchmark's figures as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.bench.rows import Row
from paceline.bench.run import PLAIN, Outcome, Run
from paceline.errors import PacelineError

UNKNOWN = "-"
COLUMNS = ("tok/s", "speed-up", "acceptance", "mean acc. length", "identical", "prompts")


def table(rows: Sequence[Row], provenance: Mapping[str, Any]) -> Table:
    result = Table("target", "kind", "method", caption=_caption(rows, provenance), caption_justify="left")
    for name in COLUMNS:
        result.add_column(name, justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last_of_kind = following is None or following.kind != row.kind
        result.add_row(row.target, row.kind, row.method, *_cells(row), end_section=last_of_kind)
    return result


def as_json(outcome: Outcome, rows: Sequence[Row], provenance: Mapping[str, Any]) -> dict[str, Any]:
    first = outcome.first_plain_ids()
    return {
        "provenance": dict(provenance),
        "rows": [asdict(row) for row in rows],
        "runs": [_run(run, first[run.prompt.id]) for run in outcome.runs],
    }


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise PacelineError(f"cannot write '{path}': {error.strerror}") from None


def _run(run: Run, plain: list[int]) -> dict[str, Any]:
    named = {"prompt": run.prompt.id, "kind": run.prompt.kind, "method": run.method}
    placed = {"repeat": run.repeat, "turn": run.turn, "same_as_none": run.measured.token_ids == plain}
    return named | placed | asdict(run.measured)


def _cells(row: Row) -> tuple[str, ...]:
    length = UNKNOWN if row.mean_acceptance_length is None else f"{row.mean_acceptance_length:.2f}"
    return (
        UNKNOWN if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}",
        _speedup(row),
        UNKNOWN if row.acceptance_rate is None or row.method == PLAIN else f"{row.acceptance_rate:.0%}",
        length,
        {True: "yes", False: "[bold red]NO[/]", None: UNKNOWN}[row.identical],
        str(row.prompts),
    )


def _speedup(row: Row) -> str:
    if row.speedup is None:
        return UNKNOWN
    if row.method == PLAIN:
        return f"{row.speedup:.2f}x"
    return f"{row.speedup:.2f}x \\[{row.speedup_low:.2f}, {row.speedup_high:.2f}]"


def _caption(rows: Sequence[Row], provenance: Mapping[str, Any]) -> str:
    lines = [
        f"{provenance['repeats']} repeats, interleaved; at most {provenance['max_tokens']} tokens; "
        f"{provenance['precision']}, {provenance['threads']} threads; decode rate, prefill excluded; 95% intervals"
    ]
    margins = [row.min_margin for row in rows if row.min_margin is not None]
    if margins:
        lines.append(f"smallest logit margin along the plain outputs: {min(margins):.2g}")
    return "\n".join(lines)
