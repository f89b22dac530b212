"""`paceline explain` from the command line: colours, plain text, JSON, the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab_files import letter_model
from typer.testing import CliRunner, Result

from paceline.cli.main import app
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.types import Sequence

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
ORIGINS = {"accepted", "correction", "bonus", "plain"}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.fixture
def letters(tmp_path: Path) -> list[str]:
    """Arguments for a tiny model that soon repeats itself."""
    options = ["--model", str(letter_model(tmp_path)), "--method", "ngram", "--max-tokens", "30", "--threads", "1"]
    return ["abcabcabc", *options]


def page_record(page: Path) -> Any:
    found = re.search(r'id="record">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def check(record: Any) -> None:
    """What holds for every record: steps tile the answer, accepted nodes are its tokens."""
    tokens, steps = record["tokens"], record["steps"]
    assert "".join(token["text"] for token in tokens) == record["text"]
    assert [token["step"] for token in tokens] == [i for i, step in enumerate(steps) for _ in range(step["count"])]
    for step in steps:
        own = tokens[step["first"] : step["first"] + step["count"]]
        kept = [token["label"] for token in own if token["origin"] == "accepted"]
        assert [step["nodes"][node]["label"] for node in step["path"]] == kept
        assert [step["nodes"][node]["parent"] for node in step["path"]] == [-1, *step["path"]][: len(kept)]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["hi", "--trace", "absent/page.html"], "cannot write 'absent/page.html': there is no folder 'absent'"),
        (["hi", "--trace", "."], "it is a folder"),
        (["  "], "prompt is empty"),
    ],
)
def test_a_mistake_is_told_before_anything_is_loaded(
    arguments: list[str], wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.llm.load_models", lambda *_: pytest.fail("loaded"))
    with pytest.raises(PacelineError) as raised:
        invoke("explain", *arguments)
    assert wrong in str(raised.value)


def test_a_folder_that_is_not_there_is_one_line_without_torch(tmp_path: Path) -> None:
    code = "import sys\nfrom paceline.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "explain", "hi", "--trace", str(tmp_path / "absent" / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: cannot write")


def test_a_pipe_gets_the_answer_alone(letters: list[str]) -> None:
    done = invoke("explain", *letters)
    assert done.exit_code == 0
    assert done.stdout == invoke("generate", *letters).stdout
    assert "\x1b" not in done.output
    assert "tokens a forward" in done.stderr
    assert invoke("explain", *letters, "-q").stderr == ""


def test_a_terminal_gets_colours_a_legend_and_figures(letters: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = invoke("explain", *letters).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = invoke("explain", *letters).stdout
    shown = ESCAPE.sub("", coloured)
    answer, rest = shown[: len(plain)], shown[len(plain) :]
    assert answer == plain
    assert coloured.index("\x1b[") < len(plain)  # the answer itself has colours
    assert all(origin in rest for origin in ORIGINS)
    assert "tokens a forward" in rest
    assert ESCAPE.sub("", invoke("explain", *letters, "-q").stdout) == plain


def test_json_and_page_hold_one_record(letters: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = invoke("explain", *letters, "--json", "--trace", str(page))
    record = json.loads(done.stdout)
    check(record)
    assert record == page_record(page)
    assert str(page) in done.stderr
    assert (record["prompt"], record["root"], record["finish_reason"]) == ("abcabcabc", "c", "length")
    assert {"plain", "accepted"} <= record["totals"]["origins"].keys() <= ORIGINS
    assert record["totals"]["tokens"] == len(record["tokens"]) == 30
    assert record["totals"]["tokens_per_forward"] > 1


def test_ctrl_c_keeps_what_there_is(letters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, page = iter(range(4)), tmp_path / "page.html"
    step = Engine.step

    def interrupted(engine: Engine) -> list[Sequence]:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    done = invoke("explain", *letters, "--trace", str(page))
    assert done.exit_code == 130
    assert "stopped" in done.stderr
    record = page_record(page)
    check(record)
    assert record["finish_reason"] == "aborted"
    assert len(record["steps"]) == 3
    assert done.stdout == record["text"] + "\n"


def test_a_stop_string_is_neither_shown_nor_recorded(letters: list[str]) -> None:
    answer = invoke("explain", *letters).stdout
    stop = answer[10:12]
    told = [*letters, "--stop", stop]
    assert invoke("explain", *told).stdout == invoke("generate", *told).stdout == answer[: answer.index(stop)] + "\n"
    record = json.loads(invoke("explain", *told, "--json").stdout)
    check(record)
    assert record["text"] == answer[: answer.index(stop)]


@pytest.mark.real_model
def test_a_real_models_answer_is_explained(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    said = " ".join(["café 😀 naïve —"] * 5)  # continued as it stands, it goes on repeating
    done = invoke("explain", said, "--raw", "--method", "ngram", "--max-tokens", "40", "--trace", str(page))
    assert done.exit_code == 0, done.output
    record = page_record(page)
    check(record)
    assert done.stdout == record["text"] + "\n"
    assert record["prompt"] == said
    assert record["context"] == said
    assert record["totals"]["accepted"] > 20
    assert "😀" in record["text"]
