"""What a study is asked, and what the user's files hold: known and checked before anything slow begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from paceline.bench.run import PLAIN, BenchConfig, encode
from paceline.bench.tasks import BenchPrompt, builtin_prompts, load_prompts, select
from paceline.build import Options, load_models
from paceline.errors import PacelineError
from paceline.model.config import ModelConfig
from paceline.study.measures import check_held_out, human_texts
from paceline.study.random_weights import FORMATS
from paceline.study.shapes import LADDER, PAPER, DraftShape, Shape, draft_shapes, ladder, paper_shapes, parameters
from paceline.train.memory import check_memory
from paceline.train.responses import Response, read_responses
from paceline.train.shards import Passage, Shards
from paceline.train.source import Stored
from paceline.train.trainer import TrainConfig
from paceline.weights.load import open_source
from paceline.weights.resolve import resolve

GROUPS = (PAPER, LADDER)
TEXT_TOKENS = 8_192  # of text by people, to measure accuracy on


@dataclass(frozen=True)
class StudyConfig:
    """depths: of the drafts as large as `budget_layers` layers of the target; kept: layers of the layer-pruned ones.
    groups: shapes of random weights to time. draft_vocab: commonest tokens that the drafts score (None: all). ks:
    draft lengths to time. rounds: of step times."""

    target: str
    out: Path
    data: Path | None = None
    prompts: Path | None = None
    limit: int | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    depths: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    budget_layers: int = 4
    draft_vocab: int | None = None
    ks: tuple[int, ...] = ()
    max_tokens: int = 128
    repeats: int = 3
    groups: tuple[str, ...] = GROUPS
    latency_precision: str = "int8"
    rounds: int = 15
    threads: int | None = None
    latency_only: bool = False

    def __post_init__(self) -> None:
        for group in self.groups:
            if group not in GROUPS:
                raise PacelineError(f"unknown shapes '{group}'; some of {', '.join(GROUPS)}")
        if self.latency_precision not in FORMATS:
            raise PacelineError(f"latency precision must be {' or '.join(FORMATS)}, not '{self.latency_precision}'")
        if self.latency_only:
            return
        if self.data is None:
            raise PacelineError("say where the target's answers and states are: --data DIR, or give --latency-only")
        if not self.depths and not self.kept:
            raise PacelineError("there is no draft to train: give --depths or --kept")
        if not self.ks:
            raise PacelineError("say at which draft lengths to time the drafts: --k")

    @property
    def bench(self) -> BenchConfig:
        """Of plain decoding; drafts and their lengths come later."""
        options = Options(self.target, method=PLAIN, threads=self.threads)
        return BenchConfig(options, (), self.chosen_prompts, self.max_tokens, repeats=self.repeats)

    @property
    def chosen_prompts(self) -> list[BenchPrompt]:
        every = builtin_prompts() if self.prompts is None else load_prompts(self.prompts)
        return select(every, None, self.limit)


@dataclass(frozen=True)
class Given:
    """Read when it is first asked for."""

    config: StudyConfig

    def check(self) -> None:
        """Raises PacelineError for all that can be known to fail before hours are spent."""
        if not self.captured.training:
            raise PacelineError(
                f"there are too few answers in {self.config.data} to train on: the first shard is held out, and it is "
                "the only one; answer more prompts with `paceline train draft --stages responses,capture`"
            )
        check_held_out(self.held_out)
        largest = max(parameters(shape.config) for shape in self.drafts)
        scored = self.config.draft_vocab or self.target.vocab_size
        check_memory(self.config.target, lambda *_: largest, scored, self.config.train.rows)

    @cached_property
    def target(self) -> ModelConfig:
        return open_source(resolve(self.config.target)).config

    @cached_property
    def shapes(self) -> dict[str, list[Shape]]:
        """Of random weights, by group."""
        made: dict[str, Callable[[], list[Shape]]] = {PAPER: paper_shapes, LADDER: lambda: ladder(self.target)}
        return {group: made[group]() for group in self.config.groups}

    @cached_property
    def drafts(self) -> list[DraftShape]:
        return draft_shapes(self.target, self.config.budget_layers, self.config.depths, self.config.kept)

    @cached_property
    def answers(self) -> Sequence[Response]:
        return read_responses(self._data / "responses.jsonl")

    @cached_property
    def captured(self) -> Shards:
        """What this target read. Raises PacelineError for another's."""
        folder = self._data / "captured"
        shards = Shards.open(folder)
        if shards is None:
            raise PacelineError(
                f"nothing was captured in {folder}; run `paceline train draft --stages responses,capture --data "
                f"{self._data}` first"
            )
        shards.check(self._of_target[0], ())
        return shards

    @cached_property
    def held_out(self) -> list[Passage]:
        return Stored(self.captured, ()).held_out()

    @property
    def texts(self) -> list[list[int]]:
        """Token ids of the prompts: text by people, in which the target had no part."""
        return self._of_target[1]

    @cached_property
    def _of_target(self) -> tuple[str, list[list[int]]]:
        """Its key and its tokens of the prompts; it is loaded once, and let go. Prompts that are too long are told."""
        bench = self.config.bench
        models = load_models(bench.options)
        encode(bench, models)
        texts = ["\n\n".join(message["content"] for message in prompt.messages) for prompt in bench.prompts]
        return models.target.key, human_texts(models.target, texts, TEXT_TOKENS)

    @property
    def _data(self) -> Path:
        assert self.config.data is not None
        return self.config.data
