"""Rank correlation of a few values, and the chance of one as large without any relation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
EXACT = 8  # values whose orders (40,320) are all tried
DRAWS = 20_000
SURE = 0.05


@dataclass(frozen=True)
class Correlation:
    """Spearman's rho of `first` and `second` over `count` drafts or shapes; p: two-sided, by permutation."""

    first: str
    second: str
    rho: float
    p: float
    count: int

    @property
    def sure(self) -> bool:
        return self.p <= SURE

    def __str__(self) -> str:
        return f"{self.first} and {self.second}: rho {self.rho:+.2f}, p {self.p:.3f}, n {self.count}"


def spearman(first: str, x: Sequence[float], second: str, y: Sequence[float]) -> Correlation:
    """rho 0 and p 1 where one of them is constant, or there are fewer than two."""
    a, b = _centred_ranks(x), _centred_ranks(y)
    size = float(np.sqrt((a**2).sum() * (b**2).sum()))
    if size == 0:
        return Correlation(first, second, 0.0, 1.0, len(x))
    rho = float(a @ b) / size
    by_chance = _orders(b) @ a / size
    extreme = int((np.abs(by_chance) >= abs(rho) - 1e-9).sum())
    p = extreme / len(by_chance) if len(x) <= EXACT else (extreme + 1) / (len(by_chance) + 1)
    return Correlation(first, second, rho, p, len(x))


def _orders(values: Values) -> Values:
    """All orders of a few values, or many random ones [orders, n]."""
    if len(values) <= EXACT:
        return np.array(list(permutations(values)))
    return np.random.default_rng(0).permuted(np.tile(values, (DRAWS, 1)), axis=1)


def _centred_ranks(values: Sequence[float]) -> Values:
    """Ranks less their mean; equal values share theirs."""
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[inverse]
    centred: Values = ranks - ranks.mean() if len(ranks) else ranks
    return centred
