"""The draft vocabulary: the tokens that the target writes most often (FR-Spec, Zhao et al. 2025; EAGLE-3)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.train.responses import Response


def commonest_tokens(responses: Iterable[Response], vocab_size: int, count: int) -> tuple[Tensor, float]:
    """The `count` commonest ids of the answers, ascending, and the share of the answers' tokens that they cover.

    Ids that no answer holds come last, lowest first: byte-level vocabularies list common strings first.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for each in responses:
        counts += torch.bincount(torch.tensor(each.response), minlength=vocab_size)
    count = min(count, vocab_size)
    chosen = counts.sort(descending=True, stable=True).indices[:count].sort().values
    return chosen, float(counts[chosen].sum() / counts.sum().clamp(min=1))
