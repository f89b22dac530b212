"""A training run from prompts to a head: four stages in two folders, each of which goes on where it stopped."""

from __future__ import annotations

import gc
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch

from paceline.bench.tasks import load_prompts
from paceline.build import Models, Options, load_models
from paceline.device import bound_product_cache, set_threads
from paceline.errors import PacelineError
from paceline.train.acceptance import Acceptance
from paceline.train.capture import Capture, new_index, store
from paceline.train.disk import make_folder
from paceline.train.drafters import DRAFTERS, Drafter, Given
from paceline.train.export import Card
from paceline.train.init import Init
from paceline.train.memory import check_memory
from paceline.train.plan import Plan, digest
from paceline.train.responses import Response, ResponseConfig, read_responses, write_responses
from paceline.train.shards import Shards
from paceline.train.source import Source, Stored, Streamed
from paceline.train.split import HELD_OUT_SEQUENCES, too_few
from paceline.train.target import TargetWeights
from paceline.train.trainer import Position, TrainConfig, Trainer, load_weights
from paceline.train.vocabulary import commonest, covered, token_counts
from paceline.weights.load import LoadedModel

Stage = Literal["responses", "capture", "train", "export"]
STAGES: tuple[Stage, ...] = get_args(Stage)
ANSWERING, CAPTURING = 0.25, 0.4  # of --hours, when these stages have to be over


class Display(Protocol):
    """What shows a run's progress."""

    def stage(self, stage: Stage, total: int | None) -> AbstractContextManager[Any]: ...
    def advance(self, tokens: int) -> None: ...
    def trained(self, progress: float, position: Position, loss: float, acceptance: Acceptance | None) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class RunConfig:
    """kind: what to train. out: checkpoint, log and head. data: responses and captured states, which several runs may
    share. hours: for all stages together. disk: most bytes of captured states, 0 to capture while training. init: a
    drafter to go on from (None: the target's own layers), whose vocabulary stays."""

    kind: str
    target: str
    out: Path
    data: Path
    prompts: Path | None = None
    hours: float | None = None
    responses: ResponseConfig = field(default_factory=ResponseConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    disk: int = 20 << 30
    draft_vocab: int = 8192
    init: str | None = None
    threads: int | None = None
    stages: tuple[Stage, ...] = STAGES

    def __post_init__(self) -> None:
        if self.kind not in DRAFTERS:
            raise PacelineError(f"unknown kind '{self.kind}'; one of {', '.join(DRAFTERS)}")
        if self.hours is not None and not self.hours > 0:
            raise PacelineError(f"--hours must be more than 0, not {self.hours:g}")
        if "responses" in self.stages and self.prompts is None:
            raise PacelineError("say what the target should answer: --prompts FILE (JSON lines)")
        if "train" in self.stages and self.hours is None and self.train.tokens is None:
            raise PacelineError("say how long to train: --hours or --tokens")


@dataclass
class Run:
    """Stages in order; what one needs from those before it is read from the disk."""

    config: RunConfig
    display: Display
    began: float = field(default_factory=time.monotonic)

    def go(self) -> Acceptance | None:
        """Runs the stages that were asked for. Returns the held-out acceptance if one of them was training.

        Raises PacelineError for what the user can mend; what was written before stays, and the same command goes on.
        """
        bound_product_cache()
        config = self.config
        check_memory(config.target, self._drafter.weights, config.draft_vocab, config.train.rows)
        if config.init is not None and "train" in config.stages:
            self._check_init(Init.open(config.init))
        for folder in (config.out, config.data):
            make_folder(folder)
        result = None
        for stage in config.stages:
            if stage == "responses":
                self._responses()
            elif stage == "capture":
                self._capture()
            elif stage == "train":
                result = self._train()
            else:
                self._export()
        return result

    def _check_init(self, init: Init) -> None:
        """Whatever is wrong with it is said before hours go into answers and states."""
        target, found = TargetWeights.read(self.config.target), init.vocabulary
        size = min(self.config.draft_vocab, target.config.vocab_size)
        vocabulary = torch.arange(size) if found is None else found
        given = Given(target, vocabulary, self._drafter.default_taps(target.config))
        init.load_into(self._drafter.objective(given).module)

    def _responses(self) -> None:
        config, path = self.config, self._answers
        assert config.prompts is not None
        prompts = load_prompts(config.prompts)
        if "train" in config.stages and len(prompts) <= HELD_OUT_SEQUENCES and not path.exists():
            raise PacelineError(too_few(len(prompts)))
        with self.display.stage("responses", config.responses.tokens):
            total = write_responses(
                self._models, prompts, path, config.responses, self.display.advance, self._over(ANSWERING)
            )
        self.display.note(f"{total:,} tokens of answers in {path}")

    def _capture(self) -> None:
        config = self.config
        if config.disk == 0:
            return
        responses = self._read
        shards = Shards.open(self._captured) or Shards(self._captured, new_index(self._target, self._taps))
        shards.check(self._target.key, self._taps)
        capture = Capture(self._target, shards.index.taps)
        with self.display.stage("capture", sum(len(each.prompt) + len(each.response) for each in responses)):
            store(shards, capture, responses, config.disk, self.display.advance, self._over(CAPTURING))
        self.display.note(f"{sum(shards.index.tokens):,} tokens captured in {shards.folder}")

    def _train(self) -> Acceptance:
        plan, source = self._plan(), self._source()
        objective = self._drafter.objective(self._given(plan))
        if plan.init is not None:
            Init.open(plan.init).load_into(objective.module)
        if self.config.disk:  # the target has done its part, and the threads are free
            self._forget_target()
        set_threads(self.config.threads)
        train = replace(self.config.train, seconds=plan.seconds, tokens=plan.tokens, seed=plan.seed)
        trainer = Trainer(objective, source, train, self._checkpoint, self.config.out / "log.jsonl")
        with self.display.stage("train", None):
            return trainer.run(self.display.trained)

    def _export(self) -> None:
        plan = Plan.load(self.config.out / "run.json")
        if plan is None:
            raise PacelineError(f"there is nothing to export in {self.config.out}: train first")
        given = self._given(plan)
        objective = self._drafter.objective(given)
        load_weights(self._checkpoint, objective)
        card = Card(plan.target, plan.taps, given.target.config, plan.story)
        self._drafter.export(self.config.out / "head", card, objective)
        self.display.note(f"exported to {self.config.out / 'head'}")

    def _plan(self) -> Plan:
        """The one that this run began with, or a new one."""
        config, path = self.config, self.config.out / "run.json"
        found = Plan.load(path)
        if found is not None:
            if (found.kind, found.target_key) != (config.kind, self._target.key):
                raise PacelineError(f"{config.out} holds a run of {found.kind} for {found.target}; use another --out")
            if (found.tokens, found.seed, found.init) != (config.train.tokens, config.train.seed, config.init):
                raise PacelineError(
                    f"the run in {config.out} began with other --tokens, --seed or --init ({found.tokens}, "
                    f"{found.seed}, {found.init}); go on with those, or use another --out"
                )
            return found
        vocabulary = None if config.init is None else Init.open(config.init).vocabulary
        counts = token_counts(self._read, self._target.config.vocab_size)
        if vocabulary is None:
            vocabulary = commonest(counts, config.draft_vocab)
        left = None if config.hours is None else max(config.hours * 3600 - (time.monotonic() - self.began), 60.0)
        plan = Plan(
            config.kind, config.target, self._target.key, self._taps, tuple(vocabulary.tolist()),
            covered(counts, vocabulary), digest(self._read), left, config.train.tokens, config.train.seed,
            shlex.join(["paceline", *sys.argv[1:]]), config.init,
        )  # fmt: skip
        plan.save(path)
        return plan

    def _given(self, plan: Plan) -> Given:
        return Given(TargetWeights.read(plan.target), torch.tensor(plan.vocabulary), plan.taps)

    def _source(self) -> Source:
        if self.config.disk == 0:
            return Streamed(Capture(self._target, self._taps), self._read)
        shards = Shards.open(self._captured)
        if shards is None:
            raise PacelineError(f"nothing was captured in {self._captured}; run the stage 'capture' first")
        shards.check(self._target.key, self._taps)
        return Stored(shards, self._taps)

    def _over(self, share: float) -> Callable[[], bool]:
        hours = self.config.hours
        return lambda: hours is not None and time.monotonic() - self.began > share * hours * 3600

    @property
    def _drafter(self) -> Drafter:
        return DRAFTERS[self.config.kind]

    @property
    def _taps(self) -> tuple[int, ...]:
        return self._drafter.default_taps(self._target.config)

    @property
    def _answers(self) -> Path:
        return self.config.data / "responses.jsonl"

    @property
    def _captured(self) -> Path:
        return self.config.data / "captured"

    @property
    def _checkpoint(self) -> Path:
        return self.config.out / "checkpoint.pt"

    @cached_property
    def _read(self) -> Sequence[Response]:
        return read_responses(self._answers)

    @cached_property
    def _models(self) -> Models:
        return load_models(Options(self.config.target, method="none", threads=self.config.threads))

    @property
    def _target(self) -> LoadedModel:
        return self._models.target

    def _forget_target(self) -> None:
        del self._models
        gc.collect()
