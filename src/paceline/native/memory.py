"""Aligned memory for the kernels."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register


def aligned(size: int) -> Tensor:
    """uint8 [size], not cleared, on a 64-byte boundary."""
    room = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNMENT
    return room[start : start + size]


class Arena:
    """One zero-filled region that tensors are cut from: huge pages where the system has them, so that reading weights
    and caches waits less for page tables. Memory is used where it was touched."""

    def __init__(self, size: int) -> None:
        own = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        region = mmap.mmap(-1, max(size, 1), **own)  # a shared one would get no huge pages
        if hasattr(mmap, "MADV_HUGEPAGE"):
            region.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(region, dtype=torch.uint8)
        self._used = 0

    @staticmethod
    def rounded(size: int) -> int:
        return -(-size // ALIGNMENT) * ALIGNMENT

    def take(self, size: int) -> Tensor:
        """uint8 [size] on a 64-byte boundary."""
        found = self._bytes[self._used : self._used + size]
        self._used += self.rounded(size)
        return found
