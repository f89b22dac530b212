"""`paceline quality`: what a precision costs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as opt


def quality(
    model: opt.Model = "smollm2-135m",
    precisions: Annotated[str, typer.Option(help="Comma separated.")] = "stored,int8,int4,bf16",
    positions: Annotated[int, typer.Option(help="Positions to compare.", min=1)] = 400,
    prompts: Annotated[Path | None, typer.Option(help="Prompts file (default: the built-in ones).")] = None,
    threads: opt.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Mean KL divergence to fp32 and top-1 agreement of each precision, teacher-forced on the bench prompts."""
    from rich.console import Console
    from rich.table import Table

    from paceline.bench.quality import measure
    from paceline.bench.tasks import builtin_prompts, load_prompts
    from paceline.device import set_threads

    set_threads(threads)
    tasks = load_prompts(prompts) if prompts else builtin_prompts()
    texts = ["\n".join(message["content"] for message in task.messages) for task in tasks]
    rows = measure(model, precisions.split(","), texts, positions)
    if as_json:
        print(json.dumps([{"model": model, **asdict(row)} for row in rows]))
        return
    table = Table(title=f"{model}: cost of precision against fp32, {rows[0].positions} positions")
    for name in ("precision", "mean KL (nats)", "top-1 agreement"):
        table.add_column(name, justify="left" if name == "precision" else "right")
    for row in rows:
        table.add_row(row.precision, f"{row.kl:.5f}", f"{row.top1:.1%}")
    Console(highlight=False).print(table)
