"""What Medusa drafts: which tokens, which part of its tree, and how sure it says it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from views import Text, budget

from paceline.cache.tree import from_paths, is_chain
from paceline.errors import PacelineError
from paceline.heads.medusa import MedusaHead
from paceline.model.decoder import NORMED
from paceline.model.linear import Linear
from paceline.propose.medusa import MedusaProposer
from paceline.propose.medusa_tree import likely_paths
from paceline.propose.rollout import Shape
from paceline.sampling.noise import Purpose, key, sample
from paceline.sampling.params import SamplingParams
from paceline.sampling.transform import RowSpan, transform
from paceline.types import NO_DRAFT, Committed, Draft, Verdict

VOCAB = 12
SMALL = Shape(width=3, nodes=12)


@dataclass(kw_only=True)
class FixedHead(MedusaHead):
    """The same logits [heads, V] whatever it reads."""

    fixed: Tensor

    def logits(self, rows: Tensor, heads: int | None = None, target_output: Linear | None = None) -> Tensor:
        return self.fixed[:heads].expand(len(rows), -1, -1).clone()


def random_logits(heads: int = 3, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(heads, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def medusa(
    logits: Tensor, shape: Shape = SMALL, paths: Iterable[Sequence[int]] | None = None,
    vocab_size: int = VOCAB,
) -> MedusaProposer:  # fmt: skip
    head = FixedHead(blocks=[[]] * len(logits), outputs=[], dtype=torch.float32, fixed=logits)
    return MedusaProposer(head, vocab_size=vocab_size, width=VOCAB, shape=shape, paths=paths)


def started(proposer: MedusaProposer, params: SamplingParams | None = None, tokens: Sequence[int] = (1, 2, 3)) -> Text:
    """A sequence whose tokens but the last have been computed."""
    view = Text(list(tokens), params=params or SamplingParams(), seed=11)
    proposer.open(view)
    show(proposer, view, kept=0)
    return view


def show(proposer: MedusaProposer, view: Text, kept: int) -> None:
    """A step that ended with the view's last tokens, of which it brought `kept`."""
    verdict = Verdict(0, tuple(range(kept - 1)), 0, kept) if kept else None
    count = max(kept, 1)
    first = len(view.tokens) - 1 - count
    proposer.observe(view, Committed(first, count, {NORMED: torch.zeros(count, 4)}, verdict))


def draft(proposer: MedusaProposer, view: Text, depth: int = 9, nodes: int = 64) -> Draft:
    return proposer.propose([view], [budget(depth, nodes)])[0]


def tokens_by_path(drafted: Draft) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(drafted.tokens.tolist(), drafted.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert drafted.confidence is not None
    return dict(zip(found, drafted.confidence, strict=True))


# The tree


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8])
def test_the_default_tree_is_closed_and_its_chain_comes_first(heads: int) -> None:
    paths = likely_paths(heads, Shape(width=8, nodes=26))
    parents, _ = from_paths(paths)  # raises for a path without its beginning
    assert len(set(paths)) == len(parents) == (8 if heads == 1 else 26)
    assert max(len(path) for path in paths) == min(heads, 5)
    assert {(0,) * depth for depth in range(1, min(heads, 4) + 1)} <= set(paths)


def test_the_default_tree_of_four_heads_narrows_with_depth_and_rank() -> None:
    paths = likely_paths(4)
    assert [sum(len(path) == depth for path in paths) for depth in (1, 2, 3, 4)] == [4, 7, 10, 5]
    for path in paths:  # whatever stands at a later rank stands at every earlier one
        better = (*path[:-1], path[-1] - 1)
        assert path[-1] == 0 or better in paths


def test_width_one_is_the_chain_of_first_ranks() -> None:
    assert likely_paths(4, Shape(width=1)) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert likely_paths(4, Shape(width=1, depth=2)) == [(0,), (0, 0)]


def test_paths_of_ones_own_are_filled_with_the_heads_candidates() -> None:
    logits = random_logits(2)
    ranked = logits.argsort(dim=1, descending=True).tolist()
    proposer = medusa(logits, paths=[[0], [2], [2, 1], [0, 0]])
    drafted = draft(proposer, started(proposer))
    first, second = ranked
    expected = {(first[0],), (first[2],), (first[0], second[0]), (first[2], second[1])}
    assert set(tokens_by_path(drafted)) == expected
    assert (drafted.draw, drafted.q) == ("point", None)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([[0], [0, 0], [0, 0, 0]], "3 tokens deep where there are 2 heads"),
        ([[0], [1, 0]], r"path \(1, 0\) of the tree lacks its beginning \(1,\)"),
        ([[0], [-1]], "has rank -1"),
        ([], "is empty"),
    ],
)
def test_a_tree_that_cannot_be_filled_is_refused(paths: list[list[int]], said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        medusa(random_logits(2), paths=paths)


# Candidates


def test_a_chain_is_the_best_candidate_of_each_head() -> None:
    logits = random_logits(4)
    proposer = medusa(logits, Shape(width=1))
    drafted = draft(proposer, started(proposer))
    assert is_chain(drafted.parents)
    assert drafted.tokens.tolist() == logits.argmax(dim=1).tolist()


def test_coupled_candidates_are_what_sampling_would_give_at_their_positions() -> None:
    logits = random_logits(3, scale=0.5)
    params = SamplingParams(temperature=1.3, seed=11, verify="coupled")
    chains = set()
    for length in range(2, 30):
        proposer = medusa(logits, Shape(width=1))
        view = started(proposer, params, tokens=[1] * length)
        words = torch.tensor([key(11, length + ahead, Purpose.SAMPLE) for ahead in range(3)])
        drafted = draft(proposer, view).tokens.tolist()
        assert drafted == sample(logits / 1.3, words).tolist()
        chains.add(tuple(drafted))
    assert len(chains) > 5


def test_under_rejection_candidates_are_the_likeliest_whatever_the_seed() -> None:
    logits = random_logits(3, scale=0.5)
    for seed in range(5):
        proposer = medusa(logits, Shape(width=1))
        view = started(proposer, SamplingParams(temperature=1.3, seed=seed, verify="rejection"))
        assert draft(proposer, view).tokens.tolist() == logits.argmax(dim=1).tolist()


def test_each_request_has_its_own_chain_of_transforms_in_a_shared_step() -> None:
    logits = random_logits(2)
    best = logits.argmax(dim=1).tolist()
    kinds = [
        SamplingParams(),
        SamplingParams(logit_bias={best[0]: -50.0}),
        SamplingParams(temperature=1.0, repetition_penalty=5.0, verify="rejection"),
    ]
    proposer = medusa(logits, Shape(width=2, nodes=6))
    views = []
    for number, params in enumerate(kinds):
        view = Text([7, best[0], 3], id=number, params=params)
        proposer.open(view)
        show(proposer, view, kept=0)
        views.append(view)
    together = proposer.propose(views, [budget(2)] * 3)
    for view, params, drafted in zip(views, kinds, together, strict=True):
        span = RowSpan(params, view.tokens, view.prompt_length, 0, before=((), ()))
        scores = transform(logits, [span])
        assert drafted.tokens[0] == scores[0].argmax()
        assert tokens_by_path(drafted)[(int(scores[0].argmax()),)] == pytest.approx(float(scores[0].softmax(0).max()))
        assert tokens_by_path(drafted) == tokens_by_path(draft(proposer, view, depth=2))


def test_tokens_that_the_request_excludes_or_nobody_knows_are_not_drafted() -> None:
    logits = random_logits(2)
    proposer = medusa(logits)
    only = started(proposer, SamplingParams(temperature=1.0, top_k=1, verify="rejection"))
    assert draft(proposer, only).tokens.tolist() == logits.argmax(dim=1).tolist()
    padded = medusa(logits, Shape(width=12, nodes=99), vocab_size=5)
    assert set(draft(padded, started(padded)).tokens.tolist()) == set(range(5))


# Budgets


def test_no_more_levels_than_the_budget_has() -> None:
    proposer = medusa(random_logits(4))
    view = started(proposer)
    assert [draft(proposer, view, depth=depth).depth for depth in (1, 2, 3, 9)] == [1, 2, 3, max(proposer.depths)]
    assert draft(proposer, view, depth=0) is NO_DRAFT


def test_the_likeliest_nodes_are_kept_with_their_parents() -> None:
    proposer = medusa(random_logits(3), Shape(width=4, nodes=20))
    view = started(proposer)
    whole = tokens_by_path(draft(proposer, view))

    def survival(path: tuple[int, ...]) -> float:
        return 1.0 if not path else survival(path[:-1]) * whole[path]

    order = sorted(whole, key=lambda path: -survival(path))
    for nodes in (1, 4, 11, 19):
        assert set(tokens_by_path(draft(proposer, view, nodes=nodes))) == set(order[:nodes])


def test_without_the_last_tokens_hidden_state_nothing_is_drafted() -> None:
    """Right after `open`, in the middle of a prompt, and after a step that it was not told of."""
    proposer = medusa(random_logits(3))
    view = Text([1, 2, 3, 4])
    proposer.open(view)
    assert draft(proposer, view) is NO_DRAFT
    proposer.observe(view, Committed(0, 2, {NORMED: torch.zeros(2, 4)}))
    assert draft(proposer, view) is NO_DRAFT
    proposer.observe(view, Committed(2, 1, {NORMED: torch.zeros(1, 4)}))
    assert draft(proposer, view).size > 0
    view.tokens.append(5)
    assert draft(proposer, view) is NO_DRAFT
    single = Text([1], id=1)
    proposer.open(single)
    assert draft(proposer, single) is NO_DRAFT


# Confidence


def test_before_anything_was_seen_confidence_is_the_heads_own_probability() -> None:
    logits = random_logits(3)
    proposer = medusa(logits, Shape(width=1))
    drafted = draft(proposer, started(proposer))
    assert drafted.confidence == pytest.approx(logits.softmax(dim=1).amax(dim=1).tolist())


def test_confidence_follows_how_often_a_rank_was_right() -> None:
    """The second-best candidate of head 1 is always what comes next."""
    logits = random_logits(2)
    best, second = logits[0].topk(2).indices.tolist()
    proposer = medusa(logits, Shape(width=2, nodes=6))
    view = started(proposer)
    before = tokens_by_path(draft(proposer, view))
    for _ in range(60):
        draft(proposer, view)
        view.tokens.append(second)
        show(proposer, view, kept=1)
    after = tokens_by_path(draft(proposer, view))
    assert before[(best,)] > before[(second,)]
    assert after[(second,)] > 0.8
    assert after[(best,)] < 0.2
    assert set(tokens_by_path(draft(proposer, view, nodes=1))) == {(second,)}


def test_a_later_head_learns_only_behind_accepted_tokens() -> None:
    """One token kept says nothing of head 2; two kept do."""
    logits = random_logits(2)
    first, later = logits.argmax(dim=1).tolist()
    proposer = medusa(logits, Shape(width=1))
    view = started(proposer)
    (_, unseen) = draft(proposer, view).confidence or ()
    view.tokens.append(first)
    show(proposer, view, kept=1)
    (_, still) = draft(proposer, view).confidence or ()
    view.tokens += [first, later]
    show(proposer, view, kept=2)
    (_, right) = draft(proposer, view).confidence or ()
    assert still == unseen
    assert right > unseen


def saying(**chances: float) -> Tensor:
    """Logits [1, V] of a head: t4=0.9 is token 4's chance, the rest is shared by the others."""
    rest = (1 - sum(chances.values())) / (VOCAB - len(chances))
    return torch.tensor([[chances.get(f"t{token}", rest) for token in range(VOCAB)]]).log()


def test_each_head_and_rank_is_trusted_for_itself() -> None:
    """They say the same and mean different things: head 1 is right at its first rank, head 2 at its second."""
    both = saying(t4=0.46, t5=0.44)
    proposer = medusa(torch.cat((both, both)), Shape(width=2, nodes=6))
    view = started(proposer)
    for _ in range(80):
        draft(proposer, view)
        view.tokens += [4, 5]
        show(proposer, view, kept=2)
    found = tokens_by_path(draft(proposer, view))
    right, wrong = [found[4,], found[4, 5]], [found[5,], found[4, 4]]
    assert min(right) > 0.8
    assert max(wrong) < 0.2


KINDS = {
    "greedy": SamplingParams(),
    "coupled": SamplingParams(temperature=1.0, verify="coupled"),
    "rejection": SamplingParams(temperature=1.0, verify="rejection"),
    "typical": SamplingParams(temperature=1.0, verify="typical"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_verification_learns_for_itself(kind: str) -> None:
    proposer = medusa(saying(t4=0.9), Shape(width=1))  # so sure that noise changes nothing

    def first(params: SamplingParams) -> float:
        return (draft(proposer, started(proposer, params)).confidence or [])[0]

    before = {name: first(params) for name, params in KINDS.items()}
    view = started(proposer, KINDS[kind])
    assert draft(proposer, view).tokens.tolist() == [4]
    view.tokens.append(5)
    show(proposer, view, kept=1)
    after = {name: first(params) for name, params in KINDS.items()}
    assert [name for name in KINDS if after[name] < before[name]] == [kind]


def test_the_same_rank_is_trusted_more_where_its_head_is_sure() -> None:
    """Always right where it says 0.9, never where it says 0.3: one figure for both would be wrong twice."""
    sure, unsure = saying(t4=0.9), saying(t4=0.3)
    proposer = medusa(sure, Shape(width=1))
    head = proposer.head
    assert isinstance(head, FixedHead)
    view = started(proposer)
    for turn in range(80):
        head.fixed = sure if turn % 2 else unsure
        draft(proposer, view)
        view.tokens.append(4 if turn % 2 else 5)
        show(proposer, view, kept=1)
    confidence: list[float] = []
    for logits in (sure, unsure):
        head.fixed = logits
        confidence += draft(proposer, view).confidence or []
    assert confidence[0] > 0.95
    assert confidence[1] < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_vocabulary_drafts_the_targets_ids(kind: str) -> None:
    """Row i stands for token ids[i], and the last for one that the tokenizer does not know."""
    ids, logits = torch.tensor([7, 2, 5, 11]), torch.tensor([[0.0, 9.0, 3.0, 20.0], [8.0, 0.0, 2.0, 20.0]])
    head = FixedHead(blocks=[[]] * 2, outputs=[], dtype=torch.float32, fixed=logits, target_ids=ids)
    proposer = MedusaProposer(head, vocab_size=11, width=VOCAB, shape=Shape(width=1))
    assert draft(proposer, started(proposer, KINDS[kind])).tokens.tolist() == [2, 7]
