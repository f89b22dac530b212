"""What a finished request gives back."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine.output import TokenLogprobs
from paceline.types import FinishReason, RequestStats, Sequence


@dataclass(frozen=True)
class GenerationResult:
    """`token_ids` are the emitted ids, an end-of-sequence token included; `text` has no special tokens or stop strings.

    `logprobs` has one entry a token when they were asked for, else it is None. `prompt_token_ids` is what was run.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    stats: RequestStats
    seed: int
    lossy: bool = False  # typical acceptance: the answer does not follow the model's own distribution

    @classmethod
    def of(cls, sequence: Sequence) -> GenerationResult:
        assert sequence.finish_reason is not None
        asked = sequence.params.logprobs is not None
        return cls(
            text=sequence.output.text,
            token_ids=sequence.tokens[sequence.prompt_length :],
            finish_reason=sequence.finish_reason,
            prompt_token_ids=sequence.tokens[: sequence.prompt_length],
            logprobs=sequence.output.logprobs if asked else None,
            stats=sequence.stats,
            seed=sequence.seed,
            lossy=sequence.params.lossy,
        )


@dataclass(frozen=True)
class StreamChunk:
    """New text and ids since the last chunk; the last one carries the result."""

    text: str
    token_ids: list[int]
    result: GenerationResult | None = None
