"""One method answering one prompt, and what was measured meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.llm import LLM
from paceline.result import GenerationResult
from paceline.sampling.params import SamplingParams


@dataclass(frozen=True)
class Measurement:
    """`tokens_per_second` is the decode rate, prefill excluded; 0 where no step followed the first.

    The counts are None for a peer that does not tell them. `cached_tokens`: of the prompt, found in the prefix cache.
    """

    token_ids: list[int]
    tokens_per_second: float
    first_token_seconds: float
    target_forwards: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    cached_tokens: int | None = None

    @classmethod
    def of(cls, result: GenerationResult) -> Measurement:
        stats = result.stats
        return cls(
            token_ids=result.token_ids,
            tokens_per_second=stats.tokens_per_second,
            first_token_seconds=stats.first_token_seconds,
            target_forwards=stats.target_forwards,
            drafted=stats.drafted,
            accepted=stats.accepted,
            cached_tokens=stats.cached_tokens,
        )


class Runner(Protocol):
    def run(self, prompt: Sequence[int]) -> Measurement: ...


@dataclass(frozen=True)
class EngineRunner:
    """A method of Paceline's own. Its engine lives through the benchmark, so its controller knows the costs."""

    llm: LLM
    params: SamplingParams

    def run(self, prompt: Sequence[int]) -> Measurement:
        return Measurement.of(self.llm.generate([list(prompt)], self.params)[0])
