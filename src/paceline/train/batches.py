"""Passages of like length side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.train.shards import Passage

LONGEST = 512  # tokens of a passage that are trained on


@dataclass(frozen=True)
class TrainingBatch:
    """tokens [B, S], taps [B, S, K, H], last [B, S, H]; lengths [B] and prompts [B] in tokens. Padded with zeros."""

    tokens: Tensor
    taps: Tensor
    last: Tensor
    best: Tensor
    lengths: Tensor
    prompts: Tensor

    @classmethod
    def of(cls, passages: Sequence[Passage]) -> TrainingBatch:
        def padded(name: str) -> Tensor:
            return pad_sequence([getattr(each, name) for each in passages], batch_first=True)

        return cls(
            padded("tokens"), padded("taps").float(), padded("last").float(), padded("best"),
            torch.tensor([len(each.tokens) for each in passages]), torch.tensor([each.prompt for each in passages]),
        )  # fmt: skip

    def judged(self, ahead: int) -> Tensor:
        """[B, S]: the rows whose guess, of the token `ahead` + 1 places behind their own, is one of the answer's.

        The answer's first token is the target's own in every step, so no draft ever has to guess it.
        """
        guessed = torch.arange(self.tokens.shape[1]) + 1 + ahead
        return (guessed > self.prompts[:, None]) & (guessed < self.lengths[:, None])


def batches(passages: Sequence[Passage], tokens: int, generator: torch.Generator | None) -> Iterator[TrainingBatch]:
    """Of about `tokens` rows each, padding included; in a random order where there is a generator."""
    cut = sorted(
        (each.cut(LONGEST) for each in passages if each.prompt + 2 < LONGEST), key=lambda each: len(each.tokens)
    )
    groups: list[list[Passage]] = [[]]
    for each in cut:
        if groups[-1] and (len(groups[-1]) + 1) * len(each.tokens) > tokens:
            groups.append([])
        groups[-1].append(each)
    groups = [group for group in groups if group]
    order = range(len(groups)) if generator is None else torch.randperm(len(groups), generator=generator).tolist()
    return (TrainingBatch.of(groups[index]) for index in order)


def ahead(x: Tensor, by: int) -> Tensor:
    """x[:, s + by] at row s; past the end, whatever: those rows are not judged."""
    return torch.roll(x, -by, dims=1)
