"""The two halves of a decoder layer, attention and MLP, and their form in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.device import send
from paceline.model.attention import Attention, Span
from paceline.model.config import ModelConfig
from paceline.model.linear import Linear
from paceline.model.norm import LayerNorm, RMSNorm
from paceline.model.rope import rotate

Norm = LayerNorm | RMSNorm
Tables = tuple[Tensor, Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass
class Layer:
    """The weights of one block. `qkv` and `gate_up` are fused; absent parts are None."""

    attention_norm: Norm
    qkv: Linear
    output: Linear
    mlp_norm: Norm
    up: Linear  # gate and up side by side where the MLP is gated
    down: Linear
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None


class Sublayers(Protocol):
    """The layers' halves over one step's batch: hidden states [T, H] -> [T, H], perhaps changed in place."""

    def attend(self, index: int, hidden: Tensor) -> Tensor:
        """Hidden states and what layer `index` attends to; writes the rows' keys and values into the pool."""
        ...

    def mlp(self, index: int, hidden: Tensor) -> Tensor: ...

    def through(self, layers: range, hidden: Tensor, keep: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Both halves of these layers, one behind the other; and what goes into those of them that are to be kept."""
        ...

    def keep(self, hidden: Tensor) -> Tensor:
        """The hidden states as they are now, whatever the next half does."""
        ...


@dataclass
class TorchSublayers:
    """`slots`: where the rows' keys and values go. `tables`: rotary angles, keyed by "is a sliding layer"."""

    config: ModelConfig
    layers: Sequence[Layer]
    pool: BlockPool
    attention: Attention
    slots: slice | Tensor
    tables: Mapping[bool, Tables]

    def attend(self, index: int, hidden: Tensor) -> Tensor:
        config, layer, pool, slots = self.config, self.layers[index], self.pool, self.slots
        table = self.tables.get(config.window(index) is not None)
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(layer.attention_norm(hidden)).view(-1, heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            qk = torch.cat((layer.query_norm(qk[:, :heads]), layer.key_norm(qk[:, heads:])), dim=1)
        if table is not None:
            qk = rotate(qk, *table)
        pool.keys[index][slots] = qk[:, heads:]
        pool.values[index][slots] = v
        attended = layer.output(self.attention(index, qk[:, :heads], pool))
        return hidden + (attended if layer.post_attention_norm is None else layer.post_attention_norm(attended))

    def mlp(self, index: int, hidden: Tensor) -> Tensor:
        layer = self.layers[index]
        inner = layer.up(layer.mlp_norm(hidden))
        activation = ACTIVATIONS[self.config.activation]
        if self.config.gated_mlp:
            gate, up = inner.chunk(2, dim=-1)
            inner = by_rows(activation, gate).mul_(up)
        else:
            inner = by_rows(activation, inner)
        out = layer.down(inner)
        return hidden + (out if layer.post_mlp_norm is None else layer.post_mlp_norm(out))

    def through(self, layers: range, hidden: Tensor, keep: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        kept = {}
        for index in layers:
            if index in keep:
                kept[index] = hidden
            hidden = self.mlp(index, self.attend(index, hidden))
        return hidden, kept

    def keep(self, hidden: Tensor) -> Tensor:
        return hidden


def write_slots(spans: Sequence[Span], device: torch.device) -> slice | Tensor:
    """Where the rows' keys and values go: one slice where a single sequence lies contiguously, else indices."""
    if len(spans) == 1:
        slots = spans[0].cache.slots(spans[0].end)
        if isinstance(slots, slice):
            return slice(slots.start + spans[0].position, slots.stop)
    tables = [s.cache.slot_table(s.end)[s.position :] for s in spans]
    return send(torch.cat(tables), device)


PARALLEL_FROM = 16_384  # elements: PyTorch splits larger activations between threads


def by_rows(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """activation(x) such that a row's bits are its own.

    PyTorch cuts large work where threads meet, and the ends of a part run other code (measured: exp differs in the last
    bit). Two threads cut at a multiple of the vector width; with more, parts are kept small enough not to be cut.
    """
    width = x.shape[1]
    if x.device.type != "cpu" or x.numel() < PARALLEL_FROM or (torch.get_num_threads() <= 2 and width % 64 == 0):
        return activation(x)
    step = max(1, (PARALLEL_FROM - 1) // width)
    return torch.cat([activation(x[i : i + step]) for i in range(0, x.shape[0], step)])
