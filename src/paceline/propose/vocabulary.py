"""Whether two models speak of the same tokens: ids compared by token string."""

from __future__ import annotations

from paceline.errors import PacelineError
from paceline.weights.load import LoadedModel


def require_same_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """Raises PacelineError naming the first tokens that differ. Padded output rows are no tokens and may differ."""
    ours, theirs = target.tokenizer.token_strings(), draft.tokenizer.token_strings()
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
    if len(theirs) > len(ours):
        raise PacelineError(
            f"the vocabularies of {target.name} and {draft.name} differ: {len(ours)} and {len(theirs)} tokens; the "
            f"draft's first extra one is id {len(ours)}, {theirs[len(ours)]!r}"
        )
