"""The key-value header of a GGUF file, without its tensors.

`gguf.GGUFReader` maps every array element to an object of its own: 2 to 10 seconds for a vocabulary. A tokenizer needs
four arrays and a few scalars, so they are read here directly, in about a tenth of a second.
"""

import mmap
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

_STRING, _ARRAY = 8, 9
# GGUF value type -> struct format (little endian)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")


class _Cursor:
    """A position in the mapped file that moves on with every value read."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def scalar(self, code: str) -> Any:
        reader = struct.Struct("<" + code)
        (value,) = reader.unpack_from(self.data, self.at)
        self.at += reader.size
        return value

    def string(self) -> str:
        start = self.at + 8
        self.at = start + int(self.scalar("Q"))
        return self.data[start : self.at].decode("utf-8", "replace")

    def strings(self, count: int) -> list[str]:
        data, at, unpack = self.data, self.at, _LENGTH.unpack_from
        found = []
        for _ in range(count):
            end = at + 8 + unpack(data, at)[0]
            found.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self.at = at
        return found

    def skip_strings(self, count: int) -> None:
        data, at, unpack = self.data, self.at, _LENGTH.unpack_from
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self.at = at

    def array(self, wanted: bool) -> list[Any] | None:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            if wanted:
                return self.strings(count)
            self.skip_strings(count)
            return None
        if kind == _ARRAY:
            nested = [self.array(wanted) for _ in range(count)]
            return nested if wanted else None
        block = struct.Struct(f"<{count}{_SCALARS[kind]}")
        start, self.at = self.at, self.at + block.size
        return list(block.unpack_from(self.data, start)) if wanted else None

    def value(self, wanted: bool) -> Any:
        kind = self.scalar("I")
        if kind == _ARRAY:
            return self.array(wanted)
        return self.string() if kind == _STRING else self.scalar(_SCALARS[kind])


def read_metadata(path: Path, arrays: Collection[str] = ()) -> dict[str, Any]:
    """All scalars and strings of a GGUF header, and of its arrays those named in `arrays`.

    Raises PacelineError if the file is not a little-endian GGUF of version 2 or later, or is cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(data, path, arrays)
    except OSError as error:
        raise PacelineError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except (struct.error, KeyError, ValueError, OverflowError) as error:
        raise PacelineError(f"{path} has a damaged GGUF header ({error}); download the file again") from error


def _read(data: mmap.mmap, path: Path, arrays: Collection[str]) -> dict[str, Any]:
    if data[:4] != b"GGUF":
        raise PacelineError(f"{path} is not a GGUF file (it starts with {data[:4]!r}); give a .gguf file")
    cursor = _Cursor(data, 4)
    version, _tensors, count = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version not in (2, 3):
        raise PacelineError(f"{path} is GGUF version {version}; convert it to version 3 (little endian)")
    found = {}
    for _ in range(count):
        key = cursor.string()
        value = cursor.value(key in arrays)
        if value is not None:
            found[key] = value
    return found
