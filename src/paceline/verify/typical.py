"""Typical acceptance (Medusa, Cai et al. 2024, section 2.3.1). Lossy: the output does not follow the target's law.

A drafted token need not be what the target samples; it is enough that the target finds it likely, measured against how
sure it is of itself. Only for requests that ask for it by name, never for greedy ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sampling.noise import sample
from paceline.verify.trees import Trees


def verify_typical(
    scores: Tensor, trees: Trees, keys: Tensor, *, epsilon: float = 0.09, delta: float = 0.3
) -> tuple[Tensor, Tensor]:
    """(column of the last accepted node [B], next token [B]).

    scores [R, V]: softmax(scores) is p. keys [R, 2]: noise of the token after the accepted ones, per row. Child x is
    accepted when p(x) > min(epsilon, delta * exp(-H(p))), H the entropy of p in nats. Of the accepted paths the longest
    is taken, of several the likeliest; then the next token is drawn from p. The defaults are the authors' (delta is the
    root of epsilon). The paper takes the argmax as the next token, this draws it, as the request asked.
    """
    p = scores.softmax(dim=1)
    own = p[trees.row.gather(1, trees.parent), trees.tokens.clamp_min(0)]
    bar = (delta * (-torch.special.entr(p).sum(dim=1)).exp()).clamp_max(epsilon)
    accept = (own > bar[trees.row.gather(1, trees.parent)]) & (trees.tokens >= 0)
    last = _longest(accept, own.log(), trees)
    row = trees.row.gather(1, last[:, None]).squeeze(1)
    return last, sample(scores[row], keys[row])


def _longest(accept: Tensor, own: Tensor, trees: Trees) -> Tensor:
    """Column [B] at the end of the longest accepted path, 0 for none; own [B, N] is log p of each node."""
    if accept.shape[1] == 0:
        return accept.new_zeros(accept.shape[0], dtype=torch.int64)
    reached = (accept[:, None, :] | ~trees.above).all(dim=2) & (trees.tokens >= 0)
    depth = torch.where(reached, trees.above.sum(dim=2), 0)
    deepest = depth.amax(dim=1, keepdim=True)
    likelihood = torch.where(trees.above, own[:, None, :], 0.0).sum(dim=2)
    node = likelihood.masked_fill(~reached | (depth < deepest), float("-inf")).argmax(dim=1)
    return torch.where(deepest.squeeze(1) > 0, node + 1, 0)
