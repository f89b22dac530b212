"""The command line as a user meets it: answers, JSON, and one clear line for each mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PACELINE = [sys.executable, "-c", "from paceline.cli.main import main; main()"]


def paceline(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PACELINE, *arguments], capture_output=True, text=True, input=stdin, timeout=300)


def refused(*arguments: str) -> str:
    """The one line of a mistake: exit code 2, nothing on stdout, no traceback."""
    done = paceline(*arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_help_answers_without_torch() -> None:
    code = "import sys\nfrom paceline.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("generate", "chat", "bench", "verify", "explain", "models", "quality", "train"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", ""], "prompt is empty"),
        (["generate", "hi", "--model", "smolm2-135m"], "did you mean 'smollm2-135m'"),
        (["generate", "hi", "--model", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["generate", "hi", "--temperature", "-1"], "temperature must be 0 or more, not -1.0"),
        (["generate", "hi", "--top-p", "0"], "top_p must be over 0 and at most 1, not 0.0"),
        (["generate", "hi", "--top-p", "1.5"], "top_p must be over 0 and at most 1, not 1.5"),
        (["generate", "hi", "--k", "0"], "k must be a whole number of at least 1, not 0"),
        (["generate", "hi", "--method", "magic"], "unknown method 'magic'"),
        (["generate", "hi", "--method", "draft"], "needs a draft model"),
        (["generate", "hi", "--precision", "int3"], "unknown precision 'int3'"),
        (["generate", "hi", "--logit-bias", "x"], "logit bias must be ID=VALUE"),
        (["generate", "hi", "--threads", "0"], "threads must be at least 1, not 0"),
        (["generate", "hi", "--method", "eagle", "--head", "none"], "method 'eagle' needs a head"),
        (["generate", "hi", "--tree", "wide"], "tree must be WIDTHxDEPTHxNODES, for example 4x6x32, not 'wide'"),
        (["generate", "hi", "--tree", "2x9x4"], "nodes at least the depth"),
        (["generate", "hi", "--prediction", "/nowhere.txt"], "cannot read the prediction '/nowhere.txt'"),
        (["bench", "--methods", "none,magic"], "magic"),
        (["models", "fetch", "smollm"], "smollm"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    assert "not GGUF" in refused("generate", "hi", "--model", str(tmp_path / "text.gguf"))
    assert "config.json" in refused("generate", "hi", "--model", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert "unsupported architecture 't5'" in refused("generate", "hi", "--model", str(tmp_path))


@pytest.mark.real_model
class TestRealModel:
    def test_a_truncated_file_is_refused(self, tmp_path: Path) -> None:
        from paceline.weights.presets import preset_path

        whole = preset_path("smollm2-135m").read_bytes()
        (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
        assert "truncated" in refused("generate", "hi", "--model", str(tmp_path / "half.gguf"))

    def test_compare_as_json(self) -> None:
        done = paceline("generate", "Count from one to ten.", "--compare", "--json", "--max-tokens", "24")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert {"text", "token_ids", "identical", "speedup", "runs"} <= report.keys()
        assert report["identical"] is True
        assert [run["method"] for run in report["runs"]] == ["none", "auto"]
        assert report["runs"][0]["token_ids"] == report["token_ids"]
        for run in report["runs"]:
            assert {"tokens_per_second", "acceptance_rate", "mean_acceptance_length"} <= run.keys()
            assert run["tokens_per_second"] > 0

    def test_streams_text_to_stdout_and_statistics_to_stderr(self) -> None:
        done = paceline("generate", "-", "--max-tokens", "12", stdin="Say hello.")
        assert done.returncode == 0
        assert done.stdout.strip()
        assert "tokens/s" in done.stderr
        assert paceline("generate", "Say hello.", "--max-tokens", "4", "-q").stderr == ""

    def test_a_prompt_past_the_context_is_refused(self) -> None:
        done = paceline("generate", "-", stdin="word " * 9000)
        assert done.returncode == 2
        assert "the context of smollm2-135m is 8192" in done.stderr

    def test_a_draft_of_another_vocabulary_changes_nothing(self, tmp_path: Path) -> None:
        from lab_files import letter_model

        arguments = ("generate", "Say hello.", "--max-tokens", "12", "-q")
        drafted = paceline(*arguments, "--draft", str(letter_model(tmp_path)), "--method", "draft")
        assert drafted.returncode == 0, drafted.stderr
        assert drafted.stdout == paceline(*arguments, "--method", "none").stdout

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--head", "/nowhere"], "'/nowhere': no such directory"),
            (["--tree", "2x9000x9000"], "deeper than the context of smollm2-135m (8192 positions)"),
            (["--k", "9000"], "deeper than the context of smollm2-135m (8192 positions)"),
            (["--method", "early-exit", "--exit-layers", "30"], "exit_layers must be between 1 and 29"),
        ],
    )
    def test_what_does_not_fit_this_model_is_one_clear_line(self, arguments: list[str], said: str) -> None:
        assert said in refused("generate", "hi", *arguments)

    def test_a_prediction_is_drafted_from(self, tmp_path: Path) -> None:
        arguments = ("generate", "Count from one to ten.", "--max-tokens", "40", "--method", "suffix", "--json", "-q")
        plain = json.loads(paceline(*arguments).stdout)
        (tmp_path / "likely.txt").write_text(plain["text"])
        predicted = json.loads(paceline(*arguments, "--prediction", str(tmp_path / "likely.txt")).stdout)
        assert predicted["token_ids"] == plain["token_ids"]
        assert predicted["target_forwards"] < plain["target_forwards"] / 2

    def test_chat_keeps_its_cache_between_turns(self) -> None:
        said = "Name three colours of the rainbow and say why you like them.\nAnd one more?\n/exit\n"
        done = paceline("chat", "--max-tokens", "30", stdin=said)
        assert done.returncode == 0, done.stderr
        reused = [line for line in done.stderr.splitlines() if "reused" in line]
        assert len(reused) == 2
        assert int(reused[1].split(", ")[-1].split()[0]) >= 32

    def test_verify_prints_its_evidence(self) -> None:
        done = paceline("verify", "--max-tokens", "8", "--seeds", "1", "--json")
        assert done.returncode == 0, done.stdout
        report = json.loads(done.stdout)
        assert report["passed"]
        assert all(check["passed"] for check in report["checks"])
        names = [check["name"] for check in report["checks"]]
        assert {"ngram: greedy", "suffix: greedy", "swift: greedy", "auto: greedy"} <= set(names)

    def test_ctrl_c_keeps_what_was_generated(self) -> None:
        process = subprocess.Popen(
            [*PACELINE, "generate", "Tell a very long story.", "--ignore-eos", "--max-tokens", "4000"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what shells start with & ignores it
        )  # fmt: skip
        assert process.stdout is not None
        first = process.stdout.read(1)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in err
        assert len(first + out) > 5
