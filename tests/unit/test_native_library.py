"""The shared library of kernels is found, checked and turned off; where there is none, one line says why."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

import paceline.native
from paceline.native import library

COMPILER = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_machine_with_a_compiler_has_the_kernels() -> None:
    """An install whose build fails falls back in silence; here it must not."""
    assert not isinstance(reason := library.load(paceline.native.__path__), str), reason


def test_a_folder_without_the_library_is_passed_over(tmp_path: Path) -> None:
    assert library.load([]) == library.load([str(tmp_path)])
    assert "no C++ compiler" in str(library.load([str(tmp_path)]))


def test_a_file_that_is_no_library_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / library.FILE_NAME).write_text("not a library")
    assert str(library.load([str(tmp_path)])).startswith("cannot be loaded: ")


def test_a_library_without_our_functions_is_a_reason_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / library.FILE_NAME).touch()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: object())
    assert "pl_abi" in str(library.load([str(tmp_path)]))


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(library.load(paceline.native.__path__), str):
        pytest.skip("the kernels are not built")
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    assert f"this version of Paceline needs {library.ABI}" in str(library.load(paceline.native.__path__))


def test_the_environment_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert library.library() is None
    assert library.why_missing() == "turned off by PACELINE_NATIVE=0"
    monkeypatch.delenv("PACELINE_NATIVE")
    assert (library.library() is None) == (library.why_missing() is not None)
