"""The draft vocabulary: the tokens that the target writes most often (FR-Spec, Zhao et al. 2025; EAGLE-3)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.train.responses import Response


def token_counts(responses: Iterable[Response], vocab_size: int) -> Tensor:
    """How often the answers hold each of the target's tokens [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for each in responses:
        counts += torch.bincount(torch.tensor(each.response), minlength=vocab_size)
    return counts


def commonest(counts: Tensor, size: int) -> Tensor:
    """The `size` commonest ids, ascending. Of those that no answer holds the lowest come first: byte-level vocabularies
    list common strings first."""
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def covered(counts: Tensor, vocabulary: Tensor) -> float:
    """The share of the answers' tokens that are in it."""
    return float(counts[vocabulary].sum() / counts.sum().clamp(min=1))
