"""One step's rows to verdicts: each request by its own verifier, all requests of a kind in one call."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from paceline.cache.tree import depths, paths, ranks
from paceline.device import send
from paceline.sampling.noise import Purpose, key, uniform
from paceline.sampling.transform import RowSpan
from paceline.types import Draft, Sequence
from paceline.verify.coupled import choose, follow
from paceline.verify.rejection import verify_rejection
from paceline.verify.trees import Trees, line_up
from paceline.verify.typical import verify_typical


@dataclass(frozen=True)
class Candidate:
    """A sequence that samples in this step, its draft, and where its rows begin among the scores.

    Row `start` follows its last token, row `start + 1 + i` node i of the draft.
    """

    sequence: Sequence
    draft: Draft
    start: int

    @property
    def span(self) -> RowSpan:
        before = ((), *paths(self.draft.parents))
        sequence = self.sequence
        return RowSpan(
            sequence.params, sequence.tokens, sequence.prompt_length, self.start, self.draft.tokens, before
        )  # fmt: skip

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + 1 + self.draft.size)

    @property
    def kind(self) -> str:
        params = self.sequence.params
        if params.greedy:
            return "greedy"
        if params.lossy:
            return "typical"
        return "coupled" if params.coupled else self.draft.draw


Walked = tuple[tuple[int, ...], list[int]]
"""Accepted nodes of a draft, root to leaf, and the tokens that they and the next one are."""


def verify(scores: Tensor, candidates: Seq[Candidate]) -> list[Walked]:
    """What each candidate's rows of `scores` make of its draft, in the candidates' order: the step's one read from the
    device."""
    kinds: dict[str, list[int]] = {}
    for b, candidate in enumerate(candidates):
        kinds.setdefault(candidate.kind, []).append(b)
    judged = [_judge(kind, scores, [candidates[b] for b in members]) for kind, members in kinds.items()]
    read = iter(torch.cat([*(c.draft.tokens for c in candidates), *judged]).tolist())
    drafted = [list(islice(read, c.draft.size)) for c in candidates]
    walked: dict[int, Walked] = {}
    for kind, members in kinds.items():
        for b in members:
            parents = candidates[b].draft.parents
            if kind in SAMPLED_FIRST:
                walked[b] = follow(parents, drafted[b], list(islice(read, len(parents) + 1)))
            else:
                column, token = islice(read, 2)
                path = paths(parents)[column - 1] if column else ()
                walked[b] = (path, [*(drafted[b][node] for node in path), token])
    return [walked[b] for b in range(len(candidates))]


SAMPLED_FIRST = ("greedy", "coupled")
"""Kinds whose rows are sampled whatever was drafted; the others judge drafts by their chances."""


def _judge(kind: str, scores: Tensor, members: list[Candidate]) -> Tensor:
    """Of each member in turn: the token sampled at every row, or (column of the last accepted node, next token)."""
    if len(members) > 1 or members[0].draft.size + 1 < scores.shape[0]:
        scores = torch.cat([scores[m.rows] for m in members])
    device = scores.device
    if kind in SAMPLED_FIRST:
        return choose(scores, None if kind == "greedy" else _row_keys(members, Purpose.SAMPLE, device))
    trees = _trees(members, device)
    if kind == "typical":
        return torch.stack(verify_typical(scores, trees, _row_keys(members, Purpose.SAMPLE, device)), dim=1).flatten()
    q = None if kind == "point" else _stack_q(members, scores.shape[1])
    coins, keys = _coins(members, device), _row_keys(members, Purpose.RESIDUAL, device)
    verdict = verify_rejection(scores, trees, q, coins, keys, replacement=kind == "iid")
    return torch.stack(verdict, dim=1).flatten()


def _trees(members: list[Candidate], device: torch.device) -> Trees:
    starts = accumulate((m.draft.size + 1 for m in members[:-1]), initial=0)
    return line_up(list(starts), [m.draft.tokens for m in members], [m.draft.parents for m in members], device)


def _row_keys(members: list[Candidate], purpose: Purpose, device: torch.device) -> Tensor:
    """Noise keys [R, 2]: a row draws the token at the position behind its own."""
    words = [
        key(m.sequence.seed, len(m.sequence.tokens) + depth, purpose)
        for m in members
        for depth in (0, *depths(m.draft.parents))
    ]
    return send(torch.tensor(words, dtype=torch.int64), device)


def _coins(members: list[Candidate], device: torch.device) -> Tensor:
    """u [B, N] of each node: keyed by its position, numbered by its rank. Cousins share it: one at most is tried."""
    size = max(m.draft.size for m in members)
    words = []
    for m in members:
        seed, position, parents = m.sequence.seed, len(m.sequence.tokens) - 1, m.draft.parents
        nodes = zip(depths(parents), ranks(parents), strict=True)
        own = [(*key(seed, position + depth, Purpose.ACCEPT), rank) for depth, rank in nodes]
        words.append(own + [(0, 0, 0)] * (size - len(own)))
    coins = send(torch.tensor(words, dtype=torch.int64).view(len(members), size, 3), device)
    return uniform(coins[..., :2], coins[..., 2])


def _stack_q(members: list[Candidate], width: int) -> Tensor:
    """[B, P, V], zero past the end of each draft's."""
    sizes = [0 if m.draft.q is None else m.draft.q.shape[0] for m in members]
    stacked = torch.zeros(len(members), max(1, *sizes), width, device=members[0].draft.tokens.device)
    for b, member in enumerate(members):
        if member.draft.q is not None:
            stacked[b, : sizes[b]] = member.draft.q
    return stacked
