"""Medusa (Cai et al. 2024): heads on the target's last hidden state, each one token further ahead, fill a tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.cache.tree import depths, subtree
from paceline.device import send
from paceline.heads.medusa import MedusaHead
from paceline.model.decoder import NORMED
from paceline.model.linear import Linear
from paceline.propose.base import Budget, Needs, Proposer
from paceline.propose.calibration import Calibration
from paceline.propose.medusa_tree import SPARSE, lay_out, likely_paths
from paceline.propose.rollout import SHORTLIST, Shape, over_target
from paceline.sampling.noise import Purpose, gumbel, key
from paceline.sampling.params import SamplingParams
from paceline.sampling.transform import NEVER, RowSpan, transform
from paceline.types import NO_DRAFT, Committed, Draft, View

Candidate = tuple[int, float]
"""Token id, and its probability in the eyes of its head."""


@dataclass
class State:
    """hidden [H]: the target's, after its final norm, at `position`. candidates: by head and rank, in this step."""

    position: int = -1
    hidden: Tensor | None = None
    candidates: list[list[Candidate]] = field(default_factory=list)

    def knows(self, view: View) -> bool:
        """The last token that the target has computed is the one before the view's last."""
        return self.hidden is not None and self.position == len(view.tokens) - 2


class MedusaProposer(Proposer):
    """A tree of the heads' best candidates from one hidden state; no cache, one forward a step whatever its depth.

    paths: the tree as paths of ranks (Medusa's choices; the default is `likely_paths` of `shape`). vocab_size: ids that
    the target's tokenizer knows. width: the target's output rows. target_output: its output head, for heads without.

    The tree is deterministic, also when sampling: candidates are ranked by the request's own distribution, for coupled
    requests with the noise that the target will sample with. A head does not know the path before it, so confidence is
    its probability calibrated by what became of such candidates: of the same head, rank and kind of verification.
    """

    name = "medusa"
    needs = Needs(taps=(NORMED,), trees=True)

    def __init__(
        self, head: MedusaHead, *, vocab_size: int, width: int, target_output: Linear | None = None,
        shape: Shape = SPARSE, paths: Iterable[Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        self.head, self.target_output = head, target_output
        self.vocab_size, self.width = vocab_size, width
        chosen = likely_paths(head.count, shape) if paths is None else paths
        self.parents, self.ranks = lay_out(chosen, head.count)
        self.depths = depths(self.parents)
        self._states: dict[int, State] = {}
        self._calibration = Calibration()

    def open(self, view: View) -> int:
        self._states[view.id] = State()
        return view.committed

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        asked = []
        for view, budget in zip(views, budgets, strict=True):
            state = self._states[view.id]
            state.candidates = []
            if min(budget.depth, budget.nodes) > 0 and state.knows(view):
                asked.append(view)
        if asked:
            self._rank(asked, min(max(budget.depth for budget in budgets), max(self.depths)))
        return [self._draft(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, view: View, committed: Committed) -> None:
        state = self._states[view.id]
        if committed.verdict is not None:
            self._learn(view, state.candidates, committed.verdict.kept)
        # A copy: the tap holds all rows of the step.
        state.hidden, state.position = committed.taps[NORMED][-1].clone(), committed.position + committed.count - 1

    def close(self, view: View) -> None:
        self._states.pop(view.id, None)

    def _rank(self, views: Sequence[View], heads: int) -> None:
        """Candidates of the first `heads` heads for each sequence; one read from the device for all."""
        states = [self._states[view.id] for view in views]
        rows = torch.stack([state.hidden for state in states if state.hidden is not None])
        scores = self._scores(views, self.head.logits(rows, heads, self.target_output))
        noisy = any(_noisy(view.params) for view in views)
        ranks = max(self.ranks) + 1
        listed, ids = scores.topk(min(SHORTLIST if noisy else ranks, scores.shape[-1]), dim=-1)
        law = listed - scores.logsumexp(dim=-1, keepdim=True)
        if noisy:
            order = self._favoured(views, law, ids).topk(min(ranks, ids.shape[-1]), dim=-1).indices
            law, ids = law.gather(-1, order), ids.gather(-1, order)
        if scores.shape[-1] < self.width and self.head.target_ids is not None:
            ids = self.head.target_ids[ids]
        for state, read in zip(states, torch.stack((ids.double(), law.exp().double()), dim=-1).tolist(), strict=True):
            state.candidates = [[(int(token), min(chance, 1.0)) for token, chance in head] for head in read]

    def _scores(self, views: Sequence[View], logits: Tensor) -> Tensor:
        """[B, heads, D] -> scores [B, heads, V] after each request's own chain, its history ending at the last token;
        [B, heads, D] where a truncated vocabulary can stay so."""
        plain, ids = all(view.params.plain_argmax for view in views), self.head.target_ids
        if ids is not None and plain:
            return logits.masked_fill_(ids >= self.vocab_size, NEVER)
        logits = over_target(logits, ids, self.width, self.vocab_size)
        if plain:
            return logits
        heads = logits.shape[1]
        spans = [
            RowSpan(view.params, view.tokens, view.prompt_length, b * heads, before=((),) * heads)
            for b, view in enumerate(views)
        ]
        return transform(logits.flatten(0, 1), spans).view(logits.shape)

    def _favoured(self, views: Sequence[View], law: Tensor, ids: Tensor) -> Tensor:
        """log p [B, heads, S] with the noise of the positions that the heads predict, for those that sample with it."""
        favour = law.double()
        for b, view in enumerate(views):
            if _noisy(view.params):
                first = len(view.tokens)
                words = [key(view.seed, first + ahead, Purpose.SAMPLE) for ahead in range(law.shape[1])]
                favour[b] += gumbel(send(torch.tensor(words), law.device)[:, None, :], ids[b])
        return favour

    def _draft(self, view: View, budget: Budget) -> Draft:
        """The likeliest nodes of the tree within the budget."""
        candidates = self._states[view.id].candidates
        tokens: dict[int, int] = {}
        confidence: dict[int, float] = {}
        survival = {-1: 1.0}
        for node, (parent, depth, rank) in enumerate(zip(self.parents, self.depths, self.ranks, strict=True)):
            too_deep = depth > min(budget.depth, len(candidates))
            if too_deep or parent not in survival or rank >= len(candidates[depth - 1]):
                continue
            token, chance = candidates[depth - 1][rank]
            if chance > 0:  # else the request's chain excludes it
                tokens[node] = token
                confidence[node] = self._calibration.adjust(_group(view.params, depth, rank), chance)
                survival[node] = survival[parent] * confidence[node]
        # Equal chances keep their order, and a parent comes before its child: the best are always a tree.
        kept = sorted(sorted(tokens, key=lambda node: -survival[node])[: budget.nodes])
        if not kept:
            return NO_DRAFT
        drafted = torch.tensor([tokens[node] for node in kept])
        return Draft(drafted, subtree(self.parents, kept), confidence=[confidence[node] for node in kept])

    def _learn(self, view: View, candidates: Sequence[Sequence[Candidate]], kept: int) -> None:
        """Every token that was kept follows accepted ones, so it says which candidates of its head were right, whether
        or not they were verified: what the controller cuts goes on being judged."""
        told = zip(view.tokens[len(view.tokens) - kept :], candidates, strict=False)
        for depth, (token, ranked) in enumerate(told, start=1):
            for rank, (candidate, chance) in enumerate(ranked):
                self._calibration.learn(_group(view.params, depth, rank), [chance], int(candidate == token))


def _group(params: SamplingParams, depth: int, rank: int) -> str:
    """Candidates that are judged together."""
    kind = "coupled" if _noisy(params) else "greedy" if params.greedy else "typical" if params.lossy else "rejection"
    return f"{kind} {depth} {rank}"


def _noisy(params: SamplingParams) -> bool:
    return params.coupled and not params.greedy
