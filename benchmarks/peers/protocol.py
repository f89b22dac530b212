"""What the runner and an engine's process say to each other: one JSON object a line, each answered by one.

An engine may live in an environment of its own, so this file needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TextIO


@dataclass(frozen=True)
class Settings:
    """`model` and `draft` are a name, GGUF file or directory, as the engine reads it; `context`: most tokens of a run.

    `program` is an executable that the engine is to start, where it is one of its own.
    """

    model: str
    modes: Sequence[str]
    threads: int
    context: int
    eos_ids: Sequence[int]
    draft: str | None = None
    program: str | None = None


@dataclass(frozen=True)
class Answer:
    """A greedy continuation, its end-of-sequence token included if it came to one.

    `prefill_seconds` reach to the end of the step that brought the first token, `first_tokens` is how many that step
    brought (a draft may be verified with the prompt), and `decode_seconds` run from there to the last token. Engines
    that tell how many forwards the target made, or how much was drafted and accepted, do so in `counts`.
    """

    token_ids: list[int]
    prefill_seconds: float
    decode_seconds: float
    first_tokens: int = 1
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Decode rate, prefill excluded; 0 where no step followed the first."""
        rest = len(self.token_ids) - self.first_tokens
        return rest / self.decode_seconds if rest > 0 and self.decode_seconds > 0 else 0.0


class Peer(Protocol):
    """One engine. A mode is a way of decoding that it was started with, "plain" among them."""

    def start(self, settings: Settings) -> dict[str, str]:
        """Load, and tell the versions and choices that a reader of the figures needs."""
        ...

    def generate(self, mode: str, prompt: Sequence[int], max_tokens: int) -> Answer: ...

    def step_costs(self, rows: Sequence[int]) -> dict[str, float]:
        """Median seconds of a step by rows (as text, for JSON); empty where the engine does not let one measure it."""
        ...

    def close(self) -> None: ...


def serve(peer: Peer) -> None:
    """Answer requests from standard input until it ends or `close` comes. Libraries that print do so on stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            _reply(replies, peer, request)
            if request["op"] == "close":
                return
    finally:
        peer.close()


def _reply(replies: TextIO, peer: Peer, request: dict[str, Any]) -> None:
    try:
        reply = {"ok": _answer(peer, request)}
    except Exception as error:  # whatever a peer's library raises is for the runner to tell
        traceback.print_exc()
        reply = {"error": f"{type(error).__name__}: {error}"}
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _answer(peer: Peer, request: dict[str, Any]) -> Any:
    if request["op"] == "start":
        return peer.start(Settings(**request["settings"]))
    if request["op"] == "generate":
        return asdict(peer.generate(request["mode"], request["prompt"], request["max_tokens"]))
    if request["op"] == "step_costs":
        return peer.step_costs(request["rows"])
    if request["op"] == "close":
        return None
    raise ValueError(f"unknown request '{request['op']}'")
