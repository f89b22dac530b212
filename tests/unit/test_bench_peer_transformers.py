"""Timing transformers' own decoding, with a stand-in for its model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.bench import peer_transformers
from paceline.bench.peer_transformers import TokenTimes, TransformersRunner, load_peers
from paceline.build import Options
from paceline.errors import PacelineError
from paceline.weights.resolve import Checkpoint


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Set `clock[0]` to move time."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


class FakeModel:
    """Generates ids 1, 2, 3, one a second after two seconds of prefill."""

    device = torch.device("cpu")

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.arguments = clock, dict[str, Any]()

    def generate(self, ids: torch.Tensor, *, streamer: TokenTimes, **arguments: Any) -> None:
        self.arguments = {"ids": ids.tolist(), **arguments}
        streamer.put(ids)
        self.clock[0] += 1
        for token in (1, 2, 3):
            self.clock[0] += 1
            streamer.put(torch.tensor([token]))
        streamer.end()


def test_prompt_and_prefill_are_not_in_the_rate(clock: list[float]) -> None:
    model = FakeModel(clock)
    measured = TransformersRunner(model, 3, {"prompt_lookup_num_tokens": 10}).run([8, 9])
    assert measured.token_ids == [1, 2, 3]
    assert measured.first_token_seconds == 2
    assert measured.tokens_per_second == 1
    assert model.arguments["ids"] == [[8, 9]]
    assert model.arguments["max_new_tokens"] == 3
    assert model.arguments["prompt_lookup_num_tokens"] == 10
    assert model.arguments["do_sample"] is False


def test_all_tokens_of_an_assisted_first_step_are_prefill(clock: list[float]) -> None:
    times = TokenTimes(started=clock[0])
    times.put(torch.tensor([[8, 9]]))
    clock[0] += 3
    times.put(torch.tensor([[1, 2, 3]]))
    clock[0] += 2
    times.put(torch.tensor([[4, 5]]))
    clock[0] += 2
    times.put(torch.tensor([[6, 7]]))
    measured = times.measurement()
    assert measured.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert measured.tokens_per_second == 1  # four tokens in four seconds
    assert measured.first_token_seconds == 3


def test_an_answer_of_one_step_has_no_rate(clock: list[float]) -> None:
    times = TokenTimes(started=clock[0])
    times.put(torch.tensor([[8]]))
    clock[0] += 1
    times.put(torch.tensor([1, 2]))
    assert times.measurement().tokens_per_second == 0


class Loaded:
    """What `_load` would give; `rows` is its vocabulary."""

    def __init__(self, rows: int) -> None:
        self.vocab_size, self.config = rows, self

    def get_text_config(self) -> Loaded:
        return self


def test_the_target_is_loaded_once_for_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []

    def load(name: str, *_: object) -> Loaded:
        loads.append(name)
        return Loaded(10)

    monkeypatch.setattr(peer_transformers, "_load", load)
    runners = load_peers(list(peer_transformers.PEERS), Options("big", draft="small"), 8, [2])
    assert loads == ["big", "small"]
    assert set(runners) == set(peer_transformers.PEERS)
    arguments = [set(runner.arguments) for runner in runners.values() if isinstance(runner, TransformersRunner)]
    assert arguments == [set(), {"prompt_lookup_num_tokens"}, {"assistant_model"}]


def test_nothing_is_loaded_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transformers, "_load", lambda *_: pytest.fail("loaded"))
    assert load_peers([], Options("big"), 8, [2]) == {}


def test_an_assistant_of_another_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transformers, "_load", lambda name, *_: Loaded({"big": 10, "small": 12}[name]))
    with pytest.raises(PacelineError, match="big has 10, small has 12"):
        load_peers(["transformers-draft"], Options("big", draft="small"), 8, [2])


def test_what_transformers_cannot_load_is_an_error_to_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_transformers, "resolve", lambda name: Checkpoint(name, tmp_path, "directory"))
    with pytest.raises(PacelineError, match="transformers cannot load 'empty'"):
        load_peers(["transformers"], Options("empty"), 8, [2])
