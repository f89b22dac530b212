"""`paceline`: one file a command; nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys

import typer

from paceline.cli.bench import bench
from paceline.cli.chat import chat
from paceline.cli.doctor import doctor
from paceline.cli.explain import explain
from paceline.cli.generate import generate
from paceline.cli.models import models_app
from paceline.cli.quality import quality
from paceline.cli.study import study_app
from paceline.cli.train import train
from paceline.cli.verify import verify
from paceline.errors import PacelineError

app = typer.Typer(
    help="Lossless speculative decoding: the same answer as the model's own, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(explain)
app.command()(chat)
app.command()(bench)
app.command()(verify)
app.command()(quality)
app.command()(doctor)
app.command()(train)
app.add_typer(models_app, name="models")
app.add_typer(study_app, name="study")


def _version(show: bool) -> None:
    if show:
        from paceline import __version__

        print(f"paceline {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2. (Typer turns Ctrl-C into exit code 130.)"""
    try:
        app()
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
