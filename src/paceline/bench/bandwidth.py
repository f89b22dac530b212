"""How fast this machine reads memory: the bound of a step with one row."""

from __future__ import annotations

import time

import torch

SIZE = 1 << 28  # bytes: past any cache


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes a second of summing a large array, the best of a few runs, with PyTorch's threads."""
    data = torch.ones(SIZE // 4, dtype=torch.int32)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        data.max()
        best = min(best, time.perf_counter() - started)
    return SIZE / best
