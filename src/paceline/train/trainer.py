"""The loop that trains any drafter: batches, optimiser, checkpoints, held-out acceptance."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.train.acceptance import Acceptance, walk
from paceline.train.batches import TrainingBatch, batches
from paceline.train.disk import said_plainly, write_whole
from paceline.train.source import Source
from paceline.train.split import too_few

EVALUATED_ROWS = 4096  # of a held-out batch


class Objective(Protocol):
    """What is trained, and how its drafts are judged."""

    @property
    def module(self) -> nn.Module: ...
    def loss(self, batch: TrainingBatch) -> Tensor: ...
    def agrees(self, batch: TrainingBatch, depth: int) -> Tensor:
        """bool [B, S, depth]: whether a draft that begins at a row has the text's own token at each depth."""
        ...


@dataclass(frozen=True)
class TrainConfig:
    """tokens: of passages, to train on in all, prompts counted; seconds: or the time, that before a resumption too;
    the first that is reached ends the run. rate: the peak of a cosine. rows: of a forward; accumulate: forwards of an
    optimiser step. depth: of the drafts that are judged; evaluations: how often they are, beside the end. bf16:
    products in bfloat16 (the weights stay fp32)."""

    tokens: int | None = None
    seconds: float | None = None
    rate: float = 1e-3
    warmup: float = 0.02
    rows: int = 1024
    accumulate: int = 1
    weight_decay: float = 0.01
    depth: int = 5
    seed: int = 0
    bf16: bool = False
    checkpoint_seconds: float = 120.0
    evaluations: int = 10


@dataclass
class Position:
    """How far a run is. unit, batch: of this epoch, in its own order."""

    epoch: int = 0
    unit: int = 0
    batch: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    evaluated: float = -1.0  # progress at the last evaluation


Report = Callable[[float, Position, float, Acceptance | None], None]
"""progress (0 to 1), position, smoothed loss, held-out acceptance where it was just measured."""


@dataclass
class Trainer:
    """`checkpoint`: the file that a killed run goes on from. `log`: a JSON line for each evaluation."""

    objective: Objective
    source: Source
    config: TrainConfig
    checkpoint: Path
    log: Path
    position: Position = field(default_factory=Position)

    def __post_init__(self) -> None:
        config = self.config
        if config.tokens is None and config.seconds is None:
            raise PacelineError("say how long to train: --hours or --tokens")
        if not self.source.units:
            raise PacelineError(too_few(len(self.source.held_out())))
        self.optimizer = torch.optim.AdamW(
            self.objective.module.parameters(), config.rate, (0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        self._resume()

    def run(self, report: Report) -> Acceptance:
        """Train to the end of the budget; returns the held-out acceptance. Raises PacelineError on a full disk."""
        config, position = self.config, self.position
        began, saved = time.perf_counter() - position.seconds, time.perf_counter()
        loss, latest = math.nan, None
        pending = self._batches()
        while self.progress < 1.0:
            if self.progress >= position.evaluated + 1 / config.evaluations or position.evaluated < 0:
                latest = self._evaluate(loss)
            loss = self._step(pending, loss)
            position.seconds = time.perf_counter() - began
            report(self.progress, position, loss, latest)
            latest = None
            if time.perf_counter() - saved > config.checkpoint_seconds:
                self.save()
                saved = time.perf_counter()
        final = self._evaluate(loss)
        report(self.progress, position, loss, final)
        self.save()
        return final

    @property
    def progress(self) -> float:
        """0 to 1: the part of the budget that is used up."""
        config, position = self.config, self.position
        by_tokens = position.tokens / config.tokens if config.tokens else 0.0
        by_time = position.seconds / config.seconds if config.seconds else 0.0
        return min(max(by_tokens, by_time), 1.0)

    def _step(self, pending: Iterator[TrainingBatch], loss: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate * _schedule(self.progress, self.config.warmup)
        total = 0.0
        for _ in range(self.config.accumulate):
            batch = next(pending)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bf16):
                part = self.objective.loss(batch) / self.config.accumulate
            part.backward()  # type: ignore[no-untyped-call]
            total += part.item()
            self.position.tokens += int(batch.lengths.sum())
        nn.utils.clip_grad_norm_(self.objective.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.position.steps += 1
        return total if math.isnan(loss) else 0.95 * loss + 0.05 * total

    def _batches(self) -> Iterator[TrainingBatch]:
        """From the position on, for ever; an order that the seed and the epoch alone decide."""
        position = self.position
        while True:
            order = torch.randperm(len(self.source.units), generator=self._generator(position.epoch, -1)).tolist()
            while position.unit < len(order):
                unit = self.source.units[order[position.unit]]
                shuffle = self._generator(position.epoch, unit)
                for index, batch in enumerate(batches(self.source.read(unit), self.config.rows, shuffle)):
                    if index >= position.batch:
                        position.batch = index + 1
                        yield batch
                position.unit, position.batch = position.unit + 1, 0
            position.epoch, position.unit = position.epoch + 1, 0

    def _generator(self, epoch: int, unit: int) -> torch.Generator:
        return torch.Generator().manual_seed(hash((self.config.seed, epoch, unit)) % 2**63)

    def _evaluate(self, loss: float) -> Acceptance:
        self.position.evaluated = self.progress
        acceptance = held_out_acceptance(self.objective, self.source, self.config.depth)
        line = {
            **asdict(self.position), "loss": None if math.isnan(loss) else loss,
            "held_out_loss": held_out_loss(self.objective, self.source, self.config.bf16), **asdict(acceptance),
        }  # fmt: skip
        with said_plainly(self.log), self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return acceptance

    def save(self) -> None:
        state = {
            "module": self.objective.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "position": asdict(self.position),
        }
        write_whole(self.checkpoint, partial(torch.save, state))

    def _resume(self) -> None:
        if self.checkpoint.exists():
            state = load_weights(self.checkpoint, self.objective)
            self.optimizer.load_state_dict(state["optimizer"])
            self.position = Position(**state["position"])


def load_weights(checkpoint: Path, objective: Objective) -> dict[str, Any]:
    """The module's weights; returns all that the checkpoint holds. Raises PacelineError."""
    try:
        state: dict[str, Any] = torch.load(checkpoint, weights_only=True)
        objective.module.load_state_dict(state["module"])
    except (RuntimeError, ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise PacelineError(
            f"cannot go on from {checkpoint}: {reason}; if it belongs to a run with other choices, use another --out, "
            "or delete it to begin anew"
        ) from None
    return state


def held_out_acceptance(objective: Objective, source: Source, depth: int) -> Acceptance:
    """Of passages that greedy decoding would have written, and that were never trained on."""
    greedy = [passage for passage in source.held_out() if passage.greedy]
    judged = []
    for batch in batches(greedy, EVALUATED_ROWS, None):
        agrees = objective.agrees(batch, depth)
        for row, (prompt, length) in enumerate(zip(batch.prompts.tolist(), batch.lengths.tolist(), strict=True)):
            judged.append(agrees[row, prompt - 1 : length - 2])
    return walk(judged)


@torch.no_grad()
def held_out_loss(objective: Objective, source: Source, bf16: bool) -> float:
    """The loss on the held-out passages, sampled answers too, all rows unrolled: it tells two drafters apart long
    before their acceptance, a count of right and wrong, does."""
    total = weight = 0.0
    for batch in batches(source.held_out(), EVALUATED_ROWS, None):
        count = int(batch.judged(1).sum())
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            total += count * objective.loss(batch).item()
        weight += count
    return total / max(weight, 1.0)


def _schedule(progress: float, warmup: float) -> float:
    """Linear to 1 over `warmup`, then a cosine to a fiftieth."""
    if progress < warmup:
        return max(progress / warmup, 0.02)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
