"""The draft study: equal budgets, statistics, verdicts that can fall either way, models of random weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from lab_training import Lab, gradients
from scipy import stats
from torch import nn

from paceline.build import Options, load_models
from paceline.errors import PacelineError
from paceline.model.config import ModelConfig, RopeConfig
from paceline.native.decoder import runs_natively
from paceline.native.library import library
from paceline.native.packed import packed_bytes
from paceline.study.begin import begin_rebuilt, principal
from paceline.study.correlation import spearman
from paceline.study.findings import (
    TrainedDraft,
    accuracy_and_acceptance,
    depth_alone,
    depth_or_weights,
    step_costs,
    throughput_follows_latency,
)
from paceline.study.latency import TimedShape, time_shapes
from paceline.study.measures import Measures, chains, measure
from paceline.study.random_weights import FORMATS, random_decoder, streamed_bytes
from paceline.study.remembered import remembered
from paceline.study.shapes import (
    LADDER,
    Shape,
    draft_shapes,
    fit,
    ladder,
    paper_shapes,
    parameters,
    pruned,
)
from paceline.study.throughput import Rate
from paceline.train.draft import DraftModule, DraftObjective
from paceline.train.trainer import held_out_acceptance

SMOLLM2 = ModelConfig("llama", 49_152, 576, 30, 9, 3, 64, 1536, 8192, rope=RopeConfig(theta=100_000.0))
TINY = ModelConfig("llama", 40, 64, 3, 2, 1, 32, 96, 512)
native = pytest.mark.skipif(library() is None, reason="the kernels are missing")


# Shapes


def test_drafts_of_equal_budget_differ_in_depth_and_in_width() -> None:
    drafts = [each.config for each in draft_shapes(SMOLLM2, 4, (32, 15, 8, 4, 2, 1), ())]
    budget = parameters(pruned(SMOLLM2, 4))
    assert [each.num_layers for each in drafts] == [32, 15, 8, 4, 2, 1]
    assert [each.hidden_size for each in drafts] == [288, 384, 480, 576, 672, 768]
    assert [parameters(each) / budget for each in drafts] == pytest.approx([1.0] * 6, abs=0.01)
    assert all(runs_natively(each) for each in drafts)
    assert drafts[3] == pruned(SMOLLM2, 4)  # at the target's own depth of the budget, the target's own layers


def test_the_ladder_weighs_what_the_target_does() -> None:
    rungs = [each.config for each in ladder(SMOLLM2)]
    assert [each.num_layers for each in rungs] == [60, 30, 15, 7, 3, 1]
    assert [parameters(each) / parameters(SMOLLM2) for each in rungs] == pytest.approx([1.0] * 6, abs=0.02)


def test_parameters_are_those_of_a_module() -> None:
    config = fit(SMOLLM2, 2, 5_000_000)
    assert parameters(config) == sum(each.numel() for each in DraftModule(config).parameters())


def test_the_papers_shapes_have_the_counts_of_their_names() -> None:
    millions = {shape.name: round(parameters(shape.config) / 1e6) for shape in paper_shapes()}
    assert [millions[f"Wide-{count}M"] for count in (796, 543, 290)] == [796, 543, 290]
    assert millions["Sheared-1.3B"] == pytest.approx(1345, abs=1)
    assert millions["Deep-796M"] == pytest.approx(796, rel=0.01)


def test_a_budget_too_small_for_its_depth_is_told() -> None:
    with pytest.raises(PacelineError, match="400 layers of this vocabulary do not fit into 2,000,000 weights"):
        fit(SMOLLM2, 400, 2_000_000)


# Random weights


@native
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_model_of_random_weights_has_its_shape_and_stays_finite(precision: str) -> None:
    decoder = random_decoder(TINY, precision)
    assert len(decoder.native_layers) == TINY.num_layers
    assert [part.rows for part in decoder.native_layers[0].qkv.parts] == [64, 32, 32]
    assert decoder.native_layers[2].down.parts[0].format == FORMATS[precision]
    first, second = (decoder.native_layers[index].output.parts[0].data for index in (0, 1))
    assert first.data_ptr() != second.data_ptr()  # each layer is streamed from memory of its own
    assert decoder.logits(torch.randn(2, TINY.hidden_size)).isfinite().all()


@native
def test_the_bytes_of_a_step_are_those_of_the_packed_matrices() -> None:
    decoder = random_decoder(TINY, "int8")
    linears = [
        linear for layer in decoder.native_layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    weights = sum(part.data.numel() for linear in linears for part in linear.parts)
    head = packed_bytes(FORMATS["int8"], TINY.vocab_size, TINY.hidden_size)
    cached = TINY.num_layers * 2 * 32 * 2 * 10  # keys and values of ten positions, one head of 32, fp16
    assert streamed_bytes(TINY, "int8", 9) == weights + head + cached


@native
def test_a_step_of_every_shape_takes_time() -> None:
    shapes = [Shape(f"{n}", LADDER, replace(TINY, num_layers=n), "made up") for n in (1, 4)]
    found = time_shapes(shapes, "int8", rounds=1)
    assert [each.layers for each in found] == [1, 4]
    assert all(each.seconds > 0 for each in found)


@native
def test_shapes_that_do_not_fit_are_told_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2e9))
    with pytest.raises(PacelineError, match=r"6 shapes of 'paper' needs about \d\.\d GB of memory, 2\.0 GB are free"):
        time_shapes(paper_shapes(), "int8", rounds=1)


# How drafts begin


def test_principal_directions_keep_the_inner_products_of_tokens() -> None:
    table = torch.randn(50, 4) @ torch.randn(4, 12)  # of rank 4
    turned = principal(table)
    torch.testing.assert_close(turned[:, :4] @ turned[:, :4].T, table @ table.T, atol=1e-3, rtol=1e-3)
    assert turned[:, 4:].abs().max() < 1e-2


@pytest.mark.parametrize("width", [8, 32])
def test_a_rebuilt_draft_begins_with_the_targets_embedding_turned(tmp_path: Path, width: int) -> None:
    target = Lab.make(tmp_path / "target").weights
    config = replace(pruned(target.config, 2), hidden_size=width, num_heads=2, num_kv_heads=1, head_dim=width // 2)
    module = DraftModule(config)
    begin_rebuilt(module, target)
    begun, output = module.embed_tokens.weight, target.output.float()
    likeness = torch.corrcoef(torch.stack([(begun @ begun.T).flatten(), (output @ output.T).flatten()]))[0, 1]
    assert likeness > 0.7  # half the width keeps more than half
    assert module.norm.weight.tolist() == [1.0] * width


# Measures


def test_chains_are_what_a_draft_behind_each_token_would_get_right() -> None:
    right = torch.tensor([True, True, False, True])
    assert chains(right, 2).tolist() == [[True, False], [False, True], [True, False]]


def test_a_drafts_measures_agree_with_those_of_its_training(tmp_path: Path) -> None:
    """The same acceptance through the engine's forward as the trainer's; the perplexity of the module's own loss."""
    lab = Lab.make(tmp_path / "target")
    passages = lab.passages((), count=8)
    module = DraftModule(pruned(lab.weights.config, 4))
    module.begin_as(lab.weights)
    with gradients():
        objective = DraftObjective(module, lab.weights, torch.arange(26), steps=1)
        source = SimpleNamespace(held_out=lambda: passages, units=[0])
        expected = held_out_acceptance(objective, source, depth=5)
    save_as_checkpoint(module, lab.folder, tmp_path / "draft")
    draft = load_models(Options(str(tmp_path / "draft"), method="none", precision="fp32")).target
    found = measure(draft, passages, [[0, 1, 2, 3]])
    assert found.acceptance_length == pytest.approx(expected.length)
    assert found.by_depth == pytest.approx(expected.by_depth)
    losses = [
        nn.functional.cross_entropy(
            nn.functional.linear(module(each.tokens[None])[0], module.embed_tokens.weight)[each.prompt - 1 : -1],
            each.tokens[each.prompt :], reduction="sum",
        )
        for each in passages
    ]  # fmt: skip
    assert math.log(found.perplexity) == pytest.approx(float(sum(losses)) / found.answer_tokens, rel=0.01)  # bf16
    assert found.text_tokens == 3


def save_as_checkpoint(module: DraftModule, target: Path, folder: Path) -> None:
    from paceline.train.export import Card, export_draft

    vocabulary = torch.arange(module.config.vocab_size)
    export_draft(folder, Card(str(target), (), module.config, {}), module.state_dict(), vocabulary)


# Statistics


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]),
        ([3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1]),  # ties
        ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]),
        ([0.3, 0.1, 0.9, 0.4, 0.2, 0.8, 0.7, 0.5, 0.6], [5, 2, 8, 1, 3, 9, 4, 6, 7]),
    ],
)
def test_rank_correlation_is_scipys(x: list[float], y: list[float]) -> None:
    found = spearman("x", x, "y", y)
    assert found.rho == pytest.approx(stats.spearmanr(x, y).statistic)
    exact = stats.permutation_test(
        (x,), lambda order: stats.spearmanr(order, y).statistic, permutation_type="pairings", n_resamples=6000,
        random_state=0,
    )  # fmt: skip
    assert found.p == pytest.approx(exact.pvalue, abs=0.02)


def test_nothing_follows_from_what_does_not_vary() -> None:
    found = spearman("x", [1, 1, 1, 1, 1], "y", [1, 2, 3, 4, 5])
    assert (found.rho, found.p, found.sure) == (0.0, 1.0, False)


# Verdicts

UP, DOWN, MIXED = [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], [3, 1, 5, 2, 6, 4]


@pytest.mark.parametrize(
    ("depths", "weights", "verdict"),
    [(UP, MIXED, "reproduced"), (MIXED, UP, "contradicted"), (MIXED, MIXED, "undecided"), (UP, UP, "undecided")],
)
def test_whether_latency_follows_depth_or_weights(depths: list[int], weights: list[int], verdict: str) -> None:
    assert depth_or_weights("shapes", depths, weights, [float(each) for each in UP]).verdict == verdict


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ([1.0, 1.2, 1.4, 1.6, 1.8, 2.0], "reproduced"),
        ([1.0, 1.01, 1.02, 1.03, 1.04, 1.05], "contradicted"),  # deeper is slower, but it does not matter
        ([2.0, 1.8, 1.6, 1.4, 1.2, 1.0], "contradicted"),
        ([1.0, 2.0, 1.1, 2.1, 1.2, 1.9], "undecided"),
    ],
)
def test_whether_depth_costs_time_at_equal_weights(seconds: list[float], verdict: str) -> None:
    assert depth_alone("shapes", UP, seconds).verdict == verdict


def test_what_a_layer_costs_beside_its_bytes_is_found() -> None:
    made = [(1, 4_000_000), (8, 2_000_000), (3, 9_000_000), (30, 5_000_000)]
    shapes = [
        TimedShape("s", LADDER, layers, 64, 96, 2, 1, 32, 1000, size, 2e-11 * size + 3e-5 * layers, "made up")
        for layers, size in made
    ]
    assert step_costs(shapes) == pytest.approx((2e-11, 3e-5))


def drafts(seconds: Sequence[float], accepted: Sequence[float], **more: Sequence[float]) -> list[TrainedDraft]:
    count = len(seconds)
    columns = zip(
        seconds, accepted, more.get("speedup", [1.0] * count), more.get("accuracy", [0.5] * count),
        more.get("perplexity", [9.0] * count), strict=True,
    )  # fmt: skip
    return [
        TrainedDraft(
            f"d{index}", "rebuilt", index, 64, 96, 1000, time, 5, Measures(length, [], perplexity, accuracy, 9, 9),
            (Rate(2, 10.0, speed / 2, 1.0, 1.0, 2.0, True), Rate(4, 10.0, speed, 1.0, 1.0, 2.0, True)),
        )
        for index, (time, length, speed, accuracy, perplexity) in enumerate(columns)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "accepted", "verdict"),
    [
        (DOWN, MIXED, "reproduced"),
        (UP, MIXED, "contradicted"),  # the slower the draft, the faster the target
        (MIXED, UP, "contradicted"),  # it goes with acceptance instead
        (MIXED, [2, 6, 1, 5, 4, 3], "undecided"),
    ],
)
def test_whether_throughput_follows_latency(seconds: list[float], accepted: list[float], verdict: str) -> None:
    """The best draft length counts, not the first."""
    assert throughput_follows_latency(drafts(seconds, accepted, speedup=UP)).verdict == verdict


@pytest.mark.parametrize(
    ("accuracy", "perplexity", "verdict"),
    [
        (UP, DOWN, "contradicted"),
        ([4, 1, 6, 2, 5, 3], DOWN, "reproduced"),
        ([4, 1, 6, 2, 5, 3], MIXED, "undecided"),  # nothing predicts it
        ([2, 1, 6, 3, 4, 5], DOWN, "undecided"),  # too related to say that it is not
    ],
)
def test_whether_accuracy_predicts_acceptance(accuracy: list[float], perplexity: list[float], verdict: str) -> None:
    found = accuracy_and_acceptance(drafts(UP, UP, accuracy=accuracy, perplexity=perplexity))
    assert found.verdict == verdict


def test_too_few_drafts_decide_nothing() -> None:
    found = throughput_follows_latency(drafts([4, 3, 2, 1], [1, 1, 1, 1], speedup=[1, 2, 3, 4]))
    assert found.verdict == "undecided"
    assert "4 are too few to tell" in found.why


# Resumption


def test_a_step_is_done_once_for_the_same_question(tmp_path: Path) -> None:
    asked: list[int] = []

    def find() -> dict[str, int]:
        asked.append(1)
        return {"times": len(asked)}

    path = tmp_path / "step.json"
    assert [remembered(path, {"k": k}, find).found["times"] for k in (1, 1, 2, 2)] == [1, 1, 2, 2]


def test_a_step_that_failed_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> None:
        raise PacelineError("no")

    with pytest.raises(PacelineError):
        remembered(tmp_path / "step.json", {}, fail)
    assert not (tmp_path / "step.json").exists()


def test_a_record_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text("{torn")
    with pytest.raises(PacelineError, match=r"cannot read .*step\.json.*delete it to do this step again"):
        remembered(tmp_path / "step.json", {}, lambda: 1)
