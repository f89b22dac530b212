"""The draft study from shapes to verdicts. Every step that is done is remembered in the study's folder."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from paceline.bench.run import PLAIN
from paceline.build import load_models
from paceline.device import bound_product_cache, has_kernels, leave_threads_to_kernels, set_threads
from paceline.native.interface import kernels
from paceline.study.findings import TrainedDraft, draft_findings, latency_findings
from paceline.study.given import Given, StudyConfig
from paceline.study.latency import Stepper, TimedShape, step_seconds, time_shapes
from paceline.study.measures import Measures, measure
from paceline.study.plot import MISSING, can_plot, plot
from paceline.study.remembered import Record, remembered
from paceline.study.report import Study, provenance
from paceline.study.shapes import DraftShape, Shape, parameters
from paceline.study.throughput import Rate, time_drafts
from paceline.study.training import School, model_folder
from paceline.train.acceptance import Acceptance
from paceline.train.disk import make_folder, write_json, write_whole
from paceline.train.plan import digest
from paceline.train.source import Stored
from paceline.train.target import TargetWeights
from paceline.train.trainer import Position
from paceline.train.vocabulary import commonest, token_counts
from paceline.weights.load import LoadedModel, load_model


class Display(Protocol):
    """What shows a study's progress."""

    def stage(self, name: str) -> AbstractContextManager[Any]: ...
    def moved(self, done: int, total: int) -> None: ...
    def trained(self, progress: float, position: Position, loss: float, acceptance: Acceptance | None) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass
class StudyRun:
    """Steps in order; what was found before is read from the study's folder. busy: cores that others used, by step."""

    config: StudyConfig
    display: Display
    command: str
    busy: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.given, self.out = Given(self.config), self.config.out

    def go(self) -> Study:
        """Writes study.json, study.md and study.png. Raises PacelineError for what the user can mend, before anything
        slow begins where that can be known."""
        bound_product_cache()
        kernels()  # raises where there are none
        if not self.config.latency_only:
            self.given.check()
        make_folder(self.out)
        threads = set_threads(self.config.threads)
        _leave_threads()
        shapes = self._time_shapes()
        drafts, target_seconds, noted = ([], None, []) if self.config.latency_only else self._drafts()
        asked = {name: str(each) if isinstance(each, Path) else each for name, each in asdict(self.config).items()}
        source = provenance(self.command, asked | {"threads": threads}, self.busy, noted)
        study = Study(source, shapes, drafts, target_seconds, latency_findings(shapes) + draft_findings(drafts))
        self._write(study)
        return study

    def _time_shapes(self) -> list[TimedShape]:
        """Random weights, a group at a time: one takes gigabytes."""
        found = []
        for group, shapes in self.given.shapes.items():
            asked = {"shapes": [asdict(shape) for shape in shapes], "precision": self.config.latency_precision}
            record = self._timed(f"latency-{group}", asked | self._timing, partial(self._time_group, shapes))
            found += [TimedShape(**each) for each in record.found]
            gc.collect()
        return found

    def _time_group(self, shapes: Sequence[Shape]) -> list[dict[str, Any]]:
        return [asdict(each) for each in time_shapes(shapes, self.config.latency_precision, self.config.rounds)]

    def _drafts(self) -> tuple[list[TrainedDraft], float, list[str]]:
        """Trained, measured and timed; seconds of a step of the target; warnings of the benchmarks."""
        trained = self._train()
        measured = {shape.name: self._measure(shape, trained[shape.name]) for shape in self.given.drafts}
        dates = {name: record.date for name, record in trained.items()}  # tell a draft from one trained anew
        steps = self._timed("latency-drafts", {"drafts": dates} | self._timing, self._time_drafts).found
        rates, noted = self._throughput(dates)
        drafts = [
            TrainedDraft(
                shape.name, shape.family, shape.config.num_layers, shape.config.hidden_size,
                shape.config.intermediate_size, parameters(shape.config), steps[shape.name],
                trained[shape.name].found["tokens"], measured[shape.name], tuple(rates[shape.name]),
            )
            for shape in self.given.drafts
        ]  # fmt: skip
        return drafts, steps[PLAIN], noted

    def _train(self) -> dict[str, Record]:
        set_threads(self.config.threads)  # the training is PyTorch's
        config, answers = self.config, self.given.answers
        target = TargetWeights.read(config.target)
        size = target.config.vocab_size
        vocabulary = commonest(token_counts(answers, size), config.draft_vocab or size)
        source = Stored(self.given.captured, ())
        school = School(config.target, target, vocabulary, source, digest(answers), config.train)
        found = {}
        for shape in self.given.drafts:
            with self.display.stage(f"train {shape.name}"):
                found[shape.name] = school.train(shape, self._folder(shape), self.display.trained)
        _leave_threads()
        return found

    def _measure(self, shape: DraftShape, trained: Record) -> Measures:
        asked = {"trained": trained.date, "text": _digest(self.given.texts)}
        with self.display.stage(f"measure {shape.name}"):
            found = remembered(self._folder(shape) / "measured.json", asked, partial(self._measured, shape)).found
        self.display.note(
            f"{shape.name}: acceptance length {found['acceptance_length']:.2f}, perplexity {found['perplexity']:.1f}, "
            f"accuracy {found['accuracy']:.1%}"
        )
        return Measures(**found)

    def _measured(self, shape: DraftShape) -> dict[str, Any]:
        return asdict(measure(self._load(shape), self.given.held_out, self.given.texts))

    def _time_drafts(self) -> dict[str, float]:
        """Seconds of a step of each draft, and of the target under `none`, all in turn."""
        models = {PLAIN: Stepper.of(load_models(self.config.bench.options).target)}
        models |= {shape.name: Stepper.of(self._load(shape)) for shape in self.given.drafts}
        return step_seconds(models, self.config.rounds)

    def _throughput(self, dates: Mapping[str, str]) -> tuple[dict[str, list[Rate]], list[str]]:
        bench = self.config.bench
        folders = {shape.name: model_folder(self._folder(shape)) for shape in self.given.drafts}
        asked = {"drafts": dict(dates), "prompts": _digest(bench.prompts), "max_tokens": bench.max_tokens}
        asked |= {"repeats": bench.repeats, "threads": self.config.threads}
        rates: dict[str, list[Rate]] = {name: [] for name in folders}
        noted: list[str] = []
        for k in self.config.ks:
            time = partial(time_drafts, bench, k, folders, self.display.moved)
            found = self._timed(f"throughput-k{k}", asked | {"k": k}, time).found
            noted += found["warnings"]
            for name, each in rates.items():
                each.append(Rate(**found["rates"][name]))
        return rates, noted

    def _timed(self, step: str, asked: Mapping[str, Any], find: Any) -> Record:
        """A step whose figures others' work would spoil."""
        with self.display.stage(step):
            record = remembered(self.out / f"{step}.json", asked, find)
        self.busy[step] = record.other_cores
        return record

    @property
    def _timing(self) -> dict[str, Any]:
        return {"rounds": self.config.rounds, "threads": self.config.threads}

    def _load(self, shape: DraftShape) -> LoadedModel:
        """As a draft is loaded for its target."""
        return load_model(str(model_folder(self._folder(shape))), as_draft=True)

    def _folder(self, shape: DraftShape) -> Path:
        return self.out / "drafts" / shape.name

    def _write(self, study: Study) -> None:
        write_json(self.out / "study.json", study.as_json(), indent=1)
        write_whole(self.out / "study.md", lambda path: path.write_text(study.as_markdown(), encoding="utf-8"))
        if can_plot():
            plot(study, self.out / "study.png")
        else:
            self.display.note(MISSING)


def _leave_threads() -> None:
    if has_kernels():
        leave_threads_to_kernels()


def _digest(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()[:16]
