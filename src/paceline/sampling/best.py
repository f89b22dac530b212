"""The likeliest token of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.device import has_kernels
from paceline.native.interface import kernels


def likeliest(scores: Tensor) -> Tensor:
    """argmax of each row [R, V] -> [R]; the lowest id on a tie."""
    if not _natively(scores):
        return scores.argmax(dim=1)
    best = torch.empty(scores.shape[0], dtype=torch.int64)
    kernels().pl_row_best(scores.data_ptr(), *scores.shape, best.data_ptr(), None)
    return best


def likeliest_with_total(scores: Tensor) -> tuple[Tensor, Tensor]:
    """argmax and log(sum(exp)) of each row [R, V], both [R], in one pass."""
    if not _natively(scores):
        return scores.argmax(dim=1), scores.logsumexp(dim=1)
    best, total = torch.empty(scores.shape[0], dtype=torch.int64), torch.empty(scores.shape[0])
    kernels().pl_row_best(scores.data_ptr(), *scores.shape, best.data_ptr(), total.data_ptr())
    return best, total


def _natively(scores: Tensor) -> bool:
    return scores.device.type == "cpu" and scores.dtype is torch.float32 and scores.is_contiguous() and has_kernels()
