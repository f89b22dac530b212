"""What happened to one request, as plain data: every token's text and origin, every step's draft tree."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.explain.spelling import Spelling, spell
from paceline.text.tokenizer import Tokenizer
from paceline.types import FinishReason, Origin, Sequence, TracedStep

CONTEXT_TOKENS = 64  # of the prompt's end, to show what the first draft follows


@dataclass(frozen=True)
class Token:
    """One token of the answer. All `text`s joined are the answer; `label` is never empty. `step`: which added it."""

    id: int
    text: str
    label: str
    origin: Origin
    step: int


@dataclass(frozen=True)
class Node:
    """One drafted token. `parent`: an index into the step's nodes, -1 for the last token before the step."""

    label: str
    parent: int
    confidence: float | None


@dataclass(frozen=True)
class Step:
    """`path`: accepted nodes, root to leaf. It added the answer's tokens `first` to `first + count - 1`."""

    method: str
    nodes: list[Node]
    path: list[int]
    first: int
    count: int
    draft_seconds: float
    target_seconds: float


@dataclass(frozen=True)
class Totals:
    """Sums over the steps; `origins` counts the answer's tokens by how they came."""

    steps: int
    tokens: int
    drafted: int
    accepted: int
    draft_seconds: float
    target_seconds: float
    tokens_per_second: float
    origins: dict[Origin, int]

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Record:
    """`setup`: model, method and settings, as shown. `context`: the end of the prompt as the model reads it, special
    tokens included; `root`: its last token, which the first draft follows."""

    setup: dict[str, str]
    prompt: str
    context: str
    root: str
    text: str
    finish_reason: FinishReason
    totals: Totals
    tokens: list[Token]
    steps: list[Step]

    def as_json(self) -> dict[str, Any]:
        rates = {
            "tokens_per_forward": self.totals.tokens_per_forward,
            "acceptance_rate": self.totals.acceptance_rate,
        }
        plain = asdict(self)
        return {**plain, "totals": plain["totals"] | rates}


@dataclass
class Recorder:
    """Takes a request's steps as they come, and gives their text out as it becomes final."""

    tokenizer: Tokenizer
    tokens: list[Token] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    _pending: bytes = b""
    _unread: deque[Token] = field(default_factory=deque)
    _read: int = 0  # characters

    def push(self, step: TracedStep) -> None:
        nodes, first = self._nodes(step), len(self.tokens)
        added = [self._token(*pair) for pair in zip(step.emitted, step.origins, strict=True)]
        self.tokens += added
        self._unread += added
        self.steps.append(
            Step(step.method, nodes, list(step.path), first, len(added), step.draft_seconds, step.target_seconds)
        )

    def read(self, length: int) -> list[Token]:
        """The answer's text since the last read, up to its first `length` characters, token by token. What comes after
        may still turn out to begin a stop string."""
        found = []
        while self._unread and self._read < length:
            token = self._unread.popleft()
            text, rest = token.text[: length - self._read], token.text[length - self._read :]
            if rest:
                self._unread.appendleft(replace(token, text=rest))
            self._read += len(text)
            found.append(replace(token, text=text))
        return found

    def finish(self) -> None:
        """Give what was held back for a character that never became whole to the last token."""
        rest, self._pending = self._pending.decode("utf-8", "replace"), b""
        if rest:
            last = self.tokens[-1]
            self.tokens[-1] = replace(last, text=last.text + rest)
            self._unread.append(replace(last, text=rest))

    def record(self, sequence: Sequence, prompt: str, setup: dict[str, str]) -> Record:
        """All of it, once finished. A stop string is no part of an answer: it is cut off the last tokens' texts."""
        before = sequence.tokens[: sequence.prompt_length]
        assert sequence.finish_reason is not None
        tokens = clip(self.tokens, len(sequence.output.text))
        return Record(
            setup=setup,
            prompt=prompt,
            context=self.tokenizer.decode(before[-CONTEXT_TOKENS:], skip_special=False),
            root=spell(self.tokenizer, before[-1]).label,
            text="".join(token.text for token in tokens),
            finish_reason=sequence.finish_reason,
            totals=self._totals(sequence.stats.tokens_per_second),
            tokens=tokens,
            steps=self.steps,
        )

    def _token(self, id_: int, origin: Origin) -> Token:
        spelling = spell(self.tokenizer, id_, self._pending)
        self._pending = spelling.pending
        return Token(id_, spelling.text, spelling.label, origin, len(self.steps))

    def _nodes(self, step: TracedStep) -> list[Node]:
        """Each node spelt after its own ancestors."""
        spelt: list[Spelling] = []
        for token, parent in zip(step.tokens, step.parents, strict=True):
            pending = self._pending if parent < 0 else spelt[parent].pending
            spelt.append(spell(self.tokenizer, token, pending))
        given: list[float | None] = [None] * len(spelt) if step.confidence is None else [*step.confidence]
        return [Node(s.label, parent, sure) for s, parent, sure in zip(spelt, step.parents, given, strict=True)]

    def _totals(self, tokens_per_second: float) -> Totals:
        return Totals(
            steps=len(self.steps),
            tokens=len(self.tokens),
            drafted=sum(len(step.nodes) for step in self.steps),
            accepted=sum(len(step.path) for step in self.steps),
            draft_seconds=sum(step.draft_seconds for step in self.steps),
            target_seconds=sum(step.target_seconds for step in self.steps),
            tokens_per_second=tokens_per_second,
            origins=dict(Counter(token.origin for token in self.tokens)),
        )


def clip(tokens: list[Token], length: int) -> list[Token]:
    """Texts cut so that together they have at most `length` characters."""
    clipped = []
    for token in tokens:
        text = token.text[:length]
        length -= len(text)
        clipped.append(replace(token, text=text))
    return clipped
