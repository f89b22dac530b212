"""Drafts of several tokens in training: a layer applied again to its own features (EAGLE-3's training-time test)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from paceline.model.rope import Rope
from paceline.train.batches import TrainingBatch, ahead
from paceline.train.modules import Angles, Past


class Step(Protocol):
    """Embeddings of the tokens that came and features of the rows before them -> features, as `Attention` sees rows."""

    def __call__(self, embeds: Tensor, features: Tensor, rows: Tensor, turn: Angles, past: Past) -> Tensor: ...


def unroll(
    layer: Step, features: Tensor, batch: TrainingBatch, embeds: Tensor, rope: Rope, steps: int
) -> Iterator[Tensor]:
    """Features of each step: [B, S, H], then [B, R, H] of the rows whose drafts go on.

    features [B, S, H]: what the first step continues; embeds [B, S, H]: the target's, of the batch's tokens.
    """
    past: Past = []
    for step in range(steps):
        if step == 1:
            features = features[:, batch.begin]
        rows = batch.rows(step)
        turn = rope.table(rows + step, embeds.shape[1] + steps)
        features = layer(ahead(embeds, step + 1, rows), features, rows, turn, past)
        yield features
