"""The key/value cache: a pool of fixed-size blocks, block tables per sequence, reference counts, prefix reuse."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.model.config import ModelConfig
from paceline.native.memory import Arena

ROUND = 64  # attention reads key ranges in multiples of this; the pool ends on one


class CacheFull(PacelineError):
    """The pool has too few free blocks for what was asked."""


@dataclass(frozen=True)
class CacheUsage:
    """What a pool holds, in blocks and bytes."""

    blocks: int
    used: int
    reusable: int  # unreferenced, kept for their prefix until the room is needed
    bytes: int


class BlockPool:
    """Keys and values of `blocks` blocks of `block_size` positions, for every layer.

    keys[layer], values[layer]: [slots, kv_heads, head_dim]. A block is free, referenced, or unreferenced but kept for
    its prefix hash (least recently used goes first). Zero-filled once: attention masks stale slots, which must be
    finite.
    """

    def __init__(
        self, config: ModelConfig, blocks: int, device: torch.device, dtype: torch.dtype,
        block_size: int = 16, salt: str = "",
    ) -> None:  # fmt: skip
        self.block_size, self.device, self.dtype = block_size, device, dtype
        self.blocks = blocks
        slots = -(-blocks * block_size // ROUND) * ROUND + ROUND
        shape = (slots, config.num_kv_heads, config.head_dim)
        states = _zeros(2 * config.num_layers, shape, dtype, device)
        self.keys, self.values = states[::2], states[1::2]
        self.salt = salt.encode()
        self.references = [0] * blocks
        self._free = [True] * blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._free_count = blocks

    @staticmethod
    def bytes_per_block(config: ModelConfig, dtype: torch.dtype, block_size: int = 16) -> int:
        return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize

    def usage(self) -> CacheUsage:
        size = sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))
        return CacheUsage(self.blocks, self.blocks - self.available, len(self._reusable), size)

    @property
    def available(self) -> int:
        """Blocks that can be handed out now: free ones and those kept only for reuse."""
        return self._free_count + len(self._reusable)

    @property
    def unused(self) -> int:
        """Blocks that hold nothing."""
        return self._free_count

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def open(self, tokens: Sequence[int], room: int) -> SequenceCache:
        """A cache for a sequence that will hold up to `room` tokens, starting from the longest known prefix.

        The last token of `tokens` is never taken from the cache: its logits are wanted. Raises CacheFull.
        """
        shared = self._match(tokens)
        for block in shared:
            self._reference(block)
        cache = SequenceCache(self, shared, length=len(shared) * self.block_size, chain=self._chain_of(shared))
        try:
            cache.reserve(room)
        except CacheFull:
            cache.free()
            raise
        return cache

    def allocate(self, count: int, after: int | None) -> list[int]:
        """`count` blocks with one reference each, consecutive if that can be (`after`: preferably right behind it)."""
        if count > self.available:
            raise CacheFull(f"the cache has {self.available} free blocks of {self.block_size} tokens, {count} needed")
        blocks = self._run(count, after)
        for block in blocks:
            self._evict(block)
            self._reference(block)
        return blocks

    def release(self, block: int) -> None:
        """Drop one reference; the block stays reusable when it has a prefix hash."""
        self.references[block] -= 1
        if self.references[block] > 0:
            return
        if block in self._hash_of:
            self._reusable[block] = None
        else:
            self._free[block] = True
            self._free_count += 1

    def register(self, block: int, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Make a full, final block findable by its tokens and all before them; returns the chained hash."""
        digest = self._digest(parent, tokens)
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest
        return digest

    def forget(self, block: int) -> None:
        """A registered block is about to change: it no longer stands for its tokens."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def _digest(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        data = b",".join(str(t).encode() for t in tokens)
        return hashlib.blake2b(parent + data, key=self.salt[:64], digest_size=16).digest()

    def _match(self, tokens: Sequence[int]) -> list[int]:
        found: list[int] = []
        parent = b""
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            parent = self._digest(parent, tokens[start : start + self.block_size])
            block = self._block_of.get(parent)
            if block is None:
                break
            found.append(block)
        return found

    def _chain_of(self, shared: list[int]) -> list[bytes]:
        return [self._hash_of[block] for block in shared]

    def _reference(self, block: int) -> None:
        if self._free[block]:
            self._free[block] = False
            self._free_count -= 1
        self._reusable.pop(block, None)
        self.references[block] += 1

    def _evict(self, block: int) -> None:
        if block in self._reusable:
            del self._reusable[block]
            self.forget(block)
            self._free[block] = True
            self._free_count += 1

    def _run(self, count: int, after: int | None) -> list[int]:
        """First choice: free blocks right behind `after`; then the first free run; then any; then the reusable."""
        if after is not None and self._is_free_run(after + 1, count):
            return list(range(after + 1, after + 1 + count))
        length = 0
        for block in range(self.blocks):
            length = length + 1 if self._free[block] else 0
            if length == count:
                return list(range(block - count + 1, block + 1))
        free = [block for block in range(self.blocks) if self._free[block]][:count]
        return free + list(self._reusable)[: count - len(free)]

    def _is_free_run(self, start: int, count: int) -> bool:
        return start + count <= self.blocks and all(self._free[start : start + count])


@dataclass
class SequenceCache:
    """One sequence's block table. `length` positions are committed; appended rows beyond it are scratch."""

    pool: BlockPool
    blocks: list[int]
    length: int = 0
    chain: list[bytes] = field(default_factory=list)  # hash of each registered full block
    _table: Tensor | None = None
    _table32: Tensor | None = None
    _views: tuple[int, list[tuple[Tensor, Tensor]]] | None = None

    def reserve(self, tokens: int) -> None:
        """Own enough blocks for `tokens` positions. Raises CacheFull, changing nothing."""
        missing = self.pool.blocks_for(tokens) - len(self.blocks)
        if missing > 0:
            self.blocks += self.pool.allocate(missing, self.blocks[-1] if self.blocks else None)
            self._moved()

    def spare(self, wanted: int) -> int:
        """How many rows, at most `wanted`, can be appended after one more. Free blocks are taken if there are any, but
        none that is kept for its prefix."""
        size = self.pool.block_size
        missing = self.pool.blocks_for(self.length + 1 + wanted) - len(self.blocks)
        self.reserve((len(self.blocks) + min(missing, self.pool.unused)) * size)
        return min(wanted, len(self.blocks) * size - self.length - 1)

    def give_back(self, length: int, room: int) -> None:
        """Keep only the first `length` positions of a prefix hit and reserve own blocks for the rest of `room`.

        Raises CacheFull.
        """
        self.truncate(length)
        kept = self.pool.blocks_for(length)
        for block in self.blocks[kept:]:
            self.pool.release(block)
        del self.blocks[kept:]
        self._moved()
        self.reserve(room)
        if length % self.pool.block_size:
            self._own(kept - 1)

    def append(self, count: int) -> None:
        """Make the `count` positions behind `length` writable: reserved, and in blocks no one else reads."""
        self.reserve(self.length + count)
        first, last = self.length // self.pool.block_size, (self.length + count - 1) // self.pool.block_size
        for index in range(first, last + 1):
            self._own(index)

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep the appended `rows` (ascending offsets from `length`) as the next positions, in that order.

        `tokens` are the sequence's ids; blocks that they fill and that are committed are registered for reuse.
        """
        if list(rows) != list(range(len(rows))):
            self._gather([self.length + row for row in rows])
        self.length += len(rows)
        self._register(tokens)

    def truncate(self, length: int) -> None:
        """Forget committed positions from `length` on; their blocks stay reserved."""
        if length > self.length:
            raise ValueError(f"cannot truncate {self.length} positions to {length}")
        self.length = length
        del self.chain[length // self.pool.block_size :]

    @contextmanager
    def scratch(self, count: int) -> Iterator[None]:
        """Room for `count` rows that are never committed: whatever is appended inside is forgotten after."""
        length = self.length
        self.append(count)
        try:
            yield
        finally:
            self.length = length

    def fork(self) -> SequenceCache:
        """A second sequence that shares every committed block; the first to write copies."""
        shared = self.blocks[: self.pool.blocks_for(self.length)]
        for block in shared:
            self.pool._reference(block)
        return SequenceCache(self.pool, list(shared), self.length, list(self.chain))

    def free(self) -> None:
        # Last block first: an eviction then takes the end of a prefix before its beginning.
        for block in reversed(self.blocks):
            self.pool.release(block)
        self.blocks, self.length, self.chain = [], 0, []
        self._moved()

    def slots(self, length: int) -> slice | Tensor:
        """Slots of positions 0..length-1: a slice when the blocks are consecutive, else an index tensor.

        `length` may reach past the reserved blocks (attention reads whole buckets); what lies there is masked.
        """
        needed = self.pool.blocks_for(length)
        blocks = self.blocks[:needed]
        start = blocks[0]
        if blocks == list(range(start, start + len(blocks))) and start * self.pool.block_size + length <= self._end():
            return slice(start * self.pool.block_size, start * self.pool.block_size + length)
        return self.slot_table(length)

    def views(self, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        """Keys and values of positions 0..length-1 by layer, each [1, kv_heads, length, head_dim].

        Consecutive blocks are seen in place, and their views last until the table or the length changes; scattered
        ones are gathered at each call.
        """
        slots = self.slots(length)
        if not isinstance(slots, slice):
            return lambda layer: (self._look(self.pool.keys[layer][slots]), self._look(self.pool.values[layer][slots]))
        if self._views is None or self._views[0] != length:
            pairs = zip(self.pool.keys, self.pool.values, strict=True)
            self._views = (length, [(self._look(k[slots]), self._look(v[slots])) for k, v in pairs])
        return self._views[1].__getitem__

    @staticmethod
    def _look(rows: Tensor) -> Tensor:
        return rows.transpose(0, 1).unsqueeze(0)

    def slot_table(self, length: int) -> Tensor:
        """Slots of positions 0..length-1 as int64 [length] on the CPU; positions not reserved point at slot 0."""
        if self._table is None:
            starts = torch.tensor(self.blocks, dtype=torch.int64)[:, None] * self.pool.block_size
            self._table = (starts + torch.arange(self.pool.block_size)).flatten()
        table = self._table[:length]
        if table.shape[0] < length:
            table = torch.cat((table, table.new_zeros(length - table.shape[0])))
        return table

    def slots32(self) -> Tensor:
        """Slots of all reserved positions as int32, for the native kernels."""
        if self._table32 is None:
            self._table32 = self.slot_table(len(self.blocks) * self.pool.block_size).int()
        return self._table32

    def _moved(self) -> None:
        self._table, self._table32, self._views = None, None, None

    def _end(self) -> int:
        return self.pool.keys[0].shape[0]

    def _own(self, index: int) -> None:
        """Copy on write: a block that others read, or that stands for a registered prefix, must not change."""
        block = self.blocks[index]
        if self.pool.references[block] == 1:
            if len(self.chain) <= index:
                self.pool.forget(block)
            return
        size = self.pool.block_size
        fresh = self.pool.allocate(1, None)[0]
        for store in (*self.pool.keys, *self.pool.values):
            store[fresh * size : (fresh + 1) * size] = store[block * size : (block + 1) * size]
        self.pool.release(block)
        self.blocks[index] = fresh
        self._moved()

    def _gather(self, positions: list[int]) -> None:
        """Move rows at `positions` to the positions right behind `length` (an accepted branch of a tree)."""
        table = self.slot_table(self.pool.block_size * len(self.blocks)).to(self.pool.device)
        source = table[torch.tensor(positions, device=self.pool.device)]
        target = table[self.length : self.length + len(positions)]
        for store in (*self.pool.keys, *self.pool.values):
            store[target] = store[source]

    def _register(self, tokens: Sequence[int]) -> None:
        size = self.pool.block_size
        for index in range(len(self.chain), min(self.length, len(tokens)) // size):
            parent = self.chain[-1] if self.chain else b""
            self.chain.append(self.pool.register(self.blocks[index], parent, tokens[index * size : (index + 1) * size]))


def _zeros(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """`count` tensors of zeros. On the CPU as untouched pages, so that a large pool costs memory only where it is used,
    and huge ones: sequences lie scattered, and a batch of them waited for page tables a quarter of its attention."""
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]
    size = math.prod(shape) * dtype.itemsize
    arena = Arena(count * Arena.rounded(size))
    return [arena.take(size).view(dtype).view(shape) for _ in range(count)]
