"""Token for token: greedy and coupled answers do not depend on the proposer, the draft length, or the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lab import CONFIG, FixedProposer, draft_proposer, engine, model, on, output, pool_for, run

from paceline.cache.pool import BlockPool
from paceline.engine.engine import Engine
from paceline.model.attention import Span
from paceline.model.decoder import Batch
from paceline.propose.base import Proposer
from paceline.propose.ngram import NgramProposer
from paceline.propose.none import NoProposer
from paceline.sampling.params import SamplingParams
from paceline.types import Sequence as Request
from paceline.weights.load import LoadedModel

WIDE = replace(CONFIG, vocab_size=40, max_positions=256)
PROMPTS = [[1, 5, 9, 1, 5], [3], [7, 7, 7, 7], list(range(30)), [2, 4] * 20]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return model(0, config=WIDE, sharpness=2.0)


def proposers(target: LoadedModel) -> dict[str, Proposer]:
    return {
        "none": NoProposer(),
        "ngram": NgramProposer(n_min=1, growth=8),
        "same draft": draft_proposer(target, model(0, config=WIDE, sharpness=2.0)),
        "other draft": draft_proposer(target, model(3, config=WIDE)),
        "fixed": FixedProposer(lambda tokens: [tokens[-1], 0, 1, 2, 3, 4, 5]),
    }


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_a_draft_like_the_target_is_never_refused(
    penalty: float, sampling: dict[str, float], target: LoadedModel
) -> None:
    """Penalties, too, follow what was drafted before."""
    machine = engine(target, draft_proposer(target, model(0, config=WIDE, sharpness=2.0)), k=4)
    params = SamplingParams(max_tokens=30, frequency_penalty=penalty, **sampling)  # type: ignore[arg-type]
    for request in run(machine, PROMPTS, [params] * len(PROMPTS)):
        assert request.stats.accepted == request.stats.drafted > 10


def plain(target: LoadedModel, prompt: list[int], params: SamplingParams) -> list[int]:
    return output(run(engine(target, NoProposer()), [prompt], [params])[0])


@pytest.mark.parametrize("k", [1, 3, 7, None])
@pytest.mark.parametrize("kind", ["ngram", "same draft", "other draft", "fixed"])
def test_greedy_equals_plain(kind: str, k: int | None, target: LoadedModel) -> None:
    params = SamplingParams(max_tokens=40)
    requests = run(engine(target, proposers(target)[kind], k=k), PROMPTS, [params] * len(PROMPTS))
    assert [output(r) for r in requests] == [plain(target, p, params) for p in PROMPTS]


@pytest.mark.parametrize("kind", ["ngram", "same draft", "other draft", "fixed"])
def test_coupled_equals_plain_under_twenty_seeds(kind: str, target: LoadedModel) -> None:
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, max_tokens=24, seed=seed, verify="coupled")
        for seed in range(20)
    ]
    requests = run(engine(target, proposers(target)[kind], k=4), [PROMPTS[0]] * 20, params)
    assert [output(r) for r in requests] == [plain(target, PROMPTS[0], each) for each in params]


def test_coupled_draft_of_the_same_model_is_always_accepted(target: LoadedModel) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=5)
    machine = engine(target, draft_proposer(target, model(0, config=WIDE, sharpness=2.0)), k=4)
    (request,) = run(machine, [PROMPTS[0]], [params])
    assert request.stats.accepted == request.stats.drafted > 0
    assert request.stats.mean_acceptance_length > 4


def test_an_answer_does_not_depend_on_the_batch(target: LoadedModel) -> None:
    """Requests of every kind share steps, joining and leaving; each answers as it does alone."""
    params = [
        SamplingParams(max_tokens=9), SamplingParams(max_tokens=33, temperature=0.8, seed=1),
        SamplingParams(max_tokens=21, temperature=1.2, top_k=5, seed=2, verify="coupled"),
        SamplingParams(max_tokens=40, frequency_penalty=0.5), SamplingParams(max_tokens=3),
    ]  # fmt: skip
    alone = [plain(target, p, each) for p, each in zip(PROMPTS, params, strict=True)]
    for max_batch in (2, 5):
        machine = engine(target, draft_proposer(target, model(3, config=WIDE)), k=3, max_batch=max_batch, chunk=8)
        assert [output(r) for r in run(machine, PROMPTS, params)] == alone


def test_a_rejection_answer_depends_on_its_seed_alone_at_fixed_draft_length(target: LoadedModel) -> None:
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=s, verify="rejection") for s in range(4)]

    def fresh() -> Engine:
        return engine(target, draft_proposer(target, model(3, config=WIDE)), k=3)

    together = [output(r) for r in run(fresh(), [PROMPTS[0]] * 4, params)]
    assert together == [output(run(fresh(), [PROMPTS[0]], [each])[0]) for each in params]


def known_answer(target: LoadedModel, prompt: list[int], count: int) -> list[int]:
    return plain(target, prompt, SamplingParams(max_tokens=count))


def oracle(prompt: list[int], answer: list[int], k: int, *, wrong: bool = False) -> FixedProposer:
    """Drafts the true continuation, or (`wrong`) one that is false from the first token."""

    def rule(tokens: list[int]) -> list[int]:  # type: ignore[type-arg, unused-ignore]
        at = len(tokens) - len(prompt)
        ahead = answer[at : at + k]
        return [(t + 1) % 40 for t in ahead] if wrong else ahead

    return FixedProposer(rule)  # type: ignore[arg-type]


def test_all_accepted_emits_k_plus_one_a_step(target: LoadedModel) -> None:
    answer = known_answer(target, PROMPTS[0], 31)
    (request,) = run(engine(target, oracle(PROMPTS[0], answer, 4), k=4), [PROMPTS[0]], [SamplingParams(max_tokens=31)])
    assert output(request) == answer
    assert request.stats.acceptance_rate == 1
    assert request.stats.target_forwards == 1 + 30 // 5


def test_all_rejected_emits_one_a_step(target: LoadedModel) -> None:
    answer = known_answer(target, PROMPTS[0], 20)
    machine = engine(target, oracle(PROMPTS[0], answer, 4, wrong=True), k=4)
    (request,) = run(machine, [PROMPTS[0]], [SamplingParams(max_tokens=20)])
    assert output(request) == answer
    assert (request.stats.accepted, request.stats.target_forwards) == (0, 20)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 6])
def test_everything_ends_at_an_end_inside_the_accepted_run(cut: int, target: LoadedModel) -> None:
    """EOS, a stop token, a stop string and max_tokens at each place of an accepted run of five."""
    prompt = PROMPTS[3]
    answer = known_answer(target, prompt, 12)
    end = answer[cut - 1]
    first = answer.index(end) + 1
    text = target.tokenizer.decode(answer)
    letter = target.tokenizer.decode([end])
    cases = {
        "length": SamplingParams(max_tokens=cut, logprobs=1),
        "stop": SamplingParams(max_tokens=12, stop_token_ids=[end], logprobs=1),
        "stop string": SamplingParams(max_tokens=12, stop=[letter], logprobs=1),
    }
    for name, params in cases.items():
        count = cut if name == "length" else first
        machine = engine(target, oracle(prompt, answer, 5), k=5)
        request = machine.add(prompt, params)
        lengths = []
        while request.finish_reason is None:
            work = machine.scheduler.schedule()
            if machine.stepper.step(work):
                lengths.append(request.committed)  # before the blocks go back
        assert output(request) == answer[:count]
        assert request.output.text == (text[: count - 1] if name == "stop string" else text[:count])
        assert [lp.token_id for lp in request.output.logprobs] == answer[:count]
        assert request.stats.generated_tokens == count
        assert lengths == [len(prompt) + count - 1]
        assert request.finish_reason == name.split()[0]


def test_eos_inside_the_draft_ends_the_answer_unless_ignored() -> None:
    base = model(0, config=WIDE, sharpness=2.0)
    answer = known_answer(base, PROMPTS[3], 12)
    eos = answer[3]
    first = answer.index(eos) + 1
    ending = model(0, config=WIDE, sharpness=2.0, eos=(eos,))
    for ignore, count in ((False, first), (True, 12)):
        machine = engine(ending, oracle(PROMPTS[3], answer, 6), k=6)
        (request,) = run(machine, [PROMPTS[3]], [SamplingParams(max_tokens=12, ignore_eos=ignore)])
        assert output(request) == answer[:count]


@pytest.mark.parametrize("kind", ["ngram", "other draft", "fixed"])
def test_the_cache_after_every_commit_equals_a_fresh_prefill(kind: str, target: LoadedModel) -> None:
    machine = engine(target, proposers(target)[kind], k=4)
    request = machine.add(PROMPTS[0], SamplingParams(max_tokens=24))
    checked = 0
    while not machine.stepper.step(machine.scheduler.schedule()):
        checked += _compare_with_prefill(target, machine.pool, request)
    assert checked > 3


def _compare_with_prefill(target: LoadedModel, pool: BlockPool, request: Request) -> int:
    assert request.cache is not None
    assert request.committed == len(request.tokens) - 1
    fresh_pool = pool_for(target, blocks=128)
    fresh = fresh_pool.open([], len(request.tokens))
    fresh.append(request.committed)
    batch = Batch(
        on(request.tokens[:-1]),
        [Span(fresh, 0, request.committed, 0)],
        fresh_pool,
    )
    target.decoder.forward(batch)
    fresh.commit(range(request.committed), request.tokens)
    for layer in range(target.config.num_layers):
        for got, want in zip(
            request.cache.views(request.committed)(layer), fresh.views(request.committed)(layer), strict=True
        ):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    return 1


@pytest.mark.parametrize("reuse_decoded", [True, False])
@pytest.mark.parametrize("kind", ["none", "ngram", "same draft", "other draft"])
def test_a_second_request_with_the_same_prefix_computes_only_the_rest(
    kind: str, reuse_decoded: bool, target: LoadedModel
) -> None:
    """Where rows are not independent, what decoding wrote is not what a prefill would: only the prompt is shared."""
    machine = engine(target, proposers(target)[kind], k=3)
    assert machine.stepper.reuse_decoded is False  # fp32
    machine.stepper.reuse_decoded = reuse_decoded
    params = SamplingParams(max_tokens=12)
    (first,) = run(machine, [PROMPTS[3]], [params])
    (second,) = run(machine, [PROMPTS[3] + output(first) + [3, 1]], [params])
    size = machine.pool.block_size
    known = len(PROMPTS[3]) + 11 if reuse_decoded else len(PROMPTS[3])
    assert second.stats.cached_tokens == known // size * size
    assert output(second) == plain(target, PROMPTS[3] + output(first) + [3, 1], params)


def test_past_the_drafts_context_it_decodes_plainly(target: LoadedModel) -> None:
    short = model(0, sharpness=2.0, config=replace(WIDE, max_positions=48))
    machine = engine(target, draft_proposer(target, short), k=4)
    (request,) = run(machine, [PROMPTS[3]], [SamplingParams(max_tokens=60)])
    assert output(request) == plain(target, PROMPTS[3], SamplingParams(max_tokens=60))
    assert 0 < request.stats.drafted < 48


def test_no_blocks_are_lost(target: LoadedModel) -> None:
    proposer = draft_proposer(target, model(3, config=WIDE))
    machine = engine(target, proposer, k=3, max_batch=3)
    run(machine, PROMPTS, [SamplingParams(max_tokens=20, temperature=1, seed=4)] * len(PROMPTS))
    aborted = machine.add(PROMPTS[0], SamplingParams(max_tokens=50))
    machine.step()
    machine.abort(aborted)
    assert machine.pool.available == machine.pool.blocks
    assert proposer.pool.available == proposer.pool.blocks
