"""From runs to rows and to a report: what is aggregated, and when answers count as identical."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.bench.margin import PlainOutput, margin
from paceline.bench.provenance import git_commit, provenance, warnings
from paceline.bench.report import as_json, table, write_json
from paceline.bench.rows import Row, build_rows
from paceline.bench.run import BenchConfig, Outcome, Run
from paceline.bench.runner import Measurement
from paceline.bench.tasks import BenchPrompt
from paceline.build import Options
from paceline.device import available_cpus
from paceline.engine.output import TokenLogprobs
from paceline.errors import PacelineError

PROMPTS = {"p0": BenchPrompt("p0", "code", []), "p1": BenchPrompt("p1", "chat", [])}
Runs = dict[tuple[str, str], list[Measurement]]  # by prompt id and method, a measurement a repeat
ROW_KEYS = {
    "target", "kind", "method", "temperature", "tokens_per_second", "speedup", "acceptance_rate",
    "mean_acceptance_length", "identical", "prompts", "speedup_low", "speedup_high", "first_token_seconds",
    "min_margin",
}  # fmt: skip


def measured(
    rate: float, ids: Sequence[int] = (1, 2, 3, 4), *, forwards: int = 4, drafted: int = 0, accepted: int = 0
) -> Measurement:
    return Measurement(list(ids), rate, 0.5, forwards, drafted, accepted)


def outcome(runs: Runs, *, temperature: float = 0.0, seed: int | None = None) -> Outcome:
    prompts = [prompt for key, prompt in PROMPTS.items() if (key, "none") in runs]
    methods = list(dict.fromkeys(method for _, method in runs))
    repeats = max(map(len, runs.values()))
    config = BenchConfig(Options("tiny"), methods, prompts, temperature=temperature, seed=seed, repeats=repeats)
    timed = [
        Run(PROMPTS[key], method, repeat, 0, each)
        for (key, method), several in runs.items()
        for repeat, each in enumerate(several)
    ]
    return Outcome(config, timed, precision="int8")


def rows_by_name(result: Outcome) -> dict[tuple[str, str], Row]:
    return {(row.kind, row.method): row for row in build_rows(result)}


def identical(**arguments: Any) -> bool | None:
    """Of the n-gram answers to one prompt, twice, with the given ids against [1, 2]."""
    ids, temperature, seed = arguments["ids"], arguments.get("temperature", 0.0), arguments.get("seed")
    runs: Runs = {("p0", "none"): [measured(10, [1, 2])] * 2, ("p0", "ngram"): [measured(10, i) for i in ids]}
    return rows_by_name(outcome(runs, temperature=temperature, seed=seed))["code", "ngram"].identical


TWO_PROMPTS: Runs = {
    ("p0", "none"): [measured(10), measured(20)],
    ("p0", "ngram"): [
        measured(40, forwards=2, drafted=4, accepted=2),
        measured(60, forwards=1, drafted=6, accepted=3),
    ],
    ("p1", "none"): [measured(100, [9]), measured(100, [9])],
    ("p1", "ngram"): [measured(100, [9], forwards=1), measured(200, [9], forwards=1, drafted=30, accepted=0)],
}


def test_a_row_for_each_kind_and_method_and_for_all() -> None:
    assert list(rows_by_name(outcome(TWO_PROMPTS))) == [
        ("code", "none"), ("code", "ngram"), ("chat", "none"), ("chat", "ngram"), ("all", "none"), ("all", "ngram"),
    ]  # fmt: skip


def test_rates_and_speedups_are_of_the_rows_own_prompts() -> None:
    rows = rows_by_name(outcome(TWO_PROMPTS))
    assert rows["code", "ngram"].tokens_per_second == 50
    assert rows["code", "ngram"].speedup == 3.5  # 4 and 3, repeat by repeat
    assert rows["chat", "ngram"].speedup == 1.5
    assert rows["all", "ngram"].speedup == 2.5
    assert rows["all", "ngram"].tokens_per_second == 100  # of 50 and 150
    assert (rows["all", "ngram"].prompts, rows["chat", "ngram"].prompts) == (2, 1)
    assert rows["all", "none"].speedup == 1
    assert rows["code", "ngram"].first_token_seconds == 0.5


def test_the_interval_is_in_the_row() -> None:
    row = rows_by_name(outcome(TWO_PROMPTS))["code", "ngram"]
    assert (row.speedup_low, row.speedup_high) == (3, 4)


def test_counts_of_speculation_are_added_up_before_they_are_divided() -> None:
    rows = rows_by_name(outcome(TWO_PROMPTS))
    assert rows["code", "ngram"].acceptance_rate == 0.5
    assert rows["all", "ngram"].acceptance_rate == 0.125  # 5 of 40; the mean of both prompts' rates is 0.25
    assert rows["code", "ngram"].mean_acceptance_length == pytest.approx(8 / 3)
    assert rows["all", "ngram"].mean_acceptance_length == 2  # 10 tokens, 5 forwards
    assert rows["code", "none"].acceptance_rate == 0


def test_equal_ids_are_identical() -> None:
    assert identical(ids=[[1, 2], [1, 2]]) is True


@pytest.mark.parametrize("ids", [[[1, 2], [1, 3]], [[1, 3], [1, 2]], [[1, 2], [1]], [[1, 2, 3], [1, 2]]])
def test_one_other_id_in_one_repeat_is_not_identical(ids: list[list[int]]) -> None:
    assert identical(ids=ids) is False


def test_sampled_answers_are_compared_under_a_seed_only() -> None:
    other = [[1, 2], [1, 3]]
    assert identical(ids=other, temperature=0.8, seed=3) is False
    assert identical(ids=[[1, 2], [1, 2]], temperature=0.8, seed=3) is True
    assert identical(ids=other, temperature=0.8) is None


def test_a_difference_in_one_kind_shows_there_and_in_all() -> None:
    rows = rows_by_name(outcome(TWO_PROMPTS | {("p1", "ngram"): [measured(1, [8]), measured(1, [9])]}))
    assert [rows[kind, "ngram"].identical for kind in ("code", "chat", "all")] == [True, False, False]
    assert all(rows[kind, "none"].identical for kind in ("code", "chat", "all"))


def test_plain_decoding_that_does_not_repeat_itself_is_not_identical() -> None:
    wavering: Runs = {("p0", "none"): [measured(10, [1]), measured(10, [2])], ("p0", "ngram"): [measured(10, [1])] * 2}
    rows = rows_by_name(outcome(wavering))
    assert rows["code", "none"].identical is False
    assert rows["code", "ngram"].identical is True  # held against the first


def test_the_untimed_plain_output_must_be_the_same_too() -> None:
    result = outcome({("p0", "none"): [measured(10, [1, 2])]})
    result.plain = {"p0": PlainOutput([1, 2], 0.5)}
    assert rows_by_name(result)["code", "none"].identical is True
    result.plain = {"p0": PlainOutput([1, 3], 0.5)}
    assert rows_by_name(result)["code", "none"].identical is False


def test_a_peer_never_counts_as_identical_or_different() -> None:
    runs: Runs = {
        ("p0", "none"): [measured(10, [1])],
        ("p0", "transformers"): [Measurement([1], 20.0, 0.1)],
    }
    row = rows_by_name(outcome(runs))["code", "transformers"]
    assert (row.identical, row.acceptance_rate, row.mean_acceptance_length) == (None, None, None)
    assert row.speedup == 2


def test_the_smallest_margin_of_the_rows_own_prompts_is_reported() -> None:
    result = outcome(TWO_PROMPTS)
    assert rows_by_name(result)["all", "none"].min_margin is None
    result.plain = {"p0": PlainOutput([1, 2, 3, 4], 0.5), "p1": PlainOutput([9], 0.25)}
    rows = rows_by_name(result)
    assert [rows[kind, "ngram"].min_margin for kind in ("code", "chat", "all")] == [0.5, 0.25, 0.25]


def test_the_margin_is_between_the_two_likeliest_whichever_was_taken() -> None:
    assert margin(TokenLogprobs(7, -3.0, {7: -3.0, 5: -1.0, 6: -1.5})) == 0.5


def test_the_report_has_rows_runs_and_provenance() -> None:
    result = outcome(TWO_PROMPTS | {("p1", "ngram"): [measured(1, [8]), measured(1, [9])]})
    report = json.loads(json.dumps(as_json(result, build_rows(result), provenance(result, "paceline bench"))))
    assert set(report) == {"provenance", "rows", "runs"}
    assert {frozenset(row) for row in report["rows"]} == {frozenset(ROW_KEYS)}
    assert len(report["runs"]) == 8
    run = next(run for run in report["runs"] if (run["prompt"], run["method"], run["repeat"]) == ("p1", "ngram", 0))
    assert run["token_ids"] == [8]
    assert run["same_as_none"] is False
    assert [run["same_as_none"] for run in report["runs"]].count(False) == 1


def test_the_provenance_tells_command_machine_and_settings() -> None:
    source = provenance(outcome(TWO_PROMPTS), "paceline bench --limit 1")
    wanted = {
        "command", "date", "paceline", "commit", "torch", "python", "processor", "threads", "precision", "draft",
        "peak_memory_bytes", "other_processes_cores", "repeats", "warnings",
    }  # fmt: skip
    assert wanted <= set(source)
    assert source["command"] == "paceline bench --limit 1"
    assert source["date"].endswith("+00:00")
    assert source["repeats"] == 2
    assert source["peak_memory_bytes"] > 1 << 20


def test_the_threads_are_those_that_compute() -> None:
    """PyTorch has one beside the kernels, however many these have."""
    result = outcome(TWO_PROMPTS)
    assert provenance(result, "")["threads"] == available_cpus()
    more = available_cpus() + 1
    options = replace(result.config.options, threads=more)
    assert provenance(replace(result, config=replace(result.config, options=options)), "")["threads"] == more


def test_few_repeats_and_a_busy_machine_are_marked() -> None:
    result = outcome({("p0", "none"): [measured(10)] * 5})
    assert warnings(result) == []
    result.other_cores = 0.5
    assert "50% of a core" in warnings(result)[0]
    assert "2 repeats are too few" in warnings(outcome(TWO_PROMPTS))[0]


def test_a_file_outside_any_checkout_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("")
    assert git_commit(tmp_path / "module.py") is None


def test_a_tracked_file_has_the_commit_and_says_when_it_was_changed(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("")
    assert git_commit(_committed(file)) == _git(tmp_path, "rev-parse", "HEAD")
    file.write_text("changed")
    assert git_commit(file) == _git(tmp_path, "rev-parse", "HEAD") + "-dirty"
    (tmp_path / "untracked.py").write_text("")
    assert git_commit(tmp_path / "untracked.py") is None


def test_the_table_shows_a_difference_loudly_and_intervals_in_brackets() -> None:
    result = outcome(TWO_PROMPTS | {("p1", "ngram"): [measured(150, [8]), measured(150, [9])]})
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(table(build_rows(result), provenance(result, "")))
    lines = console.export_text().splitlines()
    code = next(line for line in lines if "code" in line and "ngram" in line)
    chat = next(line for line in lines if "chat" in line and "ngram" in line)
    assert "3.50x [3.00, 4.00]" in code
    assert "yes" in code
    assert "NO" in chat


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="cannot write"):
        write_json(tmp_path, {})


def _committed(file: Path) -> Path:
    _git(file.parent, "init", "-q")
    _git(file.parent, "add", file.name)
    _git(file.parent, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "one")
    return file


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
