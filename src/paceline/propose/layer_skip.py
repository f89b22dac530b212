"""SWIFT: the target without some of its sublayers drafts for it (Xia et al. 2025, arXiv 2410.06916)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.pool import CacheFull
from paceline.device import send
from paceline.errors import PacelineError
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder, Sublayer
from paceline.propose.base import Budget, Needs, Proposer
from paceline.propose.layer_search import SearchSettings, SetSearch
from paceline.propose.rollout import CHAIN, Shape
from paceline.propose.self_draft import Part, SelfDraft, cache_of
from paceline.types import Committed, Draft, View


class LayerSkipProposer(Proposer):
    """Drafts with all sublayers but those of one set: `skip`, or, where that is None, one that is found while serving.

    While it searches, every `interval`-th step that drafts tries one set: the last `window` tokens of one answer are
    replayed without it in one forward, and what the draft would have said is compared with what the target did say.
    So a search costs at most `search.limit` forwards of `window` rows of what the sets leave, and never more than one
    in `interval` steps. It begins with every second layer skipped, and never skips the first or the last one.

    One set serves all requests: a step drafts for all of them in one forward, which a set each would end. When
    acceptance falls well under what the set has shown (other texts came), a new search begins from that set.
    `vocab_size`, `width`, `stop_below`: see `Rollout`. Raises PacelineError for sublayers that the target lacks.
    """

    name = "swift"

    def __init__(
        self, decoder: Decoder, *, vocab_size: int, width: int, stop_below: Callable[[], float],
        skip: frozenset[Sublayer] | None = None, search: SearchSettings | None = None, interval: int = 8,
        window: int = 32, shape: Shape = CHAIN,
    ) -> None:  # fmt: skip
        if interval < 1 or window < 1:
            raise PacelineError(f"interval and window of the layer search must be at least 1, not {interval}, {window}")
        self.decoder, self.vocab_size = decoder, vocab_size
        self.interval, self.window = interval, window
        self.settings = search or SearchSettings()
        self.sublayers = searchable(decoder.config)
        if skip is None and not self.sublayers:
            raise PacelineError(
                f"the target has {decoder.config.num_layers} layers, and the search never skips the first or the last; "
                "give the set to skip, or choose another method"
            )
        self.needs = Needs(runs_target_layers=True, trees=shape.width > 1)
        self.drafter = SelfDraft(decoder, vocab_size=vocab_size, width=width, stop_below=stop_below, shape=shape)
        self.search: SetSearch | None = None
        if skip is None:
            self._begin(every_second(self.sublayers))
        else:
            self.part = Part(skip=checked(skip, decoder.config))
        self.steps = 0

    @property
    def settled(self) -> bool:
        return self.search is None or self.search.done

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        drafting = [view for view, budget in zip(views, budgets, strict=True) if budget.depth > 0]
        if drafting and self.search is not None and not self.search.done:
            self.steps += 1
            if self.steps % self.interval == 0:
                self._try_one(self.search, drafting)
        return self.drafter.draft(views, budgets, self.part)

    def observe(self, view: View, committed: Committed) -> None:
        verdict = committed.verdict
        if verdict is None or verdict.depth == 0 or self.search is None or not self.search.done:
            return
        self.watch.learn(verdict.accepted / min(verdict.depth, verdict.accepted + 1))
        if self.watch.fell:
            self._begin(self.search.best)

    def _begin(self, start: Tensor) -> None:
        self.search = SetSearch(savings(self.decoder.config, self.sublayers), start, self.settings)
        self.watch = Watch()
        self.part = Part(skip=self._named(start))

    def _try_one(self, search: SetSearch, views: Sequence[View]) -> None:
        """Score one set on one of the answers that are long enough, each in turn."""
        ready = [view for view in views if len(view.tokens) - view.prompt_length >= self.window]
        if not ready:
            return
        view, tried = ready[len(search.tried) % len(ready)], search.ask()
        try:
            agreement = replay(self.decoder, view, Part(skip=self._named(tried)), self.window, self.vocab_size)
        except CacheFull:
            return
        search.tell(tried, agreement)
        self.part = Part(skip=self._named(search.best))

    def _named(self, chosen: Tensor) -> frozenset[Sublayer]:
        return frozenset(sublayer for sublayer, is_in in zip(self.sublayers, chosen.tolist(), strict=True) if is_in)


def replay(decoder: Decoder, view: View, part: Part, window: int, vocab_size: int) -> float:
    """How often `part` would have said the last `window` tokens of an answer: share of rows whose argmax is the token
    that came.

    Each row sees committed rows before the window and the part's own rows within it, as a draft of that length would.
    Raises CacheFull if the pool cannot hold the window a second time.
    """
    start = len(view.tokens) - 1 - window
    tokens = send(torch.tensor(view.tokens[start:]), decoder.device)
    again = cache_of(view).fork()
    try:
        again.truncate(start)
        again.append(window)  # on copies of the blocks that the window lies in
        picked = part.logits(decoder, [Span(again, 0, window, start)], tokens[:-1])[:, :vocab_size].argmax(dim=1)
        return float((picked == tokens[1:]).double().mean())
    finally:
        again.free()


@dataclass
class Watch:
    """Acceptance rates of single drafts since a search ended, to notice when the texts change."""

    LEAST = 500  # drafts of evidence; about as many count in `recent`, which chance then moves by some 0.03
    FADING = 0.005
    DROP = 0.15

    count: int = 0
    usual: float = 0.0
    recent: float = 0.0

    def learn(self, rate: float) -> None:
        self.count += 1
        self.usual += (rate - self.usual) / self.count
        self.recent += (rate - self.recent) * max(self.FADING, 1 / self.count)

    @property
    def fell(self) -> bool:
        return self.count >= self.LEAST and self.recent < self.usual - self.DROP


def searchable(config: ModelConfig) -> list[Sublayer]:
    """All sublayers of all layers but the first and the last."""
    inner = range(1, config.num_layers - 1)
    return [sublayer for layer in inner for sublayer in ((layer, "attention"), (layer, "mlp"))]


def every_second(sublayers: Sequence[Sublayer]) -> Tensor:
    return torch.tensor([layer % 2 == 1 for layer, _ in sublayers])


def savings(config: ModelConfig, sublayers: Sequence[Sublayer]) -> Tensor:
    """Share of the target's weights, output head included, in each sublayer: what one row reads, hence its time."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    weights = {
        "attention": config.hidden_size * config.head_dim * heads,
        "mlp": config.hidden_size * config.intermediate_size * (3 if config.gated_mlp else 2),
    }
    whole = config.num_layers * sum(weights.values()) + config.vocab_size * config.hidden_size
    return torch.tensor([weights[kind] / whole for _, kind in sublayers], dtype=torch.float64)


def checked(skip: frozenset[Sublayer], config: ModelConfig) -> frozenset[Sublayer]:
    for layer, kind in sorted(skip):
        if not 0 <= layer < config.num_layers or kind not in ("attention", "mlp"):
            raise PacelineError(
                f"the target has no sublayer ({layer}, {kind!r}) to skip: layers are 0 to {config.num_layers - 1}, "
                "each with 'attention' and 'mlp'"
            )
    return skip
