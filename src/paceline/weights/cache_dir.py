"""Where Paceline keeps what it fetches and converts, and the lock that keeps two processes out of one folder of it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs


def cache_root() -> Path:
    """The cache folder: ``PACELINE_CACHE`` if it is set, else the user's cache folder of this system."""
    chosen = os.environ.get("PACELINE_CACHE")
    return Path(chosen or platformdirs.user_cache_dir("paceline", appauthor=False)).expanduser().absolute()


def preset_dir(name: str) -> Path:
    """Where the files of the preset ``name`` are kept, whole or in parts."""
    return cache_root() / "models" / name


def converted_dir() -> Path:
    """Where weights that were converted from another format are kept."""
    return cache_root() / "converted"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file ``path`` as a lock between processes, waiting for it if need be.

    The system frees the lock when its holder dies, so it never goes stale. The file itself stays: deleting it would
    let one process lock the old file and another the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as handle:
        _acquire(handle.fileno())
        try:
            yield
        finally:
            _release(handle.fileno())


if sys.platform == "win32":
    import msvcrt

    def _acquire(descriptor: int) -> None:
        while True:
            try:
                return msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
            except OSError:  # LK_LOCK gives up after ten seconds; a model takes longer than that to fetch
                continue

    def _release(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _acquire(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

    def _release(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
