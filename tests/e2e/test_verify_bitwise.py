"""`paceline verify --bitwise` from the command line to its lines, its JSON and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from lab_files import letter_model
from torch import Tensor
from typer.testing import CliRunner, Result

from paceline.cli.verify import verify
from paceline.errors import PacelineError
from paceline.model.linear import Int8Linear

needs_int8 = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="int8 needs VNNI")


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(verify)
    return CliRunner().invoke(app, ("--bitwise", *arguments), catch_exceptions=False)


@pytest.fixture
def letters(tmp_path: Path) -> list[str]:
    """Options that check the model of letters on prompts of its own."""
    (tmp_path / "model").mkdir()
    texts = {"one": "abcdefghijklmnopqrstuvwxyz" + "hello" * 2, "two": "bananas", "three": "abcabcab"}
    prompts = [
        {"id": name, "kind": "text", "messages": [{"role": "user", "content": text}]} for name, text in texts.items()
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    chosen = ["--model", str(letter_model(tmp_path / "model")), "--prompts", str(tmp_path / "prompts.jsonl")]
    return [*chosen, "--max-tokens", "12", "--threads", "1", "--device", "cpu"]


@needs_int8
def test_every_method_is_held_against_plain_decoding(letters: list[str]) -> None:
    done = invoke(*letters, "--precision", "int8")
    assert done.exit_code == 0, done.output
    first, *variants, last = done.stdout.splitlines()
    assert first.startswith("plain decoding, batch 1, whole prompts: 3 prompts, 9 answers (greedy and coupled)")
    assert first.endswith("int8 on cpu; 25 variants follow")
    assert len(variants) == 25
    assert all(line.startswith("ok  ") and "in every bit" in line for line in variants)
    assert {line.split()[1] for line in variants} == {"none,", "ngram,", "suffix,", "auto,", "adversary,"}
    assert last == "75 of 75 pairs of variant and prompt equal in every bit; 25 of 25 variants without a difference"


@needs_int8
def test_a_difference_is_exit_code_1_and_says_where(letters: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Int8Linear.__call__

    def product(self: Int8Linear, x: Tensor) -> Tensor:
        return alone(self, x) if x.shape[0] != 3 else alone(self, x) * (1 + 2**-22)

    monkeypatch.setattr(Int8Linear, "__call__", product)
    done = invoke(*letters, "--precision", "int8", "--methods", "none,adversary", "--limit", "2")
    assert done.exit_code == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL adversary, batch 1, whole prompts:")]
    assert len(failed) == 1
    assert ", first in one (" in failed[0] or ", first in two (" in failed[0]
    assert ": plain " in failed[0]
    assert "0x" in failed[0]
    assert "0 of 20 pairs" not in done.stdout
    assert "of 20 pairs of variant and prompt equal in every bit" in done.stdout.splitlines()[-1]
    assert "of 10 checks failed" in done.stderr


@needs_int8
def test_a_report_for_programs(letters: list[str]) -> None:
    done = invoke(*letters, "--precision", "int8", "--methods", "none", "--limit", "1", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["passed"], report["promised"], report["precision"]) == (True, True, "int8")
    assert (report["prompts"], report["pairs"], report["equal_pairs"]) == (["one"], 5, 5)
    assert [variant["tokens"] for variant in report["variants"]] == [96, 96, 96, 96, 144]
    assert all(variant["passed"] and variant["first"] is None for variant in report["variants"])


@needs_int8
def test_as_many_seeds_as_are_asked_for(letters: list[str]) -> None:
    done = invoke(*letters, "--precision", "int8", "--methods", "none", "--seeds", "4")
    assert ": 3 prompts, 15 answers" in done.stdout.splitlines()[0]


def test_a_precision_that_promises_nothing_says_so_in_one_line(letters: list[str]) -> None:
    done = invoke(*letters, "--precision", "fp32", "--methods", "none,adversary")
    assert done.exit_code == 0, done.output
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert notes[0].startswith("note: fp32 on cpu does not promise equal bits")
    assert "FAIL" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bitwise", "--methods", "magic"], "unknown method 'magic'; one of none, ngram"),
        (["--bitwise", "--methods", ","], "--methods is empty"),
        (["--bitwise", "--methods", "draft"], "method 'draft' needs a draft model"),
        (["--bitwise", "--prompts", "/nowhere.jsonl"], "cannot read the prompts '/nowhere.jsonl'"),
        (["--methods", "ngram"], "--methods belongs to --bitwise"),
        (["--limit", "3"], "--limit belongs to --bitwise"),
    ],
)
def test_a_mistake_is_told_before_anything_is_loaded(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.build.load_model", lambda *_, **__: pytest.fail("loaded"))
    app = typer.Typer()
    app.command()(verify)
    with pytest.raises(PacelineError) as raised:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert said in str(raised.value)


@pytest.mark.real_model
def test_a_real_model_in_the_precision_of_its_file() -> None:
    done = invoke("--methods", "ngram,adversary", "--limit", "1", "--max-tokens", "6", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["equal_pairs"] == report["pairs"] == 10 or not report["promised"]
    assert all(variant["drafted"] > 0 for variant in report["variants"] if variant["name"].startswith("adversary"))
