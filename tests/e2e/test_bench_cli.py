"""`paceline bench` from the command line to its JSON, on the smallest preset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from paceline.cli.bench import bench
from paceline.errors import PacelineError


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--methods", "none,magic"], "unknown method 'magic'; one of none, ngram, suffix, draft"),
        (["--methods", ","], "--methods is empty"),
        (["--kinds", "poem"], "no prompt of kind 'poem'; there are code, edit, summ, qa, math, chat"),
        (["--methods", "draft"], "'draft' needs a draft model: give --draft"),
        (["--json", "absent/report.json"], "there is no folder 'absent'"),
        (["--json", "."], "it is a folder"),
    ],
)
def test_a_mistake_is_told_before_anything_is_loaded(
    arguments: list[str], wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.bench.run.load_models", lambda *_: pytest.fail("loaded"))
    with pytest.raises(PacelineError) as raised:
        invoke(*arguments)
    assert wrong in str(raised.value)


@pytest.mark.real_model
def test_a_real_model_gives_a_table_and_a_report(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = invoke(
        "--kinds", "code,chat", "--limit", "1", "--max-tokens", "8", "--repeats", "1", "--json", str(file)
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "speed-up" in done.stdout
    assert "1 repeats are too few" in done.stderr
    report = json.loads(file.read_text())
    assert [(row["kind"], row["method"]) for row in report["rows"]] == [
        (kind, method) for kind in ("code", "chat", "all") for method in ("none", "ngram", "auto")
    ]
    for row in report["rows"]:
        assert row["target"] == "smollm2-135m"
        assert row["identical"] is True
        assert row["tokens_per_second"] > 0
        assert row["first_token_seconds"] > 0
        assert row["min_margin"] > 0
    assert all(row["mean_acceptance_length"] == 1 for row in report["rows"] if row["method"] == "none")
    assert [len(run["token_ids"]) for run in report["runs"]] == [8] * 6
    assert [run["cached_tokens"] for run in report["runs"]] == [0] * 6  # every run pays for its prefill
    assert report["provenance"]["precision"]
    assert report["provenance"]["repeats"] == 1
