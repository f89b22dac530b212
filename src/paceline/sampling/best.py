"""The likeliest token of each row."""

from __future__ import annotations

from array import array
from functools import cache

import torch
from torch import Tensor

from paceline.device import has_kernels
from paceline.native.interface import kernels


def likeliest(scores: Tensor) -> Tensor:
    """argmax of each row [R, V] -> [R]; the lowest id on a tie."""
    if not natively(scores):
        return scores.argmax(dim=1)
    best = torch.empty(scores.shape[0], dtype=torch.int64)
    kernels().pl_row_best(scores.data_ptr(), *scores.shape, best.data_ptr(), None)
    return best


def likeliest_with_chance(scores: Tensor) -> tuple[Tensor, list[float]]:
    """argmax of each row [R, V] and its probability, both [R], in one pass; NaN for a row without a possible token."""
    if not natively(scores):
        largest, best = scores.max(dim=1)
        return best, (largest - scores.logsumexp(dim=1)).exp().tolist()
    best, chance = torch.empty(scores.shape[0], dtype=torch.int64), array("f", bytes(4 * scores.shape[0]))
    kernels().pl_row_best(scores.data_ptr(), *scores.shape, best.data_ptr(), chance.buffer_info()[0])
    return best, chance.tolist()


def natively(scores: Tensor) -> bool:
    """Whether the kernels can read these scores."""
    plain = scores.device.type == "cpu" and scores.dtype is torch.float32 and scores.is_contiguous()
    return plain and _has_kernels()


_has_kernels = cache(has_kernels)  # asked anew for every drafted token
