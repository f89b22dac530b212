"""The norm of an early exit (LayerSkip, Elhoushi et al. 2024): one weight a feature, so that the target's own output
head reads the middle of the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.config import ModelConfig
from paceline.train.batches import TrainingBatch
from paceline.train.export import Card, export_exit
from paceline.train.modules import RmsNorm
from paceline.train.rows import RowGuesses
from paceline.train.target import TargetWeights

if TYPE_CHECKING:
    from paceline.train.drafters import Given
    from paceline.train.trainer import Objective


class ExitModule(nn.Module):
    def __init__(self, target: TargetWeights) -> None:
        super().__init__()
        self.norm = RmsNorm(target.config.hidden_size, target.config.norm_eps)
        self.norm.weight.data.copy_(target.final_norm)


@dataclass
class ExitObjective(RowGuesses):
    module: ExitModule

    def hidden(self, batch: TrainingBatch) -> Tensor:
        normed: Tensor = self.module.norm(batch.taps[:, :, 0])
        return normed

    def score(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.output)


def default_taps(target: ModelConfig) -> tuple[int, ...]:
    """The input of the middle layer: the method's own default exit."""
    return (max(1, target.num_layers // 2),)


def weights(target: ModelConfig, scored: int) -> int:
    return target.hidden_size


def objective(given: Given) -> ExitObjective:
    return ExitObjective(ExitModule(given.target), given.target, given.vocabulary, steps=1)


def export(folder: Path, card: Card, trained: Objective) -> None:
    assert isinstance(trained, ExitObjective)
    export_exit(folder, card, trained.module.state_dict())
