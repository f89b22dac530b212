"""Quantised matrices in the kernels' layout: GGUF blocks packed as stored, or fp32 weights rounded to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.native.interface import kernels
from paceline.native.memory import Arena, aligned


class Format(IntEnum):
    """A GGUF tensor type that the kernels read; names as in GGUF, numbers as in `native/src/formats.h`."""

    Q4_0 = 0
    Q4_1 = 1
    Q5_0 = 2
    Q5_1 = 3
    Q8_0 = 4
    Q4_K = 5
    Q5_K = 6
    Q6_K = 7

    @classmethod
    def of_gguf(cls, name: str) -> Format | None:
        """The format of a GGUF type name such as "Q4_K"; None for one that the kernels do not read."""
        return cls.__members__.get(name)

    @property
    def block_columns(self) -> int:
        """Columns that one stored block spans; a matrix's columns must be a multiple."""
        return _STORED[self][0]

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Size of a [rows, columns] tensor in a GGUF file."""
        span, size = _STORED[self]
        return rows * (columns // span) * size


# Columns and bytes of one block in a GGUF file.
_STORED = {
    Format.Q4_0: (32, 18),
    Format.Q4_1: (32, 20),
    Format.Q5_0: (32, 22),
    Format.Q5_1: (32, 24),
    Format.Q8_0: (32, 34),
    Format.Q4_K: (256, 144),
    Format.Q5_K: (256, 176),
    Format.Q6_K: (256, 210),
}


@dataclass(frozen=True)
class Packed:
    """A matrix [rows, columns] in the kernels' layout; `data` is uint8 and starts on a 64-byte boundary."""

    format: Format
    rows: int
    columns: int
    data: Tensor

    def take_rows(self, ids: Tensor) -> Packed:
        """Rows `ids` [count] as a matrix of their own, their numbers unchanged. IndexError outside 0 .. rows - 1."""
        ids = self._checked(ids).reshape(-1)
        taken = _empty(self.format, len(ids), self.columns)
        kernels().pl_take_rows(
            self.format, self.data.data_ptr(), self.columns, ids.data_ptr(), len(ids), taken.data.data_ptr()
        )
        return taken

    def dequantize(self, ids: Tensor) -> Tensor:
        """Rows `ids` [...] as fp32 [..., columns]. IndexError outside 0 .. rows - 1."""
        ids = self._checked(ids)
        out = torch.empty(*ids.shape, self.columns, dtype=torch.float32)
        kernels().pl_dequantize_rows(
            self.format, self.data.data_ptr(), self.columns, ids.data_ptr(), ids.numel(), out.data_ptr()
        )
        return out

    def _checked(self, ids: Tensor) -> Tensor:
        listed = ids.flatten().tolist()  # for a few ids quicker than any reduction
        if listed:
            least, most = min(listed), max(listed)
            if least < 0 or most >= self.rows:
                raise IndexError(f"row ids from {least} to {most} of a matrix of {self.rows} rows")
        return ids.to("cpu", torch.int64).contiguous()


def pack(stored: np.ndarray[Any, Any] | Tensor, format: Format, rows: int, columns: int) -> Packed:
    """The blocks of a GGUF tensor, row after row, in the kernels' layout.

    PacelineError if `stored` is not the size of a [rows, columns] tensor of the format.
    """
    packed = _empty(format, rows, columns)
    data = stored.numpy() if isinstance(stored, Tensor) else stored
    if data.nbytes != format.stored_bytes(rows, columns):
        raise PacelineError(
            f"{data.nbytes} bytes of {format.name} weights where {rows} x {columns} take "
            f"{format.stored_bytes(rows, columns)}; the file is damaged, fetch it again"
        )
    data = np.ascontiguousarray(data)
    kernels().pl_pack(format, data.ctypes.data, rows, columns, packed.data.data_ptr())
    return packed


def quantize(weight: Tensor, format: Format, arena: Arena | None = None) -> Packed:
    """fp32 (or narrower) `weight` [rows, columns] rounded to Q8_0 or Q4_1, a group of 32 at a time; kept in `arena`.

    PacelineError for other formats and for weights that are not finite.
    """
    rows, columns = weight.shape
    packed = _empty(format, rows, columns, arena)
    weight = weight.detach().to("cpu", torch.float32).contiguous()
    if not weight.isfinite().all():
        raise PacelineError("the weights hold NaN or infinity and cannot be quantised; fetch or convert them again")
    if kernels().pl_quantize(format, weight.data_ptr(), rows, columns, packed.data.data_ptr()) != 0:
        raise PacelineError(f"cannot quantise to {format.name}; choose Q8_0 or Q4_1")
    return packed


def packed_bytes(format: Format, rows: int, columns: int) -> int:
    """Size of a [rows, columns] matrix in the kernels' layout; -1 if the format does not divide the columns."""
    size: int = kernels().pl_packed_bytes(format, rows, columns)
    return size


def _empty(format: Format, rows: int, columns: int, arena: Arena | None = None) -> Packed:
    size = packed_bytes(format, rows, columns)
    if size < 0:
        raise PacelineError(f"{columns} columns cannot be {format.name}; need a multiple of {format.block_columns}")
    return Packed(format, rows, columns, aligned(size) if arena is None else arena.take(size))
