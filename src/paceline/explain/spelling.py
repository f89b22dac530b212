"""How a token reads after the tokens before it."""

from __future__ import annotations

import codecs
from typing import NamedTuple

from paceline.text.tokenizer import Tokenizer


class Spelling(NamedTuple):
    """`text`: what the token adds, empty for a special token and while a character is incomplete (the token that
    completes it adds it all). `label`: text, or else a name to show. `pending`: bytes of the character begun."""

    text: str
    label: str
    pending: bytes


def spell(tokenizer: Tokenizer, token: int, pending: bytes = b"") -> Spelling:
    """`pending` is that of the token before, along whatever branch: joint decoding, one token at a time."""
    if token in tokenizer.special_ids:
        return Spelling("", tokenizer.token_string(token), pending)
    own = tokenizer.token_bytes(token)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.setstate((pending, 0))
    text = decoder.decode(own)
    return Spelling(text, text or own.hex(" ").upper() or f"id {token}", decoder.getstate()[0])
