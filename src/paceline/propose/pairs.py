"""Each token with the one after it: what a head's cache row depends on, beside all before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class Pairs(Sequence[int]):
    """Pair t of `tokens` is (x_t, x_{t+1}) as one number; there is one fewer than tokens. Nothing is copied."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            return self.tokens[index] << 32 | self.tokens[index + 1]
        start, stop, step = index.indices(len(self))
        return [self.tokens[t] << 32 | self.tokens[t + 1] for t in range(start, stop, step)]
