"""From a user's choices to an engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.device import Precision, set_threads
from paceline.engine.controller import Controller
from paceline.engine.engine import Engine, EngineConfig, make_pool
from paceline.errors import PacelineError
from paceline.propose.base import Proposer
from paceline.propose.draft_model import DraftModelProposer
from paceline.propose.ngram import NgramProposer
from paceline.propose.none import NoProposer
from paceline.propose.vocabulary import require_same_vocabulary
from paceline.weights.load import LoadedModel, load_model

METHODS = ("none", "ngram", "draft")


@dataclass(frozen=True)
class Options:
    """model, draft: a preset name, directory, .gguf file or hub id. method: none, ngram or draft; by default draft when
    there is one, else ngram. k: draft length; by default it follows measured cost and acceptance. draft_vocab: the
    draft scores only its first so many ids and the special ones. threads: by default what the container allows."""

    model: str
    draft: str | None = None
    method: str | None = None
    k: int | None = None
    device: str | None = None
    precision: Precision = "auto"
    draft_precision: Precision | None = None
    draft_vocab: int | None = None
    threads: int | None = None
    ngram_min: int = 2
    ngram_max: int = 16
    progress: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise PacelineError(f"unknown method '{self.method}'; one of {', '.join(METHODS)}")
        if self.method == "draft" and self.draft is None:
            raise PacelineError("method 'draft' needs a draft model: give --draft (draft=...)")
        if self.k is not None and self.k < 1:
            raise PacelineError(f"k must be at least 1, not {self.k}; for plain decoding use method 'none'")
        if not 1 <= self.ngram_min <= self.ngram_max:
            raise PacelineError(
                f"ngram_min must be at least 1 and at most ngram_max, not {self.ngram_min} and {self.ngram_max}"
            )

    @property
    def chosen_method(self) -> str:
        return self.method or ("draft" if self.draft is not None else "ngram")


@dataclass
class Models:
    """Loaded weights, shared by the engines of one process that differ only in method (and are stepped in turn)."""

    target: LoadedModel
    draft: LoadedModel | None = None


def load_models(options: Options) -> Models:
    set_threads(options.threads)
    target = load_model(options.model, device=options.device, precision=options.precision, progress=options.progress)
    if options.draft is None or options.chosen_method != "draft":
        return Models(target)
    draft = load_model(
        options.draft,
        device=options.device,
        precision=options.draft_precision or _draft_precision(target, options),
        head_vocab=options.draft_vocab,
        progress=options.progress,
    )
    require_same_vocabulary(target, draft)
    return Models(target, draft)


def build_engine(options: Options, models: Models) -> Engine:
    """A fresh engine, with its own cache, over weights that are already loaded."""
    target = models.target
    share = _pool_share(options)
    pool = make_pool(target.config, target.backend, target.key, share)
    controller = Controller(fixed=options.k)
    return Engine(target, _proposer(options, models, controller), pool, controller, options.engine)


def _pool_share(options: Options) -> EngineConfig:
    """A draft's cache comes out of the same budget as the target's: half each."""
    budget = options.engine.cache_bytes
    if budget is None or options.chosen_method != "draft":
        return options.engine
    return replace(options.engine, cache_bytes=budget // 2)


def _draft_precision(target: LoadedModel, options: Options) -> Precision:
    """A draft's rounding costs acceptance, never exactness: beside an int8 target, the quickest there is."""
    return "int4" if target.backend.int8 else options.precision


def _proposer(options: Options, models: Models, controller: Controller) -> Proposer:
    method = options.chosen_method
    if method == "none":
        return NoProposer()
    if method == "ngram":
        longest = options.k or 64
        return NgramProposer(n_min=options.ngram_min, n_max=options.ngram_max, max_draft=longest)
    draft = models.draft
    if draft is None:
        raise PacelineError("method 'draft' needs a draft model: give --draft (draft=...)")
    pool = make_pool(draft.config, draft.backend, draft.key, _pool_share(options))
    return DraftModelProposer(
        draft,
        pool,
        vocab_size=models.target.vocab_size,
        width=models.target.config.vocab_size,
        stop_below=lambda: controller.break_even("draft"),
        prefill_chunk=options.engine.prefill_chunk,
    )
