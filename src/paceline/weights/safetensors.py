"""A checkpoint folder: config.json and safetensors, one file or sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import PacelineError
from paceline.model.config import config_from_hf

# Older exports leave out or add an outer module; the names in `names.py` are tried with these in front.
_PREFIXES = ("", "language_model.", "model.language_model.")


class SafetensorsSource:
    quantized = False
    gemma_norm_offset = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = config_from_hf(read_json(folder / "config.json"))
        files = sorted(folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if index.exists():
            files = sorted({folder / name for name in read_json(index)["weight_map"].values()})
        if not files:
            raise PacelineError(f"no .safetensors file in {folder}; convert the checkpoint or give another directory")
        self._handles = [_open(file) for file in files]
        self._where = {name: handle for handle in self._handles for name in handle.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def stored(self, name: str) -> None:
        return None

    def get(self, name: str) -> Tensor:
        found = self._find(name)
        if found is None:
            raise PacelineError(f"tensor '{name}' is missing in {self.folder}")
        tensor: Tensor = self._where[found].get_tensor(found)
        return tensor

    def _find(self, name: str) -> str | None:
        inner = name.partition(".")[2]  # GPT-2 and OPT exports often lack the outermost module
        tail = [p + name.removeprefix("model.") for p in _PREFIXES[2:]]
        for candidate in (name, _PREFIXES[1] + name, *tail, inner):
            if candidate in self._where:
                return candidate
        return None


def read_json(path: Path) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = json.loads(path.read_text())
        return loaded
    except FileNotFoundError:
        raise PacelineError(f"{path} does not exist; a model directory needs {path.name}") from None
    except (OSError, ValueError) as error:
        raise PacelineError(f"cannot read {path}: {error}") from None


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except FileNotFoundError:
        raise PacelineError(f"shard {file} is named by the index but does not exist; fetch it again") from None
    except (SafetensorError, OSError) as error:
        raise PacelineError(f"cannot read {file}: {error}; is the file complete?") from None
