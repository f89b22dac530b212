"""Attention of a flat ragged batch over the block pool.

`RowInvariantAttention` (CPU) gives a row the same bits however many rows are computed with it; `PaddedAttention`
(accelerators) is one call for the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.pool import BlockPool, SequenceCache
from paceline.cache.tree import Parents, ancestry, branches, depths
from paceline.device import send
from paceline.model.config import ModelConfig

BUCKET = 64  # key ranges are rounded up to this many positions


@dataclass(frozen=True)
class Span:
    """Rows [start, start + count) of the batch: one sequence's, in the consecutive slots from `position` on.

    Without `parents` each row follows the one before it. With them the last `len(parents)` slots hold a draft tree
    (see `cache/tree.py`; -1: the node follows what lies before the tree) of which these rows are the last `count`
    nodes: a row sees what lies before the tree and its own ancestors, and its position is that of its depth.
    """

    cache: SequenceCache
    start: int
    count: int
    position: int
    parents: Parents | None = None

    @property
    def end(self) -> int:
        return self.position + self.count

    @property
    def base(self) -> int:
        """First slot of the tree, and position of the nodes that follow what lies before it."""
        return self.position if self.parents is None else self.end - len(self.parents)

    def positions(self) -> Tensor:
        """Positions [count] of the rows."""
        if self.parents is None:
            return torch.arange(self.position, self.end)
        return torch.tensor(depths(self.parents)[-self.count :]) + (self.base - 1)

    def sees(self, length: int, window: int | None) -> Tensor:
        """bool [count, length]: which of the slots 0..length-1 each row attends to."""
        queries, keys = self.positions()[:, None], torch.arange(length)
        if self.parents is None:
            return visible(queries, keys, window)
        size, base = len(self.parents), self.base
        keys[base : base + size] = torch.tensor(depths(self.parents)) + (base - 1)
        seen = visible(queries, keys, window)
        seen[:, base:] = False
        seen[:, base : base + size] = ancestry(self.parents)[-self.count :]
        return seen if window is None else seen & (keys > queries - window)


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
    (padded). What is left of the order is fixed by position; a tree's branches are put there in turn.
    """

    def __init__(self, config: ModelConfig, spans: Sequence[Span], device: torch.device) -> None:
        self.windows = [config.window(layer) for layer in range(config.num_layers)]
        windows = set(self.windows)
        self.parts = [part for span in spans for part in _parts(config, span, windows)]

    def __call__(self, layer: int, q: Tensor, pool: BlockPool) -> Tensor:
        window = self.windows[layer]
        if len(self.parts) == 1:
            return self.parts[0].attend(layer, q, window)
        return torch.cat([part.attend(layer, q[part.rows], window) for part in self.parts])


def _parts(config: ModelConfig, span: Span, windows: set[int | None]) -> Sequence[_Piece | _Tree]:
    if span.parents is None:
        return _consecutive(config, span.cache, span.start, span.position, span.count, windows)
    if len(span.parents) == span.count:
        return [_Tree(config, span, windows)]
    # The tree's upper levels were computed before: only their slots have them, out of place. A mask will do, since
    # only drafts are computed level by level, and no promise hangs on a draft's last bits.
    length = _bucket(span.end)
    biases = {w: additive(span.sees(length, w), span.cache.pool.dtype) for w in windows}
    return [_Piece(config, span.cache, span.start, span.count, length, biases)]


def _consecutive(
    config: ModelConfig, cache: SequenceCache, row: int, position: int, count: int, windows: set[int | None]
) -> list[_Piece]:
    """Rows whose key ranges round to the same length go into one call."""
    pieces, end = [], position + count
    while position < end:
        length = _bucket(position + 1)
        part = min(end, length) - position
        queries = torch.arange(position, position + part)[:, None]
        dtype = cache.pool.dtype
        biases = {w: additive(visible(queries, torch.arange(length), w), dtype) for w in windows}
        pieces.append(_Piece(config, cache, row, part, length, biases))
        position, row = position + part, row + part
    return pieces


def _bucket(length: int) -> int:
    return -(-length // BUCKET) * BUCKET


class _Piece:
    """Rows of one sequence that attend to the same `length` keys. The query buffer serves every layer.

    biases: for each window [count, length], added to the scores.
    """

    def __init__(
        self, config: ModelConfig, cache: SequenceCache, row: int, count: int, length: int,
        biases: Mapping[int | None, Tensor],
    ) -> None:  # fmt: skip
        kv_heads, group, dim = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
        used = count * group
        padding = -used % 4 if used % 32 in (1, 2, 3) else 0
        self.rows = slice(row, row + count)
        self.shape, self.used, self.scale = (count, kv_heads, group, dim), used, config.scale
        # [kv, count * group (padded), d]: one product per key/value head
        self.queries = torch.zeros(1, kv_heads, used + padding, dim, dtype=cache.pool.dtype)
        self.inside = self.queries[0, :, :used].view(kv_heads, count, group, dim).transpose(0, 1)
        source = torch.tensor([*(i for i in range(count) for _ in range(group)), *([0] * padding)])
        self.biases = {window: bias[source] for window, bias in biases.items()}
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


class _Tree:
    """A whole tree's rows. Each branch is written to the slots of its positions and computed like a chain.

    So a row has the bits that it would have alone. Slots are put back in the tree's order, where `commit` finds them.
    """

    def __init__(self, config: ModelConfig, span: Span, windows: set[int | None]) -> None:
        assert span.parents is not None
        self.rows = slice(span.start, span.start + span.count)
        self.pool = span.cache.pool
        table = span.cache.slot_table(span.end)
        self.slots = table[span.base :]
        depth = depths(span.parents)
        self.branches = []
        for run in branches(span.parents):
            first = span.base + depth[run[0]] - 1
            pieces = _consecutive(config, span.cache, 0, first, len(run), windows)
            self.branches.append((torch.tensor(run), table[first : first + len(run)], pieces))

    def attend(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        tree_keys, tree_values = keys[self.slots], values[self.slots]
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for nodes, slots, pieces in self.branches:
            keys[slots], values[slots] = tree_keys[nodes], tree_values[nodes]
            branch = q[nodes]
            out[nodes] = torch.cat([piece.attend(layer, branch[piece.rows], window) for piece in pieces])
        keys[self.slots], values[self.slots] = tree_keys, tree_values
        return out


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
        longest = max(span.end for span in spans)
        most = max(span.count for span in spans)
        rows = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])
        index = torch.cat([torch.arange(b * most, b * most + span.count) for b, span in enumerate(spans)])
        self.shape = (len(spans), most)
        self.rows, self.index = send(rows, device), send(index, device)  # in the batch, in the padded layout
        self.slots = send(torch.stack([span.cache.slot_table(longest) for span in spans]), device)
        windows = {config.window(layer) for layer in range(config.num_layers)}
        self.masks = {w: _masks(spans, most, longest, w, device) for w in windows}

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


def _masks(spans: Sequence[Span], most: int, longest: int, window: int | None, device: torch.device) -> Tensor:
    """bool [B, 1, most, longest]. Trees are laid out on the host, chains where they are used."""
    queries = torch.tensor([[span.position + min(i, span.count - 1) for i in range(most)] for span in spans])
    masks = visible(send(queries, device)[:, :, None], torch.arange(longest, device=device), window)
    for b, span in enumerate(spans):
        if span.parents is not None:
            masks[b, : span.count] = send(span.sees(longest, window), device)
    return masks.unsqueeze(1)
