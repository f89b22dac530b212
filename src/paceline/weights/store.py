"""Converted weights on disk, so that a second start neither dequantises nor quantises again."""

from __future__ import annotations

import json
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
from paceline.native.memory import Arena
from paceline.native.packed import Format, Packed, packed_bytes
from paceline.weights.cache_dir import converted_dir

_CONFIG = TypeAdapter(ModelConfig)


@dataclass(frozen=True)
class Converted:
    config: ModelConfig
    quantized: bool  # whether the checkpoint itself was
    tensors: Mapping[str, Tensor | Packed]


def load_converted(key: str, backend: Backend) -> Converted | None:
    """What `save_converted` stored under this key, or None; a file that cannot be read counts as absent."""
    path = _path(key, backend)
    try:
        if not path.exists():
            return None
        handle: Any = safe_open(str(path), framework="pt")
        meta = handle.metadata()
        stored = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        tensors = _unpack(stored, json.loads(meta["packed"]))
        return Converted(_CONFIG.validate_json(meta["config"]), meta["quantized"] == "True", tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):  # TypeError: no metadata at all
        return None


def save_converted(key: str, backend: Backend, converted: Converted) -> None:
    """Best effort: a full or read-only disk costs the next start its time, nothing else."""
    path = _path(key, backend)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    packed = {n: [m.format, m.rows, m.columns] for n, m in converted.tensors.items() if isinstance(m, Packed)}
    tensors = {name: each.data if isinstance(each, Packed) else each for name, each in converted.tensors.items()}
    meta = {"packed": json.dumps(packed)} | {
        "config": _CONFIG.dump_json(converted.config).decode(),
        "quantized": str(converted.quantized),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(partial), metadata=meta)
        partial.replace(path)
    except (OSError, SafetensorError):
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _unpack(stored: Mapping[str, Tensor], packed: Mapping[str, list[int]]) -> dict[str, Tensor | Packed]:
    """Packed matrices move to memory of their own, aligned for the kernels, and the file's pages go."""
    if not packed:
        return dict(stored)
    arena = Arena(sum(Arena.rounded(stored[name].numel()) for name in packed))
    tensors: dict[str, Tensor | Packed] = {name: stored[name].clone() for name in stored if name not in packed}
    for name, (form, rows, columns) in packed.items():
        if stored[name].numel() != packed_bytes(Format(form), rows, columns):
            raise ValueError(f"{name} has not the size of a [{rows}, {columns}] matrix")
        data = arena.take(stored[name].numel()).copy_(stored[name])
        tensors[name] = Packed(Format(form), rows, columns, data)
    return tensors


def _path(key: str, backend: Backend) -> Path:
    return converted_dir() / f"{key}-{backend.key}.safetensors"
