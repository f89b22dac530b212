"""Draft trees keep the guarantee: every kind of draw under every verifier, and planted bugs are caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab import (
    CONFIG,
    PROMPT,
    VOCAB,
    draft_proposer,
    engine,
    exact_law,
    model,
    output,
    p_value,
    run,
    sample_outputs,
)
from lab_trees import TREES, DropsWeakNodes, ReportsAnotherLaw, RuleTree

from paceline.engine import verification
from paceline.errors import PacelineError
from paceline.propose.none import NoProposer
from paceline.propose.rollout import Shape
from paceline.sampling.params import SamplingParams, Verify
from paceline.types import Draw
from paceline.verify.rejection import verify_rejection
from paceline.weights.load import LoadedModel

DRAWS = 1500
DRAWN: list[Draw] = ["point", "iid", "without_replacement"]
SIGNIFICANT = 1e-4
SAMPLED = SamplingParams(temperature=1.1, max_tokens=3, verify="rejection")
WIDE = replace(CONFIG, vocab_size=40, max_positions=256)
PROMPTS = [[1, 5, 9, 1, 5], [3, 2], [7, 7, 7, 7], list(range(30)), [2, 4] * 20]
SHAPES = {"wide": Shape(3, 2, 12), "deep": Shape(2, 5, 9), "one level": Shape(4, 1, 4)}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return model(0)


@pytest.fixture(scope="module")
def wide_target() -> LoadedModel:
    return model(0, config=WIDE, sharpness=2.0)


@pytest.mark.parametrize("verify", ["rejection", "coupled"])
@pytest.mark.parametrize("draw", DRAWN)
@pytest.mark.parametrize("tree", TREES)
def test_the_joint_law_is_the_targets(tree: str, draw: Draw, verify: Verify, target: LoadedModel) -> None:
    params = replace(SAMPLED, verify=verify)
    machine = engine(target, RuleTree(TREES[tree], draw, VOCAB), k=4)
    outcomes = sample_outputs(machine, params, DRAWS)
    assert p_value(outcomes, exact_law(target, params, 3)) > SIGNIFICANT


@pytest.mark.parametrize("draw", DRAWN)
def test_every_part_of_the_chain_is_exact_along_each_branch(draw: Draw, target: LoadedModel) -> None:
    """Penalties, bias and truncation see each node's own history."""
    params = replace(
        SAMPLED, top_p=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={2: 0.8}
    )
    outcomes = sample_outputs(engine(target, RuleTree(TREES["uneven"], draw, VOCAB), k=4), params, DRAWS)
    assert p_value(outcomes, exact_law(target, params, 3)) > SIGNIFICANT


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_of_a_draft_model_are_exact_under_rejection(shape: str, sampled: bool, target: LoadedModel) -> None:
    grown = replace(SHAPES[shape], sampled=sampled)
    machine = engine(target, draft_proposer(target, model(7), shape=grown, stop_below=0.05), k=None, max_batch=32)
    outcomes = sample_outputs(machine, SAMPLED, DRAWS)
    assert p_value(outcomes, exact_law(target, SAMPLED, 3)) > SIGNIFICANT


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_of_a_draft_model_give_the_tokens_of_plain_decoding(shape: str, wide_target: LoadedModel) -> None:
    params = [
        SamplingParams(max_tokens=30), SamplingParams(temperature=0.9, seed=3, max_tokens=40),
        SamplingParams(temperature=1.2, top_k=7, seed=4, verify="coupled", max_tokens=25),
        SamplingParams(frequency_penalty=0.5, max_tokens=33), SamplingParams(max_tokens=3),
    ]  # fmt: skip
    alone = [output(run(engine(wide_target, NoProposer()), [p], [c])[0]) for p, c in zip(PROMPTS, params, strict=True)]
    for k in (1, 4, None):
        proposer = draft_proposer(wide_target, model(3, config=WIDE), shape=SHAPES[shape])
        machine = engine(wide_target, proposer, k=k, chunk=8)
        assert [output(r) for r in run(machine, PROMPTS, params)] == alone


def test_a_tree_of_the_same_model_is_accepted_to_its_depth(wide_target: LoadedModel) -> None:
    proposer = draft_proposer(wide_target, model(0, config=WIDE, sharpness=2.0), shape=Shape(3, 4, 30))
    (request,) = run(engine(wide_target, proposer, k=4), [PROMPTS[0]], [SamplingParams(max_tokens=26)])
    assert request.stats.mean_acceptance_length == pytest.approx(26 / 6)
    assert request.stats.acceptance_per_position == [1.0] * 4


def test_wider_trees_accept_more_of_a_poor_draft(wide_target: LoadedModel) -> None:
    def length(width: int) -> float:
        proposer = draft_proposer(wide_target, model(3, config=WIDE), shape=Shape(width, 4, 64))
        requests = run(engine(wide_target, proposer, k=4), PROMPTS, [SamplingParams(max_tokens=40)] * len(PROMPTS))
        return sum(r.stats.mean_acceptance_length for r in requests)

    assert length(1) < length(3) < length(8)


@pytest.mark.parametrize("draw", ["iid", "without_replacement"])
@pytest.mark.parametrize("bug", [DropsWeakNodes, ReportsAnotherLaw])
def test_a_planted_bug_in_a_sampled_tree_is_caught(bug: type[RuleTree], draw: Draw, target: LoadedModel) -> None:
    outcomes = sample_outputs(engine(target, bug(TREES["two levels"], draw, VOCAB), k=4), SAMPLED, 2 * DRAWS)
    assert p_value(outcomes, exact_law(target, SAMPLED, 3)) < 1e-8


def test_forgetting_that_siblings_were_drawn_without_replacement_is_caught(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_replacement(*args: object, replacement: bool) -> object:
        return verify_rejection(*args, replacement=True)  # type: ignore[arg-type]

    monkeypatch.setattr(verification, "verify_rejection", with_replacement)
    machine = engine(target, RuleTree(TREES["siblings"], "without_replacement", VOCAB, skew=2.5), k=4)
    assert p_value(sample_outputs(machine, SAMPLED, 2 * DRAWS), exact_law(target, SAMPLED, 3)) < 1e-6


def test_a_tree_beyond_its_budget_is_refused_in_one_line(target: LoadedModel) -> None:
    class Overreaching(RuleTree):
        def propose(self, views, budgets):  # type: ignore[no-untyped-def]
            return [self.tree(view, replace(budgets[0], depth=9)) for view in views]

    machine = engine(target, Overreaching(TREES["uneven"], "point", VOCAB), k=2)
    with pytest.raises(PacelineError, match="it is 3 tokens deep where at most 2 were asked for"):
        run(machine, [PROMPT], [SamplingParams(max_tokens=9)])


def test_more_draws_than_probability_allows_are_harmless(target: LoadedModel) -> None:
    """All six tokens as siblings: the last is certain, and nothing is left to draw a correction from."""
    params = replace(SAMPLED, top_k=2)
    machine = engine(target, RuleTree((-1,) * 6, "without_replacement", VOCAB), k=2)
    outcomes = sample_outputs(machine, params, DRAWS)
    assert p_value(outcomes, exact_law(target, params, 3)) > SIGNIFICANT
