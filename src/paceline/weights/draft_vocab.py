"""Which tokens a draft model was trained to score: `draft_vocab.json` beside its weights, a list of token ids.

Training that looks at the commonest tokens alone leaves the scores of the others as they happened to begin, which may
be high. So a draft that comes with such a list scores no others; and its output takes less time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import PacelineError

FILE = "draft_vocab.json"


def trained_ids(folder: Path, rows: int) -> Tensor | None:
    """Ids [D] of output rows, ascending; None where there is no list. Raises PacelineError for one that cannot be."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PacelineError(f"cannot read {path}: {error}") from None
    if not _are_ids(ids, rows):
        raise PacelineError(f"{path} must be a list of token ids from 0 to {rows - 1}; delete it to score all of them")
    return torch.tensor(sorted(set(ids)))


def _are_ids(ids: object, rows: int) -> bool:
    if not isinstance(ids, Sequence) or not ids:
        return False
    return all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < rows for each in ids)
