"""Training the drafts of a study: one objective, data, order and budget for all, by `paceline train`'s own loop."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.study.begin import begin_rebuilt
from paceline.study.remembered import Record, read_record, remembered
from paceline.study.shapes import REBUILT, DraftShape
from paceline.train.draft import DraftModule, DraftObjective, export
from paceline.train.export import Card
from paceline.train.source import Source
from paceline.train.target import TargetWeights
from paceline.train.trainer import Report, TrainConfig, Trainer


@dataclass(frozen=True)
class School:
    """What all drafts of a study have in common. vocabulary [D]: the target's ids that they score; data: digest
    of the answers."""

    target_name: str
    target: TargetWeights
    vocabulary: Tensor
    source: Source
    data: str
    config: TrainConfig

    def objective(self, shape: DraftShape) -> DraftObjective:
        """Begun, not trained."""
        torch.manual_seed(self.config.seed)
        module = DraftModule(shape.config)
        if shape.family == REBUILT:
            begin_rebuilt(module, self.target)
        else:
            module.begin_as(self.target)
        return DraftObjective(module, self.target, self.vocabulary, steps=1)

    def train(self, shape: DraftShape, folder: Path, report: Report) -> Record:
        """Into `folder`/model, unless it is there already. Raises PacelineError on a full disk, and where the folder's
        draft was begun under other choices: hours of training are not thrown away."""
        _check_begun(folder / "begun.json", self._asked(shape))
        checkpoint = folder / "checkpoint.pt"
        train = partial(self._train, shape, folder, checkpoint, report)
        record = remembered(folder / "trained.json", self._asked(shape), train)
        checkpoint.unlink(missing_ok=True)  # with the optimiser three times the draft's size, and of no more use
        return record

    def _train(self, shape: DraftShape, folder: Path, checkpoint: Path, report: Report) -> dict[str, Any]:
        objective = self.objective(shape)
        trainer = Trainer(objective, self.source, self.config, checkpoint, folder / "log.jsonl")
        trainer.run(report)
        card = Card(self.target_name, (), shape.config, self._asked(shape) | {"target": self.target_name})
        export(model_folder(folder), card, objective)
        return asdict(trainer.position)

    def _asked(self, shape: DraftShape) -> dict[str, Any]:
        config = asdict(replace(self.config, checkpoint_seconds=0.0))
        return {"draft": asdict(shape), "training": config, "vocabulary": len(self.vocabulary), "data": self.data}


def _check_begun(path: Path, asked: dict[str, Any]) -> None:
    """Writes down what a draft begins with, or holds that against what it is to go on with."""
    begun, now = read_record(path), json.loads(json.dumps(asked))
    if begun is None:
        remembered(path, asked, lambda: None)
    elif changed := [name for name in now if begun.asked.get(name) != now[name]]:
        raise PacelineError(
            f"{path.parent} was begun with another {' and '.join(changed)}; go on with the same, or use another --out"
        )


def model_folder(folder: Path) -> Path:
    return folder / "model"
