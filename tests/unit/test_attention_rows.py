"""A row's attention has the same bits however many rows are computed with it; both kernels agree."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest
import torch
from torch import Tensor

from paceline.cache.pool import BlockPool, SequenceCache
from paceline.cache.tree import paths
from paceline.model.attention import PaddedAttention, RowInvariantAttention, Span
from paceline.model.config import ModelConfig

CPU = torch.device("cpu")
LENGTH = 1100  # past the 64-position buckets, and past the 512-key blocks of PyTorch's kernel, twice
WINDOW = 100
FULL, SLIDING = 0, 1  # layers
HEADS = [(4, 4, 64), (4, 2, 128), (9, 3, 64), (4, 1, 256), (12, 2, 128), (14, 2, 64), (2, 1, 256), (3, 1, 128)]
COUNTS = [*range(1, 20), 31, 32, 33, 34, 47, 64, 65, 130]
STARTS = [0, 1, 50, 63, 64, 440, 509, 512, 900]
REACH = [position for start in STARTS for position in range(start, start + max(COUNTS))]


@cache
def config_of(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        family="llama", vocab_size=8, hidden_size=heads * head_dim, num_layers=2, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, intermediate_size=8, max_positions=4096,
        sliding_window=WINDOW, sliding_layers=(False, True),
    )  # fmt: skip


class Filled:
    """One sequence of LENGTH positions with random keys, values and queries; every other slot of the pool is stale."""

    def __init__(self, shape: tuple[int, int, int], *, scattered: bool) -> None:
        self.config = config_of(*shape)
        self.pool = BlockPool(self.config, 160, CPU, torch.float32)
        random = torch.Generator().manual_seed(0)
        for store in (*self.pool.keys, *self.pool.values):
            store.normal_(generator=random, std=20.0)
        self.cache = scattered_cache(self.pool) if scattered else self.pool.open([], room=LENGTH)
        slots = self.cache.slot_table(LENGTH)
        for store in (*self.pool.keys, *self.pool.values):
            store[slots] = torch.randn(LENGTH, *store.shape[1:], generator=random)
        self.queries = torch.randn(LENGTH, self.config.num_heads, self.config.head_dim, generator=random)
        self.saved: list[tuple[Tensor, Tensor, Tensor]] = []

    def restore(self) -> None:
        for store, slots, rows in self.saved:
            store[slots] = rows
        self.saved.clear()

    def attend(self, layer: int, pieces: Iterable[tuple[int, int]], kind: type = RowInvariantAttention) -> Tensor:
        """One call for `(position, count)` pieces, as a flat batch."""
        spans, rows, at = [], [], 0
        for position, count in pieces:
            spans.append(Span(self.cache, at, count, position))
            rows.append(self.queries[position : position + count])
            at += count
        result: Tensor = kind(self.config, spans, CPU)(layer, torch.cat(rows), self.pool)
        return result

    def alone(self, layer: int) -> Tensor:
        """Rows computed by themselves, at their positions; those out of REACH are left zero."""
        rows = torch.zeros(LENGTH, self.config.num_heads * self.config.head_dim)
        for position in set(REACH):
            rows[position] = self.attend(layer, [(position, 1)])[0]
        return rows


def scattered_cache(pool: BlockPool) -> SequenceCache:
    """Consecutive in places only: another sequence grows in between now and then."""
    cache, other = pool.open([], room=1), pool.open([], room=1)
    for room in range(16, LENGTH + 16, 16):
        cache.reserve(room)
        if room % 48 == 0:
            other.reserve(room // 3)
    assert isinstance(cache.slots(LENGTH), Tensor)
    return cache


@pytest.mark.parametrize("layer", [FULL, SLIDING])
@pytest.mark.parametrize("shape", HEADS)
def test_rows_have_the_same_bits_in_any_company(shape: tuple[int, int, int], layer: int) -> None:
    assert_rows_invariant(Filled(shape, scattered=False), layer, STARTS, COUNTS)


@pytest.mark.parametrize("shape", [(9, 3, 64), (12, 2, 128)])
def test_rows_have_the_same_bits_in_scattered_blocks(shape: tuple[int, int, int]) -> None:
    assert_rows_invariant(Filled(shape, scattered=True), FULL, [1, 63, 509], COUNTS[::2])


@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 1, 256)])
def test_rows_have_the_same_bits_with_two_threads(shape: tuple[int, int, int]) -> None:
    filled = Filled(shape, scattered=False)
    alone = filled.alone(FULL)
    torch.set_num_threads(2)
    for count in (1, 2, 3, 5, 8, 33):
        assert torch.equal(filled.attend(FULL, [(500, count)]), alone[500 : 500 + count])


def assert_rows_invariant(filled: Filled, layer: int, starts: Iterable[int], counts: Iterable[int]) -> None:
    alone, counts = filled.alone(layer), list(counts)
    for start in starts:
        for count in counts:
            together = filled.attend(layer, [(start, count)])
            different = (together != alone[start : start + count]).any(dim=1).nonzero().flatten().tolist()
            assert not different, f"{count} rows from {start}: rows {different} differ from the same rows alone"


@pytest.mark.parametrize("shape", HEADS)
def test_scattered_blocks_give_the_bits_of_contiguous_ones(shape: tuple[int, int, int]) -> None:
    for layer in (FULL, SLIDING):
        together = [Filled(shape, scattered=s).attend(layer, [(490, 40)]) for s in (False, True)]
        assert torch.equal(*together)


@pytest.mark.parametrize("shape", HEADS)
def test_ragged_batch_gives_the_bits_of_single_sequences(shape: tuple[int, int, int]) -> None:
    filled = Filled(shape, scattered=False)
    pieces = [(0, 5), (60, 9), (511, 3), (700, 1), (3, 1), (1000, 70)]
    for layer in (FULL, SLIDING):
        single = torch.cat([filled.attend(layer, [piece]) for piece in pieces])
        assert torch.equal(filled.attend(layer, pieces), single)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("shape", [(9, 3, 64), (12, 2, 128), (2, 1, 256)])
def test_a_trees_rows_have_the_bits_of_their_branches_alone(shape: tuple[int, int, int], scattered: bool) -> None:
    """Also across a boundary of 64 positions, which some branches pass and others do not."""
    parents = (-1, 0, 0, 1, 1, 2, 2, 3, 5, 5, 8, 4, 10, 0, 13, 14, 15, 16)
    filled = Filled(shape, scattered=scattered)
    base, pool, slots = 509, filled.pool, filled.cache.slot_table(LENGTH)
    span = Span(filled.cache, 0, len(parents), base, parents)
    rows = filled.queries[base : base + len(parents)]
    together = [RowInvariantAttention(filled.config, [span], CPU)(layer, rows, pool) for layer in (FULL, SLIDING)]
    for path in paths(parents):
        for store in (*pool.keys, *pool.values):  # the branch where a chain would have it
            branch = store[slots[base + torch.tensor(path)]]
            saved, target = store[slots[base : base + len(path)]], slots[base : base + len(path)]
            store[target] = branch
            filled.saved.append((store, target, saved))
        for layer in (FULL, SLIDING):
            chain = Span(filled.cache, 0, len(path), base)
            q = filled.queries[base + torch.tensor(path)]
            alone = RowInvariantAttention(filled.config, [chain], CPU)(layer, q, pool)
            assert torch.equal(together[layer][list(path)], alone)
        filled.restore()


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("shape", HEADS)
def test_padded_attention_agrees(shape: tuple[int, int, int], scattered: bool) -> None:
    filled = Filled(shape, scattered=scattered)
    pieces = [(0, 5), (60, 9), (700, 1), (3, 1), (500, 40)]
    for layer in (FULL, SLIDING):
        rows = filled.attend(layer, pieces)
        padded = filled.attend(layer, pieces, PaddedAttention)
        assert (rows - padded).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", [RowInvariantAttention, PaddedAttention])
@pytest.mark.parametrize("shape", HEADS)
def test_against_the_definition(shape: tuple[int, int, int], kind: type) -> None:
    """softmax(q k / sqrt(d)) v in fp64 over the visible positions, one row and head at a time."""
    filled = Filled(shape, scattered=True)
    heads, kv_heads, dim = shape
    table = filled.cache.slot_table(LENGTH)
    for layer, window in ((FULL, LENGTH), (SLIDING, WINDOW)):
        keys, values = (store[layer][table].double() for store in (filled.pool.keys, filled.pool.values))
        got = filled.attend(layer, [(98, 5), (510, 4)], kind).view(9, heads, dim)
        for row, position in enumerate([*range(98, 103), *range(510, 514)]):
            first = max(0, position + 1 - window)
            for head in range(heads):
                of = head * kv_heads // heads
                scores = keys[first : position + 1, of] @ filled.queries[position, head].double() * dim**-0.5
                expected = scores.softmax(0) @ values[first : position + 1, of]
                assert (got[row, head] - expected).abs().max() < 1e-5
