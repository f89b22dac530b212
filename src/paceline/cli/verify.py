"""`paceline verify`: the lossless checks on a user's own model, with the evidence."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as opt
from paceline.cli.console import note
from paceline.cli.groups import ModelChoice, grouped
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.bench.bitwise import Bitwise, BitwiseConfig, Finding
    from paceline.build import Options

_BITWISE = "With --bitwise"
MARK = {True: "ok  ", False: "FAIL", None: "info"}


@grouped
def verify(
    models: ModelChoice,
    max_tokens: opt.MaxTokens = 64,
    seeds: Annotated[
        int | None, typer.Option(help="Seeds of the coupled check (default: 5; with --bitwise 1 a prompt).", min=1)
    ] = None,
    bitwise: Annotated[
        bool, typer.Option("--bitwise", help="Compare ids and log probabilities of every method, bit for bit.")
    ] = False,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma separated; adversary drafts trees around the right answer (default: all that can run).",
            rich_help_panel=_BITWISE,
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines of prompts (default: built-in ones).", rich_help_panel=_BITWISE)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts, of each kind in turn (default: 4).", min=1, rich_help_panel=_BITWISE)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Check on this model that speculation changes nothing, and print the evidence. Exit code 1 if a check fails."""
    options = models.options(progress=not quiet)
    if bitwise:
        config = _bitwise_config(options, methods, prompts, 4 if limit is None else limit, max_tokens, seeds or 1)
        failed, of = _run_bitwise(config, as_json)
    else:
        _refuse_without_bitwise(methods=methods, prompts=prompts, limit=limit)
        failed, of = _run_checks(options, max_tokens, seeds or 5, as_json)
    if failed:
        note(f"{failed} of {of} checks failed", quiet=quiet)
        raise typer.Exit(1)


def _run_checks(options: Options, max_tokens: int, seeds: int, as_json: bool) -> tuple[int, int]:
    """(checks that failed, all checks)."""
    from paceline.bench.evidence import run_checks
    from paceline.bench.tasks import builtin_prompts

    kinds = {task.kind: task.messages[-1]["content"] for task in builtin_prompts()}
    checks = []
    for check in run_checks(options, list(kinds.values())[:3], max_tokens, seeds):
        checks.append(check)
        if not as_json:
            print(f"{MARK[check.passed]} {check.name}: {check.seen}", flush=True)
    failed = sum(check.passed is False for check in checks)
    if as_json:
        print(json.dumps({"passed": not failed, "checks": [asdict(check) for check in checks]}))
    return failed, len(checks)


def _bitwise_config(
    options: Options, methods: str | None, prompts: Path | None, limit: int, max_tokens: int, seeds: int
) -> BitwiseConfig:
    from paceline.bench.bitwise import BitwiseConfig, spread
    from paceline.bench.tasks import builtin_prompts, load_prompts

    every = builtin_prompts() if prompts is None else load_prompts(prompts)
    named = None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    if named == []:
        raise PacelineError("--methods is empty; give names with commas between them, or leave it out")
    return BitwiseConfig(options, spread(every, limit), named, max_tokens, seeds)


def _run_bitwise(config: BitwiseConfig, as_json: bool) -> tuple[int, int]:
    """(variants that failed, all variants)."""
    from paceline.bench.bitwise import Bitwise

    check = Bitwise.load(config)
    if not as_json:
        _introduce(check)
    findings = []
    for finding in check.run():
        findings.append(finding)
        if not as_json:
            print(f"{MARK[finding.passed]} {finding.name}: {_seen(finding)}", flush=True)
    failed = sum(finding.passed is False for finding in findings)
    if as_json:
        print(json.dumps(_as_json(check, findings, passed=not failed)))
    else:
        _sum_up(findings)
    return failed, len(findings)


def _introduce(check: Bitwise) -> None:
    backend = check.target.backend
    tokens = sum(len(case.plain) for case in check.cases)
    print(
        f"plain decoding, batch 1, whole prompts: {len(check.config.prompts)} prompts, {len(check.cases)} answers "
        f"(greedy and coupled), {tokens} tokens, {backend.precision} on {backend.device}; "
        f"{len(check.variants)} variants follow",
        flush=True,
    )
    if not check.promised:
        print(
            f"note: {backend.precision} on {backend.device} does not promise equal bits, since a row's rounding may "
            "depend on the rows beside it; a variant fails here only where a log probability moves by 1 or more",
            flush=True,
        )


def _seen(finding: Finding) -> str:
    work = f"{finding.accepted} of {finding.drafted} drafted tokens accepted" if finding.drafted else "nothing drafted"
    if finding.cached_tokens:
        work += f", {finding.cached_tokens} tokens from the cache"
    if finding.first is None:
        return f"{finding.tokens} tokens equal, log probabilities and their top 5 in every bit; {work}"
    first = finding.first
    return (
        f"differs in {finding.prompts_compared - finding.equal_prompts} of {finding.prompts_compared} prompts "
        f"({finding.tokens} tokens compared), first in {finding.first_case}, token {first.position}, {first.what}: "
        f"plain {first.plain}, here {first.other}; ids equal in {finding.answers_same_ids} of {finding.answers} "
        f"answers, largest difference of a log probability {finding.gap:.3g}; {work}"
    )


def _sum_up(findings: list[Finding]) -> None:
    pairs, equal = sum(each.prompts_compared for each in findings), sum(each.equal_prompts for each in findings)
    variants = sum(each.first is None for each in findings)
    print(
        f"{equal} of {pairs} pairs of variant and prompt equal in every bit; "
        f"{variants} of {len(findings)} variants without a difference"
    )


def _as_json(check: Bitwise, findings: list[Finding], *, passed: bool) -> dict[str, object]:
    backend = check.target.backend
    return {
        "passed": passed,
        "promised": check.promised,
        "model": check.config.options.model,
        "precision": backend.precision,
        "device": str(backend.device),
        "prompts": [prompt.id for prompt in check.config.prompts],
        "pairs": sum(each.prompts_compared for each in findings),
        "equal_pairs": sum(each.equal_prompts for each in findings),
        "variants": [asdict(finding) | {"gap": _finite(finding.gap)} for finding in findings],
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _refuse_without_bitwise(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise PacelineError(f"--{name} belongs to --bitwise; give --bitwise too, or leave it out")
