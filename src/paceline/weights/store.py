"""Converted weights on disk, so that a second start neither dequantises nor quantises again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.device import Backend
from paceline.model.config import ModelConfig
from paceline.weights.cache_dir import converted_dir

_CONFIG = TypeAdapter(ModelConfig)


@dataclass(frozen=True)
class Converted:
    config: ModelConfig
    quantized: bool  # whether the checkpoint itself was
    tensors: Mapping[str, Tensor]


def load_converted(key: str, precision: str) -> Converted | None:
    """What `save_converted` stored under this key, or None; a file that cannot be read counts as absent."""
    path = _path(key, precision)
    try:
        if not path.exists():
            return None
        handle: Any = safe_open(str(path), framework="pt")
        meta = handle.metadata()
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        return Converted(_CONFIG.validate_json(meta["config"]), meta["quantized"] == "True", tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):  # TypeError: no metadata at all
        return None


def save_converted(key: str, backend: Backend, converted: Converted) -> None:
    """Best effort: a full or read-only disk costs the next start its time, nothing else."""
    path = _path(key, backend.precision)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    meta = {"config": _CONFIG.dump_json(converted.config).decode(), "quantized": str(converted.quantized)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(converted.tensors), str(partial), metadata=meta)
        partial.replace(path)
    except (OSError, SafetensorError):
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _path(key: str, precision: str) -> Path:
    # int8 and int8-fast compute with the same weights.
    return converted_dir() / f"{key}-{precision.removesuffix('-fast')}.safetensors"
