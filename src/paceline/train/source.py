"""Where a trainer's passages come from: shards on disk, or the target itself as the training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from paceline.train.capture import HELD_OUT_SEQUENCES, Capture
from paceline.train.responses import Response
from paceline.train.shards import HELD_OUT, Passage, Shards

GROUP = 64  # conversations that are captured at once where nothing is stored


class Source(Protocol):
    """Passages in units that are read whole, so that a run can be resumed inside one. A unit's content is fixed."""

    @property
    def units(self) -> Sequence[int]: ...
    def read(self, unit: int) -> list[Passage]: ...
    def held_out(self) -> list[Passage]:
        """Never among `units`."""
        ...


@dataclass(frozen=True)
class Stored:
    """taps: those that are wanted; the shards may hold more."""

    shards: Shards
    taps: Sequence[int]

    @property
    def units(self) -> Sequence[int]:
        return self.shards.training

    def read(self, unit: int) -> list[Passage]:
        return self._read(unit)

    def held_out(self) -> list[Passage]:
        return self._read(HELD_OUT)

    def _read(self, number: int) -> list[Passage]:
        passages, stored = self.shards.read(number), self.shards.index.taps
        if list(self.taps) == stored:
            return passages
        columns = [stored.index(tap) for tap in self.taps]
        return [replace(each, taps=each.taps[:, columns]) for each in passages]


@dataclass(frozen=True)
class Streamed:
    """The target reads the conversations anew in every epoch: nothing is stored, each token costs its forward."""

    capture: Capture
    responses: Sequence[Response]

    @property
    def units(self) -> Sequence[int]:
        return range(-(-(len(self.responses) - HELD_OUT_SEQUENCES) // GROUP))

    def read(self, unit: int) -> list[Passage]:
        first = HELD_OUT_SEQUENCES + unit * GROUP
        return list(self.capture.passages(self.responses[first : first + GROUP]))

    def held_out(self) -> list[Passage]:
        return self._held_out

    @cached_property
    def _held_out(self) -> list[Passage]:
        return list(self.capture.passages(self.responses[:HELD_OUT_SEQUENCES]))
