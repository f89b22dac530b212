"""A draft that was trained to score some tokens scores no others, however high their scores happen to be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from lab_training import Lab

from paceline.bench.quality import log_probabilities
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.sampling.params import SamplingParams
from paceline.study.measures import measure
from paceline.train.draft import DraftObjective, export
from paceline.train.export import Card
from paceline.weights.draft_vocab import FILE
from paceline.weights.load import load_model

SCORED = [*range(3, 20)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab.make(tmp_path_factory.mktemp("target"))


@pytest.fixture
def draft(lab: Lab, tmp_path: Path) -> Path:
    return exported(lab, tmp_path / "draft", SCORED)


def exported(lab: Lab, folder: Path, vocabulary: Sequence[int]) -> Path:
    """Half of the target. The first token, which is not trained, has the highest score of all."""
    objective = cast(DraftObjective, lab.objective("draft")[0])
    objective.vocabulary = torch.tensor(vocabulary)
    with torch.no_grad():
        objective.module.embed_tokens.weight[0] = 10 * objective.module.embed_tokens.weight.sum(0)
    export(folder, Card(str(lab.folder), (), objective.module.config, {}), objective)
    return folder


def test_as_a_draft_it_scores_what_it_was_trained_to(draft: Path) -> None:
    found = load_model(str(draft), precision="fp32", as_draft=True)
    assert found.decoder.head_ids is not None
    assert found.decoder.head_ids.tolist() == SCORED
    logs = log_probabilities(found, [3, 5, 19, 4])
    assert logs.shape == (4, found.vocab_size)
    every = log_probabilities(load_model(str(draft), precision="fp32"), [3, 5, 19, 4])[:, SCORED].log_softmax(1)
    torch.testing.assert_close(logs[:, SCORED], every, atol=1e-3, rtol=0)
    assert logs[:, SCORED].exp().sum(1).tolist() == pytest.approx([1.0] * 4)
    assert bool((logs[:, :3] == -torch.inf).all())


def test_as_a_target_it_scores_everything(draft: Path) -> None:
    found = load_model(str(draft), precision="fp32")
    assert found.decoder.head_ids is None


def test_a_smaller_vocabulary_is_one_of_what_was_trained(draft: Path, lab: Lab, tmp_path: Path) -> None:
    ids = load_model(str(draft), precision="fp32", as_draft=True, head_vocab=9).decoder.head_ids
    assert ids is not None
    assert set(range(3, 9)) <= set(ids.tolist()) <= set(SCORED)
    with pytest.raises(PacelineError, match="draft_vocab 2 leaves no token"):
        load_model(str(exported(lab, tmp_path / "late", [17, 18])), as_draft=True, head_vocab=2)


def test_rows_that_are_no_tokens_are_left_out(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.text.tokenizer.Tokenizer.vocab_size", 15)
    ids = load_model(str(draft), precision="fp32", as_draft=True).decoder.head_ids
    assert ids is not None
    assert ids.tolist() == [*range(3, 15)]


def test_one_that_was_trained_on_all_needs_no_list(lab: Lab, tmp_path: Path) -> None:
    every = range(lab.weights.config.vocab_size)
    assert not (exported(lab, tmp_path / "every", every) / FILE).exists()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_stay_the_targets(lab: Lab, draft: Path, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    plain = LLM(str(lab.folder), method="none", precision="fp32").generate("abc", params)
    drafted = LLM(str(lab.folder), method="draft", draft=str(draft), precision="fp32", k=3).generate("abc", params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0


def test_perplexity_is_of_what_is_scored(lab: Lab, draft: Path) -> None:
    found = measure(load_model(str(draft), precision="fp32", as_draft=True), lab.passages(()), [[3, 4, 5]])
    answered = sum(len(each.tokens) - each.prompt for each in lab.passages(()))
    assert 0 < found.answer_tokens < answered
    assert found.perplexity < 1e6


@pytest.mark.parametrize("content", ["no json", "[]", '["a"]', "[3, 99999]", "[-1]", "{}", "[true]"])
def test_a_list_that_cannot_be_is_named(draft: Path, content: str) -> None:
    (draft / FILE).write_text(content)
    with pytest.raises(PacelineError, match=FILE):
        load_model(str(draft), as_draft=True)


def test_the_list_is_plain_json(draft: Path) -> None:
    assert json.loads((draft / FILE).read_text()) == SCORED
