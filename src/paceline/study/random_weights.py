"""Models of random weights in the kernels' own layout: what a step costs does not depend on what the weights are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.device import Backend
from paceline.model.config import ModelConfig
from paceline.native.assemble import assemble_native
from paceline.native.decoder import NativeDecoder
from paceline.native.memory import Arena
from paceline.native.packed import Format, Packed, packed_bytes, quantize

FORMATS = {"int8": Format.Q8_0, "int4": Format.Q4_1}
"""Of a layer's matrices by precision; embedding and head are 8 bits in both, as `weights/convert.py` has them."""
Size = tuple[int, int]


def matrices(config: ModelConfig) -> Iterator[tuple[str, Size]]:
    """Names and sizes [out, in] of the layers' matrices, as `assemble_native` wants them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for at in (f"layers.{index}." for index in range(config.num_layers)):
        yield at + "qkv.0", (heads, hidden)
        yield at + "qkv.1", (kv_heads, hidden)
        yield at + "qkv.2", (kv_heads, hidden)
        yield at + "output.0", (hidden, heads)
        yield at + "up.0", (inner, hidden)
        yield at + "up.1", (inner, hidden)
        yield at + "down.0", (hidden, inner)


def streamed_bytes(config: ModelConfig, precision: str, position: int) -> int:
    """What one step of one row reads from memory: layers, output head, keys and values (fp16). Norms and the one row
    of the embedding are left out."""
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2 * (position + 1)
    return weight_bytes(config, precision) + cached


def weight_bytes(config: ModelConfig, precision: str) -> int:
    """Of the layers and the output head, which in a model for timing is the embedding, too."""
    layers = sum(packed_bytes(FORMATS[precision], *size) for _, size in matrices(config))
    return layers + packed_bytes(Format.Q8_0, config.vocab_size, config.hidden_size)


def random_decoder(config: ModelConfig, precision: str) -> NativeDecoder:
    """Each size of matrix is drawn once and copied to memory of its own wherever it occurs: a step streams them all.

    An embedding that is not the head costs a step one row, so it gets no memory. Raises PacelineError without kernels.
    """
    layers = dict(matrices(config))
    head = (config.vocab_size, config.hidden_size)
    sizes = [packed_bytes(FORMATS[precision], *size) for size in layers.values()]
    arena = Arena(sum(map(Arena.rounded, (*sizes, packed_bytes(Format.Q8_0, *head)))))
    drawn = {size: _draw(size, FORMATS[precision]) for size in dict.fromkeys(layers.values())}
    tensors: dict[str, Tensor | Packed] = {name: _copy(drawn[size], arena) for name, size in layers.items()}
    tensors["embedding.0"] = _copy(_draw(head, Format.Q8_0), arena)
    norm = torch.ones(config.hidden_size)
    for index in range(config.num_layers):
        tensors |= {f"layers.{index}.attention_norm.weight": norm, f"layers.{index}.mlp_norm.weight": norm}
    tensors["final_norm.weight"] = norm
    backend = Backend(torch.device("cpu"), "int4" if precision == "int4" else "int8", torch.float32, native=True)
    return assemble_native(config, tensors, backend, None)


def _draw(size: Size, format: Format) -> Packed:
    """Normal, of a scale that keeps hidden states finite through any depth."""
    generator = torch.Generator().manual_seed(0)
    return quantize(torch.randn(size, generator=generator) * 0.1 * size[1] ** -0.5, format)


def _copy(packed: Packed, arena: Arena) -> Packed:
    return Packed(packed.format, packed.rows, packed.columns, arena.take(packed.data.numel()).copy_(packed.data))
