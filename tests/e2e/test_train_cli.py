"""`paceline train` as a user runs it: to the end, killed on the way, and with mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from lab_files import letter_model
from lab_training import write_prompts

from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.sampling.params import SamplingParams
from paceline.train.drafters import DRAFTERS
from paceline.train.memory import check_memory

COMMAND = [sys.executable, "-c", "from paceline.cli.main import main; main()", "train"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letter_model(tmp_path_factory.mktemp("target"), layers=4, cycles=True)


def arguments(target: Path, out: Path, kind: str = "eagle3", tokens: int = 4000) -> list[str]:
    prompts = write_prompts(out.parent / "prompts.jsonl", count=130)
    return [
        kind, "--target", str(target), "--out", str(out), "--prompts", str(prompts), "--tokens", str(tokens),
        "--rows", "200", "--threads", "1", "--checkpoint-seconds", "0.5",
    ]  # fmt: skip


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=300)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "mtp", "exit"])
def test_from_prompts_to_a_head_that_drafts(target: Path, tmp_path: Path, kind: str) -> None:
    done = train(*arguments(target, tmp_path / "run", kind))
    assert done.returncode == 0, done.stderr
    assert "held-out acceptance length" in done.stdout
    method = "early-exit" if kind == "exit" else "head"
    head = str(tmp_path / "run" / "head")
    params = SamplingParams(max_tokens=24)
    plain = LLM(str(target), method="none", precision="fp32").generate("aaa", params)
    drafted = LLM(str(target), method=method, head=head, precision="fp32", k=3).generate("aaa", params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0


def test_training_goes_on_from_a_head(target: Path, tmp_path: Path) -> None:
    first = train(*arguments(target, tmp_path / "first"), "--draft-vocab", "9")
    assert first.returncode == 0, first.stderr
    head = str(tmp_path / "first" / "head")
    again = ["--data", str(tmp_path / "first" / "data"), "--stages", "train,export", "--init", head]
    second = train(*arguments(target, tmp_path / "second"), *again)
    assert second.returncode == 0, second.stderr
    begun = json.loads((tmp_path / "second" / "log.jsonl").read_text().splitlines()[0])
    reached = json.loads((tmp_path / "first" / "log.jsonl").read_text().splitlines()[-1])
    assert begun["tokens"] == 0
    assert begun["length"] == pytest.approx(reached["length"], rel=0.02)  # the head is rounded to bf16
    story = json.loads((tmp_path / "second" / "head" / "training.json").read_text())
    assert story["init"] == head
    assert json.loads((tmp_path / "second" / "head" / "config.json").read_text())["draft_vocab_size"] == 9
    other = train(*arguments(target, tmp_path / "second"), *again[:-2])
    assert other.returncode == 2
    assert "began with other --tokens, --seed or --init" in other.stderr


def test_a_head_that_cannot_be_gone_on_from_is_refused_before_anything_is_answered(
    target: Path, tmp_path: Path
) -> None:
    first = train(*arguments(target, tmp_path / "exit", "exit", tokens=400))
    assert first.returncode == 0, first.stderr
    mistakes = {
        str(tmp_path / "exit" / "head"): "has no tensor fc.weight; is it of another kind?",
        str(tmp_path / "absent"): "no such directory",
        str(tmp_path): "config.json",
    }
    for init, said in mistakes.items():
        done = train(*arguments(target, tmp_path / "run"), "--init", init)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "run" / "data").exists()


def test_a_trained_draft_is_a_model_of_its_own(target: Path, tmp_path: Path) -> None:
    done = train(*arguments(target, tmp_path / "run", "draft"))
    assert done.returncode == 0, done.stderr
    params = SamplingParams(max_tokens=24)
    plain = LLM(str(target), method="none", precision="fp32").generate("aaa", params)
    draft = str(tmp_path / "run" / "head")
    drafted = LLM(str(target), method="draft", draft=draft, precision="fp32", k=3).generate("aaa", params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted > 0


def test_killed_at_any_moment_it_goes_on_and_learns_as_much(target: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = train(*arguments(target, tmp_path / "whole" / "run", tokens=9000))
    assert whole.returncode == 0, whole.stderr
    chosen, kills = arguments(target, tmp_path / "cut" / "run", tokens=9000), 0
    for seconds in (5.0, 7.0, 9.0):
        process = subprocess.Popen([*COMMAND, *chosen], stderr=subprocess.DEVNULL, env=ENVIRONMENT)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            time.sleep(0.1)
    assert kills, "the machine was so quick that nothing was killed"
    last = train(*chosen)
    assert last.returncode == 0, last.stderr
    lengths = [
        json.loads((tmp_path / name / "run" / "log.jsonl").read_text().splitlines()[-1])["length"]
        for name in ("whole", "cut")
    ]
    assert lengths[1] == pytest.approx(lengths[0], abs=0.15)


def test_a_malformed_prompt_is_named_by_its_line(target: Path, tmp_path: Path) -> None:
    chosen = arguments(target, tmp_path / "run")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts.read_text() + '{"id": "x"\n')
    done = train(*chosen)
    assert done.returncode == 2
    assert f"{prompts}:131: not JSON" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--kind"], "unknown kind 'eagle9'; one of eagle3, medusa, mtp, draft, exit"),
        (["--tokens"], "say how long to train: --hours or --tokens"),
        (["--prompts"], "--prompts FILE"),
        (["--stages"], "unknown stage 'dance'"),
        (["--hours"], "--hours must be more than 0, not -1"),
        (["--data"], "Not a directory"),
    ],
)
def test_mistakes_are_one_line(target: Path, tmp_path: Path, changed: list[str], message: str) -> None:
    chosen = arguments(target, tmp_path / "run")
    if changed == ["--kind"]:
        chosen[0] = "eagle9"
    elif changed == ["--stages"]:
        chosen += ["--stages", "train,dance"]
    elif changed == ["--hours"]:
        chosen += ["--hours", "-1"]
    elif changed == ["--data"]:
        chosen += ["--data", chosen[chosen.index("--prompts") + 1] + "/data"]
    else:
        at = chosen.index(changed[0])
        del chosen[at : at + 2]
    done = train(*chosen)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_run_is_not_gone_on_with_under_another_budget(target: Path, tmp_path: Path) -> None:
    assert train(*arguments(target, tmp_path / "run", "exit", tokens=500)).returncode == 0
    done = train(*arguments(target, tmp_path / "run", "exit", tokens=900))
    assert done.returncode == 2
    assert "began with other --tokens, --seed or --init (500, 0, None)" in done.stderr


def test_too_few_prompts_are_told_with_numbers(target: Path, tmp_path: Path) -> None:
    chosen = arguments(target, tmp_path / "run", "exit")
    prompts = write_prompts(tmp_path / "few.jsonl", count=20)
    chosen[chosen.index("--prompts") + 1] = str(prompts)
    done = train(*chosen)
    assert done.returncode == 2
    assert "too few answers to train on: 20, and 96 are held out to judge by" in done.stderr
    assert not (tmp_path / "run" / "data" / "responses.jsonl").exists()


def test_a_stage_alone_says_what_it_lacks(target: Path, tmp_path: Path) -> None:
    done = train("eagle3", "--target", str(target), "--out", str(tmp_path), "--stages", "train", "--tokens", "9")
    assert done.returncode == 2
    assert "responses" in done.stderr
    done = train("eagle3", "--target", str(target), "--out", str(tmp_path), "--stages", "export")
    assert "train first" in done.stderr


def test_a_target_that_does_not_fit_is_told_with_numbers(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3e8))
    with pytest.raises(PacelineError, match=r"needs about 2\.5 GB of memory .*target 0\.0.*0\.3 GB are free"):
        check_memory(str(target), DRAFTERS["eagle3"].weights, 26, 100)
