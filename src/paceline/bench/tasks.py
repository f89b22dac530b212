"""The prompts of a benchmark: those that come with the package, or a file of the user's own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation to answer. `kind` groups prompts in the report."""

    id: str
    kind: str
    messages: list[dict[str, str]]


def builtin_prompts() -> list[BenchPrompt]:
    """Three prompts each of code, edit, summ, qa, math and chat."""
    text = files("paceline.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return _parse(text, "prompts.jsonl")


def load_prompts(path: Path) -> list[BenchPrompt]:
    """Read JSON lines: `id`, `kind` and `messages`, or `id`, `category` and `prompt` or `turns` (the first is asked).

    Raises PacelineError with file and line for a line that is neither, and for a file without prompts.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PacelineError(f"cannot read the prompts '{path}': {error.strerror}") from None
    except UnicodeDecodeError:
        raise PacelineError(f"cannot read the prompts '{path}': not UTF-8 text") from None
    return _parse(text, str(path))


def select(prompts: Sequence[BenchPrompt], kinds: Sequence[str] | None, limit: int | None) -> list[BenchPrompt]:
    """Prompts of these kinds (None: all), the first `limit` of each kind (None: all), in their own order."""
    known = list(dict.fromkeys(prompt.kind for prompt in prompts))
    for kind in kinds or ():
        if kind not in known:
            raise PacelineError(f"no prompt of kind '{kind}'; there are {', '.join(known)}")
    if limit is not None and limit < 1:
        raise PacelineError(f"limit must be at least 1, not {limit}")
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        if kinds and prompt.kind not in kinds:
            continue
        seen[prompt.kind] += 1
        if limit is None or seen[prompt.kind] <= limit:
            chosen.append(prompt)
    return chosen


def _parse(text: str, name: str) -> list[BenchPrompt]:
    found: dict[str, BenchPrompt] = {}
    for number, line in _lines(text):
        try:
            prompt = _prompt(_object(line))
            if prompt.id in found:
                raise ValueError(f"the id '{prompt.id}' was used before")
        except ValueError as error:
            raise PacelineError(f"{name}:{number}: {error}") from None
        found[prompt.id] = prompt
    if not found:
        raise PacelineError(f"{name}: no prompts; write one JSON object a line, with id, kind and messages")
    return list(found.values())


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, counted from 1. JSON may hold U+2028 and its like, so only \\n ends a line."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, not {type(row).__name__}")
    return row


def _prompt(row: dict[str, Any]) -> BenchPrompt:
    if "messages" in row:
        return BenchPrompt(_text(row, "id"), _text(row, "kind"), _messages(row["messages"]))
    if "turns" in row or "prompt" in row:
        content = _first_turn(row["turns"]) if "turns" in row else _text(row, "prompt")
        return BenchPrompt(_text(row, "id"), _text(row, "category"), [{"role": "user", "content": content}])
    raise ValueError("needs `messages` and `kind`, or `category` and `turns` or `prompt`")


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"`{key}` must be a non-empty string, not {json.dumps(value)}")
    return value


def _messages(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError("`messages` must be a non-empty list of objects with role and content")
    for message in value:
        if not isinstance(message, dict):
            raise ValueError("each of `messages` must be an object with role and content")
    return [{"role": _text(message, "role"), "content": _text(message, "content")} for message in value]


def _first_turn(value: object) -> str:
    if not isinstance(value, list) or not value or not isinstance(value[0], str) or not value[0]:
        raise ValueError("`turns` must be a non-empty list of strings")
    return value[0]
