"""What a target step costs by its rows, and what that says about drafting: speculation lives off this curve."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.cache.pool import BlockPool
from paceline.model.attention import Span
from paceline.model.decoder import Batch
from paceline.weights.load import LoadedModel

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
POSITION = 200
SETTLING = 0.04  # seconds of steps of a kind before any counts: one behind a wide one is slower than among its like
ROUND = 3  # steps that count, each time


@torch.inference_mode()
def step_curve(model: LoadedModel, rows: Sequence[int] = ROWS, repeats: int = 9) -> dict[int, float]:
    """Median seconds of one forward and its output head by rows of one sequence at position 200, among its like.

    The row counts are measured in turn, a few steps of each, so that a busy moment does not fall on one of them.
    """
    device, most = model.backend.device, max(rows)
    pool = BlockPool(model.config, (POSITION + most) // 16 + 1, device, model.backend.cache_dtype)
    cache = pool.open([], POSITION + most)
    cache.append(POSITION + most)

    def forward(first: int, count: int) -> float:
        started = time.perf_counter()
        tokens = torch.arange(1, count + 1, device=device)
        batch = Batch(tokens, [Span(cache, 0, count, first)], pool)
        model.decoder.logits(model.decoder.forward(batch)[0])[0, 0].item()
        return time.perf_counter() - started

    forward(0, POSITION)
    taken: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(-(-repeats // ROUND)):
        for count in rows:
            spent = 0.0
            while spent < SETTLING:
                spent += forward(POSITION, count)
            taken[count] += [forward(POSITION, count) for _ in range(ROUND)]
    return {count: statistics.median(times) for count, times in taken.items()}


@dataclass(frozen=True)
class Advice:
    """At this chance that a drafted token is accepted: the draft length that pays best, and its speed-up."""

    acceptance: float
    length: int
    speedup: float


def advise(curve: Mapping[int, float], acceptances: Sequence[float] = (0.3, 0.5, 0.7, 0.8, 0.9)) -> list[Advice]:
    """For drafts that cost nothing (n-gram, suffix): tokens a step (1 - a^(k+1)) / (1 - a) over T(k + 1) / T(1).

    Leviathan et al. 2023, theorem 3.8, with the measured cost of a step in place of 1.
    """
    found = []
    for a in acceptances:
        gains = {rows - 1: (1 - a**rows) / (1 - a) * curve[1] / curve[rows] for rows in curve}
        length = max(gains, key=lambda k: gains[k])
        found.append(Advice(a, length, gains[length]))
    return found
