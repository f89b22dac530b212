"""Early exit and SWIFT: the target drafts for itself, and neither its answers nor its cache show it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from lab import (
    CONFIG,
    draft_proposer,
    engine,
    exact_law,
    model,
    output,
    p_value,
    pool_for,
    run,
    sample_outputs,
)
from torch import Tensor
from views import Text, accepted, budget

from paceline.engine.controller import Controller
from paceline.engine.engine import Engine, EngineConfig
from paceline.errors import PacelineError
from paceline.model.decoder import Batch, Decoder, Sublayer
from paceline.propose.base import Budget, Proposer
from paceline.propose.early_exit import EarlyExitProposer
from paceline.propose.layer_search import SearchSettings
from paceline.propose.layer_skip import LayerSkipProposer, replay, savings, searchable
from paceline.propose.none import NoProposer
from paceline.propose.rollout import CHAIN, Shape
from paceline.propose.self_draft import Part
from paceline.sampling.params import SamplingParams
from paceline.types import Committed, Draft, View
from paceline.weights.load import LoadedModel

SMALL = replace(CONFIG, num_layers=4)
WIDE = replace(CONFIG, num_layers=4, vocab_size=40, max_positions=256)
PROMPTS = [[1, 5, 9, 1, 5], [3], [7, 7, 7, 7], list(range(30)), [2, 4] * 20]
SKIPPED: frozenset[Sublayer] = frozenset({(1, "attention"), (1, "mlp"), (2, "mlp")})
TREE = Shape(width=3, depth=4, nodes=9)
SAMPLED = Shape(width=2, depth=3, nodes=8, sampled=True)
KINDS = ["early exit", "swift, fixed set", "swift, searching"]
QUICK = SearchSettings(random_rounds=3, limit=12, patience=12)
SIGNIFICANT = 1e-4


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return model(0, config=WIDE, sharpness=2.0)


def proposer(
    kind: str, target: LoadedModel, *, shape: Shape = CHAIN, stop_below: float = 0.0, window: int = 4
) -> EarlyExitProposer | LayerSkipProposer:
    decoder, vocab, width = target.decoder, target.vocab_size, target.config.vocab_size

    def stop() -> float:
        return stop_below

    if kind == "early exit":
        return EarlyExitProposer(decoder, 2, vocab_size=vocab, width=width, stop_below=stop, shape=shape)
    skip = SKIPPED if kind == "swift, fixed set" else None
    return LayerSkipProposer(
        decoder, vocab_size=vocab, width=width, stop_below=stop, skip=skip, search=QUICK, interval=1, window=window,
        shape=shape,
    )  # fmt: skip


def plain(target: LoadedModel, prompt: list[int], params: SamplingParams) -> list[int]:
    return output(run(engine(target, NoProposer()), [prompt], [params])[0])


def silence(decoder: Decoder, sublayers: Sequence[Sublayer]) -> None:
    """Make sublayers the identity: their last product gives zeros."""
    for layer, kind in sublayers:
        linear = decoder.layers[layer].output if kind == "attention" else decoder.layers[layer].down
        linear.weight.zero_()  # type: ignore[attr-defined]


# Token for token


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("k", [1, 4, None])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_plain(kind: str, k: int | None, shape: Shape, target: LoadedModel) -> None:
    """Several requests of different lengths share steps, their prompts in chunks of 8."""
    params = SamplingParams(max_tokens=40)
    machine = engine(target, proposer(kind, target, shape=shape), k=k, max_batch=3, chunk=8)
    requests = run(machine, PROMPTS, [params] * len(PROMPTS))
    assert [output(r) for r in requests] == [plain(target, p, params) for p in PROMPTS]
    assert sum(r.stats.drafted for r in requests) > 0
    assert machine.pool.available == machine.pool.blocks


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_coupled_equals_plain(kind: str, shape: Shape, target: LoadedModel) -> None:
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, max_tokens=24, seed=seed, verify="coupled")
        for seed in range(12)
    ]
    requests = run(engine(target, proposer(kind, target, shape=shape), k=4), [PROMPTS[0]] * len(params), params)
    assert [output(r) for r in requests] == [plain(target, PROMPTS[0], each) for each in params]
    assert sum(r.stats.accepted for r in requests) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_inside_the_accepted_run_ends_everything(kind: str, target: LoadedModel) -> None:
    answer = plain(target, PROMPTS[3], SamplingParams(max_tokens=12))
    for cut in range(1, 9):
        ends = [
            (SamplingParams(max_tokens=cut), cut),
            (SamplingParams(max_tokens=12, stop_token_ids=[answer[cut]]), answer.index(answer[cut]) + 1),
        ]
        for params, count in ends:
            (request,) = run(engine(target, proposer(kind, target), k=5), [PROMPTS[3]], [params])
            assert output(request) == answer[:count]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_request_that_hits_the_prefix_cache_answers_alike(kind: str, target: LoadedModel) -> None:
    """Also of blocks that decoding filled: what a draft wrote there first must be gone."""
    machine = engine(target, proposer(kind, target), k=3)
    machine.stepper.reuse_decoded = True
    params = SamplingParams(max_tokens=17)
    (first,) = run(machine, [PROMPTS[3]], [params])
    longer = PROMPTS[3] + output(first)
    (second,) = run(machine, [longer], [params])
    assert second.stats.cached_tokens > len(PROMPTS[3])
    assert output(second) == plain(target, longer, params)


# In distribution


@pytest.mark.parametrize("shape", [CHAIN, TREE, SAMPLED], ids=["chain", "tree", "sampled tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_joint_law_of_three_tokens_is_the_targets(kind: str, shape: Shape) -> None:
    target = model(0, config=SMALL)
    params = SamplingParams(temperature=1.1, top_p=0.95, max_tokens=3, verify="rejection")
    drafting = proposer(kind, target, shape=shape, stop_below=0.1, window=1)
    outcomes = sample_outputs(engine(target, drafting, k=3, max_batch=64), params, 1500)
    assert p_value(outcomes, exact_law(target, params, 3)) > SIGNIFICANT
    if isinstance(drafting, LayerSkipProposer) and drafting.search is not None:
        assert len(drafting.search.tried) > 2  # the set did change under way


# The cache


@dataclass
class Watched(Proposer):
    """Compares the pool before and after each proposal, bit for bit, in every slot that is committed."""

    inner: EarlyExitProposer | LayerSkipProposer
    name: str = "watched"
    compared: int = 0
    drafted: int = 0

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        before = [self._committed(view) for view in views]
        lengths = [view.committed for view in views]
        tables = [list(view.cache.blocks) for view in views if view.cache is not None]
        drafts = self.inner.propose(views, budgets)
        assert [view.committed for view in views] == lengths
        for view, held, table in zip(views, before, tables, strict=True):
            assert view.cache is not None
            assert view.cache.blocks[: len(table)] == table
            assert all(torch.equal(was, now) for was, now in zip(held, self._committed(view), strict=True))
        self.compared += sum(lengths)
        self.drafted += sum(draft.size for draft in drafts)
        return drafts

    def observe(self, view: View, committed: Committed) -> None:
        self.inner.observe(view, committed)

    @staticmethod
    def _committed(view: View) -> list[Tensor]:
        assert view.cache is not None
        slots, pool = view.cache.slot_table(view.committed), view.cache.pool
        return [store[slots].clone() for store in (*pool.keys, *pool.values)]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_committed_rows_are_the_same_bits_after_a_proposal(kind: str, shape: Shape, target: LoadedModel) -> None:
    watched = Watched(proposer(kind, target, shape=shape))
    params = [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=3)]
    # The third shares the first one's prompt blocks with it while both run.
    run(engine(target, watched, k=4, chunk=8), [*PROMPTS[3:], PROMPTS[3]], [*params, params[0]])
    assert watched.compared > 500
    assert watched.drafted > 50


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_cache_drafts_and_searches_less_and_answers_alike(kind: str, target: LoadedModel) -> None:
    """The pool holds the request and nothing more: a wide tree finds no room near the end, a replay none at all."""
    params = SamplingParams(max_tokens=31)
    room = len(PROMPTS[0]) + params.max_tokens
    drafting = proposer(kind, target, shape=Shape(width=4, depth=4, nodes=12))
    pool = pool_for(target, blocks=room // 4)
    machine = Engine(target, drafting, pool, Controller(fixed=4), EngineConfig(prefill_chunk=64))
    (request,) = run(machine, [PROMPTS[0]], [params])
    assert output(request) == plain(target, PROMPTS[0], params)
    assert request.stats.drafted > 0
    assert pool.available == pool.blocks
    if isinstance(drafting, LayerSkipProposer) and drafting.search is not None:
        roomy = proposer(kind, target)
        run(engine(target, roomy, k=4), [PROMPTS[0]], [params])
        assert isinstance(roomy, LayerSkipProposer)
        assert roomy.search is not None
        assert len(drafting.search.tried) < len(roomy.search.tried)


# What is drafted


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("kind", ["early exit", "swift, fixed set"])
def test_where_the_left_out_layers_do_nothing_it_drafts_as_the_whole_target_would(
    kind: str, sampling: dict[str, float], shape: Shape
) -> None:
    """So the draft sees the right rows at the right positions."""
    target = model(0, config=WIDE, sharpness=2.0)
    after: list[Sublayer] = [(2, "attention"), (2, "mlp"), (3, "attention"), (3, "mlp")]
    silence(target.decoder, after if kind == "early exit" else sorted(SKIPPED))
    params = SamplingParams(max_tokens=30, **sampling)  # type: ignore[arg-type]

    def stats(drafting: Proposer) -> list[tuple[list[int], list[int], list[int]]]:
        requests = run(engine(target, drafting, k=4), PROMPTS, [params] * len(PROMPTS))
        return [(output(r), r.stats.drafted_at, r.stats.accepted_at) for r in requests]

    whole = draft_proposer(target, target, shape=shape)
    whole.prefill_chunk = 64  # as the engine's, so that it never lags behind
    own = stats(proposer(kind, target, shape=shape))
    assert own == stats(whole)
    assert shape.width > 1 or all(drafted == taken for _, drafted, taken in own)


def test_an_exit_norm_takes_the_final_norms_place(target: LoadedModel) -> None:
    def drafts(exit_norm: Tensor | None) -> list[list[int]]:
        seen: list[list[int]] = []
        exiting = EarlyExitProposer(target.decoder, 2, exit_norm, vocab_size=40, width=40, stop_below=lambda: 0.0)
        inner = exiting.propose
        exiting.propose = lambda views, budgets: noted(seen, inner(views, budgets))  # type: ignore[method-assign]
        (request,) = run(engine(target, exiting, k=3), [PROMPTS[0]], [SamplingParams(max_tokens=12)])
        assert output(request) == plain(target, PROMPTS[0], SamplingParams(max_tokens=12))
        return seen

    def noted(seen: list[list[int]], made: list[Draft]) -> list[Draft]:
        seen += [draft.tokens.tolist() for draft in made]
        return made

    size = target.config.hidden_size
    assert drafts(torch.ones(size)) == drafts(None)  # the lab's final norm has ones
    assert drafts(torch.linspace(-1, 1, size)) != drafts(None)
    assert set(itertools.chain(*drafts(torch.zeros(size)))) == {0}  # no logit stands out


def test_a_weak_token_ends_a_draft(target: LoadedModel) -> None:
    def drafted(stop_below: float) -> float:
        (request,) = run(
            engine(target, proposer("early exit", target, stop_below=stop_below), k=4),
            [PROMPTS[0]], [SamplingParams(max_tokens=40)],
        )  # fmt: skip
        return request.stats.drafted / (request.stats.target_forwards - 1)

    assert drafted(1.1) <= 1
    assert drafted(1.1) < drafted(0.4) < drafted(0.0)


@dataclass
class Counted:
    """Counts the target's forwards and what each of them ran."""

    decoder: Decoder
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        inner = self.decoder.forward

        def forward(batch: Batch) -> tuple[Tensor, dict[int, Tensor]]:
            self.batches.append(batch)
            return inner(batch)

        self.decoder.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["early exit", "swift, fixed set"])
def test_a_level_is_one_forward_of_one_row_a_sequence(kind: str) -> None:
    target = model(0, config=WIDE, sharpness=2.0)
    machine = engine(target, proposer(kind, target), k=3)
    for prompt in PROMPTS:
        machine.add(prompt, SamplingParams(max_tokens=30))
    machine.step()  # the prompts
    counted = Counted(target.decoder)
    machine.step()
    *levels, verification = counted.batches
    assert [batch.tokens.shape[0] for batch in levels] == [len(PROMPTS)] * 3
    assert verification.tokens.shape[0] == 4 * len(PROMPTS)
    assert verification.layers is None
    assert not verification.skip
    for batch in levels:
        if kind == "early exit":
            assert batch.layers == range(2)
        else:
            assert batch.skip == SKIPPED


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_budget_nothing_is_computed(kind: str) -> None:
    target = model(0, config=WIDE)
    drafting = proposer(kind, target, window=1)
    pool = pool_for(target)
    view = Text([1, 2, 3, 4], committed=3, cache=pool.open([1, 2, 3, 4], 16))
    counted = Counted(target.decoder)
    assert [draft.size for draft in drafting.propose([view], [budget(0)])] == [0]
    assert not counted.batches


# The search


def searching(target: LoadedModel, *, limit: int, interval: int = 2, window: int = 8) -> LayerSkipProposer:
    settings = SearchSettings(random_rounds=8, limit=limit, patience=limit)
    return LayerSkipProposer(
        target.decoder, vocab_size=target.vocab_size, width=target.config.vocab_size, stop_below=lambda: 0.0,
        search=settings, interval=interval, window=window,
    )  # fmt: skip


def partly_silent() -> tuple[LoadedModel, frozenset[Sublayer]]:
    """Eight layers; of the twelve sublayers between the first and the last, eight do nothing."""
    target = model(0, config=replace(WIDE, num_layers=8), sharpness=2.0)
    silent = [sublayer for i, sublayer in enumerate(searchable(target.config)) if i % 3 != 1]
    silence(target.decoder, silent)
    return target, frozenset(silent)


def test_the_search_finds_the_sublayers_that_do_nothing() -> None:
    target, silent = partly_silent()
    drafting = searching(target, limit=64, window=16)
    params = SamplingParams(max_tokens=150)
    answer = plain(target, PROMPTS[0], params)
    first = skip_acceptance(target, drafting.part.skip, params)
    (request,) = run(engine(target, drafting, k=2), [PROMPTS[0]], [params])
    while drafting.search is not None and not drafting.search.done:
        run(engine(target, drafting, k=2), [PROMPTS[0]], [params])
    assert output(request) == answer
    found = drafting.part.skip
    shares = dict(zip(searchable(target.config), savings(target.config, searchable(target.config)), strict=True))
    assert found <= silent  # none that matters
    assert sum(shares[s] for s in found) > 0.6 * sum(shares[s] for s in silent)
    assert skip_acceptance(target, found, params) > first + 0.2


def test_drafting_is_not_judged_by_the_clock_while_the_search_lasts() -> None:
    """Its replays would count as what drafting costs, and at rest it would never end."""
    target, _ = partly_silent()
    drafting = searching(target, limit=5, interval=2, window=4)
    machine = engine(target, drafting, k=2)
    judged = set()
    machine.add(PROMPTS[0], SamplingParams(max_tokens=100))
    while not machine.idle:
        searching_still = drafting.search is not None and not drafting.search.done
        machine.step()
        judged.add((searching_still, machine.controller.alone))
    assert judged == {(True, False), (False, True)}


def skip_acceptance(target: LoadedModel, skip: frozenset[Sublayer], params: SamplingParams) -> float:
    fixed = LayerSkipProposer(target.decoder, vocab_size=40, width=40, stop_below=lambda: 0.0, skip=skip)
    (request,) = run(engine(target, fixed, k=3), [PROMPTS[0]], [params])
    return request.stats.acceptance_rate


def test_a_search_costs_one_forward_in_an_interval_up_to_its_limit() -> None:
    target = model(0, config=WIDE, sharpness=2.0)
    drafting = searching(target, limit=5, interval=3, window=4)
    machine = engine(target, drafting, k=1)
    counted = Counted(target.decoder)
    request = machine.add(PROMPTS[0], SamplingParams(max_tokens=60))
    tried = []
    while not machine.idle:
        counted.batches.clear()
        machine.step()
        # A level has one row, verification one or two, a replay four; a prompt is fed before anything is drafted.
        tried.append(sum(batch.tokens.shape[0] == 4 for batch in counted.batches))
    steps = [step for step, replays in enumerate(tried) if replays]
    assert sum(tried) == len(steps) == 5
    assert [b - a for a, b in itertools.pairwise(steps)] == [3] * 4
    assert output(request) == plain(target, PROMPTS[0], SamplingParams(max_tokens=60))


def test_the_replay_scores_what_the_target_said_in_its_answer_only(target: LoadedModel) -> None:
    """The target without any part left out agrees with its own greedy answer at every place."""
    machine = engine(target, NoProposer())
    request = machine.add(PROMPTS[0], SamplingParams(max_tokens=30))
    for _ in range(20):
        machine.step()
    assert replay(target.decoder, request, Part(), 20, 40) == 1.0
    assert replay(target.decoder, request, Part(), 21, 40) <= 20 / 21  # the prompt's last token is none of its own
    assert replay(target.decoder, request, Part(skip=frozenset(searchable(target.config))), 20, 40) < 1.0
    drafting = searching(target, limit=5, interval=1, window=21)
    drafting.propose([request], [budget(1)])
    assert drafting.search is not None
    assert not drafting.search.tried  # 20 tokens of answer are too few


def test_a_new_search_begins_from_the_found_set_when_acceptance_falls(target: LoadedModel) -> None:
    drafting = searching(target, limit=1)
    first = drafting.search
    assert first is not None
    first.tell(first.ask(), 0.9)
    view = Text([1, 2, 3])
    chance = torch.Generator().manual_seed(0)
    for took in torch.randint(0, 5, (3000,), generator=chance).tolist():
        drafting.observe(view, accepted(took, 4))
    assert drafting.search is first  # as it was, give or take
    for took in torch.randint(0, 2, (400,), generator=chance).tolist():
        drafting.observe(view, accepted(took, 4))
    assert drafting.search is not first
    assert drafting.search is not None
    assert not drafting.search.done
    assert torch.equal(drafting.search.best, first.best)


def test_savings_count_weights() -> None:
    shares = savings(SMALL, searchable(SMALL))
    attention, mlp = 16 * 8 * (2 * 2 + 2 * 1), 16 * 24 * 3
    whole = 4 * (attention + mlp) + 6 * 16
    assert shares.tolist() == pytest.approx([attention / whole, mlp / whole] * 2)


# Mistakes


def refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(PacelineError, match=match):
        make()


def test_what_the_target_does_not_have_is_refused(target: LoadedModel) -> None:
    decoder = target.decoder

    def exiting(layers: int, exit_norm: Tensor | None = None) -> Proposer:
        return EarlyExitProposer(decoder, layers, exit_norm, vocab_size=40, width=40, stop_below=lambda: 0.0)

    def skipping(*skip: tuple[int, str]) -> Proposer:
        wanted: frozenset[Sublayer] = frozenset(skip)  # type: ignore[arg-type]
        return LayerSkipProposer(decoder, vocab_size=40, width=40, stop_below=lambda: 0.0, skip=wanted)

    refused(lambda: exiting(4), "after 1 to 3, not 4")
    refused(lambda: exiting(0), "not 0")
    refused(lambda: exiting(2, torch.ones(7)), r"shape \(7,\), the target wants \(16,\)")
    refused(lambda: skipping((4, "mlp")), r"no sublayer \(4, 'mlp'\)")
    refused(lambda: skipping((1, "head")), r"no sublayer \(1, 'head'\)")
    refused(lambda: searching(model(0), limit=3), "2 layers")
    refused(lambda: searching(target, limit=3, interval=0), "at least 1, not 0")
    assert skipping((0, "mlp"), (3, "attention")).name == "swift"
