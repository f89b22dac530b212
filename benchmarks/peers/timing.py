"""The order of the runs, and what each measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from benchmarks.peers.engines import Engine
from benchmarks.peers.fleet import Fleet
from benchmarks.peers.protocol import Answer

PREFILL = "prefill"
T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """Token ids to continue by at most `max_tokens`. `kind` groups them; of kind `prefill`, only the prompt counts."""

    id: str
    kind: str
    prompt: Sequence[int]
    max_tokens: int


@dataclass(frozen=True)
class Run:
    label: str
    task: Task
    repeat: int
    answer: Answer

    def as_json(self) -> dict[str, Any]:
        placed = {"mode": self.label, "prompt": self.task.id, "kind": self.task.kind, "repeat": self.repeat}
        measured = {"prompt_tokens": len(self.task.prompt), "tokens_per_second": self.answer.tokens_per_second}
        return placed | measured | asdict(self.answer)


def schedule(
    engines: Sequence[Engine], tasks: Sequence[Task], repeats: int, in_turn: bool
) -> Iterator[tuple[str, Task, int]]:
    """(mode, task, repeat): every mode on a prompt before the next prompt, in an order that turns by one each time.

    in_turn: every prompt on an engine before the next engine.
    """
    groups = [[engine] for engine in engines] if in_turn else [list(engines)]
    for repeat in range(repeats):
        for group in turned(groups, repeat):
            for index, task in enumerate(tasks):
                for label in turned(_labels(group, task), repeat + index):
                    yield label, task, repeat


def run_all(fleet: Fleet, planned: Sequence[tuple[str, Task, int]], on_run: Callable[[int, str], None]) -> list[Run]:
    """`on_run` is called before each with its number and mode."""
    runs = []
    for number, (label, task, repeat) in enumerate(planned):
        on_run(number, label)
        runs.append(Run(label, task, repeat, fleet.timed(label, task.prompt, task.max_tokens)))
    return runs


def turned(items: Sequence[T], by: int) -> list[T]:
    by %= len(items) or 1
    return [*items[by:], *items[:by]]


def _labels(engines: Sequence[Engine], task: Task) -> list[str]:
    """Prefill is the same for all modes of an engine."""
    if task.kind == PREFILL:
        return [engine.plain for engine in engines if engine.plain is not None]
    return [label for engine in engines for label in engine.labels]
