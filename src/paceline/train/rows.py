"""Drafters that guess the token behind each row from what the rows before it hold: an exit, a draft model.

Fed with the text's own tokens, their guesses at the rows that follow are those that a chain would make, as long as it
is accepted; so one scoring of the rows judges every depth, and only the first is trained.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from paceline.train.batches import TrainingBatch, ahead
from paceline.train.objective import Guesses, Scores


class RowGuesses(Guesses):
    @abstractmethod
    def hidden(self, batch: TrainingBatch) -> Tensor:
        """[B, S, H']: row s guesses x_{s+1}."""

    @abstractmethod
    def score(self, hidden: Tensor) -> Tensor:
        """[.., H'] -> logits [.., D]."""

    def guesses(self, batch: TrainingBatch, steps: int) -> Iterator[Scores]:
        hidden = self.hidden(batch)
        for depth in range(steps):
            yield partial(self._scores, ahead(hidden, depth + 1, batch.rows(depth)))

    @torch.no_grad()
    def agrees(self, batch: TrainingBatch, depth: int) -> Tensor:
        picked = self.vocabulary[self.score(self.hidden(batch)).argmax(-1)]
        right = picked == ahead(batch.tokens, 1)
        return torch.stack([ahead(right, step + 1) & batch.judged(step + 1) for step in range(depth)], dim=-1)

    def _scores(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        return self.score(hidden if rows is None else hidden[rows])
