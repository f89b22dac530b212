"""Which answers are held out of training.

A prompt decides that for itself, by its digest: what one run judges by, no later run trains on, whatever answers they
have in common and whoever goes on from whose head.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from paceline.train.responses import Response

HELD_OUT_SEQUENCES = 96  # answers to judge by
DIGESTS = 1 << 56
NEVER_TRAINED = DIGESTS // 32  # prompts of lower digests are held out or left alone


@dataclass(frozen=True)
class Split:
    """held_out: digests of the prompts to judge by, the lowest that there are. Where there are few prompts some lie
    above `NEVER_TRAINED`, and only a run with fewer of the same would hold out others."""

    held_out: frozenset[int]

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]]) -> Split:
        """Of prompts in token ids."""
        return cls(frozenset(sorted(map(digest, prompts))[:HELD_OUT_SEQUENCES]))

    def judging(self, responses: Sequence[Response]) -> list[Response]:
        return [each for each in responses if digest(each.prompt) in self.held_out][:HELD_OUT_SEQUENCES]

    def training(self, responses: Sequence[Response]) -> list[Response]:
        return [each for each in responses if self._trains(digest(each.prompt))]

    def _trains(self, prompt: int) -> bool:
        return prompt >= NEVER_TRAINED and prompt not in self.held_out


def digest(prompt: Sequence[int]) -> int:
    """Of token ids, 0 to `DIGESTS` - 1."""
    return int.from_bytes(blake2b(array("q", prompt).tobytes(), digest_size=7).digest(), "little")


def too_few(answers: int) -> str:
    """What to tell whoever has no more than are held out."""
    return (
        f"there are too few answers to train on: {answers}, and {HELD_OUT_SEQUENCES} are held out to judge by; "
        "give more prompts"
    )
