"""A draft model with another vocabulary than the target's (Timor et al. 2025, arXiv 2502.05202)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.device import send
from paceline.errors import PacelineError
from paceline.propose.base import Budget
from paceline.propose.draft_model import DraftModelProposer
from paceline.propose.retokenised import RetokenisedText, RetokenisedView
from paceline.propose.rollout import CHAIN, Growth, Level, Rollout, Shape
from paceline.propose.translation import NOT_SHARED, Translation, common_prefix
from paceline.text.tokenizer import Tokenizer
from paceline.types import NO_DRAFT, Committed, Draft, View
from paceline.weights.load import LoadedModel

Mode = Literal["tokens", "strings", "auto"]


class OtherVocabularyProposer(DraftModelProposer):
    """The draft's cache follows the text, tokenised by the draft's tokenizer.

    mode "tokens" (token-level intersection): only tokens that both vocabularies have are drafted, from the draft's
    distribution over them, so q is truthful at any temperature. "strings" (string-level exact match): the draft writes
    text in its own tokens, greedily, and what the target's tokenizer makes of it is a deterministic draft; tokens that
    only the target has can come out.

    "auto": strings for greedy and coupled requests, tokens under rejection and where the request moves logits
    (penalties, bias, grammar), which the draft can then follow. SmolLM2 135M for Qwen2.5-Coder 1.5B, six short chats,
    tokens emitted a step, "tokens" / "strings": greedy 1.91 / 2.03 (k = 2), 2.42 / 2.68 (4), 2.51 / 2.87 (6); at k = 3
    coupled 1.93 / 2.14 (temperature 0.8) and 1.94 / 2.03 (1.0), rejection 2.09 / 2.12 and 1.96 / 1.98, a draw.
    """

    def __init__(
        self, model: LoadedModel, pool: BlockPool, *, target_tokenizer: Tokenizer, vocab_size: int, width: int,
        stop_below: Callable[[], float], mode: Mode = "auto", shape: Shape = CHAIN, prefill_chunk: int = 256,
    ) -> None:  # fmt: skip
        """vocab_size, width, stop_below: see `Rollout`. shape: of drafts of shared tokens; written text is a chain.

        Raises PacelineError if the two have no token in common.
        """
        super().__init__(
            model, pool, vocab_size=vocab_size, width=width, stop_below=stop_below, shape=shape,
            prefill_chunk=prefill_chunk,
        )  # fmt: skip
        self.mode = mode
        self.translation = Translation(
            target_tokenizer, model.tokenizer, target_size=vocab_size, draft_size=model.config.vocab_size
        )
        columns, ids = _shared_columns(model, self.translation)
        if not len(ids):
            raise PacelineError(
                f"{model.name} and the target have no token in common, so it cannot draft; take another draft model"
            )
        self.columns = columns.to(self.decoder.device)  # of the draft's logits
        self.rollout = Rollout(
            vocab_size=vocab_size, width=width, stop_below=stop_below, looks=self.rollout.looks,
            ids=ids.to(self.decoder.device),
        )  # fmt: skip
        self.to_draft = self.translation.to_draft.to(self.decoder.device)
        self.own_rollout = Rollout(
            vocab_size=model.vocab_size, width=model.config.vocab_size, stop_below=stop_below,
            looks=self.rollout.looks, ids=self.decoder.head_ids,
        )  # fmt: skip
        self._texts: dict[int, RetokenisedText] = {}

    def context(self, view: View) -> Sequence[int]:
        return self._texts[view.id].ids

    def room(self, view: View) -> int:
        """The rest is taken to need as many draft ids a token as the prompt did; more blocks are taken if it does not
        suffice."""
        read, own = len(view.tokens), len(self.context(view))
        return own + -(-max(view.room - read, 0) * max(own, read) // max(read, 1))

    def open(self, view: View) -> int:
        self._texts[view.id] = RetokenisedText(self.translation)
        self._texts[view.id].follow(view.tokens)
        committed = super().open(view)
        if view.id not in self._states:
            del self._texts[view.id]
        return committed

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        for view in views:
            self._follow(view)
        self._catch_up(views, budgets)
        started = [self._start(view, budget) for view, budget in zip(views, budgets, strict=True)]
        growths = [growth for growth in started if growth is not None]
        if growths:
            self._run(growths, self._feed_new_tokens(growths))
        return [
            NO_DRAFT if growth is None else self._draft(view, growth, budget)
            for view, growth, budget in zip(views, started, budgets, strict=True)
        ]

    def observe(self, view: View, committed: Committed) -> None:
        """Keep the drafted rows whose ids are what the text now reads as."""
        state = self._states.get(view.id)
        if state is None or committed.verdict is None:
            return
        growth, state.growth = state.growth, None
        length = state.cache.length
        self._follow(view)
        if growth is None or state.cache.length < length:
            return
        slots, ids = self._fed(view, growth, committed)
        own = self.context(view)
        kept = common_prefix(ids, own[length:])
        state.cache.commit(slots[:kept], own[: length + kept])

    def close(self, view: View) -> None:
        super().close(view)
        self._texts.pop(view.id, None)

    def growth(self, view: View, budget: Budget) -> Growth:
        if not self._writes(view):
            return super().growth(view, budget)
        return Growth(RetokenisedView(view, self._texts[view.id].ids), budget)

    def _writes(self, view: View) -> bool:
        suits = view.params.coupled and not view.params.adjusts_logits
        return self.mode == "strings" or (self.mode == "auto" and suits)

    def _follow(self, view: View) -> None:
        state = self._states.get(view.id)
        if state is not None:
            kept = self._texts[view.id].follow(view.tokens)
            state.cache.truncate(min(state.cache.length, kept))

    def _start(self, view: View, budget: Budget) -> Growth | None:
        text = self._texts.get(view.id)
        if text is None or not text.ids or text.inside_a_character:
            return None
        return super()._start(view, budget)

    def _run(self, growths: Sequence[Growth], hidden: Tensor) -> None:
        writing = [isinstance(growth.view, RetokenisedView) for growth in growths]
        for own_words in (False, True):
            rows = [row for row, writes in enumerate(writing) if writes == own_words]
            if not rows:
                continue
            group = [growths[row] for row in rows]
            logits = self.decoder.logits(hidden[send(torch.tensor(rows), hidden.device)])
            if own_words:
                self.own_rollout.run(group, logits, self._feed_level)
            else:
                self.rollout.run(group, logits[:, self.columns], self._feed_shared)

    def _feed_shared(self, level: Level) -> Tensor:
        spans, tokens = self._rows(level)
        own = self.to_draft[tokens].clamp_min(0)  # a request that allows no shared token drafts another in vain
        return self.decoder.logits(self._forward(spans, own))[:, self.columns]

    def _draft(self, view: View, growth: Growth, budget: Budget) -> Draft:
        """The draft in the target's tokens."""
        draft = growth.finish()
        if not isinstance(growth.view, RetokenisedView) or not draft.size:
            return draft
        drafted = draft.tokens.tolist()
        most = min(budget.depth, budget.nodes)
        tokens = self.translation.target_ids(view.tokens, drafted)[:most]
        if not tokens:
            return NO_DRAFT
        confidence = None
        if draft.confidence is not None:
            confidence = self.translation.spread(draft.confidence, drafted, tokens)
        return Draft(torch.tensor(tokens), confidence=confidence)

    def _fed(self, view: View, growth: Growth, committed: Committed) -> tuple[list[int], list[int]]:
        """Scratch slots that may be kept, and the draft's ids in them."""
        if isinstance(growth.view, RetokenisedView):
            count = len(growth.fed)
            return list(range(count)), torch.stack(growth.tokens)[:count].tolist() if count else []
        assert committed.verdict is not None
        slots = growth.accepted_slots(committed.verdict.path)
        first = committed.position + 1
        return slots, self.translation.to_draft[list(view.tokens[first : first + len(slots)])].tolist()


def _shared_columns(model: LoadedModel, translation: Translation) -> tuple[Tensor, Tensor]:
    """Columns of the draft's logits whose tokens the target has, and their ids there, in the order of those ids."""
    head_ids = model.decoder.head_ids
    own = torch.arange(model.config.vocab_size) if head_ids is None else head_ids.cpu()
    known = own < len(translation.to_target)  # rows past the tokenizer's are no tokens
    partner = torch.full_like(own, NOT_SHARED)
    partner[known] = translation.to_target[own[known]]
    columns = (partner != NOT_SHARED).nonzero().flatten()
    columns = columns[partner[columns].argsort()]
    return columns, partner[columns]
