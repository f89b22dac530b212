"""Stand-ins for what a proposer is told: a sequence, and what a step made of its draft."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.cache.pool import SequenceCache
from paceline.propose.base import Budget
from paceline.sampling.params import SamplingParams
from paceline.types import Committed, Verdict


@dataclass
class Text:
    """A sequence that is nothing but its tokens."""

    tokens: list[int]
    id: int = 0
    prompt_length: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    room: int = 1000
    committed: int = 0
    prediction: list[int] = field(default_factory=list)
    tenant: str = ""
    cache: SequenceCache | None = None


def budget(depth: int, nodes: int = 64) -> Budget:
    return Budget(depth, nodes)


def accepted(count: int, drafted: int) -> Committed:
    """A step that accepted the first `count` of a chain of `drafted` tokens."""
    return Committed(0, count + 1, {}, Verdict(drafted, tuple(range(count)), drafted, count + 1))
