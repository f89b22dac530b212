"""What names a checkpoint's converted weights: a key that changes when its files do. Imports nothing heavy."""

from __future__ import annotations

import hashlib

from paceline.weights.cache_dir import converted_dir
from paceline.weights.resolve import Checkpoint

FORMAT = 3  # raise it when `convert` changes what it writes


def fingerprint(checkpoint: Checkpoint) -> str:
    """Changes when the checkpoint's files do: names, sizes and modification times (a full hash would cost seconds)."""
    if checkpoint.kind == "gguf":
        files = [checkpoint.path]
    else:
        files = sorted([*checkpoint.path.glob("*.safetensors"), checkpoint.path / "config.json"])
    digest = hashlib.sha256(str(FORMAT).encode())
    for file in files:
        if file.exists():
            stat = file.stat()
            digest.update(f"|{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


def remove_converted(checkpoint: Checkpoint) -> int:
    """Delete what was converted from this checkpoint, weights and tokenizer; returns the bytes freed."""
    folder = converted_dir()
    found = [*folder.glob(f"{fingerprint(checkpoint)}-*"), *folder.glob(f"{checkpoint.path.name}-*.tokenizer.json")]
    freed = sum(file.stat().st_size for file in found)
    for file in found:
        file.unlink(missing_ok=True)
    return freed
