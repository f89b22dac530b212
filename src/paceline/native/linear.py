"""A linear over quantised weights, by the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from paceline.native import interface
from paceline.native.interface import kernels
from paceline.native.memory import aligned
from paceline.native.packed import Packed


class NativeLinear:
    """y = x W^T + b for rows x [T, in] -> fp32 [T, out]; W is up to three matrices, one below the other.

    Activations are rounded to int8 in groups of 32. A row's bits depend on that row alone (native/src/linear.h).
    """

    def __init__(self, parts: Sequence[Packed], bias: Tensor | None = None) -> None:
        self.parts, self.bias = list(parts), None if bias is None else bias.float().contiguous()
        self.in_features, self.out_features = parts[0].columns, sum(part.rows for part in parts)
        self.struct = interface.Linear(len(parts), self.out_features, self.in_features)
        for index, part in enumerate(parts):
            self.struct.part[index] = interface.Matrix(part.format, part.rows, part.columns, 0, part.data.data_ptr())
        if self.bias is not None:
            self.struct.bias = self.bias.data_ptr()
        self._library, self._pointer = kernels(), byref(self.struct)
        self._work, self._rows = aligned(0), 0  # memory for so many rows, kept for the next call

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float().contiguous()
        count, width = x.shape
        if width != self.in_features:
            raise ValueError(f"rows of {width} features given to a linear of {self.in_features}")
        out = torch.empty(count, self.out_features)
        if count > self._rows:
            self._work, self._rows = aligned(self._library.pl_linear_work(count, self.in_features)), count
        self._library.pl_linear_forward(self._pointer, x.data_ptr(), count, self._work.data_ptr(), out.data_ptr())
        return out

    def rows(self, ids: Tensor) -> NativeLinear:
        """Only these output channels [n], in this order."""
        (part,) = self.parts
        return NativeLinear([part.take_rows(ids)], None if self.bias is None else self.bias[ids])
