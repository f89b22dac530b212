"""The nouns that every part shares: Sequence, Draft, Verdict, RequestStats."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from paceline.device import send
from paceline.sampling.params import SamplingParams

if TYPE_CHECKING:
    from paceline.cache.pool import SequenceCache
    from paceline.engine.output import Output

FinishReason = Literal["stop", "length", "aborted"]


@dataclass
class RequestStats:
    """What speculation did for one request. Times in seconds; a batch's step counts whole for each of its requests."""

    target_forwards: int = 0  # those that emitted tokens; prompt chunks before the last are not among them
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from the cache
    generated_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)  # by position in the draft
    accepted_at: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    other_seconds: float = 0.0
    first_token_seconds: float = 0.0  # from admission to the first token
    first_step_tokens: int = 0  # emitted by the step that ended the prompt: their time is not decoding time
    decode_seconds: float = 0.0  # from the first token's step to the last

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens (0 when nothing was drafted)."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Chance that the i-th drafted token is accepted, given that it was drafted."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target forward, the correction or bonus token included (tau)."""
        return self.generated_tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: tokens after the first step over the time after it (0 when there were none)."""
        rest = self.generated_tokens - self.first_step_tokens
        return rest / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def record(self, drafted: int, accepted: int) -> None:
        missing = drafted - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
        for i in range(drafted):
            self.drafted_at[i] += 1
        for i in range(accepted):
            self.accepted_at[i] += 1
        self.drafted += drafted
        self.accepted += accepted


class View(Protocol):
    """What a proposer sees of a sequence; read-only."""

    @property
    def id(self) -> int: ...
    @property
    def tokens(self) -> abc.Sequence[int]: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def room(self) -> int:
        """Most tokens, prompt included, that the sequence can come to."""
        ...


@dataclass
class Sequence:
    """One request in the engine. `tokens` is prompt and output; all but the last are in the cache after a step."""

    id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    room: int
    output: Output
    cache: SequenceCache | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    finish_reason: FinishReason | None = None
    admitted_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def committed(self) -> int:
        return 0 if self.cache is None else self.cache.length

    @property
    def pending(self) -> int:
        """Tokens that the target has not computed yet: the prompt's rest, or one."""
        return len(self.tokens) - self.committed


@dataclass(frozen=True)
class Draft:
    """A chain of drafted tokens [n], ids in the target's vocabulary.

    `q` [n, V]: the distribution each token was drawn from, or None when it was chosen deterministically (`point`).
    `confidence` [n]: the proposer's estimate that each token is accepted given those before it; None if it has none.
    """

    tokens: Tensor
    q: Tensor | None = None
    confidence: abc.Sequence[float] | None = None

    @property
    def size(self) -> int:
        return int(self.tokens.shape[0])

    def on(self, device: torch.device) -> Draft:
        """The same draft with its tokens on the target's device (proposers without a model draft on the host)."""
        if self.tokens.device.type == device.type:
            return self
        return Draft(send(self.tokens, device), self.q, self.confidence)

    def head(self, count: int) -> Draft:
        """The first `count` tokens. For sampled drafts `count` must be chosen without looking at what was drawn."""
        if count >= self.size:
            return self
        q = None if self.q is None else self.q[:count]
        return Draft(self.tokens[:count], q, None if self.confidence is None else self.confidence[:count])


NO_DRAFT = Draft(torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class Verdict:
    """What verification and truncation left of one draft: `accepted` of `drafted` tokens stay."""

    drafted: int
    accepted: int
