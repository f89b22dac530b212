"""A request's text as it grows: detokenising, stop strings, end of sequence, length."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.sampling.params import SamplingParams
from paceline.text.detokenizer import Detokenizer
from paceline.text.stop import StopScanner
from paceline.text.tokenizer import Tokenizer
from paceline.types import FinishReason


@dataclass(frozen=True)
class TokenLogprobs:
    """Raw log-softmax of the target at one position: of the token, and of the likeliest alternatives."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass
class Output:
    """Everything that ends where the request ends. `text` holds what is final; a stop string is not part of it."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    _unread: str = ""
    _detokenizer: Detokenizer | None = None
    _scanner: StopScanner | None = None
    _ends: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, params: SamplingParams, eos_ids: tuple[int, ...]) -> Output:
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, continues=True)
        scanner = StopScanner(params.stop) if params.stop else None
        return cls(_detokenizer=detokenizer, _scanner=scanner, _ends=ends)

    def push(self, token: int, generated: int, limit: int) -> FinishReason | None:
        """Take the `generated`-th token; say whether the request ends with it."""
        stopped = self._release("" if self._detokenizer is None else self._detokenizer.push(token))
        if stopped:
            return "stop"
        if token in self._ends:
            return self._end("stop")
        return self._end("length") if generated >= limit else None

    def end(self) -> None:
        """Release what was held back: an aborted request keeps all it has."""
        self._end("aborted")

    def read(self) -> str:
        """Text that became final since the last read."""
        text, self._unread = self._unread, ""
        return text

    def _end(self, reason: FinishReason) -> FinishReason:
        rest = "" if self._detokenizer is None else self._detokenizer.finish()
        if self._release(rest):
            return "stop"
        if self._scanner is not None:
            self._add(self._scanner.flush())
        return reason

    def _release(self, text: str) -> bool:
        if self._scanner is None:
            self._add(text)
            return False
        text, hit = self._scanner.push(text)
        self._add(text)
        return hit

    def _add(self, text: str) -> None:
        self.text += text
        self._unread += text
