"""Benchmark prompts: the built-in ones and both formats of a user's file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.tasks import BenchPrompt, builtin_prompts, load_prompts, select
from paceline.errors import PacelineError

GOOD: dict[str, Any] = {"id": "a", "kind": "chat", "messages": [{"role": "user", "content": "Hi"}]}


def write(folder: Path, *lines: object) -> Path:
    file = folder / "mine.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_three_built_in_prompts_of_each_kind() -> None:
    kinds = Counter(prompt.kind for prompt in builtin_prompts())
    assert kinds == dict.fromkeys(("code", "edit", "summ", "qa", "math", "chat"), 3)


def test_built_in_edits_show_a_file_of_25_to_45_lines() -> None:
    for prompt in select(builtin_prompts(), ["edit"], None):
        code = prompt.messages[-1]["content"].split("```")[1].strip().splitlines()[1:]
        assert 25 <= len(code) <= 45, prompt.id


def test_rows_of_messages_keep_every_message(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file = write(tmp_path, {"id": "a", "kind": "chat", "messages": messages})
    assert load_prompts(file) == [BenchPrompt("a", "chat", messages)]


def test_a_row_with_a_bare_prompt_asks_it(tmp_path: Path) -> None:
    (found,) = load_prompts(write(tmp_path, {"id": "t/1", "category": "math", "prompt": "1 + 1?"}))
    assert (found.kind, found.messages) == ("math", [{"role": "user", "content": "1 + 1?"}])


def test_rows_of_turns_ask_the_first_turn_under_their_category(tmp_path: Path) -> None:
    row = {"id": "h/1", "category": "humaneval", "turns": ["First?", "Then?"], "prompt": "def f():", "test": "..."}
    assert load_prompts(write(tmp_path, row)) == [
        BenchPrompt("h/1", "humaneval", [{"role": "user", "content": "First?"}])
    ]


def test_both_formats_and_blank_lines_may_be_mixed(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD, "", {"id": "b", "category": "math", "turns": ["1 + 1?"]}, "")
    assert [prompt.id for prompt in load_prompts(file)] == ["a", "b"]


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path: Path) -> None:
    row = json.dumps({**GOOD, "messages": [{"role": "user", "content": "a\u2028b"}]}, ensure_ascii=False)
    file = tmp_path / "mine.jsonl"
    file.write_text(row, encoding="utf-8")
    assert load_prompts(file)[0].messages[0]["content"] == "a\u2028b"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('{"id": "b",', "not JSON"),
        ("[1]", "expected a JSON object, not list"),
        ({"id": "b", "kind": "chat"}, "needs `messages` and `kind`, or `category` and `turns` or `prompt`"),
        ({**GOOD, "kind": None}, "`kind` must be a non-empty string, not null"),
        ({**GOOD, "id": 7}, "`id` must be a non-empty string, not 7"),
        ({**GOOD, "id": "b", "messages": []}, "`messages` must be a non-empty list"),
        ({**GOOD, "id": "b", "messages": ["Hi"]}, "each of `messages` must be an object"),
        ({**GOOD, "id": "b", "messages": [{"role": "user"}]}, "`content` must be a non-empty string"),
        ({"id": "b", "category": "math", "turns": []}, "`turns` must be a non-empty list"),
        ({"id": "b", "turns": ["1 + 1?"]}, "`category` must be a non-empty string"),
        (GOOD, "the id 'a' was used before"),
    ],
)
def test_a_malformed_line_is_named_with_file_and_number(tmp_path: Path, line: object, wrong: str) -> None:
    file = write(tmp_path, GOOD, "", line)
    with pytest.raises(PacelineError) as raised:
        load_prompts(file)
    assert str(raised.value).startswith(f"{file}:3: ")
    assert wrong in str(raised.value)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"mine\.jsonl: no prompts"):
        load_prompts(write(tmp_path, "", "  "))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"absent\.jsonl'"):
        load_prompts(tmp_path / "absent.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PacelineError, match="not UTF-8"):
        load_prompts(tmp_path / "binary.jsonl")


def prompts(*kinds: str) -> list[BenchPrompt]:
    return [BenchPrompt(f"{kind}-{i}", kind, []) for i, kind in enumerate(kinds)]


def test_the_limit_counts_within_each_kind() -> None:
    chosen = select(prompts("code", "code", "chat", "code", "chat"), None, 1)
    assert [prompt.id for prompt in chosen] == ["code-0", "chat-2"]


def test_only_the_kinds_asked_for_are_selected() -> None:
    chosen = select(prompts("code", "chat", "math"), ["math", "code"], None)
    assert [prompt.kind for prompt in chosen] == ["code", "math"]


def test_an_unknown_kind_is_told_with_the_known_ones() -> None:
    with pytest.raises(PacelineError, match="'poem'; there are code, chat"):
        select(prompts("code", "chat"), ["poem"], None)


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(PacelineError, match="limit must be at least 1, not 0"):
        select(prompts("code"), None, 0)
