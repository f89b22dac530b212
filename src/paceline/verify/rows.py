"""How a ragged step's rows line up for a batched verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.device import send


@dataclass(frozen=True)
class Rows:
    """`index` [B, K + 1]: row of sequence b after i drafts (the last one repeated past its own draft).

    `drafts` [B, K]: drafted ids, -1 past the end. `lengths` [B]: drafts of each sequence.
    """

    index: Tensor
    drafts: Tensor
    lengths: Tensor


def line_up(starts: Sequence[int], drafts: Sequence[Tensor], device: torch.device) -> Rows:
    """Sequence b's rows begin at `starts[b]`, one more than its drafts [n_b]."""
    lengths = [draft.shape[0] for draft in drafts]
    longest = max(lengths, default=0)
    index = torch.tensor(
        [[start + min(i, n) for i in range(longest + 1)] for start, n in zip(starts, lengths, strict=True)]
    )
    padded = torch.full((len(drafts), longest), -1, dtype=torch.int64, device=device)
    for b, draft in enumerate(drafts):
        padded[b, : lengths[b]] = draft
    return Rows(send(index, device), padded, send(torch.tensor(lengths), device))


def accepted_prefix(accept: Tensor) -> Tensor:
    """Length [B] of the leading run of True in accept [B, K]."""
    return accept.long().cumprod(dim=1).sum(dim=1)
