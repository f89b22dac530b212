"""`paceline verify`: the lossless checks on a user's own model, with the evidence."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from paceline.cli import options as opt
from paceline.cli.console import note
from paceline.cli.groups import ModelChoice, grouped


@grouped
def verify(
    models: ModelChoice,
    max_tokens: opt.MaxTokens = 64,
    seeds: Annotated[int, typer.Option(help="Seeds of the coupled check.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Check on this model that speculation changes nothing, and print the evidence. Exit code 1 if a check fails."""
    from paceline.bench.evidence import run_checks
    from paceline.bench.tasks import builtin_prompts

    options = models.options(progress=not quiet)
    kinds = {task.kind: task.messages[-1]["content"] for task in builtin_prompts()}
    checks = []
    for check in run_checks(options, list(kinds.values())[:3], max_tokens, seeds):
        checks.append(check)
        if not as_json:
            mark = {True: "ok  ", False: "FAIL", None: "info"}[check.passed]
            print(f"{mark} {check.name}: {check.seen}", flush=True)
    failed = [check.name for check in checks if check.passed is False]
    if as_json:
        print(json.dumps({"passed": not failed, "checks": [asdict(check) for check in checks]}))
    if failed:
        note(f"{len(failed)} of {len(checks)} checks failed", quiet=quiet)
        raise typer.Exit(1)
