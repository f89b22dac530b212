"""Decoder layers on the native kernels: their weights, and one step's batch through them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from ctypes import addressof, byref, c_void_p, sizeof
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.cache.tree import Parents, paths
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.rope import Rope
from paceline.native import interface
from paceline.native.interface import kernels
from paceline.native.linear import NativeLinear
from paceline.native.memory import aligned

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
NORMS = (
    "attention_norm", "mlp_norm", "embed_norm", "query_norm", "key_norm", "post_attention_norm", "post_mlp_norm",
)  # fmt: skip


@dataclass
class NativeLayer:
    """One block's weights and the struct that hands them to the kernels.

    A `qkv` of twice as many inputs reads [embed_norm(beside); attention_norm(hidden)], as a head's first layer does;
    without these norms its inputs are taken as they are.
    """

    qkv: NativeLinear
    output: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    attention_norm: Tensor | None
    mlp_norm: Tensor
    embed_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None

    def struct(self, config: ModelConfig, index: int) -> interface.Layer:
        struct = interface.Layer(self.qkv.struct, self.output.struct, self.gate_up.struct, self.down.struct)
        for name in NORMS:
            weight: Tensor | None = getattr(self, name)
            setattr(struct, name, None if weight is None else weight.data_ptr())
        struct.hidden, struct.heads, struct.kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        struct.head_dim, struct.intermediate = config.head_dim, config.intermediate_size
        struct.activation, struct.window = ACTIVATIONS[config.activation], config.window(index) or 0
        struct.eps, struct.scale = config.norm_eps, config.scale
        return struct


Angles = tuple[Tensor, Tensor]
"""cos and sin of all positions, each [.., head_dim / 2]."""

POINTER, PLACE = sizeof(c_void_p), sizeof(interface.Place)


class Places:
    """By layer, where a pool's keys and values begin, and the angles of its positions."""

    def __init__(self, pool: BlockPool) -> None:
        self.structs = (interface.Place * len(pool.keys))()
        self.address = addressof(self.structs)
        for struct, keys, values in zip(self.structs, pool.keys, pool.values, strict=True):
            struct.keys, struct.values = keys.data_ptr(), values.data_ptr()
        self._angles: dict[bool, Angles] = {}

    def turn(self, angles: dict[bool, Angles], slides: Sequence[bool]) -> None:
        """angles: by "is a sliding layer"; slides: whether each is."""
        if self._angles and all(cos is self._angles[key][0] for key, (cos, _) in angles.items()):
            return
        self._angles = angles
        for struct, key in zip(self.structs, slides, strict=True):
            struct.cos, struct.sin = (table.data_ptr() for table in angles[key])


class NativeLayers:
    """Layers one behind the other. `ropes`: keyed by "is a sliding layer"."""

    def __init__(self, config: ModelConfig, layers: Sequence[NativeLayer], ropes: Mapping[bool, Rope]) -> None:
        self.config, self.layers, self.ropes = config, list(layers), ropes
        self.structs = [layer.struct(config, index) for index, layer in enumerate(layers)]
        self.addresses = array("q", [addressof(struct) for struct in self.structs])
        self.slides = [config.window(index) is not None for index in range(len(layers))]
        self._places: WeakKeyDictionary[BlockPool, Places] = WeakKeyDictionary()
        self._largest = max(map(byref, self.structs), key=lambda pointer: int(kernels().pl_layer_work(pointer, 1)))
        self._work = aligned(0)

    def plan(self, spans: Sequence[Span], pool: BlockPool, beside: Tensor | None = None) -> NativeSublayers:
        """One step over these rows; `beside` [T, H]: what layers of wide inputs read with the hidden states."""
        return NativeSublayers(self, spans, pool, beside)

    def places(self, pool: BlockPool, longest: int) -> Places:
        """For positions below `longest`. Asked for in every step, so they are looked up once: a pool's keys and values
        stay where they are, and angles move only as their tables grow."""
        found = self._places.get(pool)
        if found is None:
            found = self._places[pool] = Places(pool)
        found.turn({slides: rope.halves(longest) for slides, rope in self.ropes.items()}, self.slides)
        return found

    def work(self, rows: int) -> Tensor:
        """Memory for a step, kept for the next."""
        size: int = kernels().pl_layer_work(self._largest, rows)
        if size > self._work.shape[0]:
            self._work = aligned(size)
        return self._work


class NativeSublayers:
    """One step's batch as the kernels take it. Hidden states, fp32 and contiguous, are changed in place."""

    def __init__(self, layers: NativeLayers, spans: Sequence[Span], pool: BlockPool, beside: Tensor | None) -> None:
        self.layers, self.beside, self.library = layers, beside, kernels()
        self.rows = Histories(spans)
        self.places = layers.places(pool, max(span.end for span in spans))
        self.work = layers.work(self.rows.count)
        self.alive = pool  # like rows, places and beside: addresses point into it
        self.struct = self.rows.struct(self.work, beside)
        self.batch = byref(self.struct)

    def attend(self, index: int, hidden: Tensor) -> Tensor:
        at = self.places.structs[index]
        self.library.pl_attention(
            byref(self.layers.structs[index]), self.batch, at.keys, at.values, at.cos, at.sin, hidden.data_ptr()
        )
        return hidden

    def mlp(self, index: int, hidden: Tensor) -> Tensor:
        self.library.pl_mlp(byref(self.layers.structs[index]), self.batch, hidden.data_ptr())
        return hidden

    def through(self, layers: range, hidden: Tensor, keep: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        kept = {index: torch.empty_like(hidden) for index in keep if index in layers}
        addresses = array("q", bytes(POINTER * len(layers)))
        for index, states in kept.items():
            addresses[index - layers.start] = states.data_ptr()
        self.library.pl_layers(
            self.layers.addresses.buffer_info()[0] + layers.start * POINTER, self.places.address + layers.start * PLACE,
            len(layers), self.batch, hidden.data_ptr(), addresses.buffer_info()[0],
        )  # fmt: skip
        return hidden, kept

    def keep(self, hidden: Tensor) -> Tensor:
        return hidden.clone()


class Histories:
    """For each row: where its key goes, its position, and the slots of all that it attends to.

    Row i sees `prefix[i]` slots of its sequence's table and then `tail_length[i]` of its own tail: a chain is all
    prefix; a tree's node has what lies before the tree as prefix and its path from the root as tail. `table` and `tail`
    are addresses. Arrays and no tensors: a draft's step has one row, and takes no longer than a few tensors' making.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.slot, self.position, self.prefix, self.tail_length = array("i"), array("i"), array("i"), array("i")
        self.table, self.tail = array("q"), array("q")
        self.alive: list[Tensor | array[int]] = []  # what the addresses point into
        for span in spans:
            table = span.cache.slots32()
            self.alive.append(table)
            self.slot.extend(_slots(span, span.position))
            self.table.extend([table.data_ptr()] * span.count)
            if span.parents is None:
                self._chain(span)
            else:
                self._tree(span, span.parents)

    def _chain(self, span: Span) -> None:
        self.position.extend(range(span.position, span.end))
        self.prefix.extend(range(span.position + 1, span.end + 1))
        self.tail.extend([0] * span.count)
        self.tail_length.extend([0] * span.count)

    def _tree(self, span: Span, parents: Parents) -> None:
        own = paths(parents)[-span.count :]
        slots = _slots(span, span.base)
        tail = array("i", [slots[node] for path in own for node in path])
        self.alive.append(tail)
        at = tail.buffer_info()[0]
        for path in own:
            self.position.append(span.base - 1 + len(path))
            self.tail.append(at)
            self.tail_length.append(len(path))
            at += len(path) * tail.itemsize
        self.prefix.extend([span.base] * span.count)

    @property
    def count(self) -> int:
        return len(self.slot)

    def struct(self, work: Tensor, beside: Tensor | None) -> interface.Batch:
        arrays = (self.slot, self.position, self.table, self.prefix, self.tail, self.tail_length)
        addresses = (each.buffer_info()[0] for each in arrays)
        return interface.Batch(
            self.count, 0, *addresses, None if beside is None else beside.data_ptr(), work.data_ptr()
        )


def _slots(span: Span, first: int) -> list[int]:
    """Slots of positions `first` .. of the span's sequence, as far as the span goes."""
    blocks, size = span.cache.blocks, span.cache.pool.block_size
    return [blocks[at // size] * size + at % size for at in range(first, span.end)]
