"""What an EAGLE head keeps of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.cache.pool import SequenceCache
from paceline.types import View


@dataclass
class State:
    """The head's side of one sequence. Slot s of `cache` is position `offset + s`: a head that starts cold behind a
    prefix hit has no rows before it. `fresh`: the target's hidden states of rows that were not fed yet."""

    view: View
    cache: SequenceCache
    offset: int = 0
    fresh: list[Sequence[Tensor]] = field(default_factory=list)
    outputs: dict[int, Tensor] = field(default_factory=dict)  # of the last row and of drafted nodes, each [H]
    stated: Sequence[float] = ()  # probabilities of the last chain's tokens

    @property
    def pending(self) -> int:
        return sum(taps[0].shape[0] for taps in self.fresh)

    def states(self) -> list[Tensor]:
        """The target's hidden states [pending, H] of the rows that were not fed yet, one for each tap."""
        if len(self.fresh) == 1:
            return list(self.fresh[0])
        return [torch.cat(parts) for parts in zip(*self.fresh, strict=True)]

    @property
    def position(self) -> int:
        """Of the first row that was not fed yet."""
        return self.offset + self.cache.length
