"""What is trained is what drafts: an exported head, loaded again, computes what its module did, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from heads import fresh
from lab_training import Lab
from torch import Tensor

from paceline.device import Backend
from paceline.heads.eagle import EagleHead
from paceline.heads.load import load_head
from paceline.heads.medusa import MedusaHead
from paceline.heads.mtp import MtpHead
from paceline.model.attention import Span
from paceline.model.linear import DenseLinear
from paceline.train.batches import TrainingBatch
from paceline.train.drafters import DRAFTERS, Given
from paceline.train.export import Card
from paceline.train.objective import Guesses

FP32 = Backend(torch.device("cpu"), "fp32", torch.float32)
STEPS, ROW = 3, 6  # drafts of three tokens that begin behind this row
VOCABULARY = torch.tensor([0, 2, 3, 5, 7, 11, 12, 13, 17, 19, 23])


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab.make(tmp_path_factory.mktemp("target"))


def trained(lab: Lab, kind: str, folder: Path) -> tuple[Guesses, TrainingBatch]:
    """Weights that are exact in bf16 and far from where training begins, exported to `folder`."""
    drafter = DRAFTERS[kind]
    taps = drafter.default_taps(lab.weights.config)
    objective = drafter.objective(Given(lab.weights, VOCABULARY, taps))
    generator = torch.Generator().manual_seed(1)
    for weight in objective.module.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = (1 + 0.3 * noise if weight.dim() == 1 else 0.4 * noise).bfloat16().float()
    card = Card(str(lab.folder), taps, lab.weights.config, {"command": "test"})
    drafter.export(folder, card, objective)
    passage = lab.passages(taps, count=1)[0]
    assert isinstance(objective, Guesses)
    return objective, TrainingBatch.of([passage])


def scores(objective: Guesses, batch: TrainingBatch) -> list[Tensor]:
    """Logits [D] of each depth of the draft that begins behind ROW, by the module."""
    return [found(None)[0, ROW] for found in objective.guesses(batch, STEPS)]


def test_eagle3(lab: Lab, tmp_path: Path) -> None:
    objective, batch = trained(lab, "eagle3", tmp_path)
    head = load_head(str(tmp_path), lab.weights.config, FP32)
    assert isinstance(head, EagleHead)
    assert head.target_ids is not None
    assert head.target_ids.tolist() == VOCABULARY.tolist()
    tokens, features = batch.tokens[0], head.fuse(list(batch.taps[0].unbind(1)))
    sequence = fresh(head)
    embed = lab.weights.embed  # as the trainer sees it, in fp16

    def run(rows: list[int], hidden: Tensor) -> Tensor:
        def compute(_: object, spans: list[Span], pool: object) -> Tensor:
            following = tokens[torch.tensor(rows) + 1]
            return head.forward(head.embed(following, embed), hidden, spans, pool)  # type: ignore[arg-type]

        return sequence.feed(rows, compute)

    out = run(list(range(ROW + 1)), features[: ROW + 1])[-1:]
    for step, wanted in enumerate(scores(objective, batch)):
        torch.testing.assert_close(head.logits(out)[0], wanted, atol=1e-4, rtol=1e-4)
        out = run([ROW + step + 1], out)


def test_mtp(lab: Lab, tmp_path: Path) -> None:
    objective, batch = trained(lab, "mtp", tmp_path)
    head = load_head(str(tmp_path), lab.weights.config, FP32)
    assert isinstance(head, MtpHead)
    output, tokens = DenseLinear(lab.weights.output.float()), batch.tokens[0]
    sequence = fresh(head)

    def run(rows: list[int], hidden: Tensor) -> Tensor:
        def compute(_: object, spans: list[Span], pool: object) -> Tensor:
            following = head.embed(tokens[torch.tensor(rows) + 1], lab.weights.embed)
            return head.forward(0, following, hidden, spans, pool)  # type: ignore[arg-type]

        return sequence.feed(rows, compute)

    out = run(list(range(ROW + 1)), batch.last[0, : ROW + 1])[-1:]
    for step, wanted in enumerate(scores(objective, batch)):
        found = head.logits(out, output)[0, VOCABULARY]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        out = run([ROW + step + 1], out)


def test_medusa(lab: Lab, tmp_path: Path) -> None:
    objective, batch = trained(lab, "medusa", tmp_path)
    head = load_head(str(tmp_path), lab.weights.config, FP32)
    assert isinstance(head, MedusaHead)
    assert head.target_ids is not None
    assert head.target_ids.tolist() == VOCABULARY.tolist()
    found = head.logits(batch.last[0, ROW : ROW + 1], STEPS)[0]
    for step, wanted in enumerate(scores(objective, batch)):
        torch.testing.assert_close(found[step], wanted, atol=1e-4, rtol=1e-4)
