"""The decoder on the native kernels: two calls a layer, the same loop around them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.cache.tree import paths
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.decoder import Batch, Decoder
from paceline.model.sublayers import Sublayers
from paceline.native import interface
from paceline.native.interface import kernels
from paceline.native.linear import NativeLinear
from paceline.native.memory import aligned
from paceline.native.packed import Packed

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def runs_natively(config: ModelConfig) -> bool:
    """Whether the kernels have all that this decoder is made of."""
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    return (
        config.norm == "rms"
        and config.gated_mlp
        and config.activation in ACTIVATIONS
        and config.rope is not None
        and config.head_dim % 16 == 0
        and all(width % 32 == 0 for width in widths)
    )


@dataclass
class NativeLayer:
    """One block's weights and the struct that hands them to the kernels."""

    qkv: NativeLinear
    output: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None

    def struct(self, config: ModelConfig, index: int) -> interface.Layer:
        struct = interface.Layer(self.qkv.struct, self.output.struct, self.gate_up.struct, self.down.struct)
        for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm", "post_attention_norm", "post_mlp_norm"):
            weight: Tensor | None = getattr(self, name)
            setattr(struct, name, None if weight is None else weight.data_ptr())
        struct.hidden, struct.heads, struct.kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        struct.head_dim, struct.intermediate = config.head_dim, config.intermediate_size
        struct.activation, struct.window = ACTIVATIONS[config.activation], config.window(index) or 0
        struct.eps, struct.scale = config.norm_eps, config.scale
        return struct


@dataclass
class NativeDecoder(Decoder):
    """`embedding` stays quantised: rows are dequantised as they are looked up."""

    packed_embedding: Packed = field(kw_only=True)
    native_layers: list[NativeLayer] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.structs = [layer.struct(self.config, index) for index, layer in enumerate(self.native_layers)]
        self.pointers = [byref(struct) for struct in self.structs]
        self._work = aligned(0)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.packed_embedding.dequantize(tokens)

    def plan(self, batch: Batch) -> Sublayers:
        return NativeSublayers(self, batch)

    def work(self, rows: int) -> Tensor:
        """Memory for a step, kept for the next."""
        size: int = kernels().pl_layer_work(self.pointers[0], rows)
        if size > self._work.shape[0]:
            self._work = aligned(size)
        return self._work


class NativeSublayers:
    """One step's batch as the kernels take it. Hidden states are changed in place."""

    def __init__(self, decoder: NativeDecoder, batch: Batch) -> None:
        self.decoder, self.pool, self.library = decoder, batch.pool, kernels()
        self.rows = Histories.of(batch.spans)
        self.angles = {local: rope.halves(batch.longest) for local, rope in decoder.ropes.items()}
        self.work = decoder.work(self.rows.count)
        self.struct = self.rows.struct(self.work)
        self.batch = byref(self.struct)

    def attend(self, index: int, hidden: Tensor) -> Tensor:
        cos, sin = self.angles[self.decoder.config.window(index) is not None]
        keys, values = self.pool.keys[index], self.pool.values[index]
        self.library.pl_attention(
            self.decoder.pointers[index], self.batch, keys.data_ptr(), values.data_ptr(), cos.data_ptr(),
            sin.data_ptr(), hidden.data_ptr(),
        )  # fmt: skip
        return hidden

    def mlp(self, index: int, hidden: Tensor) -> Tensor:
        self.library.pl_mlp(self.decoder.pointers[index], self.batch, hidden.data_ptr())
        return hidden

    def keep(self, hidden: Tensor) -> Tensor:
        return hidden.clone()


@dataclass(frozen=True)
class Histories:
    """For each row [T]: where its key goes, its position, and the slots of all that it attends to.

    Row i sees `prefix[i]` slots of its sequence's table and then `tail_length[i]` of its own tail: a chain is all
    prefix; a tree's node has what lies before the tree as prefix and its path from the root as tail. int32, but for
    `table` and `tail`, which are addresses (int64).
    """

    slot: Tensor
    position: Tensor
    table: Tensor
    prefix: Tensor
    tail: Tensor
    tail_length: Tensor
    alive: list[Tensor]  # what the addresses point into

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Histories:
        parts = [_chain(span) if span.parents is None else _tree(span) for span in spans]
        if len(parts) == 1:
            return parts[0]
        names = ("slot", "position", "table", "prefix", "tail", "tail_length")
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return cls(**joined, alive=[kept for part in parts for kept in part.alive])

    @property
    def count(self) -> int:
        return self.slot.shape[0]

    def struct(self, work: Tensor) -> interface.Batch:
        pointers = (self.slot, self.position, self.table, self.prefix, self.tail, self.tail_length, work)
        return interface.Batch(self.count, 0, *(each.data_ptr() for each in pointers))


def _chain(span: Span) -> Histories:
    table = span.cache.slots32()
    positions = torch.arange(span.position, span.end, dtype=torch.int32)
    address = torch.full((span.count,), table.data_ptr())
    none = torch.zeros(span.count, dtype=torch.int32)
    slot = table[span.position : span.end]
    return Histories(slot, positions, address, positions + 1, address, none, [table])


def _tree(span: Span) -> Histories:
    assert span.parents is not None
    table, base = span.cache.slots32(), span.base
    own = paths(span.parents)[-span.count :]
    tail = table[base + torch.tensor([node for path in own for node in path])]
    lengths = torch.tensor([len(path) for path in own], dtype=torch.int32)
    starts = lengths.cumsum(0) - lengths
    return Histories(
        slot=table[span.position : span.end].contiguous(),
        position=base - 1 + lengths,
        table=torch.full((span.count,), table.data_ptr()),
        prefix=torch.full((span.count,), base, dtype=torch.int32),
        tail=tail.data_ptr() + 4 * starts,
        tail_length=lengths,
        alive=[table, tail],
    )
