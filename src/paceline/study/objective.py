"""A draft's objective whose drafts are judged once for all depths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.train.batches import TrainingBatch, ahead
from paceline.train.draft import DraftObjective


@dataclass
class WholeVocabularyObjective(DraftObjective):
    """The same as `DraftObjective`. Over a whole vocabulary the scores of a row cost more than the layers, so they are
    computed once and not for every depth at which the row's guess counts."""

    @torch.no_grad()
    def agrees(self, batch: TrainingBatch, depth: int) -> Tensor:
        picked = self.vocabulary[self.score(self.hidden(batch)).argmax(-1)]
        right = picked == ahead(batch.tokens, 1)
        return torch.stack([ahead(right, step + 1) & batch.judged(step + 1) for step in range(depth)], dim=-1)
