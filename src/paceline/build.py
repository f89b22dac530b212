"""From a user's choices to an engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.device import Precision, leave_threads_to_kernels, set_threads
from paceline.engine.controller import Controller
from paceline.engine.engine import Engine, EngineConfig, make_pool
from paceline.errors import PacelineError
from paceline.heads.check import warn_if_useless
from paceline.heads.load import Head, load_head
from paceline.heads.shipped import shipped_head
from paceline.methods import USES_DRAFT, USES_HEAD, USES_SHIPPED_HEAD, Parts, build_proposer, known_methods
from paceline.propose.rollout import CHAIN, Shape
from paceline.weights.load import LoadedModel, load_model

NO_HEAD = "none"


@dataclass(frozen=True)
class Options:
    """What to run, and how to draft for it.

    model, draft: a preset name, directory, .gguf file or hub id; head: a directory or hub id, "none" to do without the
    one that comes with the package for some models. method: see `methods.py`; auto, the default, chooses for each
    request and step among suffix, n-gram, and the head or draft that was given.
    k: draft length; by default it follows measured cost and acceptance. tree: WIDTHxDEPTHxNODES, for methods that can
    draft trees. draft_vocab: the draft scores only its first so many ids and the special ones. threads: by default
    what the container allows. exit_layers: layers that early exit drafts with (default: half). suffix_history: tokens
    of past answers that suffix decoding remembers for each tenant.
    """

    model: str
    draft: str | None = None
    head: str | None = None
    method: str | None = None
    k: int | None = None
    tree: str | None = None
    device: str | None = None
    precision: Precision = "auto"
    draft_precision: Precision | None = None
    draft_vocab: int | None = None
    threads: int | None = None
    ngram_min: int = 2
    ngram_max: int = 16
    exit_layers: int | None = None
    suffix_history: int = 1_000_000
    progress: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in known_methods():
            raise PacelineError(f"unknown method '{self.method}'; one of {', '.join(known_methods())}")
        if self.method == "draft" and self.draft is None:
            raise PacelineError("method 'draft' needs a draft model: give --draft (draft=...)")
        if self.method in ("eagle", "medusa", "mtp", "head") and self.used_head is None:
            raise PacelineError(f"method '{self.method}' needs a head: give --head (head=...)")
        if self.k is not None and (not isinstance(self.k, int) or self.k < 1):
            raise PacelineError(f"k must be a whole number of at least 1, not {self.k}; plain decoding is method none")
        for name in ("model", "draft", "head"):
            if getattr(self, name) == "":
                raise PacelineError(f"{name} is empty; give a name, a directory or a hub id")
        if self.suffix_history != 0 and not 1_000 <= self.suffix_history <= 500_000_000:
            raise PacelineError(f"suffix_history must be 0 or 1,000 to 500,000,000 tokens, not {self.suffix_history}")
        if not 1 <= self.ngram_min <= self.ngram_max:
            raise PacelineError(
                f"ngram_min must be at least 1 and at most ngram_max, not {self.ngram_min} and {self.ngram_max}"
            )
        parse_tree(self.tree, self.k)

    @property
    def chosen_method(self) -> str:
        return self.method or "auto"

    @property
    def known_head(self) -> str | None:
        """The head that was given, or the one that comes with the package; a draft model that was given goes first."""
        if self.head is not None:
            return None if self.head == NO_HEAD else self.head
        return shipped_head(self.model) if self.draft is None else None

    @property
    def used_head(self) -> str | None:
        """The head, where the method is one that reads it; those that come with the package are EAGLE heads."""
        methods = USES_SHIPPED_HEAD if self.head is None else USES_HEAD
        return self.known_head if self.chosen_method in methods else None

    @property
    def head_name(self) -> str | None:
        """The head in use, as a report tells it."""
        return self.used_head and (self.head or "the one that comes with Paceline")

    @property
    def used_draft(self) -> str | None:
        """The draft model, where the method is one that runs it; `auto` prefers a head."""
        return self.draft if self.chosen_method in USES_DRAFT and self.used_head is None else None

    @property
    def shape(self) -> Shape:
        return parse_tree(self.tree, self.k)

    @property
    def pool_share(self) -> EngineConfig:
        """A draft's cache comes out of the same budget as the target's: half each."""
        budget = self.engine.cache_bytes
        if budget is None or self.used_draft is None:
            return self.engine
        return replace(self.engine, cache_bytes=budget // 2)


def parse_tree(text: str | None, k: int | None = None) -> Shape:
    """4x6x32 is width 4, depth 6, at most 32 nodes; None is a chain, of `k` if given. Raises PacelineError."""
    if text is None:
        return CHAIN if k is None else Shape(depth=k, nodes=k)
    try:
        width, depth, nodes = (int(part) for part in str(text).lower().split("x"))
    except ValueError:
        raise PacelineError(f"tree must be WIDTHxDEPTHxNODES, for example 4x6x32, not '{text}'") from None
    if min(width, depth, nodes) < 1 or nodes < depth:
        raise PacelineError(f"tree '{text}': width, depth and nodes must be at least 1, and nodes at least the depth")
    return Shape(width, depth, nodes)


@dataclass
class Models:
    """Loaded weights, shared by the engines of one process that differ only in method (and are stepped in turn)."""

    target: LoadedModel
    draft: LoadedModel | None = None
    head: Head | None = None


def load_models(options: Options, target: LoadedModel | None = None) -> Models:
    """What the options' method needs; a target that is already loaded is taken as it is."""
    set_threads(options.threads)
    if target is None:
        target = load_model(
            options.model, device=options.device, precision=options.precision, progress=options.progress
        )
    _check_depth(options, target)
    models = Models(target)
    if options.used_draft is not None:
        models.draft = load_model(
            options.used_draft,
            device=options.device,
            precision=options.draft_precision or ("auto" if target.backend.row_invariant else options.precision),
            as_draft=True,
            head_vocab=options.draft_vocab,
            progress=options.progress,
        )
    if target.backend.native and (models.draft is None or models.draft.backend.native):
        leave_threads_to_kernels()
    if options.used_head is not None:
        models.head = load_head(options.used_head, target.config, target.backend)
        warn_if_useless(options.used_head, models.head, target)
    return models


def build_engine(options: Options, models: Models) -> Engine:
    """A fresh engine, with its own cache, over weights that are already loaded."""
    target = models.target
    pool = make_pool(target.config, target.backend, target.key, options.pool_share)
    looks = target.backend.device.type == "cpu"
    controller = Controller(fixed=options.k, nodes=max(options.shape.nodes, 64), looks=looks)
    parts = Parts(options, target, models.draft, models.head, pool, controller)
    return Engine(target, build_proposer(options.chosen_method, parts), pool, controller, options.engine)


def _check_depth(options: Options, target: LoadedModel) -> None:
    deepest = max(options.k or 0, options.shape.depth if options.tree else 0)
    if deepest >= target.config.max_positions:
        raise PacelineError(
            f"drafts of {deepest} tokens are deeper than the context of {target.name} "
            f"({target.config.max_positions} positions); lower k or the tree's depth"
        )
