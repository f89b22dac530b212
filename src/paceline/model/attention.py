"""Attention of a flat ragged batch over the block pool.

`RowInvariantAttention` (CPU) gives a row the same bits however many rows are computed with it; `PaddedAttention`
(accelerators) is one call for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.pool import BlockPool, SequenceCache
from paceline.model.config import ModelConfig

BUCKET = 64  # key ranges are rounded up to this many positions


@dataclass(frozen=True)
class Span:
    """Rows [start, start + count) of the batch: one sequence's consecutive positions, first at `position`."""

    cache: SequenceCache
    start: int
    count: int
    position: int


class Attention(Protocol):
    """Built once a step; called once a layer. q [T, heads, head_dim] -> [T, heads * head_dim]."""

    def __call__(self, layer: int, q: Tensor, pool: BlockPool) -> Tensor: ...


def plan_attention(config: ModelConfig, spans: Sequence[Span], device: torch.device) -> Attention:
    kind = RowInvariantAttention if device.type == "cpu" else PaddedAttention
    return kind(config, spans, device)


def visible(query: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Causal (and sliding) visibility of key positions [.., L] from query positions [.., 1]."""
    seen = keys <= query
    return seen if window is None else seen & (keys > query - window)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


@dataclass
class _Piece:
    """Consecutive rows whose key range rounds to the same length."""

    rows: slice
    count: int
    length: int
    slots: slice | Tensor
    biases: dict[int | None, Tensor]


class RowInvariantAttention:
    """PyTorch's fused CPU kernel, arranged so that a row's reduction order follows from its position alone.

    Three things make its rows depend on their neighbours, each measured and removed: the key length (rounded up to
    a multiple of `BUCKET` of the row's own position; rows of one call share it), products of 1 or 3 rows (the rows of
    one key/value head are padded to a multiple of 8), and the order of blocks (fixed by position).
    """

    def __init__(self, config: ModelConfig, spans: Sequence[Span], device: torch.device) -> None:
        self.config = config
        self.group = config.num_heads // config.num_kv_heads
        self.windows = {config.window(layer) for layer in range(config.num_layers)}
        self.pieces = [piece for span in spans for piece in self._split(span)]

    def _split(self, span: Span) -> list[_Piece]:
        pieces, position, end = [], span.position, span.position + span.count
        while position < end:
            length = -(-(position + 1) // BUCKET) * BUCKET
            count = min(end, length) - position
            row = span.start + position - span.position
            queries = torch.arange(position, position + count).repeat_interleave(self.group)
            queries = F.pad(queries, (0, -queries.shape[0] % 8), value=position)[:, None]
            keys = torch.arange(length)
            biases = {w: additive(visible(queries, keys, w), span.cache.pool.dtype) for w in self.windows}
            slots = span.cache.slots(length)
            pieces.append(_Piece(slice(row, row + count), count, length, slots, biases))
            position += count
        return pieces

    def __call__(self, layer: int, q: Tensor, pool: BlockPool) -> Tensor:
        window = self.config.window(layer)
        keys, values = pool.keys[layer], pool.values[layer]
        outputs = [self._attend(piece, q[piece.rows], keys, values, piece.biases[window]) for piece in self.pieces]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, piece: _Piece, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        kv_heads, dim, rows = self.config.num_kv_heads, self.config.head_dim, piece.count * self.group
        # [count, kv * group, d] -> [1, kv, count * group (padded), d]: one product per key/value head
        grouped = q.view(piece.count, kv_heads, self.group, dim).transpose(0, 1).reshape(1, kv_heads, rows, dim)
        if rows % 8:
            grouped = F.pad(grouped, (0, 0, 0, -rows % 8))
        k = keys[piece.slots].transpose(0, 1).unsqueeze(0)
        v = values[piece.slots].transpose(0, 1).unsqueeze(0)
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped, k, v, 0.0, False, attn_mask=bias, scale=self.config.scale
        )[0]
        out = out[0, :, :rows].reshape(kv_heads, piece.count, self.group, dim).transpose(0, 1)
        return out.reshape(piece.count, kv_heads * self.group * dim)


class PaddedAttention:
    """One scaled-dot-product call for all sequences, queries and keys padded to the longest."""

    def __init__(self, config: ModelConfig, spans: Sequence[Span], device: torch.device) -> None:
        self.config = config
        longest = max(span.position + span.count for span in spans)
        most = max(span.count for span in spans)
        index, queries = [], []
        for b, span in enumerate(spans):
            index.extend(range(b * most, b * most + span.count))
            queries.append([span.position + min(i, span.count - 1) for i in range(most)])
        self.shape = (len(spans), most)
        self.index = torch.tensor(index, device=device)
        self.slots = torch.stack([span.cache.slot_table(longest) for span in spans]).to(device)
        positions = torch.tensor(queries, device=device)[:, None, :, None]
        keys = torch.arange(longest, device=device)
        windows = {config.window(layer) for layer in range(config.num_layers)}
        self.masks = {w: visible(positions, keys, w) for w in windows}

    def __call__(self, layer: int, q: Tensor, pool: BlockPool) -> Tensor:
        batch, most = self.shape
        padded = q.new_zeros(batch * most, *q.shape[1:])
        padded[self.index] = q
        out = F.scaled_dot_product_attention(
            padded.view(batch, most, *q.shape[1:]).transpose(1, 2),
            pool.keys[layer][self.slots].transpose(1, 2),
            pool.values[layer][self.slots].transpose(1, 2),
            attn_mask=self.masks[self.config.window(layer)],
            scale=self.config.scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(batch * most, -1)[self.index]
