"""Heads that come with the package: found by their model's names, used by default, small, whole, and honest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from paceline.build import Options
from paceline.errors import PacelineError
from paceline.heads import shipped
from paceline.weights.presets import PRESETS

MOST_BYTES = 20_000_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    return str(tmp_path / "smollm2-135m")


def test_it_is_used_by_default(folder: str) -> None:
    assert Options("smollm2-135m").used_head == folder
    assert Options("smollm2-135m", method="eagle").used_head == folder
    assert Options(PRESETS["smollm2-135m"].hub_repo).used_head == folder


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "swift", "early-exit"])
def test_methods_without_heads_do_without(folder: str, method: str) -> None:
    assert Options("smollm2-135m", method=method).used_head is None


def test_what_the_user_gives_goes_first(folder: str) -> None:
    assert Options("smollm2-135m", head="my/head").used_head == "my/head"
    assert Options("smollm2-135m", head="my/exit", method="early-exit").used_head == "my/exit"
    assert Options("smollm2-135m", head="none").used_head is None
    with_draft = Options("smollm2-135m", draft="gemma3-270m")
    assert (with_draft.used_head, with_draft.used_draft) == (None, "gemma3-270m")


def test_other_models_have_none(folder: str) -> None:
    assert Options("qwen2.5-coder-0.5b").used_head is None
    with pytest.raises(PacelineError, match="needs a head"):
        Options("qwen2.5-coder-0.5b", method="eagle")
    with pytest.raises(PacelineError, match="needs a head"):
        Options("smollm2-135m", method="eagle", head="none")


@pytest.mark.parametrize("method", ["medusa", "mtp"])
def test_a_method_of_another_kind_of_head_still_needs_one(folder: str, method: str) -> None:
    with pytest.raises(PacelineError, match=f"method '{method}' needs a head"):
        Options("smollm2-135m", method=method)


@pytest.mark.parametrize("path", sorted(shipped.FOLDER.iterdir()), ids=lambda path: path.name)
def test_what_is_shipped_is_small_and_tells_how_it_was_made(path: Path) -> None:
    assert path.name in PRESETS
    assert sum(file.stat().st_size for file in path.iterdir()) < MOST_BYTES
    config = json.loads((path / "config.json").read_text())
    story = json.loads((path / "training.json").read_text())
    assert story["target"] == path.name
    assert story["command"].startswith("paceline train ")
    with safe_open(str(path / "model.safetensors"), framework="pt") as stored:
        assert stored.get_slice("d2t").get_shape() == [config["draft_vocab_size"]]
