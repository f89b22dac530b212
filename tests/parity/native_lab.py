"""Small random decoders on the native kernels, one for each thing that a layer may have, and ways to run their rows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.cache.pool import BlockPool, SequenceCache
from paceline.cache.tree import Parents
from paceline.device import Backend
from paceline.model.attention import Span
from paceline.model.config import ModelConfig, RopeConfig
from paceline.model.decoder import Batch, Decoder
from paceline.native import interface
from paceline.native.library import library, why_missing
from paceline.native.packed import Format, Packed, pack
from paceline.weights.assemble import assemble
from paceline.weights.convert import convert

NATIVE = Backend(torch.device("cpu"), "int8", torch.float32, native=True)
needs_kernels = pytest.mark.skipif(library() is None, reason=f"native kernels: {why_missing()}")

VOCAB, WINDOW = 211, 24
PLAIN = ModelConfig(
    family="llama", vocab_size=VOCAB, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=96, max_positions=256,
)  # fmt: skip
CONFIGS = {
    "plain": PLAIN,
    "biases": replace(
        PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True, num_heads=6, head_dim=32, tie_embeddings=False
    ),
    "norms of queries and keys": replace(PLAIN, qk_norm=True, head_dim=48, num_heads=2, norm_eps=1e-3),
    "windows and norms behind": replace(
        PLAIN, family="gemma3_text", num_layers=3, activation="gelu_tanh", qk_norm=True, post_norms=True,
        sliding_window=WINDOW, sliding_layers=(True, False, True), rope=RopeConfig(theta=5000.0, scaling="linear",
        factor=8.0), local_rope=RopeConfig(theta=100.0), embedding_scale=8.0, attention_scale=0.2, head_dim=32,
    ),
    "twenty heads on one": replace(PLAIN, num_heads=20, num_kv_heads=1),
    "wide heads": replace(PLAIN, num_heads=2, num_kv_heads=1, head_dim=144, sliding_window=7,
        sliding_layers=(False, True)),
}  # fmt: skip


@dataclass
class Noise:
    """Weights under Hugging Face names, each drawn from its name."""

    config: ModelConfig
    quantized: bool = False
    gemma_norm_offset: bool = False

    def __contains__(self, name: str) -> bool:
        if name == "lm_head.weight":
            return not self.config.tie_embeddings
        if not name.endswith(".bias"):
            return True
        has = {"q_proj": self.config.qkv_bias, "o_proj": self.config.output_bias}
        return next((there for part, there in has.items() if part in name), ".mlp." in name and self.config.mlp_bias)

    def stored(self, name: str) -> None:
        return None

    def get(self, name: str) -> Tensor:
        module, _, kind = name.rpartition(".")
        out, width = self._shape(module.rpartition(".")[2])
        drawn = torch.Generator().manual_seed(crc32(name.encode()))
        if kind == "bias":
            return 0.3 * torch.randn(out, generator=drawn)
        if width == 0:
            return 1 + 0.3 * torch.randn(out, generator=drawn)
        return torch.randn(out, width, generator=drawn) / math.sqrt(width)

    def _shape(self, module: str) -> tuple[int, int]:
        """Outputs and inputs; a norm has none of the latter."""
        c = self.config
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        shapes = {
            "q_proj": (queries, c.hidden_size), "k_proj": (keys, c.hidden_size), "v_proj": (keys, c.hidden_size),
            "o_proj": (c.hidden_size, queries), "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size), "down_proj": (c.hidden_size, c.intermediate_size),
            "embed_tokens": (c.vocab_size, c.hidden_size), "lm_head": (c.vocab_size, c.hidden_size),
            "q_norm": (c.head_dim, 0), "k_norm": (c.head_dim, 0),
        }  # fmt: skip
        return shapes.get(module, (c.hidden_size, 0))


@cache
def native(name: str) -> Decoder:
    """The decoder of CONFIGS[name] on the kernels."""
    config = CONFIGS[name]
    return assemble(config, dict(convert(Noise(config), NATIVE)), NATIVE)


# Where the fp16 numbers of a stored block lie.
_HALVES = dict.fromkeys((Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K), (0, 2)) | {Format.Q6_K: (208,)}


def random_matrix(form: Format, rows: int, columns: int, seed: int = 0) -> Packed:
    """Every level and scale that the format has, at random."""
    drawn = np.random.default_rng(seed)
    blocks = rows * columns // form.block_columns
    stored = drawn.integers(0, 256, (blocks, form.stored_bytes(1, form.block_columns)), dtype=np.uint8)
    for offset in _HALVES.get(form, (0,)):
        halves = drawn.normal(scale=0.01, size=blocks).astype(np.float16)
        stored[:, offset : offset + 2] = halves.view(np.uint8).reshape(blocks, 2)
    return pack(stored.reshape(rows, -1), form, rows, columns)


def prompt(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def dirty_pool(
    config: ModelConfig, blocks: int = 48, block_size: int = 16, dtype: torch.dtype = torch.float16
) -> BlockPool:
    """A pool whose unwritten slots hold large numbers: reading one that is not in a row's history shows."""
    pool = BlockPool(config, blocks, torch.device("cpu"), dtype, block_size)
    drawn = torch.Generator().manual_seed(9)
    for store in (*pool.keys, *pool.values):
        store.copy_(30 * torch.randn(store.shape, generator=drawn))
    return pool


Place = Callable[[BlockPool, int], SequenceCache]


def in_one_piece(pool: BlockPool, room: int) -> SequenceCache:
    return pool.open([], room)


def in_pieces(pool: BlockPool, room: int) -> SequenceCache:
    """Blocks in no order at all, other sequences' between them."""
    needed = pool.blocks_for(room)
    single = [pool.open([], 1) for _ in range(2 * needed)]
    random.Random(needed).shuffle(single)
    cache = SequenceCache(pool, [each.blocks[0] for each in single[:needed]])
    for each in single[needed:]:
        each.free()
    assert any(b != a + 1 for a, b in zip(cache.blocks, cache.blocks[1:], strict=False))
    return cache


def opened(
    decoder: Decoder, tokens: Sequence[int], *, room: int = 80, place: Place = in_one_piece,
    pool: BlockPool | None = None,
) -> SequenceCache:  # fmt: skip
    """A cache in which `tokens` are committed, and room for as many rows behind them."""
    cache = place(pool or dirty_pool(decoder.config), len(tokens) + room)
    if tokens:
        rows(decoder, cache, tokens)
        cache.commit(range(len(tokens)), [])
    return cache


def rows(
    decoder: Decoder, cache: SequenceCache, tokens: Sequence[int], parents: Parents | None = None, first: int = 0
) -> Tensor:
    """Hidden states of `tokens` behind the committed ones, which stay as they are; of a tree, from node `first` on."""
    (found,) = together(decoder, [(cache, tokens, parents, first)])
    return found


Part = tuple[SequenceCache, Sequence[int], Parents | None, int]


def together(decoder: Decoder, parts: Sequence[Part]) -> list[Tensor]:
    """The same for several sequences in one forward."""
    spans, fed = list[Span](), list[int]()
    for sequence, tokens, parents, first in parts:
        sequence.append(len(tokens))
        spans.append(Span(sequence, len(fed), len(tokens) - first, sequence.length + first, parents))
        fed += tokens[first:]
    hidden, _ = decoder.forward(Batch(torch.tensor(fed), spans, parts[0][0].pool))
    return [hidden[span.start : span.start + span.count] for span in spans]


def random_tree(nodes: int, seed: int, reach: int = 9) -> Parents:
    chance = random.Random(seed)
    return tuple(chance.randint(max(-1, node - reach), node - 1) for node in range(nodes))


def each_row(x: Tensor) -> list[Tensor]:
    """Rows [T, ..] as T matrices of one row."""
    return [x[i : i + 1] for i in range(len(x))]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of fp32 tensors; zeros of either sign differ."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Another instruction set for a while."""
    before = interface.backend()
    assert interface.kernels().pl_use_backend(name.encode()) == 0
    try:
        yield
    finally:
        interface.kernels().pl_use_backend(before.encode())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """The kernels' threads for a while."""
    assert interface.kernels().pl_set_threads(count) == count
    try:
        yield
    finally:
        interface.kernels().pl_set_threads(1)
