"""A growing text of the target's in the draft's ids."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cache.pool import SequenceCache
from paceline.propose.translation import NOT_SHARED, Translation, common_prefix, encode_behind, whole_text
from paceline.sampling.params import SamplingParams
from paceline.types import View

WINDOW = 32  # the draft's ids at the end of the text that are tokenised anew when it grows
TRIES = 8  # places looked at for the beginning of a shorter window


class RetokenisedText:
    """`ids`: what the draft's tokenizer makes of the target's tokens so far. Special tokens that both have stay as
    they are, others are spelt out. Bytes of a character that is not whole yet are held back.

    Only the text's end is tokenised again at each step, from a place where the tokens behind it come out the same
    without what stands before; where there is none, all of the text since the last special token is.
    """

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        draft = translation.draft
        self.ids: list[int] = [draft.bos_id] if draft.adds_bos and draft.bos_id is not None else []
        self._read = 0  # of the target's tokens
        self._settled = len(self.ids)  # ids that stay; the rest say `_text`
        self._text = ""
        self._limit = 2 * WINDOW
        self._begin()

    @property
    def inside_a_character(self) -> bool:
        """The target's last tokens end in the middle of one: `ids` lack its bytes."""
        return bool(self._characters.getstate()[0])

    def follow(self, tokens: Sequence[int]) -> int:
        """Read the target's `tokens` on; returns how many of the ids before are still at their place."""
        kept = len(self.ids)
        if self._read == len(tokens):
            return kept
        target, to_draft = self.translation.target, self.translation.to_draft
        for position in range(self._read, len(tokens)):
            token = tokens[position]
            if position == 0 and token == target.bos_id:
                continue  # each begins a text in its own way
            if token in target.special_ids and (own := int(to_draft[token])) != NOT_SHARED:
                self._text += self._characters.decode(b"", final=True)
                kept = min(kept, self._tokenise())
                self._settle_behind(own)
            else:
                self._add(target.token_bytes(token))
        self._read = len(tokens)
        kept = min(kept, self._tokenise())
        self._shorten()
        return kept

    def _begin(self) -> None:
        """At the start, and behind a special token: here a SentencePiece model may put a space of its own."""
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = self.translation.target.strips_leading_space
        self._goes_on = False

    def _add(self, data: bytes) -> None:
        text = self._characters.decode(data)
        if text and self._strips:
            self._strips, text = False, text.removeprefix(" ")
        self._text += text

    def _tokenise(self) -> int:
        """Tokenise the text's end anew; returns how many ids stayed."""
        fresh = self._encode()
        same = self._settled + common_prefix(self.ids[self._settled :], fresh)
        self.ids[self._settled :] = fresh
        return same

    def _encode(self) -> list[int]:
        draft = self.translation.draft
        if self._goes_on:
            return encode_behind(draft, self._text)
        return draft.encode(self._text, bos=False, special=False)

    def _settle_behind(self, special: int) -> None:
        self.ids.append(special)
        self._settled, self._text = len(self.ids), ""
        self._begin()

    def _shorten(self) -> None:
        """Begin the window later, where its tokens do not depend on what stands before."""
        count = len(self.ids) - self._settled
        if count <= self._limit:
            return
        draft = self.translation.draft
        for back in range(WINDOW, WINDOW + TRIES):
            own = self.ids[-back:]
            data = b"".join(map(draft.token_bytes, own))
            text = whole_text(data)
            if text.encode() == data and self._text.endswith(text) and encode_behind(draft, text) == own:
                self._settled, self._text, self._goes_on = len(self.ids) - back, text, True
                self._limit = 2 * WINDOW
                return
        self._limit = 2 * count


@dataclass(frozen=True)
class RetokenisedView:
    """A sequence as the draft reads it where it writes in its own vocabulary: `tokens` are its ids, continued by the
    likeliest whatever the request's sampling is."""

    view: View
    tokens: Sequence[int]
    params: SamplingParams = SamplingParams()  # noqa: RUF009  (frozen)
    prediction: Sequence[int] = ()
    cache: SequenceCache | None = None

    @property
    def id(self) -> int:
        return self.view.id

    @property
    def seed(self) -> int:
        return self.view.seed

    @property
    def tenant(self) -> str:
        return self.view.tenant

    @property
    def room(self) -> int:
        return self.view.room

    @property
    def prompt_length(self) -> int:
        return len(self.tokens)

    @property
    def committed(self) -> int:
        return len(self.tokens) - 1
