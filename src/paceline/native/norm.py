"""RMSNorm by the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.norm import RMSNorm
from paceline.native.interface import kernels


class NativeNorm(RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight for fp32 rows [T, width]; a row's bits depend on that row alone."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__(weight, eps)
        self.plain, self.eps = weight.float().contiguous(), eps

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float().contiguous()
        out = torch.empty_like(x)
        kernels().pl_rms_norm(x.data_ptr(), *x.shape, self.plain.data_ptr(), self.eps, out.data_ptr())
        return out
