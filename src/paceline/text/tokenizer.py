"""A model's tokenizer: text to ids, ids to text, chat to text."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.text.chat_template import render_chat_template
from paceline.text.detokenizer import Detokenizer
from paceline.text.directory_tokenizer import read_directory
from paceline.text.gguf_tokenizer import read_gguf
from paceline.text.parts import TokenizerParts
from paceline.text.pieces import Pieces


class Tokenizer:
    """A thin wrapper over `tokenizers.Tokenizer`, the same for every file format.

    `bos_id` is the declared BOS token; `adds_bos` says whether the model's tokenizer puts it before a text.
    `special_ids` are the tokens left out of decoded text.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        adds_bos: bool = False,
        eos_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.bos_id = bos_id
        self.adds_bos = adds_bos and bos_id is not None
        self.eos_ids = eos_ids
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._strings = _strings_by_id(backend)
        self._pieces = Pieces(backend, self._strings, frozenset(added))
        # Whether special tokens are parsed is a switch on the backend, so no two calls may overlap.
        self._switch = threading.Lock()

    @classmethod
    def from_gguf(cls, path: Path, *, cache_dir: Path | None = None) -> "Tokenizer":
        """The tokenizer in a GGUF file's metadata; `cache_dir` keeps the built one as a tokenizer.json."""
        return cls._from_parts(read_gguf(path, cache_dir=cache_dir))

    @classmethod
    def from_directory(cls, path: Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face model directory."""
        return cls._from_parts(read_directory(path))

    @classmethod
    def _from_parts(cls, parts: TokenizerParts) -> "Tokenizer":
        return cls(
            parts.backend,
            bos_id=parts.bos_id,
            adds_bos=parts.adds_bos,
            eos_ids=parts.eos_ids,
            chat_template=parts.chat_template,
        )

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return len(self._strings)

    @property
    def strips_leading_space(self) -> bool:
        """Whether decoding drops the first space (a SentencePiece model that encodes one before every text)."""
        return self._pieces.strips_leading_space

    def encode(self, text: str, *, bos: bool = True, special: bool = True) -> list[int]:
        """`bos`: begin with BOS if this tokenizer adds one, never twice. `special`: read "<|im_end|>" as that token."""
        with self._switch:
            self.backend.encode_special_tokens = not special
            ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        if bos and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return "".join(map(detokenizer.push, ids)) + detokenizer.finish()

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token adds to the text; empty for an id outside the vocabulary."""
        return self._pieces.of(token)

    def token_string(self, token: int) -> str:
        """The vocabulary's own spelling ("Ġthe", "▁the"); empty for an unused id."""
        return self._strings[token]

    def token_strings(self) -> list[str]:
        """Every `token_string`, by id."""
        return list(self._strings)

    def render_chat(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        """The prompt text of a conversation. Raises PacelineError if the model has no template or it refuses."""
        variables: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "bos_token": "" if self.bos_id is None else self.token_string(self.bos_id),
            "eos_token": self.token_string(self.eos_ids[0]) if self.eos_ids else "",
        }
        return render_chat_template(self.chat_template, messages, **(variables | template_kwargs))


def _strings_by_id(backend: Backend) -> list[str]:
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    strings = [""] * (max(vocab.values(), default=-1) + 1)
    for text, id_ in vocab.items():
        strings[id_] = text
    return strings
