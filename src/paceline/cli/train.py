"""`paceline train`: a drafter that fits its target, from prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options as opt

if TYPE_CHECKING:
    from paceline.train.acceptance import Acceptance
    from paceline.train.run import Stage
    from paceline.train.trainer import Position

_DATA, _BUDGET = "Data", "Budget"

Kind = Annotated[str, typer.Argument(help="eagle3, medusa, mtp, draft or exit.")]
Target = Annotated[str, typer.Option("--target", "-m", help="Preset, directory, .gguf file or hub id.")]
Prompts = Annotated[
    Path | None, typer.Option(help="JSON lines of prompts for the target to answer.", rich_help_panel=_DATA)
]
Out = Annotated[Path, typer.Option(help="Folder of the run: checkpoint, log, and the drafter in the end.")]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder of answers and captured states; runs can share it (default: OUT/data).", rich_help_panel=_DATA
    ),
]
Stages = Annotated[
    str, typer.Option(help="Which of responses, capture, train, export (comma separated).", rich_help_panel=_DATA)
]
Hours = Annotated[float | None, typer.Option(help="Wall time for all stages together.", rich_help_panel=_BUDGET)]
Tokens = Annotated[
    int | None, typer.Option(help="Tokens to train on, repeats counted.", rich_help_panel=_BUDGET, min=1)
]
ResponseTokens = Annotated[
    int | None, typer.Option(help="Tokens of answers to write (default: all prompts).", rich_help_panel=_BUDGET, min=1)
]
Disk = Annotated[
    float,
    typer.Option(help="Most GB of captured states; 0 captures anew while training.", rich_help_panel=_BUDGET, min=0),
]
DraftVocab = Annotated[int, typer.Option(help="Commonest tokens that the drafter scores.", min=1)]
Init = Annotated[
    str | None, typer.Option(help="Drafter to go on from, vocabulary included: directory, hub id, or preset.")
]
Rate = Annotated[float, typer.Option(help="Peak learning rate.", min=0)]
Rows = Annotated[int, typer.Option(help="Tokens of a forward.", min=1)]
Accumulate = Annotated[int, typer.Option(help="Forwards of an optimiser step.", min=1)]
CheckpointSeconds = Annotated[float, typer.Option(help="Time between checkpoints: what a kill can cost.", min=0)]
Seed = Annotated[int, typer.Option(help="Of the order of everything.")]


def train(
    kind: Kind,
    out: Out,
    target: Target = "smollm2-135m",
    prompts: Prompts = None,
    data: Data = None,
    stages: Stages = "responses,capture,train,export",
    hours: Hours = None,
    tokens: Tokens = None,
    response_tokens: ResponseTokens = None,
    disk: Disk = 20.0,
    draft_vocab: DraftVocab = 8192,
    init: Init = None,
    rate: Rate = 1e-3,
    rows: Rows = 1024,
    accumulate: Accumulate = 1,
    checkpoint_seconds: CheckpointSeconds = 120.0,
    seed: Seed = 0,
    threads: opt.Threads = None,
    quiet: opt.Quiet = False,
) -> None:
    """Train a head or draft for a target on its own answers. Killed at any moment, the same command goes on."""
    from paceline.device import has_bf16_dot
    from paceline.train.responses import ResponseConfig
    from paceline.train.run import Run, RunConfig
    from paceline.train.trainer import TrainConfig

    config = RunConfig(
        kind, target, out, data or out / "data", prompts, hours,
        ResponseConfig(tokens=response_tokens, seed=seed),
        TrainConfig(
            tokens=tokens, rate=rate, rows=rows, accumulate=accumulate, seed=seed, bf16=has_bf16_dot(),
            checkpoint_seconds=checkpoint_seconds,
        ),
        int(disk * 1e9), draft_vocab, init, threads, parse_stages(stages),
    )  # fmt: skip
    with _display(quiet) as display:
        acceptance = Run(config, display).go()
    if acceptance is not None:
        print(f"held-out acceptance length {acceptance.length:.2f} (chain of {len(acceptance.by_depth)}, greedy)")


def parse_stages(text: str) -> tuple[Stage, ...]:
    """In their own order, whatever the text's. Raises PacelineError."""
    from paceline.errors import PacelineError
    from paceline.train.run import STAGES

    named = [part.strip() for part in text.split(",") if part.strip()]
    for name in named:
        if name not in STAGES:
            raise PacelineError(f"unknown stage '{name}'; one of {', '.join(STAGES)}")
    if not named:
        raise PacelineError(f"--stages is empty; give some of {', '.join(STAGES)}")
    return tuple(stage for stage in STAGES if stage in named)


@contextmanager
def _display(quiet: bool) -> Iterator[Bars]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, quiet=quiet)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(
        *columns, console=console, disable=quiet or not console.is_terminal, refresh_per_second=2
    ) as progress:
        yield Bars(progress, console)


class Bars:
    """A bar for each stage; without a terminal, a line now and then."""

    def __init__(self, progress: Any, console: Any) -> None:
        self.progress, self.console = progress, console
        self.done = 0

    @contextmanager
    def stage(self, stage: Stage, total: int | None) -> Iterator[None]:
        self.done = 0
        self.task = self.progress.add_task(stage, total=total, state="")
        yield
        self.progress.update(self.task, total=1, completed=1)

    def advance(self, tokens: int) -> None:
        self.done += tokens
        self.progress.update(self.task, completed=self.done, state=f"{self.done:,} tokens")

    def trained(self, progress: float, position: Position, loss: float, acceptance: Acceptance | None) -> None:
        self.progress.update(self.task, total=1.0, completed=progress, state=f"loss {loss:.3f}")
        if acceptance is not None:
            depths = " ".join(f"{share:.0%}" for share in acceptance.by_depth)
            self.note(
                f"{position.tokens:,} tokens, {position.seconds / 60:.1f} min: loss {loss:.3f}, acceptance length "
                f"{acceptance.length:.2f} (by depth {depths})"
            )

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)
