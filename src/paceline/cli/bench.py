"""`paceline bench`: how much faster each method is on this machine, and whether it says the same."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.groups import ModelChoice, grouped

# torch takes seconds to import and rich a good part of one: both wait until the command runs.
if TYPE_CHECKING:
    from paceline.bench.run import OnRun, Outcome
    from paceline.bench.tasks import BenchPrompt
    from paceline.build import Options

NARROWEST = 132  # columns; a table in a file or a pipe must not be folded to 80


Methods = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated methods, draft:MODEL, or all; peers: transformers, transformers-lookup, "
        "transformers-draft (default: none, ngram, auto, and draft with --draft)."
    ),
]
Prompts = Annotated[Path | None, typer.Option(help="JSON lines of prompts (default: 18 built-in ones).")]
Kinds = Annotated[str | None, typer.Option(help="Comma-separated kinds of prompt (default: all).")]
Limit = Annotated[int | None, typer.Option(help="Most prompts of each kind.")]
Repeats = Annotated[int, typer.Option(help="Timed runs of each prompt and method.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write rows, runs and provenance to this file.")]


@grouped
def bench(
    models: ModelChoice,
    methods: Methods = None,
    prompts: Prompts = None,
    kinds: Kinds = None,
    limit: Limit = None,
    repeats: Repeats = 5,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    json_file: JsonFile = None,
    quiet: options.Quiet = False,
) -> None:
    """Time drafting methods against plain decoding, interleaved, and check that the answers are the same."""
    from paceline.bench.run import BenchConfig, run_bench

    _require_folder(json_file)
    show = not quiet and sys.stderr.isatty()
    chosen = models.options(progress=show)
    config = BenchConfig(
        chosen, _methods(methods, chosen), _prompts(prompts, kinds, limit),
        max_tokens=max_tokens, temperature=temperature, seed=seed, repeats=repeats,
    )  # fmt: skip
    with _progress(show) as on_run:
        outcome = run_bench(config, on_run)
    _report(outcome, json_file)


def _methods(named: str | None, chosen: "Options") -> list[str]:
    from paceline.bench.methods import all_methods

    if named is None:
        return ["none", "ngram", "auto"] if chosen.draft is None else ["none", "ngram", "draft", "auto"]
    return all_methods(chosen) if named == "all" else _split(named, "--methods")


def _prompts(path: Path | None, kinds: str | None, limit: int | None) -> "list[BenchPrompt]":
    from paceline.bench.tasks import builtin_prompts, load_prompts, select

    every = builtin_prompts() if path is None else load_prompts(path)
    return select(every, None if kinds is None else _split(kinds, "--kinds"), limit)


def _split(text: str, option: str) -> list[str]:
    from paceline.errors import PacelineError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise PacelineError(f"{option} is empty; give names with commas between them, or leave it out")
    return parts


def _require_folder(json_file: Path | None) -> None:
    """Minutes of timing should not end with a file that cannot be written."""
    from paceline.errors import PacelineError

    if json_file is not None and not json_file.parent.is_dir():
        raise PacelineError(f"cannot write '{json_file}': there is no folder '{json_file.parent}'")
    if json_file is not None and json_file.is_dir():
        raise PacelineError(f"cannot write '{json_file}': it is a folder; give a file name")


@contextmanager
def _progress(show: bool) -> "Iterator[OnRun | None]":
    """A bar on stderr. It is drawn between runs only: a thread that draws would take time from what is measured."""
    if not show:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("loading", total=None)
        progress.refresh()

        def on_run(done: int, total: int, method: str) -> None:
            progress.update(task, completed=done, total=total, description=method or "margins", refresh=True)

        yield on_run


def _report(outcome: "Outcome", json_file: Path | None) -> None:
    from rich.console import Console

    from paceline.bench.provenance import provenance
    from paceline.bench.report import as_json, table, write_json
    from paceline.bench.rows import build_rows

    rows = build_rows(outcome)
    source = provenance(outcome, shlex.join(["paceline", *sys.argv[1:]]))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    console.print(table(rows, source))
    for warning in source["warnings"]:
        typer.echo(f"warning: {warning}", err=True)
    if json_file is not None:
        write_json(json_file, as_json(outcome, rows, source))
