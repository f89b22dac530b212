"""Steps of a study that are written down when they are done, so that a killed study goes on behind them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paceline.bench.noise import CpuClock, other_cores
from paceline.errors import PacelineError
from paceline.train.disk import write_json


@dataclass(frozen=True)
class Record:
    """What a step found. asked: what it was to find. other_cores: cores that others kept busy meanwhile."""

    asked: dict[str, Any]
    found: Any
    date: str
    other_cores: float = field(default=0.0)


def remembered(path: Path, asked: Mapping[str, Any], find: Callable[[], Any]) -> Record:
    """What `path` says of the same question, or what `find` finds now (as JSON has it). Raises PacelineError."""
    question = json.loads(json.dumps(asked))
    record = read_record(path)
    if record is None or record.asked != question:
        began = CpuClock.read()
        found = json.loads(json.dumps(find()))
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        record = Record(question, found, date, round(other_cores(began, CpuClock.read()), 4))
        write_json(path, vars(record), indent=1)
    return record


def read_record(path: Path) -> Record | None:
    """None where nothing was written. Raises PacelineError for a file that is no record."""
    if not path.exists():
        return None
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PacelineError(f"cannot read {path}: {error}; delete it to do this step again") from None
