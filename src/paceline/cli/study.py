"""`paceline study`: questions about drafting, answered on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options as opt

if TYPE_CHECKING:
    from paceline.train.acceptance import Acceptance
    from paceline.train.trainer import Position

study_app = typer.Typer(help="Questions about drafting, answered on this machine.", no_args_is_help=True)

_DRAFTS, _TRAINING, _TIMING = "Drafts", "Training", "Timing"

Out = Annotated[Path, typer.Option(help="Folder of the study: table, picture, figures, and the drafts themselves.")]
Target = Annotated[str, typer.Option("--target", "-m", help="Preset, directory, .gguf file or hub id.")]
LatencyOnly = Annotated[bool, typer.Option("--latency-only", help="Time random weights, and stop there.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Answers and states, from `paceline train draft --stages responses,capture --data DIR`."),
]
Prompts = Annotated[
    Path | None, typer.Option(help="JSON lines of prompts by people: for throughput and accuracy (default: built-in).")
]
Limit = Annotated[int | None, typer.Option(help="Most prompts of each kind.")]
Depths = Annotated[
    str, typer.Option(help="Layers of the drafts of equal weights (comma separated).", rich_help_panel=_DRAFTS)
]
BudgetLayers = Annotated[
    int, typer.Option(help="They weigh as much as so many layers of the target.", rich_help_panel=_DRAFTS, min=1)
]
Kept = Annotated[
    str, typer.Option(help="Layers that layer-pruned drafts keep (comma separated).", rich_help_panel=_DRAFTS)
]
Tokens = Annotated[int, typer.Option(help="To train each draft on, repeats counted.", rich_help_panel=_TRAINING, min=1)]
Rate = Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel=_TRAINING, min=0)]
Rows = Annotated[int, typer.Option(help="Tokens of a forward.", rich_help_panel=_TRAINING, min=1)]
DraftVocab = Annotated[
    int | None,
    typer.Option(help="Commonest tokens that the drafts score (default: all).", rich_help_panel=_TRAINING, min=1),
]
CheckpointSeconds = Annotated[
    float, typer.Option(help="Time between checkpoints: what a kill can cost.", rich_help_panel=_TRAINING, min=0)
]
Seed = Annotated[int, typer.Option(help="Of the order of everything.", rich_help_panel=_TRAINING)]
Ks = Annotated[str, typer.Option("--k", help="Draft lengths to time (comma separated).", rich_help_panel=_TIMING)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Longest answer.", rich_help_panel=_TIMING, min=2)]
Repeats = Annotated[int, typer.Option(help="Of each prompt, draft and draft length.", rich_help_panel=_TIMING, min=1)]
Rounds = Annotated[int, typer.Option(help="Of step times.", rich_help_panel=_TIMING, min=1)]
Shapes = Annotated[str, typer.Option(help="Random weights to time: some of paper, ladder.", rich_help_panel=_TIMING)]
LatencyPrecision = Annotated[str, typer.Option(help="Of the random weights: int8 or int4.", rich_help_panel=_TIMING)]


@study_app.callback()
def study() -> None:
    """Without it a single command would be the whole application."""


@study_app.command()
def drafts(
    out: Out,
    target: Target = "smollm2-135m",
    latency_only: LatencyOnly = False,
    data: Data = None,
    prompts: Prompts = None,
    limit: Limit = None,
    depths: Depths = "32,15,8,4,2,1",
    budget_layers: BudgetLayers = 4,
    kept: Kept = "2,4,8",
    tokens: Tokens = 1_000_000,
    rate: Rate = 1e-3,
    rows: Rows = 1024,
    draft_vocab: DraftVocab = None,
    checkpoint_seconds: CheckpointSeconds = 120.0,
    seed: Seed = 0,
    k: Ks = "1,2,4,6",
    max_tokens: MaxTokens = 128,
    repeats: Repeats = 3,
    rounds: Rounds = 15,
    shapes: Shapes = "paper,ladder",
    latency_precision: LatencyPrecision = "int8",
    threads: opt.Threads = None,
    quiet: opt.Quiet = False,
) -> None:
    """Drafts of equal parameters from deep to wide: step time, acceptance, throughput, and what was published of them.

    Killed at any moment, the same command goes on.
    """
    from paceline.device import has_bf16_dot
    from paceline.study.given import StudyConfig
    from paceline.study.run import StudyRun
    from paceline.train.trainer import TrainConfig

    config = StudyConfig(
        target, out, data, prompts, limit,
        TrainConfig(
            tokens=tokens, rate=rate, rows=rows, seed=seed, bf16=has_bf16_dot(), checkpoint_seconds=checkpoint_seconds,
            evaluations=2,
        ),
        whole_numbers(depths, "--depths"), whole_numbers(kept, "--kept"), budget_layers, draft_vocab,
        whole_numbers(k, "--k"), max_tokens, repeats, tuple(_parts(shapes)), latency_precision, rounds, threads,
        latency_only,
    )  # fmt: skip
    with _display(quiet) as display:
        found = StudyRun(config, display, shlex.join(["paceline", *sys.argv[1:]])).go()
    print(found.as_markdown(), end="")


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Numbers of at least 1 with commas between them; an empty text is none. Raises PacelineError."""
    from paceline.errors import PacelineError

    parts = _parts(text)
    if not all(part.isdecimal() and int(part) for part in parts):
        raise PacelineError(f"{option} takes whole numbers of at least 1 with commas between them, not '{text}'")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@contextmanager
def _display(quiet: bool) -> Iterator[StudyDisplay]:
    """Drawn between what is measured only: a thread that draws would take time from it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[state]}"))
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, auto_refresh=False) as progress:
        yield StudyDisplay(progress, console)


class StudyDisplay:
    """A bar for each stage; without a terminal, a line now and then."""

    def __init__(self, progress: Any, console: Any) -> None:
        self.progress, self.console = progress, console

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.name = name
        self.task = self.progress.add_task(name, total=None, state="")
        self.progress.refresh()
        yield
        self.progress.update(self.task, total=1, completed=1, refresh=True)

    def moved(self, done: int, total: int) -> None:
        self.progress.update(self.task, completed=done, total=total, refresh=True)

    def trained(self, progress: float, position: Position, loss: float, acceptance: Acceptance | None) -> None:
        self.progress.update(self.task, total=1.0, completed=progress, state=f"loss {loss:.3f}", refresh=True)
        if acceptance is not None:
            self.note(
                f"{self.name}: {position.tokens:,} tokens, {position.seconds / 60:.1f} min, loss {loss:.3f}, "
                f"acceptance length {acceptance.length:.2f}"
            )

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
