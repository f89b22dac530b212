"""Who runs in the next step: admission between steps, prompt chunks at fixed boundaries, a budget of rows."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from paceline.cache.pool import BlockPool, CacheFull
from paceline.propose.base import Proposer
from paceline.types import Sequence


@dataclass(frozen=True)
class Work:
    """One sequence's part of a step: its next `count` tokens; `samples` when they reach its last one."""

    sequence: Sequence
    count: int
    samples: bool


@dataclass
class Scheduler:
    """A request's whole room in the cache is reserved when it is admitted, so that none is ever evicted half-way.

    Prompt chunks end at multiples of `prefill_chunk` of the position, whatever else runs. `max_rows` bounds the prompt
    tokens of a step (at least one chunk always runs).
    """

    pool: BlockPool
    proposer: Proposer
    max_batch: int
    prefill_chunk: int
    max_rows: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    def schedule(self) -> list[Work]:
        self._admit()
        work, rows = [], 0
        for sequence in self.running:
            chunk = self._chunk(sequence)
            if chunk.samples and chunk.count == 1:
                work.append(chunk)
            elif rows == 0 or rows + chunk.count <= self.max_rows:
                rows += chunk.count
                work.append(chunk)
        return work

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give its blocks back."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        try:
            if sequence in self.running:
                self.running.remove(sequence)
                self.proposer.close(sequence)
        finally:
            if sequence.cache is not None:
                sequence.cache.free()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            sequence = self.waiting[0]
            try:
                self._open(sequence)
            except CacheFull:
                return  # `Engine.add` refuses what could never fit, so running requests will make room
            self.waiting.popleft()
            sequence.admitted_at = time.perf_counter()
            sequence.stats.cached_tokens = sequence.committed
            self.running.append(sequence)

    def _open(self, sequence: Sequence) -> None:
        """Blocks for the request and its place in the proposer, or CacheFull and neither."""
        sequence.cache = self.pool.open(sequence.tokens, sequence.room)
        usable = self.proposer.open(sequence)
        if usable == sequence.cache.length:
            return
        try:
            sequence.cache.give_back(usable, sequence.room)
        except CacheFull:
            self.proposer.close(sequence)
            sequence.cache.free()
            raise

    def _chunk(self, sequence: Sequence) -> Work:
        begin, end = sequence.committed, len(sequence.tokens)
        boundary = (begin // self.prefill_chunk + 1) * self.prefill_chunk
        if end <= boundary:
            return Work(sequence, end - begin, samples=True)
        return Work(sequence, boundary - begin, samples=False)
