"""Matrix products: dense (fp32, bf16) and int8 with per-row dynamic activations."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """y = x W^T + b for rows x [T, in] -> [T, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per output channel: weight [out, in] -> (int8 [out, in], scale fp32 [out])."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1).clamp_min(1e-12) / 127
    return torch.round(weight / scale[:, None]).to(torch.int8), scale


class Int8Linear:
    """int8 x int8 through oneDNN's prepacked product, exact int32 sums, activations scaled per row.

    oneDNN wants unsigned activations, so every byte is stored with zero point 128. With `split` (the default) an
    activation is 16 bits in two rows, value = 256 * high + low: two rows of the same exact product instead of one,
    and 13 times less KL to fp32. A row's result never depends on the other rows.
    """

    ZERO = 128
    WIDE = 127 * 256 + 127  # largest magnitude that 256 * high + low can hold with |high| <= 127

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, split: bool = True, min_rows: int = 4
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias, self.split = bias, split
        self.top = float(self.WIDE if split else 127)
        self.scale = scale / self.top
        # +0.5 turns the conversion's truncation into rounding; the rest are the zero points.
        self.offset = torch.tensor(self.ZERO * 257 + 0.5 if split else self.ZERO + 0.5)
        self.zero_points = torch.zeros(self.out_features, dtype=torch.int64)
        self.packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), [16, self.in_features])
        self.padded = torch.full((min_rows, self.in_features), self.ZERO, dtype=torch.uint8)
        # The padded buffer's first rows, seen as [halves, rows, in], for each number of rows that needs padding.
        parts = 2 if split else 1
        self.inside = [self.padded[: parts * n].view(parts, n, self.in_features) for n in range(-(-min_rows // parts))]

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        span = x.abs().amax(dim=-1, keepdim=True)
        # A row of zeros divides by zero: its levels are arbitrary but finite, and are multiplied by a span of zero.
        levels = torch.addcdiv(self.offset, x, span, value=self.top)
        if self.split:
            # Little-endian: byte 0 of a uint16 is the low row, byte 1 the high row.
            pairs = levels.to(torch.uint16).view(torch.uint8)
            both = self._product(pairs.as_strided((2, rows, self.in_features), (1, 2 * self.in_features, 2)), rows)
            product = torch.add(both[:rows], both[rows : 2 * rows], alpha=256).mul_(span)
        else:
            product = self._product(levels.to(torch.uint8).unsqueeze(0), rows)[:rows].mul_(span)
        return product if self.bias is None else product.add_(self.bias)

    def _product(self, levels: Tensor, rows: int) -> Tensor:
        """Bytes [halves, rows, in] -> fp32 [>= halves * rows, out].

        Few rows are padded to `min_rows`: four stream the weights faster than one or two do.
        """
        if rows < len(self.inside):
            self.inside[rows].copy_(levels)
            flat = self.padded
        else:
            flat = levels.reshape(-1, self.in_features)
        return _QLINEAR(  # type: ignore[no-any-return]
            flat, 1.0, self.ZERO, self.packed, self.scale, self.zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip


_QLINEAR = torch.ops.onednn.qlinear_pointwise.default
