"""EAGLE heads and one repeated MTP depth: lossless, and drafting from exactly the rows that the papers say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from lab import CONFIG, engine, exact_law, letters, model, output, p_value, run, sample_outputs
from lab_heads import (
    EAGLE,
    TINY,
    WIDE,
    Watched,
    assert_drafts_from_scratch,
    assert_same_drafts,
    drafted,
    eagle1_head,
    eagle3_head,
    expected_draft,
    head,
    head_proposer,
    nodes_of,
    small_engine,
    successor_model,
)
from torch import Tensor

from paceline.engine.engine import Engine
from paceline.heads.block import TorchBlock
from paceline.heads.eagle import Eagle1Head
from paceline.model.attention import Span
from paceline.propose.base import NOTHING, Budget
from paceline.propose.eagle import EagleProposer
from paceline.propose.none import NoProposer
from paceline.propose.rollout import CHAIN, Shape
from paceline.sampling.params import SamplingParams
from paceline.weights.load import LoadedModel

DRAWS = 1500
SIGNIFICANT = 1e-4
SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, max_tokens=3, verify="rejection")
GREEDY = SamplingParams(max_tokens=12)
SHAPES = {"chain": CHAIN, "tree": Shape(3, 3, 12), "deep tree": Shape(2, 4, 6)}
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


def eagle(target: LoadedModel, *, kind: str = "eagle-1", shape: Shape = CHAIN, blocks: int = 4096) -> EagleProposer:
    proposer = head_proposer(target, head(kind, target), shape, blocks=blocks)
    assert isinstance(proposer, EagleProposer)
    return proposer


# Token for token


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", EAGLE)
def test_greedy_and_coupled_answers_are_those_of_plain_decoding(
    kind: str, shape: str, wide_target: LoadedModel, alone: list[list[int]]
) -> None:
    """Requests of every kind and length share steps, joining and leaving, their prompts in chunks of eight."""
    for k, max_batch in ((1, 5), (4, 2), (None, 5)):
        proposer = eagle(wide_target, kind=kind, shape=SHAPES[shape])
        requests = run(engine(wide_target, proposer, k=k, max_batch=max_batch, chunk=8), PROMPTS, KINDS)
        assert [output(r) for r in requests] == alone
        assert k is None or sum(r.stats.drafted for r in requests) > 0


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", EAGLE)
def test_coupled_answers_are_those_of_plain_decoding_under_twenty_seeds(
    kind: str, shape: str, tiny_target: LoadedModel
) -> None:
    base = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, max_tokens=20, verify="coupled")
    params, prompt = [replace(base, seed=seed) for seed in range(20)], [1, 2, 0, 1, 2]
    requests = run(engine(tiny_target, eagle(tiny_target, kind=kind, shape=SHAPES[shape]), k=4), [prompt] * 20, params)
    assert [output(r) for r in requests] == [plain(tiny_target, prompt, each) for each in params]
    assert sum(r.stats.accepted for r in requests) > 0


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_everything_ends_at_an_end_inside_an_accepted_run(shape: str, tiny_target: LoadedModel) -> None:
    """Length, stop token and EOS at every place: nothing past the end is emitted or kept."""
    proposer, prompt, whole = eagle(tiny_target, shape=SHAPES[shape]), [1, 2, 0, 1, 2], 16
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


@pytest.mark.parametrize("kind", EAGLE)
def test_the_joint_law_of_chains_is_the_targets(kind: str, target: LoadedModel) -> None:
    machine = engine(target, eagle(target, kind=kind), k=3)
    assert p_value(sample_outputs(machine, SAMPLED, DRAWS), exact_law(target, SAMPLED, 3)) > SIGNIFICANT


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", EAGLE)
def test_the_joint_law_of_trees_is_the_targets(kind: str, sampled: bool, target: LoadedModel) -> None:
    machine = engine(target, eagle(target, kind=kind, shape=Shape(3, 3, 12, sampled=sampled)), k=3, max_batch=64)
    assert p_value(sample_outputs(machine, SAMPLED, DRAWS), exact_law(target, SAMPLED, 3)) > SIGNIFICANT


def test_output_rows_that_are_no_tokens_are_never_drafted(wide_target: LoadedModel) -> None:
    """The target's output is padded beyond its tokenizer, and the head's vocabulary with it."""
    padded = replace(wide_target, tokenizer=letters(30))
    for params in (GREEDY, SamplingParams(temperature=1.0, seed=1)):
        (request,) = run(engine(padded, eagle(padded, kind="eagle-3")), [[1, 2, 3]], [params])
        assert output(request) == plain(padded, [1, 2, 3], params)
        assert max(request.tokens) < 30


def test_drafts_that_stop_at_weak_tokens_are_exact(target: LoadedModel) -> None:
    proposer = head_proposer(target, eagle1_head(target), stop_below=0.3)
    outcomes = sample_outputs(engine(target, proposer, k=4, max_batch=64), SAMPLED, DRAWS)
    assert p_value(outcomes, exact_law(target, SAMPLED, 3)) > SIGNIFICANT


# What is drafted

TEXTS = [[1, 2, 0, 1, 2], [2, 2, 2, 1] * 5, [0, 1], [1, 2, 0] * 3, [2]]
MIXED = [SamplingParams(max_tokens=20), *(SamplingParams(max_tokens=20, temperature=1.0, seed=s) for s in range(3, 7))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", EAGLE)
def test_drafts_are_what_the_head_says_of_the_whole_text(kind: str, shape: str, tiny_target: LoadedModel) -> None:
    """After every mixture of acceptances each node is what the head gives over rows (x_{t+1}, f_t) from the first on,
    with features from one forward of the target, and its own output in place of them behind the last token."""
    watched = Watched(eagle(tiny_target, kind=kind, shape=SHAPES[shape]))
    run(engine(tiny_target, watched, k=4, chunk=8), TEXTS, MIXED)
    assert len(watched.drafts) > 25
    assert {0, 1, 2} <= set(watched.accepted)
    assert_drafts_from_scratch(watched, tiny_target, head(kind, tiny_target), SHAPES[shape])


def test_a_head_that_lost_one_row_would_be_noticed(tiny_target: LoadedModel) -> None:
    """The comparison can fail: without its first row the head drafts otherwise."""
    watched = Watched(eagle(tiny_target))
    run(engine(tiny_target, watched, k=4), TEXTS[:1], MIXED[:1])
    (view, budget, draft), own = watched.drafts[0], head("eagle-1", tiny_target)
    assert nodes_of(draft) == pytest.approx(expected_draft(tiny_target, own, view, budget, CHAIN), abs=1e-4)
    assert nodes_of(draft) != pytest.approx(expected_draft(tiny_target, own, view, budget, CHAIN, first=1), abs=1e-2)


def test_a_head_may_score_every_token_in_an_order_of_its_own(tiny_target: LoadedModel) -> None:
    own = eagle3_head(tiny_target, ids=[2, 0, 1])
    watched = Watched(head_proposer(tiny_target, own))
    run(engine(tiny_target, watched, k=3), TEXTS, MIXED)
    assert_drafts_from_scratch(watched, tiny_target, own, CHAIN)


def fitting_head(target: LoadedModel) -> Eagle1Head:
    """Passes the normed embedding of the token on, which is all that this target ever knows."""
    fitting, hidden, norm = eagle1_head(target), CONFIG.hidden_size, target.decoder.final_norm
    assert isinstance(fitting.block, TorchBlock)
    for layer in fitting.block.layers:
        layer.output = layer.down = lambda x: x.new_zeros(x.shape[0], hidden)
    fitting.fc = lambda x: norm(x[:, :hidden])
    return fitting


@pytest.mark.parametrize("shape", [CHAIN, Shape(2, 4, 30)], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_that_knows_the_target_is_always_accepted(temperature: float, shape: Shape) -> None:
    """One row too early or too late and nothing would be."""
    target = successor_model()
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=21)
    machine = engine(target, head_proposer(target, fitting_head(target), shape), k=4)
    (request,) = run(machine, [[3, 1, 4]], [params])
    assert output(request) == plain(target, [3, 1, 4], params)
    assert len(set(output(request))) > 4
    assert request.stats.acceptance_per_position == [1.0] * 4
    assert request.stats.target_forwards == 1 + 20 // 5


# Prefix hits


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", EAGLE)
def test_behind_a_prefix_hit_a_head_drafts_as_on_a_fresh_engine(
    kind: str, shape: str, wide_target: LoadedModel
) -> None:
    """The whole prompt again, the conversation so far and more, and a prompt that leaves the first one half-way."""
    proposer = eagle(wide_target, kind=kind, shape=SHAPES[shape])
    machine = engine(wide_target, Watched(proposer), chunk=8)
    (first,) = run(machine, [LONG], [GREEDY])
    continued = LONG + output(first) + [3, 1]
    for prompt, known in ((LONG, 28), (LONG[:29], 28), (continued, 28), (LONG[:19] + [39, 38], 16)):
        again, drafts = drafted(machine, prompt, GREEDY)
        untouched = engine(wide_target, Watched(eagle(wide_target, kind=kind, shape=SHAPES[shape])))
        fresh, expected = drafted(untouched, prompt, GREEDY)
        assert again.stats.cached_tokens == known
        assert output(again) == output(fresh)
        assert_same_drafts(drafts, expected)
    assert proposer.cold_starts == 0


def test_what_decoding_left_in_the_head_serves_where_the_target_shares_it_too(wide_target: LoadedModel) -> None:
    machine = engine(wide_target, Watched(eagle(wide_target)))
    machine.stepper.reuse_decoded = True
    (first,) = run(machine, [LONG], [GREEDY])
    again, drafts = drafted(machine, [*LONG, *output(first), 3, 1], GREEDY)
    _, expected = drafted(engine(wide_target, Watched(eagle(wide_target))), [*LONG, *output(first), 3, 1], GREEDY)
    assert again.stats.cached_tokens == 40
    assert_same_drafts(drafts, expected)


def test_rows_wait_until_a_draft_needs_them(wide_target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drafts only what fills many rows is fed; the draft that comes then is the one of a head that kept up."""
    proposer = eagle(wide_target)
    machine = engine(wide_target, proposer)
    fed: list[int] = []
    feed = proposer._forward

    def forward(spans: Sequence[Span], tokens: Tensor, features: Tensor) -> Tensor:
        fed.append(len(tokens))
        return feed(spans, tokens, features)

    monkeypatch.setattr(proposer, "_forward", forward)
    monkeypatch.setattr(machine.controller, "budget", lambda source, request: NOTHING)
    sequence = machine.add([*LONG, *LONG[:2]], SamplingParams(max_tokens=40))
    for _ in range(10):
        machine.step()
    assert fed == [32]
    budget = Budget(3, 3)
    (late,) = proposer.propose([sequence], [budget])
    assert fed[1] == 9
    _, expected = drafted(engine(wide_target, Watched(eagle(wide_target))), sequence.tokens[:-1], GREEDY)
    first = next(draft for draft in expected if draft.size)
    assert late.tokens.tolist() == first.tokens.tolist()[:3]


@pytest.mark.parametrize("size", [17, 18])
def test_one_block_is_computed_again_where_the_token_behind_it_differs(size: int, wide_target: LoadedModel) -> None:
    """The head's row at position 15 holds the token at 16: the target has the block, the head has another's."""
    proposer = eagle(wide_target)
    machine = engine(wide_target, Watched(proposer))
    run(machine, [LONG], [GREEDY])
    prompt = (LONG[:16] + [39, 38])[:size]
    again, drafts = drafted(machine, prompt, GREEDY)
    _, expected = drafted(engine(wide_target, Watched(eagle(wide_target))), prompt, GREEDY)
    assert again.stats.cached_tokens == 12
    assert_same_drafts(drafts, expected)
    assert proposer.cold_starts == 0


def test_a_head_whose_rows_were_evicted_starts_cold_and_says_so(wide_target: LoadedModel) -> None:
    """It drafts from the rows it has, stays lossless, and leaves nothing behind that a later prompt would take."""
    proposer = eagle(wide_target, blocks=12)
    watched = Watched(proposer)
    machine = engine(wide_target, watched)
    run(machine, [LONG], [GREEDY])
    run(machine, [[(7 * i) % 40 for i in range(36)]], [GREEDY])  # needs all twelve blocks
    for cold_starts, (size, known) in enumerate(((30, 28), (30, 28), (10, 8)), start=1):
        watched.drafts.clear()
        (again,) = run(machine, [LONG[:size]], [GREEDY])
        assert (again.stats.cached_tokens, proposer.cold_starts) == (known, cold_starts)
        assert output(again) == plain(wide_target, LONG[:size], GREEDY)
        assert len(watched.drafts) > 2
        assert_drafts_from_scratch(watched, wide_target, head("eagle-1", wide_target), CHAIN, first=known)


@pytest.mark.parametrize("kind", EAGLE)
def test_a_cold_start_with_one_token_left_waits_for_its_first_row(kind: str, wide_target: LoadedModel) -> None:
    """All but the last token are in the target's cache, none in the head's: there is nothing to draft from yet."""
    proposer = eagle(wide_target, kind=kind)
    machine = engine(wide_target, Watched(proposer))
    run(machine, [LONG[:17]], [GREEDY])
    forget(proposer)
    again, drafts = drafted(machine, LONG[:17], GREEDY)
    assert (again.stats.cached_tokens, proposer.cold_starts) == (16, 1)
    assert [draft.size > 0 for draft in drafts] == [False] + [True] * (len(drafts) - 1)
    assert output(again) == plain(wide_target, LONG[:17], GREEDY)


def forget(proposer: EagleProposer) -> None:
    """Every block of the head's that is kept for its prefix."""
    for block in list(proposer.pool._reusable):
        proposer.pool._evict(block)


def test_a_cold_start_far_into_a_text_drafts() -> None:
    """Past the first thousand positions, for which rotary tables are made when they are needed."""
    far = model(0, config=replace(WIDE, max_positions=2048), sharpness=-1.0)
    prompt = [(7 * i + i // 3) % 40 for i in range(1100)]
    machine = engine(far, NoProposer(), chunk=512)
    run(machine, [prompt], [GREEDY])
    watched = Watched(eagle(far))
    again = Engine(far, watched, machine.pool, machine.controller, machine.config)
    (request,) = run(again, [prompt], [GREEDY])
    assert (request.stats.cached_tokens, watched.inner.cold_starts) == (1096, 1)
    assert request.stats.drafted > 0
    for view, budget, draft in watched.drafts[:2]:
        want = expected_draft(far, eagle1_head(far), view, budget, CHAIN, first=1096)
        assert nodes_of(draft) == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("kind", EAGLE)
def test_a_prompt_that_was_answered_with_one_token_leaves_the_heads_rows_too(
    kind: str, wide_target: LoadedModel
) -> None:
    proposer = eagle(wide_target, kind=kind)
    machine = engine(wide_target, Watched(proposer), chunk=8)
    run(machine, [LONG], [SamplingParams(max_tokens=1)])
    again, drafts = drafted(machine, LONG, GREEDY)
    _, expected = drafted(engine(wide_target, Watched(eagle(wide_target, kind=kind))), LONG, GREEDY)
    assert (again.stats.cached_tokens, proposer.cold_starts) == (28, 0)
    assert_same_drafts(drafts, expected)


def test_a_request_that_joins_right_behind_anothers_prompt_shares_the_heads_rows(wide_target: LoadedModel) -> None:
    """The target has the first one's prompt, the head only its hidden states."""
    proposer = eagle(wide_target)
    machine = engine(wide_target, proposer)
    first = machine.add(LONG, GREEDY)
    machine.step()
    second = machine.add(LONG, GREEDY)
    while not machine.idle:
        machine.step()
    assert (second.stats.cached_tokens, proposer.cold_starts) == (28, 0)
    assert output(first) == output(second) == plain(wide_target, LONG, GREEDY)


# Room


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_without_room_in_the_heads_cache_a_sequence_decodes_plainly(shape: str, wide_target: LoadedModel) -> None:
    """The first two requests fill it; the third goes without; one that comes later drafts again."""
    proposer = eagle(wide_target, shape=SHAPES[shape], blocks=24)
    machine = engine(wide_target, proposer, k=3)
    prompts = [LONG, LONG[::-1], [5] * 30]
    requests = run(machine, prompts, [GREEDY] * 3)
    assert [output(r) for r in requests] == [plain(wide_target, p, GREEDY) for p in prompts]
    assert [r.stats.drafted > 0 for r in requests] == [True, True, False]
    (later,) = run(machine, [[6] * 30], [GREEDY])
    assert later.stats.drafted > 0
    assert proposer.pool.available == proposer.pool.blocks


def test_a_tree_that_does_not_fit_is_not_drafted(wide_target: LoadedModel) -> None:
    """The sequence has its own room in the head's cache and no more: near its end a wide tree finds none."""
    proposer = eagle(wide_target, shape=Shape(6, 4, 40), blocks=11)
    machine = engine(wide_target, proposer, k=4)
    (request,) = run(machine, [LONG], [GREEDY])
    assert output(request) == plain(wide_target, LONG, GREEDY)
    assert 0 < request.stats.drafted_at[0] < request.stats.target_forwards - 1


def test_shared_blocks_that_cannot_be_copied_cost_only_the_drafts(wide_target: LoadedModel) -> None:
    """The head has more of a text than the target does, in blocks that another request still reads; the target brings
    those rows again. Whatever the room for copies, nobody fails."""
    outcomes = set()
    for blocks in range(10, 18):
        proposer = eagle(wide_target, blocks=blocks)
        machine = engine(wide_target, proposer, k=1)
        first = machine.add(LONG[:20], SamplingParams(max_tokens=20))
        while len(first.tokens) < 30:
            machine.step()
        prompt = list(first.tokens)
        second = machine.add(prompt, SamplingParams(max_tokens=6))
        while not machine.idle:
            machine.step()
        assert second.stats.cached_tokens == 20
        for request, text, count in ((first, LONG[:20], 20), (second, prompt, 6)):
            assert output(request) == plain(wide_target, text, SamplingParams(max_tokens=count))
        assert first.stats.drafted > 0
        assert proposer.pool.available == proposer.pool.blocks
        outcomes.add(second.stats.drafted > 0)
    assert outcomes == {False, True}


@pytest.mark.parametrize("depth", [1, 3])
def test_a_drawn_tree_without_room_in_the_targets_cache_is_a_chain_no_deeper(
    depth: int, wide_target: LoadedModel
) -> None:
    """All children of a node are verified or none: where eight do not fit, one is drawn."""
    watched = Watched(eagle(wide_target, shape=Shape(8, depth, 24, sampled=True)))
    params = SamplingParams(max_tokens=8, temperature=1.0, verify="rejection", seed=1)
    (request,) = run(small_engine(wide_target, watched, blocks=7, k=6), [LONG[:20]], [params])
    assert len(output(request)) == 8
    assert all(draft.draw == "iid" and draft.depth <= depth for _, _, draft in watched.drafts)
    assert request.stats.drafted > 0


def test_a_wide_tree_at_the_end_of_its_room_writes_to_no_other_sequence(wide_target: LoadedModel) -> None:
    shape = Shape(8, 4, 20)
    watched = Watched(eagle(wide_target, shape=shape))
    run(engine(wide_target, watched, k=4), [LONG, [4, 2]], [SamplingParams(max_tokens=18), GREEDY])
    watched.drafts = [seen for seen in watched.drafts if len(seen[0].tokens) > len(LONG) + 8]
    assert_drafts_from_scratch(watched, wide_target, head("eagle-1", wide_target), shape)


def test_no_blocks_are_lost(wide_target: LoadedModel) -> None:
    proposer = eagle(wide_target, shape=SHAPES["tree"])
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
@pytest.mark.parametrize("kind", EAGLE)
def test_a_prompt_of_one_token(kind: str, shape: str, wide_target: LoadedModel) -> None:
    """There is no pair of tokens yet, so nothing to draft from; one step later there is."""
    machine = engine(wide_target, Watched(eagle(wide_target, kind=kind, shape=SHAPES[shape])))
    request, drafts = drafted(machine, [3], GREEDY)
    assert output(request) == plain(wide_target, [3], GREEDY)
    assert [draft.size > 0 for draft in drafts] == [False] + [True] * (len(drafts) - 1)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_up_to_the_end_of_the_context(shape: str) -> None:
    short = model(0, config=replace(WIDE, max_positions=40), sharpness=-1.0)
    params = SamplingParams(max_tokens=60)
    (request,) = run(engine(short, eagle(short, shape=SHAPES[shape]), k=4), [LONG], [params])
    assert len(request.tokens) == 40
    assert output(request) == plain(short, LONG, params)
    assert request.stats.drafted > 0


def test_a_budget_of_nothing_gives_no_draft_and_keeps_the_cache_in_step(tiny_target: LoadedModel) -> None:
    """Another method drafts in between: the rows are fed all the same."""
    watched = Watched(eagle(tiny_target))
    machine = engine(tiny_target, watched, k=3)
    budget, steps = machine.stepper._budget, iter(range(1000))
    machine.stepper._budget = lambda item: NOTHING if next(steps) % 3 else budget(item)  # type: ignore[method-assign]
    (request,) = run(machine, TEXTS[1:2], [replace(MIXED[1], max_tokens=30)])
    assert output(request) == plain(tiny_target, TEXTS[1], replace(MIXED[1], max_tokens=30))
    assert 5 < len(watched.drafts) < 12
    assert_drafts_from_scratch(watched, tiny_target, head("eagle-1", tiny_target), CHAIN)


def test_rows_that_never_came_end_the_drafting_and_not_the_request(
    tiny_target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Better no draft than one from rows that are out of step."""
    proposer = eagle(tiny_target)
    observe, steps = proposer.observe, iter(range(1000))
    monkeypatch.setattr(proposer, "observe", lambda *seen: None if next(steps) == 4 else observe(*seen))
    request, drafts = drafted(engine(tiny_target, Watched(proposer)), TEXTS[0], MIXED[1])
    assert output(request) == plain(tiny_target, TEXTS[0], MIXED[1])
    assert [draft.size > 0 for draft in drafts] == [True] * 4 + [False] * (len(drafts) - 4)


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
def test_a_step_that_fails_in_the_head_can_be_taken_again(
    call: int, tiny_target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, say: rows and tokens stay together."""
    proposer = eagle(tiny_target)
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
    assert_drafts_from_scratch(watched, tiny_target, head("eagle-1", tiny_target), CHAIN)
