"""Heads trained here, opened by the speculators package itself, where it is installed (it is no dependency)."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from lab_training import Lab
from test_trained_heads import STEPS, VOCABULARY, trained

pytest.importorskip("speculators")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab.make(tmp_path_factory.mktemp("target"))


def test_eagle3_is_loaded_and_computes_the_same(lab: Lab, tmp_path: Path) -> None:
    """Its training-time forward gives the logits of every step; ours are those of the module that was exported."""
    with torch.inference_mode(False), torch.no_grad():
        objective, batch = trained(lab, "eagle3", tmp_path)
        head = importlib.import_module("speculators.models.eagle3").Eagle3DraftModel.from_pretrained(tmp_path).float()
    assert (head.d2t + torch.arange(len(VOCABULARY))).tolist() == VOCABULARY.tolist()
    ours = objective.module.state_dict()
    theirs = head.state_dict()
    assert len(ours) > 10
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name].float(), weight, atol=0, rtol=0)
    assert len(list(objective.guesses(batch, STEPS))) == STEPS


def test_mtp_is_loaded(lab: Lab, tmp_path: Path) -> None:
    with torch.inference_mode(False), torch.no_grad():
        objective, _ = trained(lab, "mtp", tmp_path)
        head = importlib.import_module("speculators.models.mtp").MTPDraftModel.from_pretrained(tmp_path).float()
    theirs = head.state_dict()
    for name, weight in objective.module.state_dict().items():
        torch.testing.assert_close(theirs[name].float(), weight, atol=0, rtol=0)
