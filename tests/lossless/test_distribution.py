"""At any temperature the answers follow the target's own joint law, whatever drafts; planted bugs are caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from lab import (
    PROMPT,
    FixedProposer,
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

from paceline.engine import verification
from paceline.propose.base import Budget, Proposer
from paceline.propose.draft_model import DraftModelProposer
from paceline.propose.ngram import NgramProposer
from paceline.propose.none import NoProposer
from paceline.sampling.noise import sample
from paceline.sampling.params import SamplingParams
from paceline.types import Draft, View
from paceline.verify.rejection import verify_rejection
from paceline.verify.trees import Trees
from paceline.weights.load import LoadedModel

LENGTH = 3
DRAWS = 1500
SIGNIFICANT = 1e-4  # seeds are fixed: a sound build passes every time, at these many tests once in a hundred builds not

CHAINS = {
    "temperature": SamplingParams(temperature=1.1, max_tokens=LENGTH),
    "top_k": SamplingParams(temperature=0.9, top_k=3, max_tokens=LENGTH),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8, max_tokens=LENGTH),
    "min_p": SamplingParams(temperature=1.2, min_p=0.15, max_tokens=LENGTH),
    "penalties and bias": SamplingParams(
        temperature=1.0, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5,
        logit_bias={0: 1.0, 3: -0.7}, max_tokens=LENGTH,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return model(0)


def proposer_of(kind: str, target: LoadedModel) -> Proposer:
    drafts = {
        "draft equal to the target": model(0),
        "draft independent of it": model(7),
        "adversarial draft": model(0, sharpness=-1.5),
        "overconfident draft": model(0, sharpness=4.0),
    }
    if kind in drafts:
        return draft_proposer(target, drafts[kind])
    if kind == "ngram":
        return NgramProposer(n_min=1, growth=4)
    if kind == "deterministic":
        return FixedProposer(lambda tokens: [(tokens[-1] + i) % 6 for i in range(1, 5)])
    return NoProposer()


KINDS = [
    "draft equal to the target", "draft independent of it", "adversarial draft", "overconfident draft", "ngram",
    "deterministic",
]  # fmt: skip


@pytest.mark.parametrize("verify", ["rejection", "coupled"])
@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_joint_law_of_three_tokens_is_the_targets(kind: str, verify: str, target: LoadedModel) -> None:
    for k in (1, 2, 4):
        params = SamplingParams(temperature=1.1, top_p=0.95, max_tokens=LENGTH, verify=verify)  # type: ignore[arg-type]
        outcomes = sample_outputs(engine(target, proposer_of(kind, target), k=k), params, DRAWS)
        assert p_value(outcomes, exact_law(target, params, LENGTH)) > SIGNIFICANT


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("kind", ["draft independent of it", "deterministic"])
def test_every_part_of_the_chain_is_exact_under_rejection(kind: str, chain: str, target: LoadedModel) -> None:
    params = SamplingParams(**{**vars(CHAINS[chain]), "verify": "rejection"})
    outcomes = sample_outputs(engine(target, proposer_of(kind, target), k=3), params, DRAWS)
    assert p_value(outcomes, exact_law(target, params, LENGTH)) > SIGNIFICANT


def always_accept(
    scores: Tensor, trees: Trees, q: Tensor | None, u: Tensor, keys: Tensor, *, replacement: bool
) -> tuple[Tensor, Tensor]:
    return verify_rejection(scores, trees, q, torch.zeros_like(u), keys, replacement=replacement)


def resample_from_p(
    scores: Tensor, trees: Trees, q: Tensor | None, u: Tensor, keys: Tensor, *, replacement: bool
) -> tuple[Tensor, Tensor]:
    last, _ = verify_rejection(scores, trees, q, u, keys, replacement=replacement)
    row = trees.row.gather(1, last[:, None]).squeeze(1)
    return last, sample(scores[row], keys[row])


@pytest.mark.parametrize("bug", [always_accept, resample_from_p])
@pytest.mark.parametrize("kind", ["draft independent of it", "deterministic"])
def test_a_planted_verification_bug_is_caught(
    bug: object, kind: str, target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "verify_rejection", bug)
    params = SamplingParams(temperature=1.1, max_tokens=LENGTH, verify="rejection")
    outcomes = sample_outputs(engine(target, proposer_of(kind, target), k=2), params, DRAWS)
    assert p_value(outcomes, exact_law(target, params, LENGTH)) < 1e-8


class DropsWeakTokens(DraftModelProposer):
    """The planted bug: a sampled token is not verified because its own probability is low."""

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        kept = []
        for draft in super().propose(views, budgets):
            own = [] if draft.q is None else [float(q[t]) for q, t in zip(draft.q, draft.tokens, strict=True)]
            kept.append(draft.keep(range(next((i for i, value in enumerate(own) if value < 0.25), len(own)))))
        return kept


def test_dropping_a_sampled_token_for_its_own_probability_is_caught(target: LoadedModel) -> None:
    draft = model(0)
    biased = DropsWeakTokens(draft, pool_for(draft), vocab_size=6, width=6, stop_below=lambda: 0.0)
    params = SamplingParams(temperature=1.1, max_tokens=LENGTH, verify="rejection")
    outcomes = sample_outputs(engine(target, biased, k=2), params, DRAWS)
    assert p_value(outcomes, exact_law(target, params, LENGTH)) < 1e-8


def test_stopping_after_a_weak_token_is_exact(target: LoadedModel) -> None:
    """What `stop_below` does: the weak token itself is verified."""
    stopping = draft_proposer(target, model(7), stop_below=0.3)
    params = SamplingParams(temperature=1.1, max_tokens=LENGTH, verify="rejection")
    outcomes = sample_outputs(engine(target, stopping, k=4), params, DRAWS)
    assert p_value(outcomes, exact_law(target, params, LENGTH)) > SIGNIFICANT


def test_adaptive_draft_lengths_are_exact(target: LoadedModel) -> None:
    """Lengths follow measured acceptance, and the draft stops at its own weak tokens: nothing may leak into the law."""
    adapting = draft_proposer(target, model(7), stop_below=0.3)
    params = SamplingParams(temperature=1.1, max_tokens=LENGTH, verify="rejection")
    outcomes = sample_outputs(engine(target, adapting, k=None, max_batch=16), params, DRAWS)
    assert p_value(outcomes, exact_law(target, params, LENGTH)) > SIGNIFICANT


def test_a_reduced_draft_vocabulary_is_exact_when_sampling(target: LoadedModel) -> None:
    params = SamplingParams(temperature=1.1, max_tokens=LENGTH, verify="rejection")
    draft = model(7, head_ids=torch.tensor([0, 2, 3]))
    outcomes = sample_outputs(engine(target, draft_proposer(target, draft), k=3), params, DRAWS)
    assert p_value(outcomes, exact_law(target, params, LENGTH)) > SIGNIFICANT


def test_a_mixed_batch_follows_each_requests_own_law(target: LoadedModel) -> None:
    """Greedy, coupled and rejection requests share every step; each kind answers as it would alone."""
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=LENGTH),
        SamplingParams(temperature=1.1, max_tokens=LENGTH, verify="coupled"),
        SamplingParams(temperature=0.8, top_k=4, max_tokens=LENGTH, verify="rejection"),
    ]
    params = [replace(kinds[i % 3], seed=i) for i in range(3 * DRAWS)]
    machine = engine(target, draft_proposer(target, model(7)), k=3)
    answers = [tuple(output(r)) for r in run(machine, [PROMPT] * len(params), params)]
    assert len(set(answers[::3])) == 1
    for i in (1, 2):
        assert p_value(answers[i::3], exact_law(target, kinds[i], LENGTH)) > SIGNIFICANT


def test_a_user_processor_is_exact_under_speculation(target: LoadedModel) -> None:
    """It sees each row's own history, drafts included: here no token may follow itself."""

    def no_repeat(logits: Tensor, history: Sequence[int]) -> Tensor:
        banned = logits.clone()
        banned[history[-1]] = float("-inf")
        return banned

    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, verify="rejection", processors=(no_repeat,))
    outcomes = sample_outputs(engine(target, draft_proposer(target, model(7)), k=3), params, DRAWS)
    assert all(a != b for o in outcomes for a, b in zip((PROMPT[-1], *o), o, strict=False))
    assert p_value(outcomes, exact_law(target, params, LENGTH)) > SIGNIFICANT
