"""Rejection verification (Leviathan et al. 2023, algorithm 1; Chen et al. 2023): the most that can be accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sampling.noise import sample
from paceline.verify.rows import Rows, accepted_prefix


def verify_rejection(
    scores: Tensor, rows: Rows, q: Tensor | None, uniforms: Tensor, residual_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """(accepted drafts [B], next token [B]).

    scores [R, V]: softmax(scores) is p. q [B, K, V]: the distribution each draft was drawn from, or None for drafts
    that were chosen deterministically (a point mass). uniforms [R]: one draw in (0, 1) per row. residual_keys
    [R, 2]: noise of the token after the accepted drafts, per row.

    Draft x is accepted with probability min(1, p(x) / q(x)); the first rejection emits from norm(max(0, p - q)); a
    fully accepted draft is followed by a bonus token from p.
    """
    p = scores.softmax(dim=1)
    before = rows.index[:, :-1]
    drafted = rows.drafts.clamp_min(0)
    target = p[before, drafted]
    proposed = torch.ones_like(target) if q is None else q.gather(2, drafted[:, :, None]).squeeze(2)
    accepted = accepted_prefix((uniforms[before] * proposed < target) & (rows.drafts >= 0))
    last = rows.index.gather(1, accepted[:, None]).squeeze(1)
    remaining = residual(p[last], rows, q, accepted)
    return accepted, sample(remaining.log(), residual_keys[last])


def residual(p: Tensor, rows: Rows, q: Tensor | None, accepted: Tensor) -> Tensor:
    """Distribution (unnormalised) of the next token: p after a full draft, else max(0, p - q) at the rejection."""
    rejected = accepted < rows.lengths
    if rows.drafts.shape[1] == 0:
        return p
    at = accepted.clamp_max(rows.drafts.shape[1] - 1)[:, None]
    if q is None:
        token = rows.drafts.gather(1, at).clamp_min(0)
        left = p.scatter(1, token, 0.0)
    else:
        left = (p - q.gather(1, at[:, :, None].expand(-1, -1, q.shape[2])).squeeze(1)).clamp_min(0)
    # p == q up to rounding leaves nothing: any draw from p is then exact to the same rounding.
    usable = rejected & (left.sum(dim=1) > 0)
    return torch.where(usable[:, None], left, p)
