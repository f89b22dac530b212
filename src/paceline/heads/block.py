"""Decoder layers that are fed hidden states: what heads have in common with a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.device import Backend
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.decoder import Batch, Decoder
from paceline.model.sublayers import Layer, Norm

Rows = Callable[[Tensor], Tensor]
"""Any function of rows [T, in] -> [T, out]."""


class Block(Protocol):
    """A head's layers, between embedding and output, which belong to the head itself (or to the target).

    dtype: of hidden states; cache_dtype: of the keys and values in its pool.
    """

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def cache_dtype(self) -> torch.dtype: ...
    def run(
        self, hidden: Tensor, spans: Sequence[Span], pool: BlockPool, layers: Iterable[int] | None = None,
        beside: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Rows [T, H] through the layers (default: all) -> [T, H]; writes keys and values into the pool.

        beside [T, H]: what a first layer that takes 2 H inputs (EAGLE-3's) reads before the hidden states.
        """
        ...


def same(x: Tensor) -> Tensor:
    return x


def as_norm(function: Rows) -> Norm:
    """A layer calls its norms and nothing else, so any function of rows will do."""
    return cast(Norm, function)


@dataclass(kw_only=True)
class HiddenBatch(Batch):
    hidden: Tensor  # [T, width], in place of embeddings


class TorchBlock(Decoder):
    """The decoder without its ends. What is beside the hidden states travels with them: see `widen`."""

    @classmethod
    def of(cls, config: ModelConfig, layers: list[Layer], backend: Backend) -> TorchBlock:
        nothing = torch.empty(0, device=backend.device)
        return cls(config, nothing, layers, as_norm(same), same, backend.device, backend.dtype)

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.dtype

    def run(
        self, hidden: Tensor, spans: Sequence[Span], pool: BlockPool, layers: Iterable[int] | None = None,
        beside: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        stream = hidden if beside is None else torch.cat((beside, hidden), dim=1)
        batch = HiddenBatch(torch.empty(0), spans, pool, layers, hidden=stream)
        return self.forward(batch)[0][:, stream.shape[1] - hidden.shape[1] :]

    def _embed(self, batch: Batch) -> Tensor:
        assert isinstance(batch, HiddenBatch)
        return batch.hidden


def widen(layer: Layer, attention_norm: Rows, hidden: int) -> Layer:
    """The layer over a stream [T, 2H] whose first half is what lies beside, and stays as it is.

    Attention and MLP then add to the second half alone, so that the decoder's own layer serves unchanged.
    """
    mlp_norm, output, down = layer.mlp_norm, layer.output, layer.down
    return replace(
        layer,
        attention_norm=as_norm(attention_norm),
        output=lambda x: F.pad(output(x), (hidden, 0)),
        mlp_norm=as_norm(lambda stream: mlp_norm(stream[:, hidden:])),
        down=lambda x: F.pad(down(x), (hidden, 0)),
    )
