"""Medusa keeps the guarantee: chains and trees, every verifier, and it drafts for the positions that it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from lab import CONFIG, engine, exact_law, model, output, p_value, run, sample_outputs
from lab_medusa import knowing_head, proposer, random_head

from paceline.propose.medusa import MedusaProposer
from paceline.propose.none import NoProposer
from paceline.propose.rollout import Shape
from paceline.sampling.params import SamplingParams, Verify
from paceline.weights.load import LoadedModel

DRAWS = 1500
SIGNIFICANT = 1e-4
SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, max_tokens=3, verify="rejection")
WIDE = replace(CONFIG, vocab_size=40, max_positions=256)
PROMPTS = [[1, 5, 9, 1, 5], [3], [7, 7, 7, 7], list(range(30)), [2, 4] * 20]
SHAPES = {"chain": Shape(width=1), "tree": Shape(width=3, nodes=12), "wide tree": Shape(width=8, nodes=26)}
KINDS = [
    SamplingParams(max_tokens=30), SamplingParams(temperature=0.9, seed=3, max_tokens=40),
    SamplingParams(temperature=1.2, top_k=7, seed=4, verify="coupled", max_tokens=25),
    SamplingParams(frequency_penalty=0.5, max_tokens=33), SamplingParams(max_tokens=3),
]  # fmt: skip


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return model(0)


@pytest.fixture(scope="module")
def wide_target() -> LoadedModel:
    return model(0, config=WIDE, sharpness=2.0)


def plain(target: LoadedModel, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return output(run(engine(target, NoProposer()), [prompt], [params])[0])


# Token for token


@pytest.mark.parametrize("k", [1, 3, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_and_coupled_answers_are_those_of_plain_decoding(
    shape: str, k: int | None, wide_target: LoadedModel
) -> None:
    """Requests of every kind and length share steps, their prompts in chunks of eight."""
    machine = engine(wide_target, proposer(wide_target, random_head(wide_target), SHAPES[shape]), k=k, chunk=8)
    requests = run(machine, PROMPTS, KINDS)
    assert [output(r) for r in requests] == [plain(wide_target, p, c) for p, c in zip(PROMPTS, KINDS, strict=True)]
    assert sum(r.stats.drafted for r in requests) > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_coupled_answers_are_those_of_plain_decoding_under_twenty_seeds(shape: str, wide_target: LoadedModel) -> None:
    kind = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, max_tokens=24, verify="coupled")
    params = [replace(kind, seed=seed) for seed in range(20)]
    machine = engine(wide_target, proposer(wide_target, random_head(wide_target), SHAPES[shape]), k=3)
    requests = run(machine, [PROMPTS[0]] * 20, params)
    assert [output(r) for r in requests] == [plain(wide_target, PROMPTS[0], each) for each in params]
    assert sum(r.stats.accepted for r in requests) > 0


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_request_that_hits_the_prefix_cache_drafts_and_answers_as_without(
    shape: str, wide_target: LoadedModel
) -> None:
    """Cached positions bring no hidden states; the prompt's last token is computed and does."""
    machine = engine(wide_target, proposer(wide_target, random_head(wide_target), SHAPES[shape]), k=3)
    params = SamplingParams(max_tokens=12)
    (first,) = run(machine, [PROMPTS[3]], [params])
    for prompt in (PROMPTS[3], PROMPTS[3] + output(first)[:4] + [3, 1]):
        (again,) = run(machine, [prompt], [params])
        assert again.stats.cached_tokens > 0
        assert again.stats.drafted > 0
        assert output(again) == plain(wide_target, prompt, params)


# In law


@pytest.mark.parametrize("verify", ["rejection", "coupled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_joint_law_is_the_targets(shape: str, verify: Verify, target: LoadedModel) -> None:
    params = replace(SAMPLED, verify=verify)
    machine = engine(target, proposer(target, random_head(target), SHAPES[shape]), k=3)
    assert p_value(sample_outputs(machine, params, DRAWS), exact_law(target, params, 3)) > SIGNIFICANT


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_every_part_of_the_chain_is_exact(shape: str, target: LoadedModel) -> None:
    """Heads do not know the path before them: what they were ranked by is not what the target samples by."""
    params = replace(
        SAMPLED, top_p=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={2: 0.8}
    )
    machine = engine(target, proposer(target, random_head(target), SHAPES[shape]), k=3)
    assert p_value(sample_outputs(machine, params, DRAWS), exact_law(target, params, 3)) > SIGNIFICANT


def test_drafts_that_follow_what_was_learned_are_exact(target: LoadedModel) -> None:
    """Records fill while requests come and go, the controller cuts by them, and nothing leaks into the law."""
    machine = engine(target, proposer(target, random_head(target), SHAPES["tree"]), k=None, max_batch=16)
    outcomes = sample_outputs(machine, SAMPLED, DRAWS)
    assert p_value(outcomes, exact_law(target, SAMPLED, 3)) > SIGNIFICANT


def test_a_mixed_batch_follows_each_requests_own_law(target: LoadedModel) -> None:
    kinds = [
        SamplingParams(max_tokens=3), replace(SAMPLED, verify="coupled"), replace(SAMPLED, temperature=0.8, top_k=4)
    ]  # fmt: skip
    params = [replace(kinds[i % 3], seed=i) for i in range(3 * DRAWS)]
    machine = engine(target, proposer(target, random_head(target), SHAPES["tree"]), k=3)
    answers = [tuple(output(r)) for r in run(machine, [[1, 4, 2, 2, 5]] * len(params), params)]
    assert set(answers[::3]) == {tuple(plain(target, [1, 4, 2, 2, 5], kinds[0]))}
    for i in (1, 2):
        assert p_value(answers[i::3], exact_law(target, kinds[i], 3)) > SIGNIFICANT


@pytest.mark.parametrize("kind", ["truncated vocabulary", "target's output"])
def test_other_output_heads_are_exact(kind: str, target: LoadedModel) -> None:
    truncated = kind == "truncated vocabulary"
    head = random_head(target, shared=not truncated, ids=torch.tensor([5, 0, 2]) if truncated else None)
    for params in (SAMPLED, replace(SAMPLED, verify="coupled")):
        machine = engine(target, proposer(target, head, SHAPES["tree"]), k=3)
        assert p_value(sample_outputs(machine, params, DRAWS), exact_law(target, params, 3)) > SIGNIFICANT
    greedy = SamplingParams(max_tokens=20)
    (request,) = run(engine(target, proposer(target, head, SHAPES["tree"]), k=3), [[1, 4]], [greedy])
    assert output(request) == plain(target, [1, 4], greedy)


# The lossy rule, for those who ask for it


def test_typical_acceptance_takes_longer_runs_of_the_same_drafts(target: LoadedModel) -> None:
    def length(verify: Verify) -> float:
        machine = engine(target, proposer(target, random_head(target), SHAPES["tree"]), k=3)
        params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24, verify=verify) for seed in range(20)]
        return sum(r.stats.mean_acceptance_length for r in run(machine, [PROMPTS[0][:2]] * 20, params)) / 20

    assert length("typical") > 1.3 * length("rejection")


def test_greedy_requests_never_use_typical_acceptance(wide_target: LoadedModel) -> None:
    params = SamplingParams(max_tokens=30, verify="typical")
    machine = engine(wide_target, proposer(wide_target, random_head(wide_target), SHAPES["tree"]), k=3)
    (request,) = run(machine, [PROMPTS[0]], [params])
    assert output(request) == plain(wide_target, PROMPTS[0], SamplingParams(max_tokens=30))


# The right positions


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [8, 64])
def test_heads_that_know_the_answer_are_accepted_whole(shape: str, chunk: int, wide_target: LoadedModel) -> None:
    """Head 1 drafts the token after the last one, which the target chose itself: one place off, and nothing fits."""
    prompt = PROMPTS[3]
    answer = plain(wide_target, prompt, SamplingParams(max_tokens=33))
    head = knowing_head(wide_target, prompt + answer, heads=4)
    machine = engine(wide_target, proposer(wide_target, head, SHAPES[shape]), k=4, chunk=chunk)
    (request,) = run(machine, [prompt], [SamplingParams(max_tokens=31)])
    assert output(request) == answer[:31]
    assert request.stats.target_forwards == 1 + 30 // 5
    assert request.stats.acceptance_per_position == [1.0] * 4


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 6])
def test_an_end_inside_the_accepted_run_ends_everything(cut: int, wide_target: LoadedModel) -> None:
    prompt = PROMPTS[3]
    answer = plain(wide_target, prompt, SamplingParams(max_tokens=16))
    first = answer.index(answer[cut - 1]) + 1
    ending = model(0, config=WIDE, sharpness=2.0, eos=(answer[cut - 1],))
    cases = [
        (wide_target, SamplingParams(max_tokens=cut), cut),
        (wide_target, SamplingParams(max_tokens=12, stop_token_ids=[answer[cut - 1]]), first),
        (ending, SamplingParams(max_tokens=12), first),
    ]
    for served, params, count in cases:
        head = knowing_head(served, prompt + answer, heads=4)
        machine = engine(served, proposer(served, head, SHAPES["tree"]), k=4)
        requests = run(machine, [prompt, PROMPTS[0]], [params, params])
        assert output(requests[0]) == answer[:count]
        assert output(requests[1]) == plain(served, PROMPTS[0], params)
        assert machine.pool.available == machine.pool.blocks


def test_a_wider_tree_accepts_more_of_poor_heads(wide_target: LoadedModel) -> None:
    def length(shape: Shape) -> float:
        machine = engine(wide_target, proposer(wide_target, random_head(wide_target), shape), k=3)
        requests = run(machine, PROMPTS, [SamplingParams(max_tokens=40)] * len(PROMPTS))
        return sum(r.stats.mean_acceptance_length for r in requests)

    assert length(Shape(width=1)) < length(Shape(width=4, nodes=26)) < length(Shape(width=20, nodes=60))


def test_nothing_is_kept_of_requests_that_ended_or_were_aborted(wide_target: LoadedModel) -> None:
    drafting: MedusaProposer = proposer(wide_target, random_head(wide_target))
    machine = engine(wide_target, drafting, k=3, max_batch=2)
    run(machine, PROMPTS, [SamplingParams(max_tokens=9)] * len(PROMPTS))
    aborted = machine.add(PROMPTS[0], SamplingParams(max_tokens=50))
    machine.step()
    machine.abort(aborted)
    assert not drafting._states
    assert machine.pool.available == machine.pool.blocks


def test_the_hidden_state_kept_is_one_row_and_no_whole_prompts(wide_target: LoadedModel) -> None:
    """A slice would hold every row of the step that it came from."""
    drafting = proposer(wide_target, random_head(wide_target))
    machine = engine(wide_target, drafting, k=3)
    machine.add(PROMPTS[4], SamplingParams(max_tokens=5))
    machine.step()
    (state,) = drafting._states.values()
    assert state.hidden is not None
    assert state.hidden.untyped_storage().nbytes() == WIDE.hidden_size * 4
