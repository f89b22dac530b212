"""From a token to the bytes it stands for.

Text is made by joining bytes and decoding them once (or incrementally): the same bytes give the same text however the
tokens arrive. `tokenizers`' own decoder cannot promise that: its byte fallback turns a whole run of byte tokens into
replacement characters if one byte of it is wrong, which may arrive long after the good ones were shown.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.errors import PacelineError

_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself if printable Latin-1, else the next character from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class Pieces:
    """The bytes of every token of a byte-level or SentencePiece-style vocabulary."""

    def __init__(self, backend: Backend, strings: Sequence[str], added: frozenset[int]) -> None:
        steps = _decoder_steps(backend)
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        if not steps or not (self._byte_level or kinds <= _SENTENCEPIECE_STEPS):
            named = ", ".join(sorted(kinds)) or "none"
            raise PacelineError(
                f"tokenizer decoder not supported: {named}; use a byte-level or SentencePiece tokenizer"
            )
        self.strips_leading_space = any(map(_strips_leading_space, steps))
        self._strings = strings
        self._added = added

    def of(self, token: int) -> bytes:
        """Empty for an id outside the vocabulary (rows that pad a model's embedding)."""
        text = self._strings[token] if 0 <= token < len(self._strings) else ""
        if token in self._added:
            return text.encode()
        return _from_byte_level(text) if self._byte_level else _from_sentencepiece(text)


def _from_byte_level(text: str) -> bytes:
    try:
        return bytes([BYTE_OF[char] for char in text])
    except KeyError:
        return text.encode()


def _from_sentencepiece(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _strips_leading_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme") != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
