"""What a benchmark runs, in which order, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from paceline.bench.run import BenchConfig, rotated, schedule, timed_runs, warm_up
from paceline.bench.runner import Measurement
from paceline.bench.tasks import BenchPrompt
from paceline.build import Options
from paceline.errors import PacelineError

PROMPTS = [BenchPrompt("p0", "code", []), BenchPrompt("p1", "chat", [])]


def config(
    methods: Sequence[str], *, draft: str | None = None, temperature: float = 0.0, repeats: int = 3
) -> BenchConfig:
    return BenchConfig(Options("tiny", draft=draft), methods, PROMPTS, temperature=temperature, repeats=repeats)


@dataclass
class FakeRunner:
    """Answers with its own first id, and notes who ran on what."""

    name: str
    log: list[tuple[str, list[int]]] = field(default_factory=list)

    def run(self, prompt: Sequence[int]) -> Measurement:
        self.log.append((self.name, list(prompt)))
        return Measurement([len(self.log)], 10.0, 0.1)


def test_none_is_added_first_and_no_method_is_run_twice() -> None:
    assert config(["ngram", "ngram"]).methods == ("none", "ngram")
    assert config(["ngram", "none"]).methods == ("none", "ngram")


def test_the_order_turns_by_one() -> None:
    assert rotated("abc", 0) == ["a", "b", "c"]
    assert rotated("abc", 1) == ["b", "c", "a"]
    assert rotated("abc", 5) == ["c", "a", "b"]


def test_every_method_takes_every_turn_on_every_prompt() -> None:
    plan = list(schedule(config(["none", "ngram", "draft"], draft="tiny", repeats=3)))
    for prompt in PROMPTS:
        for method in ("none", "ngram", "draft"):
            assert {turn for p, m, _, turn in plan if p is prompt and m == method} == {0, 1, 2}


def test_methods_are_interleaved_prompt_by_prompt() -> None:
    plan = [(prompt.id, method, repeat) for prompt, method, repeat, _ in schedule(config(["ngram"], repeats=2))]
    assert plan == [
        ("p0", "none", 0), ("p0", "ngram", 0), ("p1", "ngram", 0), ("p1", "none", 0),
        ("p0", "ngram", 1), ("p0", "none", 1), ("p1", "none", 1), ("p1", "ngram", 1),
    ]  # fmt: skip


def test_timed_runs_give_each_runner_the_ids_of_its_prompt() -> None:
    log: list[tuple[str, list[int]]] = []
    runners = {name: FakeRunner(name, log) for name in ("none", "ngram")}
    seen: list[tuple[int, int, str]] = []
    runs = timed_runs(config(["ngram"], repeats=2), runners, {"p0": [7], "p1": [8, 9]}, lambda *news: seen.append(news))
    assert [(run.method, {"p0": [7], "p1": [8, 9]}[run.prompt.id]) for run in runs] == log
    assert [run.measured.token_ids for run in runs] == [[i] for i in range(1, 9)]
    assert seen[0] == (0, 8, "none")
    assert seen[1] == (1, 8, "ngram")
    assert seen[-1] == (8, 8, "")


def test_warm_up_runs_every_method_once() -> None:
    log: list[tuple[str, list[int]]] = []
    warm_up({name: FakeRunner(name, log) for name in ("none", "ngram")}, [1, 2])
    assert log == [("none", [1, 2]), ("ngram", [1, 2])]


def test_an_unknown_method_is_told_with_the_known_ones() -> None:
    with pytest.raises(PacelineError, match="'magic'; one of none, ngram, suffix, draft"):
        config(["magic"])


@pytest.mark.parametrize("method", ["draft", "transformers-draft"])
def test_a_method_that_drafts_with_a_model_needs_one(method: str) -> None:
    with pytest.raises(PacelineError, match=f"'{method}' needs a draft model: give --draft"):
        config([method])
    assert method in config([method], draft="tiny").methods


@pytest.mark.parametrize("method", ["transformers", "transformers-lookup"])
def test_peers_are_greedy_only(method: str) -> None:
    with pytest.raises(PacelineError, match=r"decodes greedily; use temperature 0, not 0\.7"):
        config([method], temperature=0.7)


def test_counts_that_measure_nothing_are_refused() -> None:
    with pytest.raises(PacelineError, match="max_tokens must be at least 2, not 1"):
        BenchConfig(Options("tiny"), ["none"], PROMPTS, max_tokens=1)
    with pytest.raises(PacelineError, match="repeats must be at least 1, not 0"):
        config(["none"], repeats=0)
