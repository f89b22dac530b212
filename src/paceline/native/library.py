"""Find and load the shared library of CPU kernels, or say in one line why there is none."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import paceline.native
from paceline.device import native_enabled

ABI = 7  # what pl_abi() of native/ must return
FILE_NAME = "libpaceline.so"  # on every system


def library() -> ctypes.CDLL | None:
    """The library, loaded once, of the ABI that this version of Paceline speaks; None where `why_missing` says why."""
    loaded = _loaded() if native_enabled() else None
    return loaded if isinstance(loaded, ctypes.CDLL) else None


def why_missing() -> str | None:
    """Why `library` returns None, in one line; None when there is a library."""
    if not native_enabled():
        return "turned off by PACELINE_NATIVE=0"
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else None


@cache
def _loaded() -> ctypes.CDLL | str:
    return load(paceline.native.__path__)


def load(folders: Iterable[str]) -> ctypes.CDLL | str:
    """The library in the first of `folders` that holds one, or the reason why it cannot be used.

    An editable install spreads the package over two folders: its Python files stay in the source tree, what was built
    lies in site-packages.
    """
    path = next((file for folder in folders if (file := Path(folder, FILE_NAME)).is_file()), None)
    if path is None:
        return "not built when Paceline was installed: no C++ compiler, or it failed (pip install -v shows how)"
    try:
        loaded = ctypes.CDLL(str(path))
        abi = int(loaded.pl_abi())
    except (OSError, AttributeError) as error:
        return f"cannot be loaded: {error}"
    if abi != ABI:
        return f"{path} has ABI {abi}, this version of Paceline needs {ABI}; install Paceline again"
    return loaded
