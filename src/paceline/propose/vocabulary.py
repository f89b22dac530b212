"""Whether two models speak of the same tokens: ids compared by token string."""

from __future__ import annotations

from paceline.weights.load import LoadedModel


def same_vocabulary(target: LoadedModel, draft: LoadedModel) -> bool:
    """Padded output rows are no tokens and may differ; tokens that only the draft knows are never proposed."""
    ours = target.tokenizer.token_strings()[: target.vocab_size]
    theirs = draft.tokenizer.token_strings()[: draft.vocab_size]
    if len(ours) > draft.config.vocab_size:
        return False
    return all(a == b for a, b in zip(ours, theirs, strict=False))
