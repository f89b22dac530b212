"""One step's rows to verdicts: each request by its own verifier, all requests of a kind in one call."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.device import send
from paceline.sampling.noise import Purpose, key, uniform
from paceline.sampling.transform import RowSpan
from paceline.types import Draft, Sequence
from paceline.verify.coupled import choose, verify_coupled
from paceline.verify.rejection import verify_rejection
from paceline.verify.rows import line_up

Kind = Literal["greedy", "coupled", "rejection of chosen", "rejection of sampled"]


@dataclass(frozen=True)
class Candidate:
    """A sequence that samples in this step, its draft, and its rows among the scores."""

    sequence: Sequence
    draft: Draft
    span: RowSpan

    @property
    def kind(self) -> Kind:
        params = self.sequence.params
        if params.greedy:
            return "greedy"
        if params.coupled:
            return "coupled"
        return "rejection of chosen" if self.draft.q is None else "rejection of sampled"


def verify(scores: Tensor, candidates: Seq[Candidate]) -> tuple[Tensor, Tensor]:
    """(accepted drafts [B], next token [B]) on the device, in the candidates' order."""
    kinds: dict[Kind, list[int]] = {}
    for b, candidate in enumerate(candidates):
        kinds.setdefault(candidate.kind, []).append(b)
    parts = [_verify_kind(kind, scores, [candidates[b] for b in members]) for kind, members in kinds.items()]
    if len(parts) == 1:
        return parts[0]
    order = send(torch.tensor([b for members in kinds.values() for b in members]).argsort(), scores.device)
    return torch.cat([p[0] for p in parts])[order], torch.cat([p[1] for p in parts])[order]


def _verify_kind(kind: Kind, scores: Tensor, members: list[Candidate]) -> tuple[Tensor, Tensor]:
    scores = scores if len(members) == 1 and members[0].span.count == scores.shape[0] else torch.cat(
        [scores[m.span.rows] for m in members]
    )  # fmt: skip
    starts, total = [], 0
    for member in members:
        starts.append(total)
        total += member.span.count
    rows = line_up(starts, [m.draft.tokens for m in members], scores.device)
    if kind == "greedy":
        return verify_coupled(choose(scores, None), rows)
    if kind == "coupled":
        return verify_coupled(choose(scores, _keys(members, Purpose.SAMPLE, scores.device)), rows)
    accept = uniform(
        _keys(members, Purpose.ACCEPT, scores.device), torch.zeros((), dtype=torch.int64, device=scores.device)
    )
    residual_keys = _keys(members, Purpose.RESIDUAL, scores.device)
    q = _stack_q(members, scores.shape[1]) if kind == "rejection of sampled" else None
    return verify_rejection(scores, rows, q, accept, residual_keys)


def _keys(members: list[Candidate], purpose: Purpose, device: torch.device) -> Tensor:
    """Noise keys [R, 2]: row i of a sequence draws the token at position len(tokens) + i."""
    words = [key(m.sequence.seed, len(m.sequence.tokens) + i, purpose) for m in members for i in range(m.span.count)]
    return send(torch.tensor(words, dtype=torch.int64), device)


def _stack_q(members: list[Candidate], width: int) -> Tensor:
    """[B, K, V], zero past the end of each draft."""
    longest = max(m.draft.size for m in members)
    stacked = torch.zeros(len(members), longest, width, device=members[0].draft.tokens.device)
    for b, member in enumerate(members):
        if member.draft.q is not None:
            stacked[b, : member.draft.size] = member.draft.q
    return stacked
