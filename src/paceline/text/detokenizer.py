"""Text from a stream of tokens."""

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns token ids into text one at a time; a character that spans tokens is held back until it is whole.

    All pushes and `finish()`, joined, equal `tokenizer.decode(ids)`. The work per token is constant.
    """

    def __init__(self, tokenizer: "Tokenizer", *, skip_special: bool = True, continues: bool = False) -> None:
        """`continues`: the text follows other text, so a SentencePiece model's leading space is kept."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._continues = continues
        self._restart()

    def push(self, token: int) -> str:
        if self._skip_special and token in self._tokenizer.special_ids:
            return ""
        return self._release(self._utf8.decode(self._tokenizer.token_bytes(token)))

    def finish(self) -> str:
        """What is left (an unfinished character as U+FFFD); the detokenizer is as new afterwards."""
        rest = self._release(self._utf8.decode(b"", final=True))
        self._restart()
        return rest

    def _restart(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = self._tokenizer.strips_leading_space and not self._continues

    def _release(self, text: str) -> str:
        if text and self._at_start:
            self._at_start = False
            return text.removeprefix(" ")
        return text
