"""Passages of like length side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.train.shards import Passage

LONGEST = 512  # tokens of a passage that are trained on
WHOLE = 32  # rows of a batch are padded to a multiple: a product of a new shape costs its code's making
LONG_DRAFTS = 4  # in training, one row in so many begins a draft of more than a token


@dataclass(frozen=True)
class TrainingBatch:
    """tokens [B, S], taps [B, S, K, H], last [B, S, H]; lengths [B] and prompts [B] in tokens. Padded with zeros.

    begin [R]: the rows at which drafts of more than a token begin, ascending.
    """

    tokens: Tensor
    taps: Tensor
    last: Tensor
    best: Tensor
    lengths: Tensor
    prompts: Tensor
    begin: Tensor

    @classmethod
    def of(cls, passages: Sequence[Passage], generator: torch.Generator | None = None) -> TrainingBatch:
        """Long drafts begin at every row, or with a generator at a part of them, drawn anew each time.

        A draft sees of others only the rows of their first token, so each can be unrolled without the rest. The first
        token's loss needs every row and teaches most; the tokens behind it would cost thrice as much again.
        """

        longest = whole(max(len(each.tokens) for each in passages))

        def padded(name: str) -> Tensor:
            parts = [getattr(each, name) for each in passages]
            out: Tensor = parts[0].new_zeros(len(parts), longest, *parts[0].shape[1:])
            for row, part in enumerate(parts):
                out[row, : len(part)] = part
            return out

        return cls(
            padded("tokens"), padded("taps").float(), padded("last").float(), padded("best"),
            torch.tensor([len(each.tokens) for each in passages]), torch.tensor([each.prompt for each in passages]),
            _some(longest, generator),
        )  # fmt: skip

    def rows(self, depth: int) -> Tensor:
        """The rows [R] whose drafts reach so deep; depth 0: all."""
        return self.begin if depth else torch.arange(self.tokens.shape[1])

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
    return (TrainingBatch.of(groups[index], generator) for index in order)


def whole(rows: int) -> int:
    """`rows` and as many as fill a multiple of `WHOLE`."""
    return -(-rows // WHOLE) * WHOLE


def _some(rows: int, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return torch.arange(rows)
    return torch.randperm(rows, generator=generator)[: -(-rows // LONG_DRAFTS)].sort().values


def ahead(x: Tensor, by: int, rows: Tensor | None = None) -> Tensor:
    """x[:, s + by] for every row s, or those of `rows`; past the end, whatever: such rows are not judged."""
    return torch.roll(x, -by, dims=1) if rows is None else x[:, (rows + by) % x.shape[1]]
