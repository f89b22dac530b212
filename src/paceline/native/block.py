"""A head's decoder layers on the native kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.rope import ropes
from paceline.native.layers import NativeLayer, NativeLayers


class NativeBlock:
    """What `heads/block.py` says of a `Block`. A row's bits are its own."""

    dtype, cache_dtype = torch.float32, torch.float16

    def __init__(self, config: ModelConfig, layers: Sequence[NativeLayer]) -> None:
        self.stack = NativeLayers(config, layers, ropes(config, torch.device("cpu")))

    def run(
        self, hidden: Tensor, spans: Sequence[Span], pool: BlockPool, layers: Iterable[int] | None = None,
        beside: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        hidden = hidden.clone(memory_format=torch.contiguous_format)  # it is changed in place
        step = self.stack.plan(spans, pool, None if beside is None else beside.contiguous())
        for run in [range(len(self.stack.layers))] if layers is None else (range(i, i + 1) for i in layers):
            step.through(run, hidden, ())
        return hidden
