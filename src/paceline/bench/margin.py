"""How close a greedy output came to being another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.engine.output import TokenLogprobs
from paceline.llm import LLM
from paceline.sampling.params import SamplingParams


@dataclass(frozen=True)
class PlainOutput:
    """A plain greedy output and its smallest logit margin, likeliest minus second, over all positions."""

    token_ids: list[int]
    margin: float


def plain_output(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> PlainOutput:
    """Decode once more with log-probabilities, outside the timing. A margin of 0 is a tie: the lowest id won."""
    result = llm.generate([list(prompt)], replace(params, logprobs=2))[0]
    return PlainOutput(result.token_ids, min(margin(entry) for entry in result.logprobs or ()))


def margin(entry: TokenLogprobs) -> float:
    first, second = sorted(entry.top.values(), reverse=True)[:2]
    return first - second
