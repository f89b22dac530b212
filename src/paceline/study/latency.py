"""The time of one decode step at one row, all models in turn, so that a busy moment falls on all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil
import torch

from paceline.bench.step_curve import POSITION
from paceline.cache.pool import BlockPool
from paceline.errors import PacelineError
from paceline.model.attention import Span
from paceline.model.decoder import Batch, Decoder
from paceline.study.random_weights import random_decoder, streamed_bytes, weight_bytes
from paceline.study.shapes import Shape, parameters
from paceline.weights.load import LoadedModel

CHAIN = 4  # steps in a row, as a draft of this length takes them
SPARE = 2e9  # bytes beside the weights: Python, PyTorch, what a matrix is drawn as


@dataclass(frozen=True)
class TimedShape:
    """seconds: of a step. bytes: that it reads."""

    name: str
    group: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    bytes: int
    seconds: float
    source: str


class Stepper:
    """Runs one row behind `POSITION` others. The cache is not filled: what lies in it costs the same."""

    def __init__(self, decoder: Decoder, cache_dtype: torch.dtype) -> None:
        self.decoder, self.pool = decoder, BlockPool(decoder.config, POSITION // 16 + 1, decoder.device, cache_dtype)
        self.cache = self.pool.open([], POSITION + 1)
        self.cache.append(POSITION + 1)
        self.token = torch.ones(1, dtype=torch.int64, device=decoder.device)

    @classmethod
    def of(cls, model: LoadedModel) -> Stepper:
        return cls(model.decoder, model.backend.cache_dtype)

    def step(self) -> None:
        batch = Batch(self.token, [Span(self.cache, 0, 1, POSITION)], self.pool)
        self.decoder.logits(self.decoder.forward(batch)[0])[0, 0].item()


@torch.inference_mode()
def step_seconds(models: Mapping[str, Stepper], rounds: int) -> dict[str, float]:
    """Median over rounds of the mean of a chain of steps; the first round warms up. What ran before a chain has pushed
    the model's weights out of the processor's caches, as the target does to a draft."""
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 1):
        for name, model in models.items():
            began = time.perf_counter()
            for _ in range(CHAIN):
                model.step()
            taken[name].append((time.perf_counter() - began) / CHAIN)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def time_shapes(shapes: Sequence[Shape], precision: str, rounds: int) -> list[TimedShape]:
    """All of a group are in memory at once. Raises PacelineError without kernels, or before more is made than fits."""
    check_room(shapes, precision)
    seconds = step_seconds(
        {shape.name: Stepper(random_decoder(shape.config, precision), torch.float16) for shape in shapes}, rounds
    )
    return [_timed(shape, precision, seconds[shape.name]) for shape in shapes]


def check_room(shapes: Sequence[Shape], precision: str) -> None:
    needed = sum(weight_bytes(shape.config, precision) for shape in shapes) + SPARE
    free = psutil.virtual_memory().available
    if needed > free:
        raise PacelineError(
            f"timing the {len(shapes)} shapes of '{shapes[0].group}' needs about {needed / 1e9:.1f} GB of memory, "
            f"{free / 1e9:.1f} GB are free; try --latency-precision int4, or leave them out with --shapes"
        )


def _timed(shape: Shape, precision: str, seconds: float) -> TimedShape:
    config = shape.config
    return TimedShape(
        shape.name, shape.group, config.num_layers, config.hidden_size, config.intermediate_size, config.num_heads,
        config.num_kv_heads, config.head_dim, parameters(config), streamed_bytes(config, precision, POSITION), seconds,
        shape.source,
    )  # fmt: skip
