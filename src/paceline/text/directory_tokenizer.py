"""A tokenizer from a Hugging Face model directory."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.errors import PacelineError
from paceline.text.end_tokens import end_ids
from paceline.text.parts import TokenizerParts

_SLOW_FILES = ("tokenizer.model", "vocab.json", "tiktoken.model")


def read_directory(path: Path) -> TokenizerParts:
    """Raises PacelineError if the directory holds no tokenizer, or one that cannot be read."""
    path = Path(path)
    backend = _backend(path)
    # special_tokens_map.json is the older file: tokenizer_config.json overrides it
    config = _json(path / "special_tokens_map.json") | _json(path / "tokenizer_config.json")
    added = backend.get_added_tokens_decoder()
    special = frozenset(id_ for id_, token in added.items() if token.special)
    bos = _token_id(backend, config.get("bos_token"))
    declared = [_token_id(backend, config.get("eos_token")), *_generation_ends(path)]
    return TokenizerParts(
        backend=backend,
        bos_id=bos,
        adds_bos=bos is not None and backend.encode("").ids[:1] == [bos],
        eos_ids=end_ids(declared, {token.content: id_ for id_, token in added.items()}, special),
        chat_template=_chat_template(path, config),
    )


def _backend(path: Path) -> Backend:
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return Backend.from_file(str(file))
        except Exception as error:  # `tokenizers` raises bare exceptions
            raise PacelineError(f"cannot read {file} ({error}); download it again, or update `tokenizers`") from error
    if any((path / name).is_file() for name in _SLOW_FILES):
        return _converted(path)
    raise PacelineError(f"no tokenizer in {path}; it needs tokenizer.json, tokenizer.model, or vocab.json + merges.txt")


def _converted(path: Path) -> Backend:
    from transformers import AutoTokenizer  # seconds to import, and only needed here

    try:
        backend: Backend = AutoTokenizer.from_pretrained(str(path)).backend_tokenizer
        return backend
    except Exception as error:  # many kinds, all about the files in the directory
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PacelineError(f"cannot convert the tokenizer in {path} ({reason}); add its tokenizer.json") from error


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PacelineError(f"{file} is not valid JSON ({error}); download it again") from error
    return found if isinstance(found, dict) else {}


def _token_id(backend: Backend, token: Any) -> int | None:
    """A token is given as its text, or as a dict with its `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _generation_ends(path: Path) -> list[int]:
    ends = _json(path / "generation_config.json").get("eos_token_id")
    if ends is None:
        ends = _json(path / "config.json").get("eos_token_id")
    return list(ends) if isinstance(ends, list) else [ends] if isinstance(ends, int) else []


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template") or _json(path / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several named ones
        return next((str(entry["template"]) for entry in found if entry.get("name") == "default"), None)
    return found
