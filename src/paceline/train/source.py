"""Where a trainer's passages come from: shards on disk, or the target itself as the training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from paceline.train.capture import Capture
from paceline.train.responses import Response
from paceline.train.shards import HELD_OUT, Passage, Shards
from paceline.train.split import Split

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
        return range(-(-len(self._training) // GROUP))

    def read(self, unit: int) -> list[Passage]:
        return list(self.capture.passages(self._training[unit * GROUP : (unit + 1) * GROUP]))

    def held_out(self) -> list[Passage]:
        return self._held_out

    @cached_property
    def _training(self) -> list[Response]:
        return self._split.training(self.responses)

    @cached_property
    def _held_out(self) -> list[Passage]:
        return list(self.capture.passages(self._split.judging(self.responses)))

    @cached_property
    def _split(self) -> Split:
        return Split.of([each.prompt for each in self.responses])
