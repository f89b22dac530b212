"""A head by name: from a directory or the hub, whatever format it is in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from paceline.device import Backend
from paceline.errors import PacelineError
from paceline.heads.config import HeadFolder
from paceline.heads.eagle import EagleHead
from paceline.heads.exit import ExitHead
from paceline.heads.expected import listed
from paceline.heads.formats import eagle1, eagle3, exit, medusa, mtp
from paceline.heads.medusa import MedusaHead
from paceline.heads.mtp import MtpHead
from paceline.heads.tensors import open_tensors
from paceline.model.config import ModelConfig
from paceline.weights.safetensors import read_json

Head = EagleHead | MtpHead | MedusaHead | ExitHead


class Format(Protocol):
    """A module of `formats/`: how one kind of head lies on disk."""

    def matches(self, folder: HeadFolder) -> bool: ...

    def load(self, folder: HeadFolder, target: ModelConfig, backend: Backend) -> Head: ...


# In order: EAGLE-3 heads have all that EAGLE-1 is known by.
FORMATS: dict[str, Format] = {"early exit": exit, "EAGLE-3": eagle3, "EAGLE-1": eagle1, "MTP": mtp, "Medusa": medusa}


def load_head(name: str, target: ModelConfig, backend: Backend) -> Head:
    """The head in a directory or hub repository, for a target of this config.

    `backend` is the target's: linears are dense in its dtype. MTP blocks that came with a model are in that model's own
    directory. Raises PacelineError: no such head, a format that is not known, a head of another model, tensors missing,
    left over or of another shape.
    """
    path = find_head(name)
    folder = HeadFolder(name, read_json(path / "config.json"), open_tensors(path))
    for form in FORMATS.values():
        if form.matches(folder):
            return form.load(folder, target, backend)
    raise PacelineError(f"unknown head format in '{name}': found {_found(folder)}; known formats: {', '.join(FORMATS)}")


def _found(folder: HeadFolder) -> str:
    if folder.speculators_type is not None:
        return f"speculators_model_type '{folder.speculators_type}'"
    return f"tensors {listed(sorted(folder.tensors.entries))}"


def find_head(name: str) -> Path:
    """A directory as it is, a hub id (org/name) once it is fetched. Raises PacelineError."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise PacelineError(f"'{name}' is a file; give the directory of the head, which holds its config.json too")
    if path.is_absolute() or name.startswith((".", "~")):
        raise PacelineError(f"cannot read head '{name}': no such directory")
    if name.count("/") != 1:
        raise PacelineError(f"unknown head '{name}': give a directory or a hub id (org/name)")
    found = _fetch(name, ["*.json", "*.safetensors"])
    if not any(found.glob("*.safetensors")):
        found = _fetch(name, ["*.json", "*.bin", "*.pt"])
    return found


def _fetch(name: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises its own, its HTTP library's and the system's errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PacelineError(f"cannot fetch '{name}' from the hub: {reason}; check the name and the network") from None
