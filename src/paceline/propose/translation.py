"""Two vocabularies side by side: the tokens that both know, and drafted text in the target's tokens.

Timor et al. 2025 (arXiv 2502.05202): token-level intersection (TLI) and string-level exact match (SLEM).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from paceline.text.tokenizer import Tokenizer

NOT_SHARED = -1
WINDOWS = (24, 6, 1)  # tokens of the context that drafted text is tokenised with; fewer where the context is unusual
_BYTE_SPELLED = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Translation:
    """Tokens are the same where they stand for the same bytes, however each vocabulary spells them; special tokens
    where both are special and have the same name.

    to_target [D]: the target's id of each draft id, to_draft [V] the reverse; -1 where only one of the two has the
    token. Each token has at most one partner, so that a distribution over shared tokens keeps its mass when mapped.
    target_size, draft_size: ids that the models have rows for, where the tokenizer knows more.
    """

    def __init__(
        self, target: Tokenizer, draft: Tokenizer, *, target_size: int | None = None, draft_size: int | None = None
    ) -> None:
        self.target, self.draft = target, draft
        ours = _known(target, target_size)
        theirs = _known(draft, draft_size)
        pairs = [*_same_bytes(target, ours, draft, theirs), *_same_special(target, ours, draft, theirs)]
        self.shared = len(pairs)
        self.draft_tokens = sum(1 for token in theirs if draft.token_string(token))
        self.to_target = torch.full((draft.vocab_size,), NOT_SHARED, dtype=torch.int64)
        self.to_draft = torch.full((target.vocab_size,), NOT_SHARED, dtype=torch.int64)
        if pairs:
            target_ids, draft_ids = torch.tensor(pairs).T
            self.to_target[draft_ids] = target_ids
            self.to_draft[target_ids] = draft_ids

    @property
    def share(self) -> float:
        """Part of the draft's vocabulary that the target has too."""
        return self.shared / max(self.draft_tokens, 1)

    def target_ids(self, context: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """What the draft's ids `drafted` say, as the target's tokenizer would put it behind `context` (target ids).

        Empty where the new text would change the context's own tokens. Half a character at the end is left out. The
        last token may be one that more text would lengthen; it stays, since one more draft step to settle it costs more
        than it gains (SmolLM2 135M for Qwen2.5-Coder 1.5B: 2.03 tokens a step with two draft steps, 2.05 with a third).
        """
        special = next((i for i, token in enumerate(drafted) if token in self.draft.special_ids), None)
        data = b"".join(map(self.draft.token_bytes, drafted[:special]))
        text = whole_text(data)
        ids = self._behind(context, text)
        if ids is None or special is None or len(text.encode()) < len(data):
            return ids or []
        end = int(self.to_target[drafted[special]])
        return ids if end == NOT_SHARED else [*ids, end]

    def spread(self, chances: Sequence[float], drafted: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Chances of the target's `tokens` from those of the draft's ids that they were made of.

        A drafted id counts where it begins, so the products along both agree.
        """
        ends, reached = [], 0
        for token in tokens:
            reached += len(self.target.token_bytes(token))
            ends.append(reached)
        found = [1.0] * len(tokens)
        at, begin = 0, 0
        for token, chance in zip(drafted, chances, strict=True):
            while at < len(tokens) and ends[at] <= begin:
                at += 1
            if at == len(tokens):
                break
            found[at] *= chance
            begin += len(self.draft.token_bytes(token))
        return found

    def _behind(self, context: Sequence[int], text: str) -> list[int] | None:
        """`text` tokenised together with the context's end; None where that does not leave the context as it is."""
        if not text:
            return []
        for window in WINDOWS:
            own = self._plain_end(context, window)
            data = b"".join(map(self.target.token_bytes, own))
            before = whole_text(data)
            if len(before.encode()) < len(data):
                continue  # it begins or ends inside a character
            ids = encode_behind(self.target, before + text)
            if ids[: len(own)] == own:
                return ids[len(own) :]
        return None

    def _plain_end(self, context: Sequence[int], most: int) -> list[int]:
        """The last `most` tokens of the context, as far as no special token comes between."""
        end = list(context[-most:])
        special = [i for i, token in enumerate(end) if token in self.target.special_ids]
        return end[special[-1] + 1 :] if special else end


def encode_behind(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of text that goes on from other text: no BOS, and no space put before it."""
    if not tokenizer.strips_leading_space:
        return tokenizer.encode(text, bos=False, special=False)
    line_end = tokenizer.encode("\n", bos=False, special=False)
    ids = tokenizer.encode("\n" + text, bos=False, special=False)
    if ids[: len(line_end)] == line_end:
        return ids[len(line_end) :]
    return tokenizer.encode(text, bos=False, special=False)


def whole_text(data: bytes) -> str:
    """The text that `data` begins with, up to the first byte that is part of no whole character."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _known(tokenizer: Tokenizer, size: int | None) -> range:
    return range(tokenizer.vocab_size if size is None else min(size, tokenizer.vocab_size))


def _same_bytes(target: Tokenizer, ours: range, draft: Tokenizer, theirs: range) -> list[tuple[int, int]]:
    mine, other = _by_bytes(target, ours), _by_bytes(draft, theirs)
    return [(_usual(target, mine[data]), _usual(draft, other[data])) for data in mine.keys() & other.keys()]


def _by_bytes(tokenizer: Tokenizer, ids: Iterable[int]) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for token in ids:
        data = b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token)
        if data:
            found.setdefault(data, []).append(token)
    return found


def _usual(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Which of several tokens with the same bytes a text is made of: the tokenizer's own choice, or at least none of
    those that spell a byte by its number."""
    if len(ids) == 1:
        return ids[0]
    data = tokenizer.token_bytes(ids[0])
    own = encode_behind(tokenizer, whole_text(data))
    if len(own) == 1 and own[0] in ids:
        return own[0]
    return next((token for token in ids if not _BYTE_SPELLED.fullmatch(tokenizer.token_string(token))), ids[0])


def _same_special(target: Tokenizer, ours: range, draft: Tokenizer, theirs: range) -> list[tuple[int, int]]:
    mine = {target.token_string(token): token for token in target.special_ids if token in ours}
    other = {draft.token_string(token): token for token in draft.special_ids if token in theirs}
    return [(mine[name], other[name]) for name in mine.keys() & other.keys()]
