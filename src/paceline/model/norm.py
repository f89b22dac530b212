"""RMSNorm and LayerNorm."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), in fp32, over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        width = weight.shape[0]
        # |x| / sqrt(width) replaces the mean: one reduction, and sqrt(width) rides on the weight.
        self.weight = weight.float() * width**0.5
        self.floor = torch.tensor((width * eps) ** 0.5, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x if x.dtype is torch.float32 else x.float()
        length: Tensor = torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), self.floor)
        normed: Tensor = (wide * self.weight).div_(length)
        return normed if wide is x else normed.to(x.dtype)


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
