"""What every head is trained for: the target's own distribution of the tokens ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.train.batches import WHOLE, TrainingBatch, ahead
from paceline.train.target import TargetWeights

DECAY = 0.8  # weight of a depth's loss over that of the one before: a late guess counts only if the early ones held


class Scores(Protocol):
    """Logits over the draft vocabulary of the rows that a mask picks (None: all): of [B, S], or of `batch.rows`."""

    def __call__(self, rows: Tensor | None) -> Tensor: ...


@dataclass
class Guesses(ABC):
    """Drafters that guess the tokens behind a row's own next one. Depth d of row s guesses x_{s + d + 2}.

    The loss is soft cross-entropy against the target's distribution over the draft vocabulary (EAGLE-3, section 3);
    rows whose likeliest token is not in it are left out.

    vocabulary [D]: the target's ids that are scored; steps: depths that are trained.
    """

    module: nn.Module
    target: TargetWeights
    vocabulary: Tensor
    steps: int = 4

    @abstractmethod
    def guesses(self, batch: TrainingBatch, steps: int) -> Iterator[Scores]:
        """The scores of each depth in turn, of the rows that reach it."""

    @cached_property
    def output(self) -> Tensor:
        return self.target.rows(self.vocabulary)

    @cached_property
    def known(self) -> Tensor:
        known = torch.zeros(len(self.target.output), dtype=torch.bool)
        known[self.vocabulary] = True
        return known

    def loss(self, batch: TrainingBatch) -> Tensor:
        law = F.linear(batch.last, self.output).softmax(-1)
        known = self.known[batch.best.clamp(min=0)]
        total, weight = torch.zeros(()), 1.0
        for depth, scores in enumerate(self.guesses(batch, self.steps)):
            begin = batch.rows(depth)
            judged = batch.judged(depth + 1)[:, begin] & ahead(known, depth + 1, begin)
            if bool(judged.any()):
                taken = filled(judged)
                row, of = taken.nonzero(as_tuple=True)
                wanted = law[row, (begin[of] + depth + 1) % law.shape[1]] * judged[taken][:, None]
                total = total + weight * F.cross_entropy(scores(taken).float(), wanted) * (len(wanted) / judged.sum())
            weight *= DECAY
        return total

    @torch.no_grad()  # not inference_mode: what is computed here once is used in training, too
    def agrees(self, batch: TrainingBatch, depth: int) -> Tensor:
        found = []
        for step, scores in enumerate(self.guesses(batch, depth)):
            picked = self.vocabulary[scores(None).argmax(-1)]
            found.append((picked == ahead(batch.tokens, step + 2)) & batch.judged(step + 1))
        missing = [torch.zeros_like(found[0])] * (depth - len(found))
        return torch.stack([*found, *missing], dim=-1)


def filled(rows: Tensor) -> Tensor:
    """The mask with some more rows, if there are any, so that products of few different shapes come of it."""
    taken = rows.flatten().clone()
    taken[(~taken).nonzero()[: -int(taken.sum()) % WHOLE]] = True
    return taken.view_as(rows)
