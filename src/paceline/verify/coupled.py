"""Coupled verification: follow the branch that equals what plain decoding samples (Gumbel coupling)."""

from __future__ import annotations

from torch import Tensor

from paceline.sampling.best import likeliest
from paceline.sampling.noise import sample
from paceline.verify.trees import Trees


def choose(scores: Tensor, keys: Tensor | None) -> Tensor:
    """What plain decoding emits at each row [R]: argmax of scores [R, V] plus the row's SAMPLE noise, if any."""
    return likeliest(scores) if keys is None else sample(scores, keys)


def verify_coupled(chosen: Tensor, trees: Trees) -> tuple[Tensor, Tensor]:
    """(column of the last accepted node [B], next token [B]) for the tokens `chosen` [R] at every row.

    The next token is the target's own choice where no child equals it, or the bonus token at a leaf, so the emitted
    tokens are `chosen` along the path whatever the draft was: the output cannot depend on it.
    """
    own = chosen[trees.row]
    last = trees.walk(own.gather(1, trees.parent) == trees.tokens)
    return last, own.gather(1, last[:, None]).squeeze(1)
