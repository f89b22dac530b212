"""The comparison with other engines: its order, its ratios and what it says to an engine's process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the scripts are no part of the package

from benchmarks.peers.engines import Engine  # noqa: E402
from benchmarks.peers.protocol import Answer, Settings  # noqa: E402
from benchmarks.peers.quality import distance, of_server  # noqa: E402
from benchmarks.peers.ratios import against_best, common, geometric_mean, like_ours, rates  # noqa: E402
from benchmarks.peers.timing import PREFILL, Run, Task, schedule  # noqa: E402

TASKS = [Task("a", "code", [1, 2], 8), Task("b", "chat", [3], 8), Task("p", PREFILL, [4] * 4, 1)]


def engine(name: str, *modes: str) -> Engine:
    return Engine(name, "python", Settings("m", modes, 1, 16, ()))


ENGINES = [engine("ours", "none", "auto"), engine("llama_cpp", "plain", "draft-4")]


@pytest.mark.parametrize("in_turn", [False, True])
def test_every_mode_answers_every_prompt_once_a_repeat_and_prefill_only_plainly(in_turn: bool) -> None:
    planned = list(schedule(ENGINES, TASKS, 3, in_turn))
    expected = {(label, task, repeat) for label in ("ours:none", "ours:auto", "llama_cpp:plain", "llama_cpp:draft-4")
                for task in "ab" for repeat in range(3)}  # fmt: skip
    expected |= {(label, "p", repeat) for label in ("ours:none", "llama_cpp:plain") for repeat in range(3)}
    assert len(planned) == len(expected)
    assert {(label, task.id, repeat) for label, task, repeat in planned} == expected


def test_no_mode_is_always_first() -> None:
    planned = [(label, repeat) for label, task, repeat in schedule(ENGINES, TASKS[:1], 4, in_turn=False)]
    assert len({planned[4 * repeat][0] for repeat in range(4)}) == 4


def test_engines_in_turn_are_each_started_once_a_repeat() -> None:
    order = [label.partition(":")[0] for label, _, _ in schedule(ENGINES, TASKS, 2, in_turn=True)]
    changes = sum(before != after for before, after in pairwise(order))
    assert changes == 2  # ours, llama.cpp; llama.cpp, ours


def test_tokens_of_the_first_step_are_not_in_the_decode_rate() -> None:
    assert Answer(list(range(11)), 5.0, 2.0, first_tokens=5).tokens_per_second == 3.0
    assert Answer([1, 2], 5.0, 0.0, first_tokens=2).tokens_per_second == 0.0


def runs(table: Mapping[str, Mapping[str, list[float]]]) -> list[Run]:
    """{kind: {mode: rate of each repeat}} with one prompt a kind."""
    return [
        Run(label, Task(kind, kind, [1], 8), repeat, Answer([0, 1], 1.0, 1 / rate if rate else 0.0))
        for kind, modes in table.items()
        for label, found in modes.items()
        for repeat, rate in enumerate(found)
    ]


def test_our_best_mode_of_a_kind_meets_the_peers_best_run_by_run() -> None:
    drift = np.array([1.0, 0.25, 0.5])  # the machine slows down: each repeat's ratio stays what it is
    table = {
        "code": {"ours:none": [10.0] * 3, "ours:auto": list(90 * drift), "a:plain": list(30 * drift), "b:x": [9.0] * 3},
        "chat": {"ours:none": list(40 * drift), "ours:auto": [8.0] * 3, "a:plain": [5.0] * 3, "b:x": list(20 * drift)},
    }
    by_kind = rates(runs(table))
    ratios = against_best(by_kind)
    assert [(each.ours, each.theirs) for each in ratios] == [("ours:auto", "a:plain"), ("ours:none", "b:x")]
    assert [each.ratio.median for each in ratios] == pytest.approx([3.0, 2.0])
    mean = geometric_mean(by_kind, ratios)
    assert mean is not None
    assert [mean.low, mean.median, mean.high] == pytest.approx([6**0.5] * 3)


def test_the_geometric_means_interval_holds_what_varies_between_repeats() -> None:
    by_kind = rates(runs({"code": {"ours:auto": [1.0, 2.0, 4.0], "a:plain": [1.0] * 3}}))
    mean = geometric_mean(by_kind, against_best(by_kind))
    assert mean is not None
    assert (mean.low, mean.median, mean.high) == pytest.approx((1.0, 2.0, 4.0))


def test_a_run_that_ended_with_its_first_step_is_left_out() -> None:
    by_kind = rates(runs({"code": {"ours:auto": [4.0, 0.0, 4.0], "a:plain": [2.0, 2.0, 0.0]}}))
    ratios = against_best(by_kind)
    assert ratios[0].ratio.median == pytest.approx(2.0)
    mean = geometric_mean(by_kind, ratios)
    assert mean is not None
    assert mean.high == pytest.approx(2.0)


def test_answers_are_like_ours_up_to_the_first_other_token() -> None:
    task = Task("a", "code", [1], 8)
    plain = Run("ours:none", task, 0, Answer([5, 6, 7, 8], 1.0, 1.0))
    other = [Run("a:plain", task, repeat, Answer(ids, 1.0, 1.0)) for repeat, ids in enumerate(([5, 6, 9, 8], [5]))]
    assert like_ours([plain, *other], "code", "a:plain") == 0.75
    assert like_ours(other, "code", "a:plain") is None
    assert common([1, 2], [1, 2, 3]) == 2


class StubServer:
    """Answers a prefix with scores that depend on its length, likeliest first, as llama-server does."""

    scores = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

    def completion(self, prompt: Sequence[int], max_tokens: int, **asked: Any) -> dict[str, Any]:
        assert max_tokens == 1
        assert asked == {"cache_prompt": True, "n_probs": 6}
        row = self.scores[len(prompt) - 1].log_softmax(dim=0) + 1e-4  # its sum over the vocabulary is a little off
        listed = [{"id": int(token), "logprob": float(row[token])} for token in row.argsort(descending=True)]
        return {"completion_probabilities": [{"top_logprobs": listed}]}


def test_a_servers_answers_become_the_rows_of_a_teacher_forced_passage() -> None:
    rows = of_server(StubServer(), [7, 8, 9, 7], rows=6, vocabulary=5).log_softmax(dim=1)
    torch.testing.assert_close(rows, StubServer.scores[:, :5].double().log_softmax(dim=1))


def test_the_distance_is_given_with_and_without_the_first_position_of_each_passage() -> None:
    truth = [torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75], [1.0, 1e-9]]).log()]
    found = [torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log(), torch.tensor([[0.75, 0.25], [1.0, 1e-9]]).log()]
    seen = distance("x", truth, found)
    second = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)  # of the first passage; the second passage's is 0
    first = 0.25 * np.log(1 / 3) + 0.75 * np.log(3)  # of the second passage; the first passage's is 0
    assert seen.positions == 4
    assert seen.kl == pytest.approx((first + second) / 4, rel=1e-5)
    assert seen.kl_after_first == pytest.approx(second / 2, rel=1e-5)
    assert seen.top1 == 0.5


STUB = """
from benchmarks.peers.protocol import Answer, serve
class Stub:
    def start(self, settings): print("a library's noise"); return {"model": settings.model}
    def generate(self, mode, prompt, max_tokens):
        if mode == "bad": raise KeyError(mode)
        return Answer([*prompt, max_tokens], 1.0, 2.0)
    def step_costs(self, rows): return {}
    def close(self): print("closed")
serve(Stub())
"""


def test_an_engine_answers_line_by_line_whatever_its_library_prints_and_survives_an_error() -> None:
    settings = {"model": "m", "modes": ["plain"], "threads": 1, "context": 8, "eos_ids": []}
    requests = [
        {"op": "start", "settings": settings},
        {"op": "generate", "mode": "bad", "prompt": [1], "max_tokens": 2},
        {"op": "generate", "mode": "plain", "prompt": [1], "max_tokens": 2},
        {"op": "close"},
    ]
    done = subprocess.run(
        [sys.executable, "-c", STUB], cwd=ROOT, capture_output=True, text=True, check=True,
        input="".join(json.dumps(request) + "\n" for request in requests),
    )  # fmt: skip
    started, failed, answered, closed = map(json.loads, done.stdout.splitlines())
    assert started == {"ok": {"model": "m"}}
    assert failed == {"error": "KeyError: 'bad'"}
    assert answered["ok"]["token_ids"] == [1, 2]
    assert closed == {"ok": None}
    assert "a library's noise" in done.stderr
    assert "closed" in done.stderr
