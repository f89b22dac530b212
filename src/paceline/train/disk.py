"""Writing that survives being killed, and a full disk said plainly."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from paceline.errors import PacelineError


@contextmanager
def said_plainly(path: Path) -> Iterator[None]:
    """A system's error about `path` as one PacelineError. What was written before is whole: the run can be resumed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        code, text = getattr(error, "errno", None), str(error)
        if code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text:
            raise PacelineError(
                f"the disk is full: could not write {path}; free some space and run the same command again, "
                "it goes on where it stopped"
            ) from None
        raise PacelineError(f"cannot write {path}: {getattr(error, 'strerror', None) or text}") from None


def make_folder(path: Path) -> None:
    """So that nobody waits for what cannot be written. Raises PacelineError."""
    with said_plainly(path):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def write_json(path: Path, content: object, **options: Any) -> None:
    """As `write_whole`."""
    text = json.dumps(content, **options) + "\n"
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """`write` to a file beside it, which then takes the name: `path` is never half written. Raises PacelineError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with said_plainly(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(partial)
            partial.replace(path)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
