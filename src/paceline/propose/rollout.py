"""Drafting level by level, whatever computes the logits: draft model, head, or the target's own layers.

A method brings one forward a level; what is drawn from its logits, the tree's shape and where to stop are decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.pool import SequenceCache
from paceline.cache.tree import Parents, is_chain
from paceline.device import send
from paceline.model.attention import Span
from paceline.propose.base import Budget
from paceline.propose.calibration import tenth
from paceline.sampling.best import likeliest, likeliest_with_chance
from paceline.sampling.noise import Purpose, gumbel, key, sample
from paceline.sampling.transform import NEVER, NO_TOKENS, RowSpan, transform
from paceline.types import NO_DRAFT, Draft, View

ROOT = -1  # the node that stands for the last token
SHORTLIST = 256  # tokens that may become children where several are drawn with noise


@dataclass(frozen=True)
class Shape:
    """The tree to grow (EAGLE-2, Li et al. 2024): at each of `depth` levels the `width` likeliest nodes get `width`
    children each; the `nodes` likeliest of all are kept. Width 1 is a chain.

    `sampled`: children are drawn without replacement, for requests under rejection; else they are the likeliest.
    """

    width: int = 1
    depth: int = 64
    nodes: int = 64
    sampled: bool = False


CHAIN = Shape()


@dataclass(eq=False)
class Growth:
    """One sequence's draft in the making."""

    view: View
    budget: Budget
    shape: Shape = CHAIN
    lead: int = 0  # scratch rows before the nodes' own: the last token's, where it is not committed
    worth: Sequence[float] | None = None  # of each tenth of a probability as confidence; None: as much as it says
    tokens: list[Tensor] = field(default_factory=list)  # each a scalar on the device
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)  # product of confidences down to each node
    q: dict[int, Tensor] = field(default_factory=dict)  # by parent
    stated: list[float] = field(default_factory=list)  # the method's probability of each node
    fed: list[int] = field(default_factory=list)  # nodes that were forwarded, in the order of their scratch slots

    def __post_init__(self) -> None:
        # All children of a sampled node are verified or none: without room for the first ones, a chain.
        if self.shape.sampled and self.shape.width > min(self.shape.nodes, self.budget.nodes):
            self.shape = replace(self.shape, width=1)

    @property
    def draws(self) -> bool:
        """Tokens are random and must be judged by the distribution they came from."""
        params = self.view.params
        return not params.coupled and (self.shape.width == 1 or self.shape.sampled)

    @property
    def noisy(self) -> bool:
        """Children are not simply the likeliest."""
        return self.draws or (self.view.params.coupled and not self.view.params.greedy)

    def path(self, node: int) -> list[int]:
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def depth(self, node: int) -> int:
        return 0 if node == ROOT else self.depths[node]

    def chance(self, node: int) -> float:
        return 1.0 if node == ROOT or not self.survival else self.survival[node]

    def history(self, row: int, node: int) -> RowSpan:
        view = self.view
        if not view.params.adjusts_logits:  # nobody will look at what was drafted before
            return RowSpan(view.params, view.tokens, view.prompt_length, row)
        drafted = torch.stack(self.tokens) if self.tokens else NO_TOKENS
        return RowSpan(view.params, view.tokens, view.prompt_length, row, drafted, (self.path(node),))

    def noise_key(self, node: int) -> tuple[int, int]:
        """Noise for the children of `node`. Coupled drafts share the noise of the position. Others draw anew in every
        step: a draw that was rejected must not come back at the same position, since by then it has had its say in how
        long drafts are."""
        step = len(self.view.tokens)
        if self.view.params.coupled:
            return key(self.view.seed, step + self.depth(node), Purpose.SAMPLE)
        return key(self.view.seed, step << 32 | (node + 1), Purpose.DRAFT)

    def add(self, parent: int, token: Tensor, confidence: float | None) -> None:
        self.tokens.append(token)
        self.depths.append(self.depth(parent) + 1)
        self.parents.append(parent)
        if confidence is not None:
            confidence = 0.0 if confidence != confidence else confidence  # NaN: no token was allowed
            self.stated.append(confidence)
            if self.worth is not None:
                confidence = self.worth[tenth(confidence)]
            chance = self.chance(parent)  # before this node's own is there
            self.confidence.append(confidence)
            self.survival.append(chance * confidence)

    def span(self, cache: SequenceCache, start: int, nodes: Sequence[int]) -> Span:
        """The batch rows of `nodes`, in the scratch slots behind those of the nodes that were fed before."""
        position = cache.length + self.lead + len(self.fed)
        self.fed += nodes
        return Span(cache, start, len(nodes), position, None if self.shape.width == 1 else self._fed_parents())

    def _fed_parents(self) -> Parents | None:
        """By scratch slot, None for a chain."""
        slot = {node: i for i, node in enumerate(self.fed)}
        parents = tuple(slot.get(self.parents[node], ROOT) for node in self.fed)
        return None if is_chain(parents) else parents

    def accepted_slots(self, path: Sequence[int]) -> list[int]:
        """Scratch slots of the accepted nodes as far down as they were fed."""
        slot = {node: i for i, node in enumerate(self.fed, start=self.lead)}
        kept = []
        for node in path:
            if node not in slot:
                break
            kept.append(slot[node])
        return kept

    def finish(self) -> Draft:
        """The draft; a tree whose nodes may be cut is reduced to its likeliest."""
        if not self.tokens:
            return NO_DRAFT
        tokens, parents = torch.stack(self.tokens), tuple(self.parents)
        confidence = self.confidence or None
        if self.q:
            zero = torch.zeros_like(next(iter(self.q.values())))
            q = torch.stack([self.q.get(parent, zero) for parent in range(ROOT, max(self.q) + 1)])
            return Draft(tokens, parents, "without_replacement" if self.shape.width > 1 else "iid", q, confidence)
        draft = Draft(tokens, parents, confidence=confidence)
        most = min(self.shape.nodes, self.budget.nodes)
        if draft.size <= most:
            return draft
        # Equal chances keep their order, and a parent comes before its child: the best are always a tree.
        best = sorted(range(draft.size), key=lambda node: -self.chance(node))[:most]
        return draft.keep(sorted(best))


Level = list[tuple[Growth, list[int]]]
"""Nodes to give children to; a level's logits have one row for each, in this order."""


class Rollout:
    """Grows drafts for a batch of sequences, one forward for all at each level.

    vocab_size: ids the target's tokenizer knows; no others are proposed. width: the target's output rows. ids [D]: the
    target ids that the method's logits stand for, None where they are the target's own rows. stop_below(): a node whose
    chance of being emitted fell under it gets no children (0: never); the weak node itself stays, so that what is
    verified never depends on what was drawn. looks: confidences are read at each level; on an accelerator that is a
    stall, so chains do without.
    """

    def __init__(
        self, *, vocab_size: int, width: int, stop_below: Callable[[], float], looks: bool, ids: Tensor | None = None
    ) -> None:
        self.vocab_size, self.width, self.ids = vocab_size, width, ids
        padding = None if ids is None else ids >= vocab_size  # output rows that are no tokens
        self.padding = padding if padding is not None and bool(padding.any()) else None
        self.stop_below, self.looks = stop_below, looks

    def run(self, growths: Sequence[Growth], logits: Tensor, step: Callable[[Level], Tensor]) -> None:
        """Grow all from `logits` [B, D], the rows of each sequence's last token; `Growth.finish` gives their drafts.

        `step(level)` forwards the nodes of a level and returns their logits [R, D].
        """
        level: Level = [(growth, [ROOT]) for growth in growths]
        threshold = self.stop_below()
        while level:
            before = [len(growth.tokens) for growth, _ in level]
            self._grow(level, self._scores(level, logits))
            level = [
                (growth, nodes)
                for (growth, _), first in zip(level, before, strict=True)
                if (nodes := next_level(growth, first, threshold))
            ]
            if level:
                logits = step(level)

    def _scores(self, level: Level, logits: Tensor) -> Tensor:
        """Scores [R, V] after each request's own chain; [R, D] where a reduced vocabulary can stay so."""
        params = [growth.view.params for growth, _ in level]
        reduced = self.ids is not None and len(self.ids) < self.width
        if not reduced or any(p.adjusts_logits for p in params):
            logits = over_target(logits, self.ids, self.width, self.vocab_size)
        elif self.padding is not None:
            logits = logits.masked_fill(self.padding, NEVER)
        if all(p.plain_argmax for p in params):
            return logits
        rows = [(growth, node) for growth, nodes in level for node in nodes]
        return transform(logits, [growth.history(row, node) for row, (growth, node) in enumerate(rows)])

    def _grow(self, level: Level, scores: Tensor) -> None:
        """Children for every node of the level from its row of scores."""
        rows = [(growth, node) for growth, nodes in level for node in nodes]
        trees = [row for row, (growth, _) in enumerate(rows) if growth.shape.width > 1]
        chains = [row for row, (growth, _) in enumerate(rows) if growth.shape.width == 1]
        if chains:
            self._grow_chains([rows[row] for row in chains], scores if not trees else scores[chains])
        if trees:
            self._grow_trees([rows[row] for row in trees], scores if not chains else scores[trees])

    def _grow_chains(self, rows: Sequence[tuple[Growth, int]], scores: Tensor) -> None:
        noisy = [row for row, (growth, _) in enumerate(rows) if growth.noisy]
        if noisy:
            words = send(torch.tensor([rows[row][0].noise_key(rows[row][1]) for row in noisy]), scores.device)
            if len(noisy) == len(rows):
                picked = sample(scores, words, self._columns(scores))
            else:
                index, picked = send(torch.tensor(noisy), scores.device), likeliest(scores)
                picked[index] = sample(scores[index], words, self._columns(scores))
            confidence = self._chances(picked, scores)
        else:
            picked, confidence = self._likeliest(scores)
        tokens = self._target_ids(picked, scores).unbind()
        q = self._law(scores) if any(growth.draws for growth, _ in rows) else None
        for row, (growth, node) in enumerate(rows):
            growth.add(node, tokens[row], confidence[row])
            if q is not None and growth.draws:
                growth.q[node] = q[row]

    def _likeliest(self, scores: Tensor) -> tuple[Tensor, Sequence[float | None]]:
        """The likeliest token of each row, and its probability where that may be read."""
        return likeliest_with_chance(scores) if self.looks else (likeliest(scores), [None] * scores.shape[0])

    def _chances(self, picked: Tensor, scores: Tensor) -> Sequence[float | None]:
        if not self.looks:
            return [None] * scores.shape[0]
        own = scores.gather(1, picked[:, None]).squeeze(1) - scores.logsumexp(dim=1)
        chances: list[float] = own.exp().tolist()
        return chances

    def _grow_trees(self, rows: Sequence[tuple[Growth, int]], scores: Tensor) -> None:
        """`width` children a node: the likeliest, or those that the noise favours (Gumbel top-k)."""
        widest = min(max(growth.shape.width for growth, _ in rows), scores.shape[1])
        noisy = [row for row, (growth, _) in enumerate(rows) if growth.noisy]
        listed, columns = scores.topk(min(SHORTLIST, scores.shape[1]) if noisy else widest, dim=1)
        ids = self._target_ids(columns, scores)
        law = listed.log_softmax(dim=1) if noisy else listed - scores.logsumexp(dim=1, keepdim=True)
        favour = law.double()
        for row in noisy:
            growth, node = rows[row]
            favour[row] += gumbel(send(torch.tensor(growth.noise_key(node)), scores.device), ids[row])
        order = favour.topk(widest, dim=1)
        tokens = ids.gather(1, order.indices)
        confidence = law.gather(1, order.indices).exp().tolist()
        possible = (order.values > NEVER).tolist()
        for row, (growth, node) in enumerate(rows):
            for child in range(min(widest, growth.shape.width)):
                if possible[row][child]:
                    growth.add(node, tokens[row, child], confidence[row][child])
            if growth.draws:
                # Exactly what the children were drawn from: the shortlist, renormalised.
                growth.q[node] = law.new_zeros(self.width).scatter(0, ids[row], law[row].exp())

    def _columns(self, scores: Tensor) -> Tensor | None:
        """The target's ids that the columns of `scores` stand for; None where they are its own rows."""
        return self.ids if scores.shape[1] < self.width else None

    def _target_ids(self, picked: Tensor, scores: Tensor) -> Tensor:
        columns = self._columns(scores)
        return picked if columns is None else columns[picked]

    def _law(self, scores: Tensor) -> Tensor:
        """softmax(scores) over the target's ids, [R, V]."""
        law, columns = scores.softmax(dim=1), self._columns(scores)
        return law if columns is None else law.new_zeros(len(law), self.width).index_copy_(1, columns, law)


def over_target(logits: Tensor, ids: Tensor | None, width: int, vocab_size: int) -> Tensor:
    """Logits [.., D], whose columns stand for the target's `ids` (None: its own rows) -> the target's [.., width].

    What the method does not score and what is no token can never be drafted.
    """
    if ids is not None:
        logits = logits.new_full((*logits.shape[:-1], width), NEVER).index_copy_(-1, ids, logits)
    if logits.shape[-1] < width:
        logits = F.pad(logits, (0, width - logits.shape[-1]), value=NEVER)
    logits[..., vocab_size:] = NEVER
    return logits[..., :width]


def next_level(growth: Growth, first: int, stop_below: float) -> list[int]:
    """Which of the nodes drawn last, `first` and after, get children of their own."""
    new = range(first, len(growth.tokens))
    if not new or growth.depth(new[0]) >= min(growth.budget.depth, growth.shape.depth):
        return []
    alive = [node for node in new if growth.chance(node) >= stop_below]
    if growth.draws:  # nothing that was drawn is cut later, so there has to be room for all children
        left = (min(growth.shape.nodes, growth.budget.nodes) - len(growth.tokens)) // growth.shape.width
        alive = alive[: max(left, 0)] if growth.shape.width > 1 else alive
    return sorted(sorted(alive, key=lambda node: -growth.chance(node))[: growth.shape.width])
