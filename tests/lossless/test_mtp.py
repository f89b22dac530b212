"""Several MTP depths: lossless, and each depth reads the rows that DeepSeek-V3's equations say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from lab import CONFIG, engine, exact_law, model, output, p_value, run, sample_outputs
from lab_heads import (
    DEPTHS,
    TINY,
    WIDE,
    Watched,
    assert_drafts_from_scratch,
    drafted,
    expected_draft,
    head,
    head_proposer,
    mtp_head,
    nodes_of,
    pool_of,
    small_engine,
    successor_model,
)
from torch import Tensor

from paceline.heads.block import TorchBlock
from paceline.heads.mtp import MtpHead
from paceline.propose.base import NOTHING
from paceline.propose.mtp import MtpProposer
from paceline.propose.none import NoProposer
from paceline.propose.rollout import CHAIN, Shape
from paceline.sampling.params import SamplingParams
from paceline.weights.load import LoadedModel

DRAWS = 1500
SIGNIFICANT = 1e-4
SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, max_tokens=4, verify="rejection")
GREEDY = SamplingParams(max_tokens=12)
SHAPES = {"chain": CHAIN, "tree": Shape(3, 3, 12), "narrow tree": Shape(2, 5, 5)}
PROMPTS = [[1, 5, 9, 1, 5], [3], [7, 7, 7, 7], list(range(30)), [2, 4] * 20]
KINDS = [
    SamplingParams(max_tokens=30), SamplingParams(temperature=0.9, seed=3, max_tokens=40),
    SamplingParams(temperature=1.2, top_k=7, seed=4, verify="coupled", max_tokens=25),
    SamplingParams(frequency_penalty=0.5, max_tokens=33), SamplingParams(max_tokens=3),
]  # fmt: skip
LONG = list(range(30))


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return model(0)


@pytest.fixture(scope="module")
def wide_target() -> LoadedModel:
    return model(0, config=WIDE, sharpness=-1.0)


@pytest.fixture(scope="module")
def tiny_target() -> LoadedModel:
    return model(1, config=TINY, sharpness=-1.0)


def plain(target: LoadedModel, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return output(run(engine(target, NoProposer()), [prompt], [params])[0])


@pytest.fixture(scope="module")
def alone(wide_target: LoadedModel) -> list[list[int]]:
    with torch.inference_mode():
        return [plain(wide_target, p, c) for p, c in zip(PROMPTS, KINDS, strict=True)]


def mtp(target: LoadedModel, *, kind: str = "mtp 3", shape: Shape = CHAIN, blocks: int = 8192) -> MtpProposer:
    proposer = head_proposer(target, head(kind, target), shape, blocks=blocks)
    assert isinstance(proposer, MtpProposer)
    return proposer


# Token for token


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", DEPTHS)
def test_greedy_and_coupled_answers_are_those_of_plain_decoding(
    kind: str, shape: str, wide_target: LoadedModel, alone: list[list[int]]
) -> None:
    """Requests of every kind and length share steps, joining and leaving, their prompts in chunks of eight."""
    for k, max_batch in ((1, 5), (4, 2), (None, 5)):
        machine = engine(
            wide_target, mtp(wide_target, kind=kind, shape=SHAPES[shape]), k=k, max_batch=max_batch, chunk=8
        )
        requests = run(machine, PROMPTS, KINDS)
        assert [output(r) for r in requests] == alone
        assert k is None or sum(r.stats.drafted for r in requests) > 0


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", DEPTHS)
def test_coupled_answers_are_those_of_plain_decoding_under_twenty_seeds(
    kind: str, shape: str, tiny_target: LoadedModel
) -> None:
    base = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, max_tokens=20, verify="coupled")
    params, prompt = [replace(base, seed=seed) for seed in range(20)], [1, 2, 0, 1, 2]
    requests = run(engine(tiny_target, mtp(tiny_target, kind=kind, shape=SHAPES[shape]), k=4), [prompt] * 20, params)
    assert [output(r) for r in requests] == [plain(tiny_target, prompt, each) for each in params]
    assert sum(r.stats.accepted for r in requests) > 0


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_everything_ends_at_an_end_inside_an_accepted_run(shape: str, tiny_target: LoadedModel) -> None:
    """Length and stop token at every place: nothing past the end is emitted or kept."""
    proposer, prompt, whole = mtp(tiny_target, shape=SHAPES[shape]), [1, 2, 0, 1, 2], 16
    coupled = SamplingParams(temperature=1.0, seed=5, max_tokens=whole)
    answer = plain(tiny_target, prompt, coupled)
    cases = [(replace(coupled, max_tokens=cut), cut) for cut in range(1, whole)]
    cases += [(replace(coupled, stop_token_ids=[token]), answer.index(token) + 1) for token in set(answer)]
    machine = engine(tiny_target, proposer, k=4)
    for params, count in cases:
        (request,) = run(machine, [prompt], [params])
        assert output(request) == answer[:count]
    assert proposer.pool.available == proposer.pool.blocks
    assert machine.pool.available == machine.pool.blocks


# In law


@pytest.mark.parametrize("kind", DEPTHS)
def test_the_joint_law_of_chains_is_the_targets(kind: str, target: LoadedModel) -> None:
    machine = engine(target, mtp(target, kind=kind), k=3, max_batch=64)
    assert p_value(sample_outputs(machine, SAMPLED, DRAWS), exact_law(target, SAMPLED, 4)) > SIGNIFICANT


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", DEPTHS)
def test_the_joint_law_of_trees_is_the_targets(kind: str, sampled: bool, target: LoadedModel) -> None:
    machine = engine(target, mtp(target, kind=kind, shape=Shape(3, 3, 12, sampled=sampled)), k=3, max_batch=64)
    assert p_value(sample_outputs(machine, SAMPLED, DRAWS), exact_law(target, SAMPLED, 4)) > SIGNIFICANT


# What is drafted

TEXTS = [[1, 2, 0, 1, 2], [2, 2, 2, 1] * 5, [0, 1], [1, 2, 0] * 3, [2]]
MIXED = [SamplingParams(max_tokens=20), *(SamplingParams(max_tokens=20, temperature=1.0, seed=s) for s in range(3, 7))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [*DEPTHS, "mtp 4"])
def test_each_depth_drafts_from_its_own_rows_of_the_whole_text(kind: str, shape: str, tiny_target: LoadedModel) -> None:
    """After every mixture of acceptances a node at depth k is what depth k gives when all depths go over the whole
    text once: row t reads x_{t+k}, drafted ones included, and h^{k-1}_t, as far as the target has computed."""
    watched = Watched(mtp(tiny_target, kind=kind, shape=SHAPES[shape]))
    run(engine(tiny_target, watched, k=4, chunk=8), TEXTS, MIXED)
    assert len(watched.drafts) > 25
    assert {1, 2} <= set(watched.accepted)
    assert_drafts_from_scratch(watched, tiny_target, head(kind, tiny_target), SHAPES[shape])


def test_a_head_that_lost_one_row_would_be_noticed(tiny_target: LoadedModel) -> None:
    """The comparison can fail: without its first row each depth drafts otherwise."""
    watched = Watched(mtp(tiny_target))
    run(engine(tiny_target, watched, k=4), TEXTS[:1], MIXED[:1])
    (view, budget, draft), own = watched.drafts[0], head("mtp 3", tiny_target)
    assert nodes_of(draft) == pytest.approx(expected_draft(tiny_target, own, view, budget, CHAIN), abs=1e-4)
    assert nodes_of(draft) != pytest.approx(expected_draft(tiny_target, own, view, budget, CHAIN, first=1), abs=1e-2)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_a_draft_is_never_deeper_than_there_are_depths(k: int, wide_target: LoadedModel) -> None:
    watched = Watched(mtp(wide_target))
    run(engine(wide_target, watched, k=k), [LONG], [GREEDY])
    assert max(draft.depth for _, _, draft in watched.drafts) == min(k, 3)


def fitting_head(target: LoadedModel, depths: int) -> MtpHead:
    """Each depth passes the normed embedding of its token on, which is all that this target ever knows."""
    fitting, hidden = mtp_head(target, depths), CONFIG.hidden_size
    assert isinstance(fitting.block, TorchBlock)
    for layer in fitting.block.layers:
        layer.output = layer.down = lambda x: x.new_zeros(x.shape[0], hidden)
    for depth in fitting.depths:
        depth.embed_norm, depth.project, depth.final_norm = _same, lambda x: x[:, hidden:], target.decoder.final_norm
    return fitting


def _same(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("shape", [CHAIN, Shape(2, 3, 14)], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_depths_that_know_the_target_are_always_accepted(temperature: float, shape: Shape) -> None:
    """One row too early or too late and nothing would be."""
    target = successor_model()
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=21)
    (request,) = run(engine(target, head_proposer(target, fitting_head(target, 3), shape), k=4), [[3, 1, 4]], [params])
    assert output(request) == plain(target, [3, 1, 4], params)
    assert len(set(output(request))) > 4
    assert request.stats.acceptance_per_position == [1.0] * 3
    assert request.stats.target_forwards == 1 + 20 // 4


# Prefix hits


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", DEPTHS)
def test_behind_a_prefix_hit_every_depth_starts_cold(kind: str, shape: str, tiny_target: LoadedModel) -> None:
    """It drafts from the rows behind the hit as if the text began there, and says that it does."""
    proposer = mtp(tiny_target, kind=kind, shape=SHAPES[shape])
    watched = Watched(proposer)
    machine = engine(tiny_target, watched, k=4)
    prompt = TEXTS[1]
    run(machine, [prompt], [MIXED[0]])
    for cold_starts, tail in enumerate(([1, 2, 0, 0, 1], [1], [2]), start=1):
        watched.drafts.clear()
        params = replace(MIXED[1], seed=cold_starts)
        (again,) = run(machine, [prompt + tail], [params])
        assert again.stats.cached_tokens == len(prompt)
        assert proposer.cold_starts == cold_starts
        assert output(again) == plain(tiny_target, prompt + tail, params)
        assert_drafts_from_scratch(watched, tiny_target, head(kind, tiny_target), SHAPES[shape], first=len(prompt))


# Room


def test_without_room_for_all_depths_a_sequence_decodes_plainly(wide_target: LoadedModel) -> None:
    """Eleven blocks a depth: the first request has its three, for the second two are left over, and go back."""
    proposer = mtp(wide_target, blocks=3 * 11 + 2 * 11 + 6)
    prompts = [LONG, LONG[::-1]]
    requests = run(engine(wide_target, proposer, k=3), prompts, [GREEDY] * 2)
    assert [output(r) for r in requests] == [plain(wide_target, p, GREEDY) for p in prompts]
    assert [r.stats.drafted > 0 for r in requests] == [True, False]
    assert proposer.pool.available == proposer.pool.blocks


def test_a_tree_that_does_not_fit_is_not_drafted(wide_target: LoadedModel) -> None:
    """The sequence has its own room and no more: near its end a wide tree finds none."""
    proposer = mtp(wide_target, shape=Shape(4, 3, 40), blocks=3 * 11)
    (request,) = run(engine(wide_target, proposer, k=3), [LONG], [GREEDY])
    assert output(request) == plain(wide_target, LONG, GREEDY)
    assert 0 < request.stats.drafted_at[0] < request.stats.target_forwards - 1


def test_a_drawn_tree_without_room_in_the_targets_cache_is_a_chain_no_deeper(wide_target: LoadedModel) -> None:
    """All children of a node are verified or none: where eight do not fit, one is drawn, at most once a depth."""
    watched = Watched(mtp(wide_target, kind="mtp 2", shape=Shape(8, 2, 24, sampled=True)))
    params = SamplingParams(max_tokens=8, temperature=1.0, verify="rejection", seed=1)
    (request,) = run(small_engine(wide_target, watched, blocks=7, k=6), [LONG[:20]], [params])
    assert len(output(request)) == 8
    assert all(draft.draw == "iid" and draft.depth <= 2 for _, _, draft in watched.drafts)
    assert request.stats.drafted > 0


def test_a_wide_tree_at_the_end_of_its_room_writes_to_no_other_sequence(wide_target: LoadedModel) -> None:
    shape = Shape(8, 3, 20)
    watched = Watched(mtp(wide_target, shape=shape))
    run(engine(wide_target, watched, k=4), [LONG, [4, 2]], [SamplingParams(max_tokens=18), GREEDY])
    watched.drafts = [seen for seen in watched.drafts if len(seen[0].tokens) > len(LONG) + 8]
    assert_drafts_from_scratch(watched, wide_target, head("mtp 3", wide_target), shape)


def test_no_blocks_are_lost(wide_target: LoadedModel) -> None:
    proposer = mtp(wide_target, shape=SHAPES["tree"])
    machine = engine(wide_target, proposer, k=3, max_batch=3, chunk=8)
    run(machine, PROMPTS, [SamplingParams(max_tokens=20, temperature=1, seed=4)] * len(PROMPTS))
    for steps in (1, 2, 6):  # within the prompt, at its end, while decoding
        aborted = machine.add([steps, *LONG], SamplingParams(max_tokens=50))
        for _ in range(steps):
            machine.step()
        with torch.inference_mode(False):  # it comes from outside of a step
            machine.abort(aborted)
    assert machine.pool.available == machine.pool.blocks
    assert proposer.pool.available == proposer.pool.blocks


# Beginnings, ends, mishaps


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize(("depths", "waits"), [(2, 1), (3, 2), (4, 3)])
def test_a_prompt_of_one_token(depths: int, waits: int, shape: str, wide_target: LoadedModel) -> None:
    """Nothing is drafted until every depth has a first row to work from."""
    machine = engine(wide_target, Watched(mtp(wide_target, kind=f"mtp {depths}", shape=SHAPES[shape])), k=4)
    request, drafts = drafted(machine, [3], GREEDY)
    assert output(request) == plain(wide_target, [3], GREEDY)
    assert [draft.size > 0 for draft in drafts] == [False] * waits + [True] * (len(drafts) - waits)


def test_a_single_depth_drafts_one_token(wide_target: LoadedModel) -> None:
    own = mtp_head(wide_target, 1)
    proposer = MtpProposer(
        own, wide_target.decoder, pool_of(wide_target, own), vocab_size=WIDE.vocab_size, stop_below=lambda: 0.0
    )
    request, drafts = drafted(engine(wide_target, Watched(proposer), k=4), [3], GREEDY)
    assert output(request) == plain(wide_target, [3], GREEDY)
    assert [draft.size for draft in drafts] == [0] + [1] * (len(drafts) - 1)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_up_to_the_end_of_the_context(shape: str) -> None:
    short = model(0, config=replace(WIDE, max_positions=40), sharpness=-1.0)
    params = SamplingParams(max_tokens=60)
    (request,) = run(engine(short, mtp(short, shape=SHAPES[shape]), k=4), [LONG], [params])
    assert len(request.tokens) == 40
    assert output(request) == plain(short, LONG, params)
    assert request.stats.drafted > 0


def test_a_budget_of_nothing_gives_no_draft_and_keeps_the_caches_in_step(tiny_target: LoadedModel) -> None:
    """Another method drafts in between: the rows are fed all the same."""
    watched = Watched(mtp(tiny_target))
    machine = engine(tiny_target, watched, k=3)
    budget, steps = machine.stepper._budget, iter(range(1000))
    machine.stepper._budget = lambda item: NOTHING if next(steps) % 3 else budget(item)  # type: ignore[method-assign]
    (request,) = run(machine, TEXTS[1:2], [replace(MIXED[1], max_tokens=30)])
    assert output(request) == plain(tiny_target, TEXTS[1], replace(MIXED[1], max_tokens=30))
    assert 5 < len(watched.drafts) < 12
    assert_drafts_from_scratch(watched, tiny_target, head("mtp 3", tiny_target), CHAIN)


def test_rows_that_never_came_end_the_drafting_and_not_the_request(
    tiny_target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Better no draft than one from rows that are out of step."""
    proposer = mtp(tiny_target)
    observe, steps = proposer.observe, iter(range(1000))
    monkeypatch.setattr(proposer, "observe", lambda *seen: None if next(steps) == 4 else observe(*seen))
    request, drafts = drafted(engine(tiny_target, Watched(proposer)), TEXTS[0], MIXED[1])
    assert output(request) == plain(tiny_target, TEXTS[0], MIXED[1])
    assert [draft.size > 0 for draft in drafts] == [True] * 4 + [False] * (len(drafts) - 4)


@pytest.mark.parametrize("call", range(1, 10))
def test_a_step_that_fails_in_the_head_can_be_taken_again(
    call: int, tiny_target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in any depth, say: rows and tokens stay together."""
    proposer = mtp(tiny_target)
    forward, calls = proposer.head.forward, iter(range(1, 1000))

    def failing(*args: Tensor) -> Tensor:
        if next(calls) == call:
            raise MemoryError
        return forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(proposer.head, "forward", failing)
    watched = Watched(proposer)
    machine = engine(tiny_target, watched, k=3)
    request = machine.add(TEXTS[0], MIXED[1])
    failures = 0
    while not machine.idle:
        try:
            machine.step()
        except MemoryError:
            failures += 1
    assert failures == 1
    assert output(request) == plain(tiny_target, TEXTS[0], MIXED[1])
    assert_drafts_from_scratch(watched, tiny_target, head("mtp 3", tiny_target), CHAIN)
