"""What a training run decided when it began: `run.json`, by which it can be resumed and told from others."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import torch

import paceline
from paceline.errors import PacelineError
from paceline.train.disk import write_json
from paceline.train.responses import Response


@dataclass(frozen=True)
class Plan:
    """vocabulary: the target's ids that the drafter scores; covered: their share of the answers' tokens. data: digest
    of the answers. seconds, tokens: the budget of training, None where there is none. init: the drafter that it went on
    from, if any."""

    kind: str
    target: str
    target_key: str
    taps: tuple[int, ...]
    vocabulary: tuple[int, ...]
    covered: float
    data: str
    seconds: float | None
    tokens: int | None
    seed: int
    command: str
    init: str | None = None
    paceline: str = paceline.__version__
    torch: str = torch.__version__
    python: str = platform.python_version()

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Plan | None:
        """None where no run began. Raises PacelineError for a file that is none."""
        if not path.exists():
            return None
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**raw, "taps": tuple(raw["taps"]), "vocabulary": tuple(raw["vocabulary"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PacelineError(f"cannot read {path}: {error}; use another --out, or delete it to begin anew") from None

    @property
    def story(self) -> dict[str, object]:
        """What an exported head tells of how it was made."""
        return {name: value for name, value in asdict(self).items() if name not in ("vocabulary", "taps")}


def digest(responses: Sequence[Response]) -> str:
    """Of the text that was trained on."""
    found = sha256()
    for each in responses:
        found.update(json.dumps([each.id, each.prompt, each.response]).encode())
    return found.hexdigest()[:16]
