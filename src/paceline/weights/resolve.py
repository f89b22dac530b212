"""From what a user types after `--model` to files on this disk."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import PacelineError
from paceline.weights.presets import PRESETS, preset_path

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.json"]


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk. `name` is what the user typed."""

    name: str
    path: Path
    kind: Literal["directory", "gguf"]


def resolve(name: str, *, progress: bool = False) -> Checkpoint:
    """A preset name, a directory, a .gguf file, a hub id, or `org/repo/file.gguf` on the hub; fetched if need be."""
    if name in PRESETS:
        return Checkpoint(name, preset_path(name, progress=progress), "gguf")
    path = Path(name).expanduser()
    if path.is_dir():
        return Checkpoint(name, path, "directory")
    if path.is_file():
        return Checkpoint(name, path, "gguf")
    if path.is_absolute() or name.startswith((".", "~")) or (path.suffix == ".gguf" and name.count("/") != 2):
        raise PacelineError(f"cannot read '{name}': no such file or directory")
    if name.count("/") in (1, 2):
        return _from_hub(name)
    close = difflib.get_close_matches(name.lower(), PRESETS, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    known = ", ".join(PRESETS)
    raise PacelineError(
        f"unknown model '{name}': {hint}presets are {known}; or give a directory, a .gguf file or a hub id (org/name)"
    )


def _from_hub(name: str) -> Checkpoint:
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if name.endswith(".gguf"):
            repo, _, file = name.rpartition("/")
            return Checkpoint(name, Path(hf_hub_download(repo, file)), "gguf")
        return Checkpoint(name, Path(snapshot_download(name, allow_patterns=HUB_FILES)), "directory")
    except Exception as error:  # the hub client raises its own, its HTTP library's and the system's errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PacelineError(f"cannot fetch '{name}' from the hub: {reason}; check the name and the network") from None
