"""Medusa heads in training (Cai et al. 2024, Medusa-1): residual blocks on the last hidden state, one output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.config import ModelConfig
from paceline.train.batches import TrainingBatch
from paceline.train.export import Card, export_medusa
from paceline.train.objective import Guesses, Scores
from paceline.train.target import TargetWeights

if TYPE_CHECKING:
    from paceline.train.drafters import Given
    from paceline.train.trainer import Objective

HEADS = 4


class ResidualBlock(nn.Module):
    """h + SiLU(A h), under the names of vLLM's file. It begins as the identity."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden, bias=False)])
        nn.init.zeros_(self.layers[0].weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.layers[0](x))


class MedusaModule(nn.Module):
    """The output over `vocabulary` [D], which the heads share, begins as the target's."""

    def __init__(self, target: TargetWeights, vocabulary: Tensor, heads: int = HEADS) -> None:
        super().__init__()
        hidden = target.config.hidden_size
        self.blocks = nn.ModuleList([ResidualBlock(hidden) for _ in range(heads)])
        self.lm_head = nn.Linear(hidden, len(vocabulary), bias=False)
        self.lm_head.weight.data.copy_(target.rows(vocabulary))

    def score(self, head: int, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.blocks[head](hidden))
        return logits


@dataclass
class MedusaObjective(Guesses):
    module: MedusaModule

    def guesses(self, batch: TrainingBatch, steps: int) -> Iterator[Scores]:
        """Head d reads the row's own hidden state, whatever lies between."""
        for head in range(min(steps, HEADS)):
            yield partial(self._scores, batch, head)

    def _scores(self, batch: TrainingBatch, head: int, rows: Tensor | None) -> Tensor:
        hidden = batch.last[:, batch.rows(head)]
        return self.module.score(head, hidden if rows is None else hidden[rows])


def default_taps(target: ModelConfig) -> tuple[int, ...]:
    return ()


def weights(target: ModelConfig, scored: int) -> int:
    return target.hidden_size * (HEADS * target.hidden_size + scored)


def objective(given: Given) -> MedusaObjective:
    return MedusaObjective(MedusaModule(given.target, given.vocabulary), given.target, given.vocabulary, HEADS)


def export(folder: Path, card: Card, trained: Objective) -> None:
    assert isinstance(trained, MedusaObjective)
    export_medusa(folder, card, trained.module.state_dict(), trained.vocabulary, HEADS)
