"""Decoder layers that are fed hidden states: what heads have in common with a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.device import Backend
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.decoder import Batch, Decoder
from paceline.model.sublayers import Layer, Norm

Rows = Callable[[Tensor], Tensor]
"""Any function of rows [T, in] -> [T, out]."""


def same(x: Tensor) -> Tensor:
    return x


def as_norm(function: Rows) -> Norm:
    """A layer calls its norms and nothing else, so any function of rows will do."""
    return cast(Norm, function)


@dataclass(kw_only=True)
class HiddenBatch(Batch):
    hidden: Tensor  # [T, width], in place of embeddings


class Block(Decoder):
    """The decoder's layers between embedding and output, which belong to the head (or to the target)."""

    @classmethod
    def of(cls, config: ModelConfig, layers: list[Layer], backend: Backend) -> Block:
        nothing = torch.empty(0, device=backend.device)
        return cls(config, nothing, layers, as_norm(same), same, backend.device, backend.dtype)

    def run(
        self, hidden: Tensor, positions: Tensor, spans: Sequence[Span], pool: BlockPool,
        layers: Iterable[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Rows [T, width] through the layers (default: all) -> [T, width]; writes keys and values into the pool."""
        batch = HiddenBatch(positions, positions, spans, pool, layers, hidden=hidden)
        return self.forward(batch)[0]

    def _embed(self, batch: Batch) -> Tensor:
        assert isinstance(batch, HiddenBatch)
        return batch.hidden
