"""Finding a set by trying few of them: random search, then Bayesian optimisation.

SWIFT (Xia et al. 2025, arXiv 2410.06916) so finds the sublayers that a draft skips. What is known of a set without
trying it, the work that it saves, is computed; what is not, how often the draft still agrees with the target, is
learnt by a Gaussian process. Sets are bool [n] tensors: True for what is skipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import PacelineError

LONGEST = 16  # draft lengths over which the model of the speed-up takes its best


@dataclass(frozen=True)
class SearchSettings:
    """ratio: mean share of sublayers in a random set (the paper's is 0.45, and fixed). random_rounds: sets tried at
    random before the model suggests them. limit: sets tried in all. patience: the search ends when its choice has stood
    for so many. row_cost: of one more row of verification, in units of a step of one row."""

    ratio: float = 0.45
    random_rounds: int = 16
    limit: int = 96
    patience: int = 32
    row_cost: float = 0.06
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise PacelineError(f"the skip ratio must lie between 0 and 1, not {self.ratio}")
        if min(self.random_rounds, self.limit, self.patience) < 1:
            raise PacelineError(
                "random_rounds, limit and patience of the layer search must be at least 1, not "
                f"{self.random_rounds}, {self.limit} and {self.patience}; to search nothing, give the skipped set"
            )


def speed_up(agreement: Tensor, cost: Tensor, row_cost: float) -> Tensor:
    """Modelled gain over plain decoding [m] at the best draft length k, of drafts whose tokens agree with the target's
    with chance `agreement` [m] and cost `cost` [m] of a target step each.

    (1 + a + .. + a^k) / (k cost + 1 + k row_cost): Leviathan et al. 2023, theorem 3.8, with rows that are not free.
    """
    length = torch.arange(1, LONGEST + 1)
    emitted = 1 + (agreement.clamp(0, 1)[:, None] ** length).cumsum(dim=1)
    return (emitted / (1 + length * (cost[:, None] + row_cost))).amax(dim=1)


class GaussianProcess:
    """Posterior of a function on sets from noisy values [m] at `sets` [m, n] (Rasmussen and Williams 2006, alg. 2.1).

    The kernel adds what each member does by itself (linear) and how alike two sets are (exponential in their Hamming
    distance); a value's noise is that of a few dozen tokens. Values are standardised, so none of it needs fitting.
    """

    REACH = 0.3  # share of members that differ at which likeness has fallen to 1/e
    NOISE = 0.2  # variance, of 1

    def __init__(self, sets: Tensor, values: Tensor) -> None:
        self.sets, self.mean = sets, values.mean()
        self.scale = values.std(unbiased=False).clamp_min(1e-6)
        noisy = self._kernel(sets, sets) + self.NOISE * torch.eye(len(sets), dtype=torch.float64)
        self.factor = torch.linalg.cholesky(noisy)
        self.weights = torch.cholesky_solve(((values - self.mean) / self.scale)[:, None], self.factor)

    def predict(self, sets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, each [p], at `sets` [p, n]."""
        near = self._kernel(sets, self.sets)
        known = torch.linalg.solve_triangular(self.factor, near.T, upper=False).square().sum(dim=0)
        return self.mean + self.scale * (near @ self.weights)[:, 0], self.scale * (1 - known).clamp_min(1e-9).sqrt()

    def _kernel(self, a: Tensor, b: Tensor) -> Tensor:
        alike = likeness(a, b)
        return (alike + ((alike - 1) / 2 / self.REACH).exp()) / 2


def likeness(a: Tensor, b: Tensor) -> Tensor:
    """float64 [p, m] of sets [p, n] and [m, n]: 1 for equal sets, -1 for opposite ones, linear in Hamming distance."""
    return (2 * a.double() - 1) @ (2 * b.double() - 1).T / a.shape[1]


class SetSearch:
    """Ask for a set, try it, tell how often its draft agreed; `best` is the choice so far.

    saved [n]: the share of a target step that leaving out each sublayer saves. The choice is the tried set of the
    highest modelled speed-up by the process's mean, not by its own value: the best of many noisy values is mostly luck.
    The paper's code tries up to 1000 sets at random, every 25th by upper confidence bound, and keeps the set of the
    highest agreement seen; here a short random phase is followed by expected improvement alone.
    """

    MUTANTS, RANDOM = 256, 32  # candidates that the model chooses from

    def __init__(self, saved: Tensor, start: Tensor, settings: SearchSettings) -> None:
        self.saved, self.settings, self.best = saved.double(), settings, start
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.tried: list[Tensor] = []
        self.agreements: list[float] = []
        self.unchanged = 0

    @property
    def done(self) -> bool:
        return len(self.tried) >= self.settings.limit or self.unchanged >= self.settings.patience

    def ask(self) -> Tensor:
        """The set to try next; the first is the one to start from."""
        if not self.tried:
            return self.best
        if len(self.tried) < self.settings.random_rounds:
            return self._random(1)[0]
        return self._improvement()

    def tell(self, tried: Tensor, agreement: float) -> None:
        self.tried.append(tried)
        self.agreements.append(agreement)
        sets = torch.stack(self.tried)
        best = sets[self._gain(self._model(), sets)[0].argmax()]
        self.unchanged = self.unchanged + 1 if torch.equal(best, self.best) else 0
        self.best = best

    def _model(self) -> GaussianProcess:
        return GaussianProcess(torch.stack(self.tried), torch.tensor(self.agreements, dtype=torch.float64))

    def _gain(self, model: GaussianProcess, sets: Tensor) -> tuple[Tensor, Tensor]:
        """Speed-up at the model's mean agreement, and half of what one deviation either way makes of it."""
        mean, deviation = model.predict(sets)
        cost = 1 - sets.double() @ self.saved
        low, mid, high = (speed_up(mean + by * deviation, cost, self.settings.row_cost) for by in (-1, 0, 1))
        return mid, ((high - low) / 2).clamp_min(1e-6)

    def _improvement(self) -> Tensor:
        """The candidate of the highest expected improvement (Jones et al. 1998): neighbours of the best four, and a few
        random sets."""
        model, tried = self._model(), torch.stack(self.tried)
        known = self._gain(model, tried)[0]
        parents = tried[known.topk(min(4, len(tried))).indices]
        flips = self._some(self.MUTANTS, min(4, len(self.saved)))  # one to four members put in or taken out
        mutants = parents[torch.arange(self.MUTANTS) % len(parents)] ^ flips
        candidates = torch.cat((mutants, self._random(self.RANDOM)))
        new = (likeness(candidates, tried) < 1).all(dim=1)
        if not new.any():
            return self._random(1)[0]
        candidates = candidates[new]
        mean, deviation = self._gain(model, candidates)
        z = (mean - known.max()) / deviation
        above, density = torch.special.ndtr(z), (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
        return candidates[(deviation * (z * above + density)).argmax()]

    def _random(self, count: int) -> Tensor:
        n = len(self.saved)
        return self._some(count, min(n, max(1, round(2 * self.settings.ratio * n))))

    def _some(self, count: int, most: int) -> Tensor:
        """`count` random sets [count, n] of 1 to `most` members, every size as likely."""
        sizes = torch.randint(1, most + 1, (count, 1), generator=self.generator)
        ranks = torch.rand(count, len(self.saved), generator=self.generator).argsort(dim=1).argsort(dim=1)
        return ranks < sizes
