"""The weights in a head's folder, under the names that the modules ask for."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import PacelineError
from paceline.weights.safetensors import read_json

Shape = tuple[int, ...]
Rename = Callable[[str], str | None]
"""From a name in the file to ours; None: it is not for the head."""


@dataclass(frozen=True)
class Entry:
    """One tensor in a file. `read` loads it, `shape` is known without."""

    stored_as: str
    shape: Shape
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class HeadTensors:
    """Tensors by name. Nothing is read before `get`, so that a few can be taken from a whole model's checkpoint."""

    folder: Path
    entries: Mapping[str, Entry]

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def shape(self, name: str) -> Shape:
        return self.entries[name].shape

    def get(self, name: str) -> Tensor:
        return self.entries[name].read()

    def rename(self, rule: Rename) -> HeadTensors:
        return replace(self, entries={new: entry for old, entry in self.entries.items() if (new := rule(old))})


def open_tensors(folder: Path) -> HeadTensors:
    """One or several files, safetensors before PyTorch's. Raises PacelineError for what is absent or unreadable."""
    entries: dict[str, Entry] = {}
    for file in _files(folder):
        entries.update(_safetensors(file) if file.suffix == ".safetensors" else _pytorch(file))
    return HeadTensors(folder, entries)


def _files(folder: Path) -> list[Path]:
    for kind in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{kind}.index.json"
        if index.exists():
            return sorted({folder / name for name in read_json(index)["weight_map"].values()})
        if (folder / kind).exists():
            return [folder / kind]
    for patterns in (["*.safetensors"], ["*.bin", "*.pt"]):
        if found := sorted(file for pattern in patterns for file in folder.glob(pattern)):
            return found
    raise PacelineError(f"no weights in {folder}: a head needs a .safetensors, .bin or .pt file beside its config.json")


def _safetensors(file: Path) -> dict[str, Entry]:
    try:
        handle: Any = safe_open(str(file), framework="pt")
    except FileNotFoundError:
        raise PacelineError(f"shard {file} is named by the index but does not exist; fetch it again") from None
    except (SafetensorError, OSError) as error:
        raise PacelineError(f"cannot read {file}: {error}; is the file complete?") from None

    def entry(name: str) -> Entry:
        return Entry(name, tuple(handle.get_slice(name).get_shape()), lambda: handle.get_tensor(name))

    return {name: entry(name) for name in handle.keys()}  # noqa: SIM118


def _pytorch(file: Path) -> dict[str, Entry]:
    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise PacelineError(f"shard {file} is named by the index but does not exist; fetch it again") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PacelineError(f"cannot read {file}: {reason}; is it a file of weights alone, and complete?") from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise PacelineError(f"{file} does not hold tensors by name; save the head's state_dict alone")

    def entry(name: str, tensor: Tensor) -> Entry:
        return Entry(name, tuple(tensor.shape), lambda: tensor)

    return {name: entry(name, tensor) for name, tensor in loaded.items()}
