"""What a user may type after --model, and what is said when it is nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from paceline.errors import PacelineError
from paceline.weights import resolve as module
from paceline.weights.presets import PRESETS
from paceline.weights.resolve import Checkpoint, resolve


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise AssertionError(f"fetched {args}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.setattr(module, "preset_path", refuse)


def test_preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def fetch(name: str, *, progress: bool) -> Path:
        asked.append((name, progress))
        return tmp_path

    monkeypatch.setattr(module, "preset_path", fetch)
    name = next(iter(PRESETS))
    assert resolve(name, progress=True) == Checkpoint(name, tmp_path, "gguf")
    assert asked == [(name, True)]


def test_preset_wins_over_a_directory_of_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = next(iter(PRESETS))
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "preset_path", lambda name, *, progress: tmp_path / "preset.gguf")
    assert resolve(name).path == tmp_path / "preset.gguf"
    assert resolve(f"./{name}") == Checkpoint(f"./{name}", Path(name), "directory")


def test_directory(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == Checkpoint(str(tmp_path), tmp_path, "directory")


def test_directory_that_looks_like_a_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Checkpoint("org/name", Path("org/name"), "directory")


def test_hub_snapshot_directory(tmp_path: Path) -> None:
    """The hub's cache keeps files as links into `blobs`."""
    blob = tmp_path / "blobs/abc"
    blob.parent.mkdir()
    blob.write_text('{"model_type": "llama"}')
    snapshot = tmp_path / "snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(blob)
    found = resolve(str(snapshot))
    assert (found.path / "config.json").read_text() == blob.read_text()


def test_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert resolve(str(path)) == Checkpoint(str(path), path, "gguf")


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert resolve("~/models").path == tmp_path / "models"


def test_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def snapshot(repo: str, *, allow_patterns: list[str]) -> str:
        asked.append(repo)
        assert "*.safetensors" in allow_patterns
        assert "*.json" in allow_patterns
        assert not any(pattern in ("*", "*.bin", "*.gguf") for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("org/name") == Checkpoint("org/name", tmp_path, "directory")
    assert asked == ["org/name"]


def test_gguf_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file: str(tmp_path / repo / file))
    expected = tmp_path / "org/name/model-q4.gguf"
    assert resolve("org/name/model-q4.gguf") == Checkpoint("org/name/model-q4.gguf", expected, "gguf")


@pytest.mark.parametrize("name", ["org/name", "org/name/model.gguf"])
@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("no such entry\nsecond line"),
        OSError(),
        ValueError("bad repo id"),
        RuntimeError("socket"),
    ],
)
def test_hub_error_is_one_line(name: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(PacelineError, match=f"cannot fetch '{name}' from the hub: .+; check the name and the network") as caught:  # fmt: skip  # noqa: E501
        resolve(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/absent/model", "./absent", "../absent", "~/absent", "absent.gguf", "a/absent.gguf"])
def test_missing_file_is_named(name: str) -> None:
    with pytest.raises(PacelineError, match=f"cannot read '{name}': no such file or directory"):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "close"),
    [("smollm2", "smollm2-135m"), ("SMOLLM2-135M", "smollm2-135m"), ("qwen2.5-coder-1.5", "qwen2.5-coder-1.5b")],
)
def test_unknown_preset_suggests_the_nearest(name: str, close: str) -> None:
    with pytest.raises(PacelineError) as caught:
        resolve(name)
    assert f"unknown model '{name}': did you mean '{close}'?" in str(caught.value)
    assert ", ".join(PRESETS) in str(caught.value)


def test_unknown_name_without_a_near_one() -> None:
    with pytest.raises(PacelineError) as caught:
        resolve("zzzz")
    assert "did you mean" not in str(caught.value)
    assert "presets are" in str(caught.value)
