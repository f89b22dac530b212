"""How fast this machine reads memory: the bound of a step with one row."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.device import has_kernels
from paceline.native.interface import kernels

ROWS, WIDTH = 64, 1 << 20  # 256 MB of fp32: past any cache


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes a second of looking through a large array with all threads, the best of a few runs."""
    data = torch.ones(ROWS, WIDTH)
    look = _native if has_kernels() else torch.sum
    return max(data.nbytes / _seconds(look, data) for _ in range(repeats))


def _native(data: Tensor) -> None:
    kernels().pl_row_best(data.data_ptr(), *data.shape, None, None)


def _seconds(look: Callable[[Tensor], object], data: Tensor) -> float:
    started = time.perf_counter()
    look(data)
    return time.perf_counter() - started
