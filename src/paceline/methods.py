"""The drafting methods by name, and how each is built. Packages add their own by an entry point.

An entry point of the group `paceline.proposers` names a function that takes `Parts` and returns a `Proposer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.engine.controller import Controller
from paceline.engine.engine import make_pool
from paceline.errors import PacelineError
from paceline.heads.eagle import EagleHead
from paceline.heads.exit import ExitHead
from paceline.heads.load import Head
from paceline.heads.medusa import MedusaHead
from paceline.heads.mtp import MtpHead
from paceline.native.chain import NativeChain
from paceline.propose.auto import AutoProposer
from paceline.propose.base import Proposer
from paceline.propose.draft_model import DraftModelProposer
from paceline.propose.eagle import EagleProposer
from paceline.propose.early_exit import EarlyExitProposer
from paceline.propose.layer_skip import LayerSkipProposer
from paceline.propose.medusa import MedusaProposer
from paceline.propose.medusa_tree import SPARSE
from paceline.propose.mtp import MtpProposer, RepeatedDepth
from paceline.propose.ngram import NgramProposer
from paceline.propose.none import NoProposer
from paceline.propose.other_vocabulary import OtherVocabularyProposer
from paceline.propose.suffix import SuffixProposer
from paceline.propose.suffix_index import SuffixHistory
from paceline.propose.vocabulary import same_vocabulary
from paceline.weights.load import LoadedModel

if TYPE_CHECKING:
    from paceline.build import Options

GROUP = "paceline.proposers"


@dataclass(frozen=True)
class Parts:
    """What a method is built from. `pool`: the target's cache, after which a head's is sized."""

    options: Options
    target: LoadedModel
    draft: LoadedModel | None
    head: Head | None
    pool: BlockPool
    controller: Controller

    def stop_below(self, source: str) -> Callable[[], float]:
        return lambda: self.controller.break_even(source)

    def head_pool(self, head: EagleHead | MtpHead, copies: int = 1) -> BlockPool:
        """As many positions as the target has, `copies` times, of the head's few layers."""
        device, pool, salt = self.target.backend.device, self.pool, f"{self.target.key}-head"
        return BlockPool(head.config, pool.blocks * copies, device, head.cache_dtype, pool.block_size, salt)


Build = Callable[[Parts], Proposer]


def _none(parts: Parts) -> Proposer:
    return NoProposer()


def _ngram(parts: Parts) -> Proposer:
    options = parts.options
    return NgramProposer(n_min=options.ngram_min, n_max=options.ngram_max, max_draft=options.k or 64)


def _suffix(parts: Parts) -> Proposer:
    kept = parts.options.suffix_history
    return SuffixProposer(SuffixHistory(kept) if kept else None)


def _draft(parts: Parts) -> Proposer:
    draft, target, options = parts.draft, parts.target, parts.options
    if draft is None:
        raise PacelineError("method 'draft' needs a draft model: give --draft (draft=...)")
    pool = make_pool(draft.config, draft.backend, draft.key, options.pool_share)
    stop_below, width = parts.stop_below("draft"), target.config.vocab_size
    if not same_vocabulary(target, draft):
        return OtherVocabularyProposer(
            draft, pool, target_tokenizer=target.tokenizer, vocab_size=target.vocab_size, width=width,
            stop_below=stop_below, prefill_chunk=options.engine.prefill_chunk,
        )  # fmt: skip
    return DraftModelProposer(
        draft, pool, vocab_size=target.vocab_size, width=width, stop_below=stop_below, shape=options.shape,
        prefill_chunk=options.engine.prefill_chunk,
    )  # fmt: skip


def _head(parts: Parts) -> Proposer:
    """The method of whatever head was given."""
    head, target, shape = parts.head, parts.target, parts.options.shape
    vocab_size, decoder = target.vocab_size, target.decoder
    if isinstance(head, EagleHead):
        stop_below = parts.stop_below("eagle")
        return EagleProposer(
            head, decoder, parts.head_pool(head), vocab_size=vocab_size, stop_below=stop_below, shape=shape,
            chain=NativeChain.of(head, decoder, vocab_size),
        )  # fmt: skip
    if isinstance(head, MedusaHead):
        return MedusaProposer(
            head, vocab_size=vocab_size, width=target.config.vocab_size, target_output=decoder.head,
            shape=shape if parts.options.tree else SPARSE,
        )  # fmt: skip
    if isinstance(head, MtpHead):
        stop_below, depths = parts.stop_below("mtp"), len(head.depths)
        pool = parts.head_pool(head, depths)
        if depths == 1:
            once = RepeatedDepth(head)
            return EagleProposer(
                once, decoder, pool, vocab_size=vocab_size, stop_below=stop_below, shape=shape, name="mtp"
            )
        return MtpProposer(head, decoder, pool, vocab_size=vocab_size, stop_below=stop_below, shape=shape)
    if isinstance(head, ExitHead):
        return _exit(parts, head.layers, head.norm)
    raise PacelineError("methods eagle, medusa and mtp need a head: give --head (head=...)")


def _head_named(name: str) -> Build:
    def build(parts: Parts) -> Proposer:
        proposer = _head(parts)
        if proposer.name != name:
            raise PacelineError(
                f"'{parts.options.head}' is a head for method '{proposer.name}', not '{name}'; use that method"
            )
        return proposer

    return build


def _swift(parts: Parts) -> Proposer:
    target = parts.target
    return LayerSkipProposer(
        target.decoder, vocab_size=target.vocab_size, width=target.config.vocab_size,
        stop_below=parts.stop_below("swift"),
    )  # fmt: skip


def _early_exit(parts: Parts) -> Proposer:
    target, layers = parts.target, parts.options.exit_layers
    every = target.config.num_layers
    if layers is not None and not 1 <= layers < every:
        raise PacelineError(f"exit_layers must be between 1 and {every - 1} for this model, not {layers}")
    if isinstance(parts.head, ExitHead):
        return _exit(parts, layers or parts.head.layers, parts.head.norm)
    return _exit(parts, layers or max(1, every // 2))


def _exit(parts: Parts, layers: int, norm: Tensor | None = None) -> Proposer:
    target = parts.target
    return EarlyExitProposer(
        target.decoder, layers, norm, vocab_size=target.vocab_size, width=target.config.vocab_size,
        stop_below=parts.stop_below("early-exit"),
    )  # fmt: skip


def _auto(parts: Parts) -> Proposer:
    heavy = _head(parts) if parts.head is not None else _draft(parts) if parts.draft is not None else None
    return AutoProposer([_suffix(parts), _ngram(parts)], heavy, parts.controller)


BUILT_IN: dict[str, Build] = {
    "none": _none,
    "ngram": _ngram,
    "suffix": _suffix,
    "draft": _draft,
    "eagle": _head_named("eagle"),
    "medusa": _head_named("medusa"),
    "mtp": _head_named("mtp"),
    "head": _head,
    "swift": _swift,
    "early-exit": _early_exit,
    "auto": _auto,
}
USES_DRAFT = ("draft", "auto")
USES_HEAD = ("eagle", "medusa", "mtp", "head", "early-exit", "auto")
USES_SHIPPED_HEAD = ("eagle", "head", "auto")


def available_methods(draft: str | None, head: str | None, layers: int | None = None) -> list[str]:
    """The built-in methods that can run with what was given, `none` first; of the heads' methods only `head`.

    layers: the target's, if known. Self-speculation needs some to leave out.
    """
    missing = {"eagle", "medusa", "mtp"} | (set() if draft else {"draft"}) | (set() if head else {"head"})
    missing |= {"swift", "early-exit"} if layers is not None and layers < 4 else set()
    return [name for name in BUILT_IN if name not in missing]


def known_methods() -> list[str]:
    return [*BUILT_IN, *(point.name for point in entry_points(group=GROUP) if point.name not in BUILT_IN)]


def build_proposer(name: str, parts: Parts) -> Proposer:
    """Raises PacelineError for a name that nothing was registered under."""
    if name in BUILT_IN:
        return BUILT_IN[name](parts)
    for point in entry_points(group=GROUP):
        if point.name == name:
            build: Build = point.load()
            return build(parts)
    raise PacelineError(f"unknown method '{name}'; one of {', '.join(known_methods())}")
