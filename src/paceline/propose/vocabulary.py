"""Whether two models speak of the same tokens: ids compared by token string."""

from __future__ import annotations

from paceline.errors import PacelineError
from paceline.weights.load import LoadedModel


def require_same_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """Raises PacelineError naming the first tokens that differ.

    Padded output rows are no tokens and may differ; tokens that only the draft knows are never proposed.
    """
    ours = target.tokenizer.token_strings()[: target.vocab_size]
    theirs = draft.tokenizer.token_strings()[: draft.vocab_size]
    for token, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            raise PacelineError(
                f"the vocabularies of {target.name} and {draft.name} differ: id {token} is {a!r} in the target and "
                f"{b!r} in the draft; take a draft of the same family"
            )
    if len(ours) > draft.config.vocab_size:
        raise PacelineError(
            f"the vocabularies of {target.name} and {draft.name} differ: the target knows {len(ours)} tokens, the "
            f"draft has rows for {draft.config.vocab_size}; the first it lacks is {ours[draft.config.vocab_size]!r}"
        )
