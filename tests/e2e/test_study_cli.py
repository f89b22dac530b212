"""`paceline study drafts` as a user runs it: to the end, killed on the way, and with mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lab_training import write_prompts
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from paceline.cli.main import main
from paceline.native.library import library
from paceline.study.plot import MISSING, can_plot

pytestmark = pytest.mark.skipif(library() is None, reason="step times are the native kernels'")

MAIN = [sys.executable, "-c", "from paceline.cli.main import main; main()"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LAYERS, HIDDEN, INNER, LETTERS = 4, 64, 96, 26
DRAFTS = ["rebuilt-3x64", "rebuilt-1x96", "kept-1x64"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of widths that the kernels take; each letter's likeliest successor is another one."""
    folder, generator = tmp_path_factory.mktemp("target"), torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (64, HIDDEN), "self_attn.k_proj": (32, HIDDEN), "self_attn.v_proj": (32, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 64), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    embedding = torch.randn(LETTERS, HIDDEN, generator=generator) * 0.4
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.roll(7, 0).contiguous()}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    for at in (f"model.layers.{index}." for index in range(LAYERS)):
        tensors |= {f"{at}{name}.weight": torch.randn(size, generator=generator) * 0.1 for name, size in shapes.items()}
        tensors |= {
            f"{at}{norm}.weight": torch.ones(HIDDEN) for norm in ("input_layernorm", "post_attention_layernorm")
        }
    save_file(tensors, str(folder / "model.safetensors"))
    sizes = {
        "model_type": "llama", "vocab_size": LETTERS, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes))
    tokenizer = Tokenizer(BPE({chr(ord("a") + i): i for i in range(LETTERS)}, []))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(target, tmp_path_factory.mktemp("data"), prompts=130)


def captured(target: Path, folder: Path, prompts: int) -> Path:
    asked = write_prompts(folder / "prompts.jsonl", count=prompts)
    done = paceline(
        "train", "draft", "--target", str(target), "--prompts", str(asked), "--out", str(folder / "run"), "--data",
        str(folder), "--stages", "responses,capture", "--threads", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MAIN, *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=300)


Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """The command in this process, which saves its start: exit code, what it printed, what it said meanwhile."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def arguments(target: Path, data: Path, out: Path, tokens: int = 3000) -> list[str]:
    return [
        "study", "drafts", "--target", str(target), "--data", str(data), "--out", str(out), "--prompts",
        str(data / "prompts.jsonl"), "--limit", "2", "--depths", "3,1", "--kept", "1", "--budget-layers", "2",
        "--tokens", str(tokens), "--rows", "200", "--shapes", "ladder", "--k", "1,4", "--max-tokens", "12",
        "--rate", "0.01", "--repeats", "1", "--rounds", "2", "--threads", "1", "--checkpoint-seconds", "0.2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def studied(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Folder of a whole study, what it printed, and what it said meanwhile."""
    out = tmp_path_factory.mktemp("study") / "out"
    done = paceline(*arguments(target, data, out))
    assert done.returncode == 0, done.stderr
    return out, done.stdout, done.stderr


def test_a_study_measures_every_draft_and_judges_every_finding(studied: tuple[Path, str, str]) -> None:
    out, printed, said = studied
    found = json.loads((out / "study.json").read_text())
    assert [draft["name"] for draft in found["drafts"]] == DRAFTS
    assert [shape["layers"] for shape in found["shapes"]] == [8, 4, 2, 1]
    for draft in found["drafts"]:
        assert draft["tokens"] >= 3000
        assert draft["step_seconds"] > 0
        assert 1.0 <= draft["measures"]["acceptance_length"] <= 6.0
        assert [rate["k"] for rate in draft["rates"]] == [1, 4]
        assert all(rate["accepted"] >= 1.0 and rate["tokens_per_second"] > 0 for rate in draft["rates"])
    claims = [finding["claim"] for finding in found["findings"]]
    assert len(claims) == 4  # latency of random weights, of drafts; throughput; accuracy
    assert all(finding["verdict"] == "undecided" for finding in found["findings"])  # three drafts tell nothing
    assert found["provenance"]["threads"] == 1
    assert found["provenance"]["command"].startswith("paceline study drafts")
    assert printed == (out / "study.md").read_text()
    assert all(claim in printed for claim in claims)
    assert (out / "study.png").exists() == can_plot()
    assert (MISSING in said) != can_plot()


def test_a_trained_draft_knows_more_than_chance(studied: tuple[Path, str, str]) -> None:
    found = json.loads((studied[0] / "study.json").read_text())
    for draft in found["drafts"]:
        assert draft["measures"]["perplexity"] < LETTERS
        assert draft["measures"]["acceptance_length"] > 1 + 1 / LETTERS


def test_the_same_command_again_does_nothing_anew(
    studied: tuple[Path, str, str], target: Path, data: Path, here: Here
) -> None:
    out, printed, _ = studied
    before = stamps(out)
    code, again, said = here(*arguments(target, data, out))
    assert code == 0, said
    assert stamps(out) == before
    assert again.split("## Step time")[1] == printed.split("## Step time")[1]


def test_one_more_draft_trains_that_draft_alone(
    studied: tuple[Path, str, str], target: Path, data: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(studied[0], tmp_path / "out"))
    before = stamps(out / "drafts")
    more = arguments(target, data, out)
    more[more.index("--kept") + 1] = "1,2"
    done = paceline(*more)
    assert done.returncode == 0, done.stderr
    assert {path: stamp for path, stamp in stamps(out / "drafts").items() if path in before} == before
    found = json.loads((out / "study.json").read_text())
    assert [draft["name"] for draft in found["drafts"]] == [*DRAFTS, "kept-2x64"]


def stamps(folder: Path) -> dict[str, int]:
    """When the study's steps and drafts were written; not its pages, which are written anew each time."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("study.")]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in found}


def test_killed_while_it_trains_it_goes_on(target: Path, data: Path, tmp_path: Path) -> None:
    chosen = arguments(target, data, tmp_path / "out", tokens=9000)
    first, second = (tmp_path / "out" / "drafts" / name for name in DRAFTS[:2])
    process = subprocess.Popen([*MAIN, *chosen], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    wait_for(second / "checkpoint.pt", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    trained = (first / "trained.json").read_text()
    steps = len((second / "log.jsonl").read_text().splitlines())
    done = paceline(*chosen)
    assert done.returncode == 0, done.stderr
    assert (first / "trained.json").read_text() == trained
    log = [json.loads(line) for line in (second / "log.jsonl").read_text().splitlines()]
    assert len(log) > steps
    assert sum(line["tokens"] == 0 for line in log) == 1  # it did not begin anew
    assert not (second / "checkpoint.pt").exists()


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    for _ in range(6000):
        if path.exists():
            return
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    raise AssertionError(f"{path} never came")


def test_random_weights_alone_need_no_data_and_tables_no_matplotlib(
    target: Path, tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.study.run.can_plot", lambda: False)
    code, _, said = here(
        "study", "drafts", "--target", str(target), "--out", str(tmp_path), "--latency-only", "--shapes", "ladder",
        "--rounds", "2", "--threads", "1",
    )  # fmt: skip
    assert code == 0, said
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["drafts"] == []
    assert all(shape["seconds"] > 0 and shape["bytes"] > 0 for shape in found["shapes"])
    assert said.strip() == MISSING
    assert (tmp_path / "study.md").exists()
    assert not (tmp_path / "study.png").exists()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--data", None, "say where the target's answers and states are: --data DIR, or give --latency-only"),
        ("--data", "nowhere", "nothing was captured in nowhere/captured; run `paceline train draft"),
        ("--depths", "3,0", "--depths takes whole numbers of at least 1 with commas between them, not '3,0'"),
        ("--kept", "9", "cannot keep 9 layers of a target of 4"),
        ("--k", ",", "say at which draft lengths to time the drafts: --k"),
        ("--shapes", "ladder,snake", "unknown shapes 'snake'; some of paper, ladder"),
        ("--max-tokens", "90", "passes the context of 64"),
        ("--tokens", "3001", "was begun with another training; go on with the same, or use another --out"),
    ],
)
def test_mistakes_are_one_line(
    studied: tuple[Path, str, str], target: Path, data: Path, here: Here, option: str, value: str | None, message: str
) -> None:
    chosen = arguments(target, data, studied[0])
    at = chosen.index(option)
    chosen[at : at + 2] = [] if value is None else [option, value]
    code, printed, said = here(*chosen)
    assert (code, printed) == (2, "")
    assert message in said
    assert said.strip().splitlines()[-1].startswith("error: ")


def test_too_little_data_is_told_before_anything_is_trained(target: Path, tmp_path: Path, here: Here) -> None:
    few = captured(target, tmp_path, prompts=20)
    code, _, said = here(*arguments(target, few, tmp_path / "out"))
    assert code == 2
    assert "there are too few answers" in said
    assert not (tmp_path / "out").exists()
