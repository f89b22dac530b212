"""The block pool against a model of itself: what a sequence reads is what was committed to it, and no block is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from paceline.cache.pool import BlockPool, CacheFull, SequenceCache
from paceline.model.config import ModelConfig

CONFIG = ModelConfig(
    family="llama", vocab_size=9, hidden_size=4, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=2,
    intermediate_size=4, max_positions=64,
)  # fmt: skip
CPU, SIZE, BLOCKS = torch.device("cpu"), 4, 12


def value(tokens: list[int], layer: int) -> float:
    """What a real prefill would leave at the last position: a function of the whole history."""
    return float(hash((tuple(tokens), layer)) % 100_003)


def write(cache: SequenceCache, tokens: list[int], first: int) -> None:
    """Rows for tokens[first:] at their positions, as a forward over them would write."""
    table = cache.slot_table(len(tokens))
    for position in range(first, len(tokens)):
        for layer, (keys, values) in enumerate(zip(cache.pool.keys, cache.pool.values, strict=True)):
            keys[table[position]] = value(tokens[: position + 1], layer)
            values[table[position]] = -value(tokens[: position + 1], layer)


def check(cache: SequenceCache, tokens: list[int]) -> None:
    """Compare with a fresh prefill of the committed tokens, through both ways of reading."""
    assert cache.length == len(tokens)
    if not tokens:
        return
    for layer in range(CONFIG.num_layers):
        want = [value(tokens[: i + 1], layer) for i in range(len(tokens))]
        keys, values = cache.views(len(tokens))(layer)
        assert keys[0, 0, :, 0].tolist() == want
        assert values[0, 0, :, 1].tolist() == [-w for w in want]
        assert cache.pool.keys[layer][cache.slot_table(len(tokens)), 0, 0].tolist() == want


tokens_of = st.lists(st.integers(0, 2), min_size=1, max_size=9)


class PoolMachine(RuleBasedStateMachine):
    """Random append, commit of a path, truncate, scratch, share, free; few token ids, so that prefixes meet."""

    caches = Bundle("caches")

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(CONFIG, BLOCKS, CPU, torch.float32, SIZE)
        self.held: dict[int, tuple[SequenceCache, list[int]]] = {}
        self.past: list[list[int]] = [[0]]
        self.next = 0

    def keep(self, cache: SequenceCache, tokens: list[int]) -> int:
        self.next += 1
        self.held[self.next] = (cache, tokens)
        self.past.append(list(tokens))
        return self.next

    @rule(target=caches, data=st.data(), more=tokens_of)
    def open_what_was_seen_before(self, data: st.DataObject, more: list[int]) -> int:
        """Where a stale prefix hash would show."""
        return self.open(data.draw(st.sampled_from(self.past)) + more)

    @rule(name=caches)
    def truncate_into_a_full_block_and_write_anew(self, name: int) -> None:
        if name in self.held and len(self.held[name][1]) >= SIZE:
            cache, tokens = self.held[name]
            del tokens[SIZE - 1 :]
            cache.truncate(len(tokens))
            try:
                cache.append(2)
            except CacheFull:
                return
            tokens += [2, 1]
            write(cache, tokens, len(tokens) - 2)
            cache.commit(range(2), tokens)

    @rule(target=caches, prompt=tokens_of)
    def open_new(self, prompt: list[int]) -> int:
        return self.open(prompt)

    def open(self, prompt: list[int]) -> int:
        try:
            cache = self.pool.open(prompt, len(prompt))
        except CacheFull:
            return -1
        known = cache.length
        assert known % SIZE == 0
        assert known < len(prompt)
        check(cache, prompt[:known])
        cache.append(len(prompt) - known)
        write(cache, prompt, known)
        cache.commit(range(len(prompt) - known), prompt)
        return self.keep(cache, list(prompt))

    @rule(name=caches, drafted=tokens_of, data=st.data())
    def append_and_commit_a_path(self, name: int, drafted: list[int], data: st.DataObject) -> None:
        """Rows off the path are written too, then the path moves to contiguous positions."""
        if name not in self.held:
            return
        cache, tokens = self.held[name]
        rows = sorted(data.draw(st.sets(st.integers(0, len(drafted) - 1))))
        try:
            cache.append(len(drafted))
        except CacheFull:
            return
        path = [drafted[row] for row in rows]
        table = cache.slot_table(len(tokens) + len(drafted))
        for row in range(len(drafted)):
            grown = tokens + path[: rows.index(row) + 1] if row in rows else [-1]
            for layer, (keys, values) in enumerate(zip(self.pool.keys, self.pool.values, strict=True)):
                keys[table[len(tokens) + row]] = value(grown, layer)
                values[table[len(tokens) + row]] = -value(grown, layer)
        tokens += path
        cache.commit(rows, tokens)
        self.past.append(list(tokens))

    @rule(name=caches, share=st.floats(0, 1))
    def truncate(self, name: int, share: float) -> None:
        if name in self.held:
            cache, tokens = self.held[name]
            del tokens[int(len(tokens) * share) :]
            cache.truncate(len(tokens))

    @rule(name=caches, count=st.integers(1, 6))
    def scratch(self, name: int, count: int) -> None:
        if name in self.held:
            cache, tokens = self.held[name]
            try:
                with cache.scratch(count):
                    table = cache.slot_table(len(tokens) + count)
                    for store in (*self.pool.keys, *self.pool.values):
                        store[table[len(tokens) :]] = 7.0
            except CacheFull:
                return
            assert cache.length == len(tokens)

    @rule(target=caches, name=caches)
    def share(self, name: int) -> int:
        if name not in self.held:
            return -1
        cache, tokens = self.held[name]
        return self.keep(cache.fork(), list(tokens))

    @rule(name=consumes(caches))
    def free(self, name: int) -> None:
        if name in self.held:
            self.held.pop(name)[0].free()

    @invariant()
    def everyone_reads_their_own(self) -> None:
        for cache, tokens in getattr(self, "held", {}).values():
            check(cache, tokens)

    @invariant()
    def blocks_are_counted(self) -> None:
        if hasattr(self, "pool"):
            used = {block for cache, _ in self.held.values() for block in cache.blocks}
            assert self.pool.available == BLOCKS - len(used)
            references = [sum(cache.blocks.count(b) for cache, _ in self.held.values()) for b in range(BLOCKS)]
            assert self.pool.references == references


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_full_pool_says_how_much_it_has() -> None:
    pool = BlockPool(CONFIG, 2, CPU, torch.float32, SIZE)
    with pytest.raises(CacheFull, match="has 2 free blocks of 4 tokens, 3 needed"):
        pool.open([1, 2], 9)
    assert pool.available == 2


def test_prefixes_are_reused_until_the_room_is_needed() -> None:
    pool = BlockPool(CONFIG, 3, CPU, torch.float32, SIZE)
    first = pool.open(list(range(8)), 8)
    first.append(8)
    first.commit(range(8), list(range(8)))
    first.free()
    assert (pool.usage().used, pool.usage().reusable) == (0, 2)
    again = pool.open([*range(8), 8], 9)
    assert again.length == 8
    again.free()
    pool.open([5, 5], 12).free()
    assert pool.open([*range(8), 8], 9).length == 0


def test_another_salt_finds_nothing() -> None:
    one, other = (BlockPool(CONFIG, 3, CPU, torch.float32, SIZE, salt) for salt in ("a", "b"))
    assert one._digest(b"", [1, 2, 3, 4]) != other._digest(b"", [1, 2, 3, 4])
