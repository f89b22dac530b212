"""What is trained is what drafts: an exported head, loaded again, computes what its module did, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from heads import fresh
from lab_training import Lab
from torch import Tensor

from paceline.build import Options, build_engine, load_models
from paceline.cache.pool import BlockPool
from paceline.device import Backend
from paceline.heads.eagle import EagleHead
from paceline.heads.load import Head, load_head
from paceline.heads.medusa import MedusaHead
from paceline.heads.mtp import MtpHead
from paceline.model.attention import Span
from paceline.model.linear import DenseLinear
from paceline.propose.early_exit import EarlyExitProposer
from paceline.propose.mtp import RepeatedDepth
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


def drafted(lab: Lab, head: EagleHead | RepeatedDepth, batch: TrainingBatch, taps: list[Tensor]) -> list[Tensor]:
    """The same by the head: rows 0 .. ROW with the target's states, then its own outputs, token by token."""
    sequence, tokens = fresh(head if isinstance(head, EagleHead) else head.head), batch.tokens[0]
    output = DenseLinear(lab.weights.output.float())

    def feed(rows: list[int], features: Tensor) -> Tensor:
        def compute(_: Sequence[int], spans: list[Span], pool: BlockPool) -> Tensor:
            embeds = head.embed(tokens[torch.tensor(rows) + 1], lab.weights.embed)  # as the trainer sees it, in fp16
            return head.forward(embeds, features, spans, pool)

        return sequence.feed(rows, compute)[-1:]

    out = feed(list(range(ROW + 1)), head.fuse([tap[: ROW + 1] for tap in taps]))
    found = []
    for step in range(STEPS):
        found.append(head.logits(out, output)[0])
        out = feed([ROW + step + 1], out)
    return found


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def loaded(lab: Lab, folder: Path) -> Head:
    head = load_head(str(folder), lab.weights.config, FP32)
    if isinstance(head, EagleHead | MedusaHead):
        assert head.target_ids is not None
        assert head.target_ids.tolist() == VOCABULARY.tolist()
    return head


def test_eagle3(lab: Lab, tmp_path: Path) -> None:
    objective, batch = trained(lab, "eagle3", tmp_path)
    head = loaded(lab, tmp_path)
    assert isinstance(head, EagleHead)
    assert_close(drafted(lab, head, batch, list(batch.taps[0].unbind(1))), scores(objective, batch))


def test_mtp(lab: Lab, tmp_path: Path) -> None:
    objective, batch = trained(lab, "mtp", tmp_path)
    head = loaded(lab, tmp_path)
    assert isinstance(head, MtpHead)
    found = drafted(lab, RepeatedDepth(head), batch, [batch.last[0]])
    assert_close([logits[VOCABULARY] for logits in found], scores(objective, batch))


def test_medusa(lab: Lab, tmp_path: Path) -> None:
    objective, batch = trained(lab, "medusa", tmp_path)
    head = loaded(lab, tmp_path)
    assert isinstance(head, MedusaHead)
    assert_close(list(head.logits(batch.last[0, ROW : ROW + 1], STEPS)[0]), scores(objective, batch))


def test_exit(lab: Lab, tmp_path: Path) -> None:
    """Read by the method that drafts with it, at the layer and with the norm that were trained."""
    objective, _ = trained(lab, "exit", tmp_path)
    options = Options(str(lab.folder), method="early-exit", head=str(tmp_path), precision="fp32", threads=1)
    proposer = build_engine(options, load_models(options)).proposer
    assert isinstance(proposer, EarlyExitProposer)
    assert proposer.part.layers == range(lab.weights.config.num_layers // 2)
    (trained_norm,) = objective.module.parameters()
    assert proposer.part.norm is not None
    ones = torch.ones(1, lab.weights.config.hidden_size)
    torch.testing.assert_close(proposer.part.norm(ones)[0], trained_norm / (1 + 1e-6) ** 0.5, atol=1e-4, rtol=1e-4)
