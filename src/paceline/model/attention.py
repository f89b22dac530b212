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
from paceline.device import send
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


class RowInvariantAttention:
    """PyTorch's fused CPU kernel, arranged so that a row's reduction order follows from its position alone.

    Two things make its rows depend on their neighbours, each measured and removed: the key length (rounded up to a
    multiple of `BUCKET` of the row's own position; the rows of one call share it), and matrix products of 1 to 3 rows
    (padded). What is left of the order is fixed by position.
    """

    def __init__(self, config: ModelConfig, spans: Sequence[Span], device: torch.device) -> None:
        self.config = config
        self.windows = [config.window(layer) for layer in range(config.num_layers)]
        self.pieces = [piece for span in spans for piece in self._split(span)]

    def _split(self, span: Span) -> list[_Piece]:
        """Rows whose key ranges round to the same length go into one call."""
        pieces, position, end = [], span.position, span.position + span.count
        while position < end:
            length = -(-(position + 1) // BUCKET) * BUCKET
            count = min(end, length) - position
            row = span.start + position - span.position
            pieces.append(_Piece(self.config, span.cache, row, position, count, length, set(self.windows)))
            position += count
        return pieces

    def __call__(self, layer: int, q: Tensor, pool: BlockPool) -> Tensor:
        window = self.windows[layer]
        if len(self.pieces) == 1:
            return self.pieces[0].attend(layer, q, window)
        return torch.cat([piece.attend(layer, q[piece.rows], window) for piece in self.pieces])


class _Piece:
    """Consecutive rows of one sequence that attend to the same `length` keys. The query buffer serves every layer."""

    def __init__(
        self, config: ModelConfig, cache: SequenceCache, row: int, position: int, count: int, length: int,
        windows: set[int | None],
    ) -> None:  # fmt: skip
        kv_heads, group, dim = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
        used = count * group
        padded = used + (-used % 4 if used % 32 in (1, 2, 3) else 0)
        self.rows = slice(row, row + count)
        self.shape, self.used, self.scale = (count, kv_heads, group, dim), used, config.scale
        dtype = cache.pool.dtype
        # [kv, count * group (padded), d]: one product per key/value head
        self.queries = torch.zeros(1, kv_heads, padded, dim, dtype=dtype)
        self.inside = self.queries[0, :, :used].view(kv_heads, count, group, dim).transpose(0, 1)
        positions = torch.arange(position, position + count).repeat_interleave(group)
        positions = F.pad(positions, (0, padded - used), value=position)[:, None]
        self.biases = {w: additive(visible(positions, torch.arange(length), w), dtype) for w in windows}
        self.views = cache.views(length)

    def attend(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        count, kv_heads, group, dim = self.shape
        self.inside.copy_(q.view(self.shape))
        keys, values = self.views(layer)
        out = _FLASH(self.queries, keys, values, 0.0, False, attn_mask=self.biases[window], scale=self.scale)[0]
        if out.shape[2] > self.used:
            out = out.narrow(2, 0, self.used)
        if count > 1:
            out = out.view(kv_heads, count, group, dim).transpose(0, 1)
        merged: Tensor = out.reshape(count, kv_heads * group * dim)
        return merged


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class PaddedAttention:
    """Scaled-dot-product calls over padded sequences: one for those that decode, one for those in a prompt chunk.

    Apart, since padding every decoding row to a chunk's length would cost the chunk again for each of them.
    """

    SHORT = 32  # rows of a sequence that decodes: its drafts and one more

    def __init__(self, config: ModelConfig, spans: Sequence[Span], device: torch.device) -> None:
        short = [span for span in spans if span.count <= self.SHORT]
        long = [span for span in spans if span.count > self.SHORT]
        self.parts = [_Padded(config, part, device) for part in (short, long) if part]

    def __call__(self, layer: int, q: Tensor, pool: BlockPool) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for part in self.parts:
            out[part.rows] = part.attend(layer, q[part.rows], pool)
        return out


class _Padded:
    """Sequences of one call, queries and keys padded to the longest among them."""

    def __init__(self, config: ModelConfig, spans: Sequence[Span], device: torch.device) -> None:
        self.config = config
        longest = max(span.position + span.count for span in spans)
        most = max(span.count for span in spans)
        rows = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])
        index = torch.cat([torch.arange(b * most, b * most + span.count) for b, span in enumerate(spans)])
        queries = [[span.position + min(i, span.count - 1) for i in range(most)] for span in spans]
        self.shape = (len(spans), most)
        self.rows, self.index = send(rows, device), send(index, device)  # in the batch, in the padded layout
        self.slots = send(torch.stack([span.cache.slot_table(longest) for span in spans]), device)
        positions = send(torch.tensor(queries), device)[:, None, :, None]
        keys = torch.arange(longest, device=device)
        windows = {config.window(layer) for layer in range(config.num_layers)}
        self.masks = {w: visible(positions, keys, w) for w in windows}

    def attend(self, layer: int, q: Tensor, pool: BlockPool) -> Tensor:
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
