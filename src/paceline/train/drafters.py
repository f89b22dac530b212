"""What can be trained, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from paceline.model.config import ModelConfig
from paceline.train import draft, eagle3, exit, medusa, mtp
from paceline.train.export import Card
from paceline.train.target import TargetWeights
from paceline.train.trainer import Objective


@dataclass(frozen=True)
class Given:
    """What an objective is made from. vocabulary [D]: the target's ids that the drafter scores. taps: the layers it
    reads."""

    target: TargetWeights
    vocabulary: Tensor
    taps: tuple[int, ...]


class Drafter(Protocol):
    """A module that trains one kind."""

    def default_taps(self, target: ModelConfig) -> tuple[int, ...]:
        """Hidden states of the target that it reads, beside the one behind the final norm."""
        ...

    def weights(self, target: ModelConfig, scored: int) -> int:
        """How many it trains, where it scores so many tokens."""
        ...

    def objective(self, given: Given) -> Objective: ...
    def export(self, folder: Path, card: Card, objective: Objective) -> None: ...


DRAFTERS: Mapping[str, Drafter] = {"eagle3": eagle3, "medusa": medusa, "mtp": mtp, "draft": draft, "exit": exit}
