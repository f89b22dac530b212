"""What a tokenizer file yields, whatever its format."""

from dataclasses import dataclass

from tokenizers import Tokenizer as Backend


@dataclass(frozen=True)
class TokenizerParts:
    backend: Backend
    bos_id: int | None = None
    adds_bos: bool = False
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None
