"""Suffix decoding, predictions and the choice among methods: exact like the rest, and chosen by what pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from lab import CONFIG, draft_proposer, engine, exact_law, model, output, p_value, run, sample_outputs
from views import Text, accepted, budget

from paceline.engine.controller import Controller
from paceline.engine.engine import Engine
from paceline.engine.record import Outcome
from paceline.propose.auto import AutoProposer
from paceline.propose.base import Budget, Proposer
from paceline.propose.calibration import Calibration
from paceline.propose.ngram import NgramProposer
from paceline.propose.none import NoProposer
from paceline.propose.suffix import SuffixProposer
from paceline.propose.suffix_index import SuffixHistory
from paceline.sampling.params import SamplingParams
from paceline.types import NO_DRAFT, Draft, View
from paceline.weights.load import LoadedModel

WIDE = replace(CONFIG, vocab_size=40, max_positions=256)
PROMPTS = [[1, 5, 9, 1, 5], [3, 2], [7, 7, 7, 7], list(range(30)), [2, 4] * 20]
SAMPLED = SamplingParams(temperature=1.1, max_tokens=3, verify="rejection")


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return model(0, config=WIDE, sharpness=2.0)


def auto_engine(target: LoadedModel, heavy: LoadedModel | None, *, k: int | None = None, max_batch: int = 32) -> Engine:
    """An engine whose proposer and stepper share one controller, as `build_engine` makes them."""
    drafting = None if heavy is None else draft_proposer(target, heavy)
    light: list[Proposer] = [SuffixProposer(SuffixHistory(10_000)), NgramProposer(n_min=1)]
    controller = Controller(fixed=k)
    made = engine(target, AutoProposer(light, drafting, controller), k=k, max_batch=max_batch, chunk=16)
    made.controller = made.stepper.controller = controller
    return made


@pytest.fixture
def told_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take what they might on a real model, whatever else this machine does: so drafts pay."""
    observe = Controller.observe

    def told(self: Controller, outcomes: Sequence[Outcome], target_seconds: float, draft_seconds: float) -> None:
        rows = sum(1 + outcome.draft.size for outcome in outcomes)
        observe(self, outcomes, 0.02 + 0.0005 * rows, 0.0002)

    monkeypatch.setattr(Controller, "observe", told)


@pytest.mark.usefixtures("told_costs")
@pytest.mark.parametrize("kind", ["suffix", "auto", "auto with a draft"])
@pytest.mark.parametrize("k", [3, None])
def test_greedy_and_coupled_equal_plain(kind: str, k: int | None, target: LoadedModel) -> None:
    params = [
        SamplingParams(max_tokens=40), SamplingParams(temperature=0.9, seed=3, max_tokens=40),
        SamplingParams(temperature=1.2, top_k=7, seed=4, verify="coupled", max_tokens=25),
        SamplingParams(frequency_penalty=0.5, max_tokens=33), SamplingParams(max_tokens=3),
    ]  # fmt: skip
    alone = [output(run(engine(target, NoProposer()), [p], [c])[0]) for p, c in zip(PROMPTS, params, strict=True)]
    if kind == "suffix":
        machine = engine(target, SuffixProposer(SuffixHistory(10_000)), k=k, chunk=16)
    else:
        machine = auto_engine(target, model(3, config=WIDE) if "draft" in kind else None, k=k)
    for _ in range(2):  # the second time the answers are history
        requests = run(machine, PROMPTS, params)
        assert [output(r) for r in requests] == alone
    for request in requests:
        assert sum(request.stats.accepted_from.values()) == request.stats.accepted
        assert set(request.stats.accepted_from) <= ({"suffix"} if kind == "suffix" else {"suffix", "ngram", "draft"})
    assert any(request.stats.accepted_from for request in requests)


@pytest.mark.parametrize("kind", ["suffix", "auto with a draft"])
def test_sampling_is_exact(kind: str) -> None:
    target = model(0)
    if kind == "suffix":
        machine = engine(target, SuffixProposer(SuffixHistory(10_000)), k=None, max_batch=16)
    else:
        machine = auto_engine(target, model(7), max_batch=16)
    outcomes = sample_outputs(machine, SAMPLED, 1500, prompt=[1, 4, 2, 1, 4])
    assert p_value(outcomes, exact_law(target, SAMPLED, 3, prompt=[1, 4, 2, 1, 4])) > 1e-4


def test_an_answer_given_before_is_drafted_from_history(target: LoadedModel) -> None:
    machine = engine(target, SuffixProposer(SuffixHistory(10_000)), k=8)
    params = SamplingParams(max_tokens=40)
    first, second = (run(machine, [PROMPTS[3]], [params])[0] for _ in range(2))
    assert output(first) == output(second)
    assert second.stats.target_forwards < first.stats.target_forwards


def test_history_is_kept_apart_by_tenant(target: LoadedModel) -> None:
    machine = engine(target, SuffixProposer(SuffixHistory(10_000)), k=8)

    def forwards(tenant: str) -> int:
        params = SamplingParams(max_tokens=40, tenant=tenant)
        return run(machine, [PROMPTS[3]], [params])[0].stats.target_forwards

    first = forwards("a")
    assert forwards("b") == first
    assert forwards("a") < first


def test_a_prediction_is_drafted_from_and_picked_up_again_after_a_difference(target: LoadedModel) -> None:
    params = SamplingParams(max_tokens=60)
    answer = output(run(engine(target, NoProposer()), [PROMPTS[0]], [params])[0])
    edited = [*answer[:20], 39, 38, *answer[22:40], *answer[43:]]

    def length(prediction: list[int]) -> float:
        machine = engine(target, SuffixProposer(None), k=8)
        (request,) = run(machine, [PROMPTS[0]], [replace(params, prediction=prediction)])
        assert output(request) == answer
        return request.stats.mean_acceptance_length

    assert length(answer) > 7
    assert length([]) < length(edited) < length(answer)


class Scripted(Proposer):
    """Drafts the same chain whenever it is asked; counts how often that is."""

    def __init__(self, name: str, confidence: float, tokens: int = 4) -> None:
        self.name, self.confidence, self.length, self.asked = name, confidence, tokens, 0

    def propose(self, views: list[View], budgets: list[Budget]) -> list[Draft]:  # type: ignore[override]
        self.asked += sum(budget.depth > 0 for budget in budgets)
        return [
            Draft(torch.arange(n), confidence=[self.confidence] * n)
            if (n := min(budget.depth, self.length))
            else NO_DRAFT
            for budget in budgets
        ]


def test_what_the_engine_trims_counts_against_its_method(target: LoadedModel) -> None:
    """Nothing of these drafts is worth verifying, and that is known of the method afterwards."""
    machine = engine(target, Scripted("doubtful", 0.01), k=None)
    run(machine, [PROMPTS[0]], [SamplingParams(max_tokens=30)])
    record = machine.controller.record("doubtful").everywhere
    assert 0 < record.accepted < 0.02 * record.tried


def choosing(light: Scripted, heavy: Scripted | None) -> tuple[AutoProposer, Controller, Text]:
    controller, text = Controller(), Text([1, 2, 3])
    for rows in (1, 4, 16, 1, 8, 32) * 20:
        controller.target.learn(rows, 0.05 + 0.002 * (rows - 1))
    auto = AutoProposer([light], heavy, controller)
    auto.open(text)
    return auto, controller, text


def test_a_sure_light_draft_spares_the_heavy_method() -> None:
    light, heavy = Scripted("suffix", 0.98, 16), Scripted("draft", 0.9)
    auto, _, text = choosing(light, heavy)
    assert auto.propose([text], [budget(64)])[0].source == "suffix"
    assert heavy.asked == 0


def test_light_methods_rest_where_asking_costs_more_than_what_they_find() -> None:
    light = Scripted("suffix", 0.95, 0)
    auto, _, text = choosing(light, None)

    def asked(steps: int) -> int:
        before = light.asked
        for _ in range(steps):
            auto.propose([text], [budget(64)])
        return light.asked - before

    asked(400)
    assert asked(40) == 10
    light.length = 16
    asked(8)
    assert asked(40) == 40


def test_the_heavy_methods_cost_is_its_own() -> None:
    """Not what the light ones took before it, which they take all the same."""
    slow, heavy = Scripted("suffix", 0.1), Scripted("draft", 0.9, 2)
    auto, controller, text = choosing(slow, heavy)
    (draft,) = auto.propose([text], [budget(64)])
    assert draft.source == "draft"
    controller.observe([Outcome(0, "draft", draft, 0, draft.depth)], 0.05, 10.0)
    assert controller.record("draft").draft_seconds < 1.0  # type: ignore[operator]


def test_the_heavy_method_drafts_where_the_light_one_is_unsure() -> None:
    auto, _, text = choosing(Scripted("suffix", 0.1), Scripted("draft", 0.9))
    assert auto.propose([text], [budget(64)])[0].source == "draft"


def test_a_heavy_method_that_fails_on_a_request_is_given_up_there_only() -> None:
    auto, controller, text = choosing(Scripted("suffix", 0.05), Scripted("draft", 0.9))
    other = Text([1, 2, 3], id=1)
    auto.open(other)
    for _ in range(15):
        (draft,) = auto.propose([text], [budget(64)])
        if draft.source == "draft":
            auto.observe(text, accepted(0, draft.size))
            controller.observe([Outcome(0, "draft", draft, 0, draft.depth)], 0.05, 0.01 * draft.size)
    assert auto.propose([text], [budget(64)])[0].source == "suffix"
    assert controller.record("draft").acceptance(1) > controller.record("draft").acceptance(0)


def test_only_the_method_that_drafted_learns_from_the_verdict() -> None:
    light = NgramProposer(n_min=1)
    controller, text = Controller(), Text([1, 2, 3, 1, 2])
    auto = AutoProposer([light], Scripted("draft", 0.9), controller)
    auto.open(text)
    before = light.propose([text], [budget(4)])[0].confidence
    auto._choices[text.id].source = "draft"
    for _ in range(20):
        auto.observe(text, accepted(0, 3))
    assert light.propose([text], [budget(4)])[0].confidence == before


def test_stated_chances_move_to_what_they_were_worth() -> None:
    calibration = Calibration()
    assert calibration.adjust("history", 0.9) == pytest.approx(0.9)
    for _ in range(200):
        calibration.learn("history", [0.9, 0.9, 0.3], 0)
    assert calibration.adjust("history", 0.9) < 0.15
    assert calibration.adjust("history", 0.3) == pytest.approx(0.3)  # never judged
    assert calibration.adjust("request", 0.9) == pytest.approx(0.9)
