"""Milliseconds of one forward and its output head for 1 to 64 rows of one sequence at position 200."""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from paceline.cache.pool import BlockPool
from paceline.device import set_threads
from paceline.model.attention import Span
from paceline.model.decoder import Batch
from paceline.weights.load import LoadedModel, load_model

ROWS = (1, 2, 3, 4, 8, 16, 32, 64)
POSITION = 200


@torch.inference_mode()
def step_cost(model: LoadedModel, repeats: int) -> dict[int, float]:
    """Median milliseconds by rows; two runs of each warm up."""
    pool = BlockPool(model.config, 32, model.backend.device, model.backend.dtype)
    cache = pool.open([], POSITION + max(ROWS))
    cache.append(POSITION + max(ROWS))

    def forward(first: int, count: int) -> None:
        tokens = torch.arange(1, count + 1, device=model.backend.device)
        batch = Batch(tokens, tokens + (first - 1), [Span(cache, 0, count, first)], pool)
        model.decoder.logits(model.decoder.forward(batch)[0]).sum().item()

    forward(0, POSITION)
    costs = {}
    for rows in ROWS:
        taken = []
        for _ in range(repeats + 2):
            started = time.perf_counter()
            forward(POSITION, rows)
            taken.append(time.perf_counter() - started)
        costs[rows] = statistics.median(taken[2:]) * 1e3
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    set_threads(None)
    costs = step_cost(load_model(options.model, precision=options.precision), options.repeats)
    for rows, cost in costs.items():
        print(f"{rows:3d} rows  {cost:8.2f} ms  {cost / costs[1]:.2f} x one row")


if __name__ == "__main__":
    main()
