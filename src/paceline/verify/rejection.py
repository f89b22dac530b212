"""Rejection verification of draft trees: the most that can be accepted.

Chains: Leviathan et al. 2023, algorithm 1; Chen et al. 2023. Several children: SpecInfer (Miao et al. 2023), recursive
rejection without replacement (Jeon et al. 2024). At a node the children are tried in order against what is left of the
target's distribution, r; a child that is refused takes its own part out of r. Whether the j-th child would be accepted
depends on p, q and the children before it, never on chance, so all nodes are judged at once and the path is read off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sampling.noise import sample
from paceline.verify.trees import Trees


def verify_rejection(
    scores: Tensor, trees: Trees, q: Tensor | None, uniforms: Tensor, residual_keys: Tensor, *, replacement: bool = True
) -> tuple[Tensor, Tensor]:
    """(column of the last accepted node [B], next token [B]).

    scores [R, V]: softmax(scores) is p. q [B, P, V]: the distribution that each column's children were drawn from
    (P <= N + 1), or None for drafts chosen deterministically. uniforms [B, N]: one draw in (0, 1) per node.
    residual_keys [R, 2]: noise of the token after the accepted ones, per row. `replacement`: siblings were drawn
    independently; otherwise without replacement.

    Child x is accepted with probability min(1, r(x) / q(x)), where r starts as p; refused, it leaves
    r = norm(max(0, r - q)). No child accepted: the next token comes from r; at a leaf it is a bonus token from p.
    """
    p = scores.softmax(dim=1)
    chance = chosen_chances(p, trees) if q is None else drawn_chances(p, trees, q, replacement)
    last = trees.walk((uniforms < chance) & (trees.tokens >= 0))
    row = trees.row.gather(1, last[:, None]).squeeze(1)
    left = residual(p[row], trees, q, last, replacement)
    return last, sample(left.log(), residual_keys[row])


def chosen_chances(p: Tensor, trees: Trees) -> Tensor:
    """[B, N] for point drafts: p(x) over what its elder siblings left, 1 - sum of their p."""
    own = p[trees.row.gather(1, trees.parent), trees.tokens.clamp_min(0)]
    repeated = (trees.elder & (trees.tokens[:, :, None] == trees.tokens[:, None, :])).any(dim=2)
    own = own.masked_fill(repeated, 0.0)
    return own / (1 - (trees.elder * own[:, None, :]).sum(dim=2))


def drawn_chances(p: Tensor, trees: Trees, q: Tensor, replacement: bool) -> Tensor:
    """[B, N] for sampled drafts: r(x) / q(x), with r and q as the elder siblings left them."""
    chances = p.new_zeros(trees.tokens.shape)
    for rank in range(trees.widest):
        batch, column, node = trees.of_rank(rank)
        tokens = trees.tokens[batch, node][:, None]
        if rank == 0:  # the only one of a chain: no distribution is copied
            left, drawn = p[trees.row[batch, column], tokens[:, 0]], q[batch, column, tokens[:, 0]]
        else:
            r, law = p[trees.row[batch, column]], q[batch, column]
            for elder in range(rank):
                elders = trees.tokens[batch, trees.children[batch, column, elder]]
                r, law = refuse(r, law, elders, replacement)
            left, drawn = r.gather(1, tokens)[:, 0], law.gather(1, tokens)[:, 0]
        # A law that gives its own token no chance is not the one it was drawn from: then nothing is accepted.
        chances[batch, node] = torch.where(drawn > 0, left / drawn, 0.0)
    return chances


def refuse(r: Tensor, q: Tensor, tokens: Tensor, replacement: bool) -> tuple[Tensor, Tensor]:
    """What is left of r and q, rows [S, V], after the children `tokens` [S] drawn from q were refused."""
    left = (r - q).clamp_min(0)
    mass = left.sum(dim=1, keepdim=True)
    # r == q up to rounding leaves nothing: any draw from r is then exact to the same rounding.
    left = torch.where(mass > 0, left / mass, r)
    if replacement:
        return left, q
    q = q.scatter(1, tokens[:, None], 0.0)
    return left, q / q.sum(dim=1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)


def residual(p: Tensor, trees: Trees, q: Tensor | None, last: Tensor, replacement: bool) -> Tensor:
    """Distribution [B, V] (unnormalised) of the token after column `last` [B]: p without what its children took."""
    batch = torch.arange(p.shape[0], device=p.device)
    law = None if q is None else q[batch, last.clamp_max(q.shape[1] - 1)]
    for rank in range(trees.widest):
        child = trees.children[batch, last, rank]
        tokens = trees.tokens[batch, child.clamp_min(0)].clamp_min(0)
        if law is None:
            left = p.scatter(1, tokens[:, None], 0.0)
            left = torch.where(left.sum(dim=1, keepdim=True) > 0, left, p)
        else:
            left, law_left = refuse(p, law, tokens, replacement)
            law = torch.where((child >= 0)[:, None], law_left, law)
        p = torch.where((child >= 0)[:, None], left, p)
    return p
