"""One decoder for every family: the flags of `ModelConfig` say what each layer has."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.device import send
from paceline.model.attention import Attention, Span, plan_attention
from paceline.model.config import ModelConfig
from paceline.model.linear import Linear
from paceline.model.norm import LayerNorm, RMSNorm
from paceline.model.rope import Rope, rotate

Norm = LayerNorm | RMSNorm
NORMED = -1  # the tap of the last layer's output after the final norm
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


Sublayer = tuple[int, Literal["attention", "mlp"]]


@dataclass
class Batch:
    """One forward: a flat ragged batch. tokens [T] ids, positions [T], spans cover the rows in order."""

    tokens: Tensor
    positions: Tensor
    spans: Sequence[Span]
    pool: BlockPool
    layers: Iterable[int] | None = None  # default: all, in order
    skip: Container[Sublayer] = ()  # sublayers of these that are passed by
    taps: Sequence[int] = ()  # hidden states to return: see `Decoder.forward`
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest = max(span.end for span in self.spans)


@dataclass
class Decoder:
    config: ModelConfig
    embedding: Tensor  # [V, H]
    layers: list[Layer]
    final_norm: Norm
    head: Linear
    device: torch.device
    dtype: torch.dtype  # of the activations and the cache
    positions: Tensor | None = None  # learned positions, [max + offset, H]
    head_ids: Tensor | None = None  # the ids that `head` scores, where it is not all of them
    ropes: dict[bool, Rope] = field(init=False)  # keyed by "is a sliding layer"

    def __post_init__(self) -> None:
        # Gemma rounds the factor to the model's dtype; follow it.
        self.embedding_scale = torch.tensor(self.config.embedding_scale, dtype=self.dtype, device=self.device)
        self.ropes = {}
        rope, local = self.config.rope, self.config.local_rope
        if rope is not None:
            self.ropes[False] = Rope(rope, self.config.head_dim, self.device)
            self.ropes[True] = Rope(local, self.config.head_dim, self.device) if local else self.ropes[False]

    def forward(self, batch: Batch) -> tuple[Tensor, dict[int, Tensor]]:
        """Final hidden states [T, H] (before the last norm) and the taps asked for, each [T, H].

        Tap i is the input of layer i (`hidden_states[i]` in transformers), `num_layers` the last layer's output, -1
        that output after the final norm. Writes keys and values of every row into its sequence's slots in `batch.pool`.
        """
        hidden = self._embed(batch)
        attention = plan_attention(self.config, batch.spans, self.device)
        slots = write_slots(batch.spans, self.device)
        tables = {local: rope.table(batch.positions, batch.longest) for local, rope in self.ropes.items()}
        taps = {}
        for index in range(self.config.num_layers) if batch.layers is None else batch.layers:
            if index in batch.taps:
                taps[index] = hidden
            if (index, "attention") not in batch.skip:
                table = tables.get(self.config.window(index) is not None)
                hidden = self._attend(index, hidden, table, attention, slots, batch.pool)
            if (index, "mlp") not in batch.skip:
                hidden = self._mlp(self.layers[index], hidden)
        if self.config.num_layers in batch.taps:
            taps[self.config.num_layers] = hidden
        if NORMED in batch.taps:
            taps[NORMED] = self.final_norm(hidden)
        return hidden, taps

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows [R, H] -> fp32 logits [R, V] (or [R, len(head_ids)])."""
        return self.head(self.final_norm(hidden)).float()

    def _embed(self, batch: Batch) -> Tensor:
        hidden = F.embedding(batch.tokens, self.embedding).to(self.dtype)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        if self.positions is not None:
            hidden = hidden + self.positions[batch.positions + self.config.position_offset]
        return hidden

    def _attend(
        self,
        index: int,
        hidden: Tensor,
        table: Tables | None,
        attention: Attention,
        slots: slice | Tensor,
        pool: BlockPool,
    ) -> Tensor:
        config, layer = self.config, self.layers[index]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(layer.attention_norm(hidden)).view(-1, heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            qk = torch.cat((layer.query_norm(qk[:, :heads]), layer.key_norm(qk[:, heads:])), dim=1)
        if table is not None:
            qk = rotate(qk, *table)
        pool.keys[index][slots] = qk[:, heads:]
        pool.values[index][slots] = v
        attended = layer.output(attention(index, qk[:, :heads], pool))
        return hidden + (attended if layer.post_attention_norm is None else layer.post_attention_norm(attended))

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        inner = layer.up(layer.mlp_norm(hidden))
        activation = ACTIVATIONS[self.config.activation]
        if self.config.gated_mlp:
            gate, up = inner.chunk(2, dim=-1)
            inner = by_rows(activation, gate).mul_(up)
        else:
            inner = by_rows(activation, inner)
        out = layer.down(inner)
        return hidden + (out if layer.post_mlp_norm is None else layer.post_mlp_norm(out))


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
