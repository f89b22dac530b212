"""Coupled verification: follow the draft while it equals what plain decoding samples (Gumbel coupling)."""

from __future__ import annotations

from torch import Tensor

from paceline.sampling.noise import sample
from paceline.verify.rows import Rows, accepted_prefix


def choose(scores: Tensor, keys: Tensor | None) -> Tensor:
    """What plain decoding emits at each row [R]: argmax of scores [R, V] plus the row's SAMPLE noise, if any."""
    return scores.argmax(dim=1) if keys is None else sample(scores, keys)


def verify_coupled(chosen: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """(accepted drafts [B], next token [B]) for the tokens `chosen` [R] at every row.

    The next token is the target's own choice at the first difference, or the bonus token after a full draft, so the
    emitted tokens are `chosen` along the path whatever the draft was: the output cannot depend on it.
    """
    own = chosen[rows.index]
    accepted = accepted_prefix(own[:, :-1] == rows.drafts)
    return accepted, own.gather(1, accepted[:, None]).squeeze(1)
