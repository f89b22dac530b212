"""Medusa heads for the laboratory: random ones, and ones that know the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from lab import DEVICE, on, pool_for
from torch import Tensor

from paceline.heads.medusa import MedusaHead
from paceline.model.attention import Span
from paceline.model.decoder import NORMED, Batch
from paceline.model.linear import DenseLinear, Linear
from paceline.propose.medusa import MedusaProposer
from paceline.propose.medusa_tree import SPARSE
from paceline.propose.rollout import Shape
from paceline.weights.load import LoadedModel


def random_head(
    target: LoadedModel, heads: int = 3, *, seed: int = 0, sharpness: float = 1.0, shared: bool = False,
    ids: Tensor | None = None,
) -> MedusaHead:  # fmt: skip
    """`shared`: the target's output head serves. `ids`: logits for these tokens alone."""
    generator = torch.Generator().manual_seed(seed)
    hidden, rows = target.config.hidden_size, target.config.vocab_size if ids is None else len(ids)

    def linear(out: int, scale: float) -> DenseLinear:
        return DenseLinear((torch.randn(out, hidden, generator=generator) * scale).to(DEVICE))

    return MedusaHead(
        blocks=[[linear(hidden, 0.35)] for _ in range(heads)],
        outputs=[] if shared else [linear(rows, 0.35 * sharpness) for _ in range(heads)],
        dtype=torch.float32,
        target_ids=None if ids is None else ids.to(DEVICE),
    )


def proposer(
    target: LoadedModel, head: MedusaHead, shape: Shape = SPARSE, paths: Iterable[Sequence[int]] | None = None
) -> MedusaProposer:
    return MedusaProposer(
        head, vocab_size=target.vocab_size, width=target.config.vocab_size, target_output=target.decoder.head,
        shape=shape, paths=paths,
    )  # fmt: skip


@dataclass(kw_only=True)
class KnowingHead(MedusaHead):
    """Knows a text and the target's hidden states [n, H] at its tokens: head k scores the token k + 1 behind."""

    text: Sequence[int]
    states: Tensor
    vocabulary: int

    def logits(self, rows: Tensor, heads: int | None = None, target_output: Linear | None = None) -> Tensor:
        logits = rows.new_zeros(len(rows), heads or self.count, self.vocabulary)
        for b, place in enumerate(torch.cdist(rows, self.states).argmin(dim=1).tolist()):
            for k, token in enumerate(self.text[place + 2 : place + 2 + logits.shape[1]]):
                logits[b, k, token] = 9.0
        return logits


def knowing_head(target: LoadedModel, text: Sequence[int], heads: int) -> KnowingHead:
    pool = pool_for(target, blocks=64)
    cache = pool.open([], len(text))
    cache.append(len(text))
    batch = Batch(on(text), [Span(cache, 0, len(text), 0)], pool, taps=(NORMED,))
    states = target.decoder.forward(batch)[1][NORMED]
    return KnowingHead(
        blocks=[[]] * heads, outputs=[], dtype=torch.float32, text=text, states=states,
        vocabulary=target.config.vocab_size,
    )  # fmt: skip
