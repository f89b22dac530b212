"""Matrix products: dense (fp32, bf16), int8 with per-row dynamic activations, int4 weights for drafts."""

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


GROUP = 32


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """4 bits, asymmetric, groups of 32 inputs: weight [out, in] -> nibbles uint8 [out, in / 2], bf16 [in / 32, out, 2].

    The last holds (scale, middle): value = (nibble - 8) * scale + middle. Even inputs are the low nibbles.
    """
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    # Round the scale to what is stored before levels are chosen by it.
    scale = ((high - low) / 15).clamp_min(1e-9).to(torch.bfloat16)
    middle = (low + 8 * scale.float()).to(torch.bfloat16)
    levels = (groups - middle.float()[..., None]) / scale.float()[..., None] + 8
    levels = levels.round_().clamp_(0, 15).to(torch.uint8).view(rows, columns)
    return levels[:, ::2] | levels[:, 1::2] << 4, torch.stack((scale, middle), dim=2).transpose(0, 1).contiguous()


class Int4Linear:
    """4-bit weights, bf16 activations, through PyTorch's packed CPU kernel. Rows are not promised to be independent.

    The kernel's time grows with every row, so `WIDE` rows and more (a prompt) go through `wide`, the same in int8.
    """

    STEP = 16  # the kernel wants multiples of this many output channels
    WIDE = 5

    def __init__(self, nibbles: Tensor, groups: Tensor, wide: Int8Linear, bias: Tensor | None = None) -> None:
        self.out_features = nibbles.shape[0]
        self.wide, self.bias = wide, bias
        missing = -self.out_features % self.STEP
        nibbles = F.pad(nibbles, (0, 0, 0, missing))
        levels = torch.stack((nibbles & 15, nibbles >> 4), dim=2).flatten(1).to(torch.int32)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        self.groups = F.pad(groups, (0, 0, 0, missing)).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] >= self.WIDE:
            product = self.wide(x.float()).to(x.dtype)
        else:
            product = _INT4(x, self.packed, GROUP, self.groups)
            if product.shape[1] > self.out_features:
                product = product[:, : self.out_features]
        return product if self.bias is None else product.add_(self.bias)


_INT4 = torch.ops.aten._weight_int4pack_mm_for_cpu.default
