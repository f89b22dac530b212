"""The guarantee on SmolLM2, in few bits: ids equal to plain decoding's, and every row's bits its own."""

from __future__ import annotations

import pytest
import torch

from paceline.bench.evidence import _all_logits
from paceline.build import Models, Options, load_models
from paceline.llm import LLM
from paceline.sampling.params import SamplingParams

pytestmark = pytest.mark.real_model

PROMPTS = [
    "List the months of the year, then list them again in reverse order.",
    "Write a Python function that reverses a string, with a short docstring.",
    "Why is the sky blue? Answer in two sentences.",
]
PRESET = "smollm2-135m"


@pytest.fixture(scope="module")
def models() -> Models:
    """The same model rounded harder drafts for itself: close to the target, but not the target."""
    loaded = load_models(Options(PRESET, draft=PRESET, draft_precision="int4"))
    if not loaded.target.backend.row_invariant:
        pytest.skip(f"{loaded.target.backend.precision} on this processor promises no equal bits")
    return loaded


def llm(models: Models, method: str, **options: object) -> LLM:
    return LLM(PRESET, models=models, method=method, draft=PRESET, **options)


def answers(engine: LLM, params: SamplingParams) -> list[list[int]]:
    return [engine.chat([{"role": "user", "content": prompt}], params).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("options", [{"method": "ngram"}, {"method": "draft"}, {"method": "draft", "k": 5}])
def test_greedy_equals_plain(options: dict[str, object], models: Models) -> None:
    params = SamplingParams(max_tokens=40)
    assert answers(llm(models, **options), params) == answers(llm(models, "none"), params)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_coupled_equals_plain(method: str, models: Models) -> None:
    for seed in range(3):
        params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=seed)
        assert answers(llm(models, method), params) == answers(llm(models, "none"), params)


def test_a_batch_answers_as_one_by_one(models: Models) -> None:
    params = SamplingParams(max_tokens=24)
    engine = llm(models, "draft", k=3)
    prompts = [engine.chat_prompt([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    together = [result.token_ids for result in engine.generate(prompts, params)]
    assert together == answers(llm(models, "none"), params)


def test_every_row_has_the_same_bits_alone_and_in_company(models: Models) -> None:
    ids = llm(models, "none").encode(" ".join(PROMPTS) * 3)[:140]
    together = _all_logits(models.target, ids, len(ids))
    for step in (1, 3, 16, 17):
        assert torch.equal(_all_logits(models.target, ids, step), together)


@pytest.fixture(scope="module")
def shipped() -> Models:
    return load_models(Options(PRESET, method="eagle"))


@pytest.mark.parametrize("tree", [None, "3x4x12"])
def test_the_head_that_comes_with_it_changes_nothing_and_is_accepted(tree: str | None, shipped: Models) -> None:
    plain = LLM(PRESET, models=shipped, method="none")
    drafted = LLM(PRESET, models=shipped, method="eagle", tree=tree, k=4)
    for params in (SamplingParams(max_tokens=48), SamplingParams(max_tokens=24, temperature=0.8, seed=1)):
        assert answers(drafted, params) == answers(plain, params)
    result = drafted.chat([{"role": "user", "content": PROMPTS[1]}], SamplingParams(max_tokens=64))
    assert result.stats.mean_acceptance_length > 1.5
