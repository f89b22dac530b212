"""A tiny target that can be learnt, its answers, and what was captured of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from lab_files import letter_model

from paceline.build import Models, Options, load_models
from paceline.train.capture import Capture
from paceline.train.drafters import DRAFTERS, Given
from paceline.train.responses import Response
from paceline.train.shards import Passage
from paceline.train.target import TargetWeights
from paceline.train.trainer import Objective

LETTERS = 26


@contextmanager
def gradients() -> Iterator[None]:
    """The suite runs without; training needs them."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@dataclass
class Lab:
    """`folder` holds the target."""

    folder: Path
    models: Models
    weights: TargetWeights

    @classmethod
    def make(cls, folder: Path, layers: int = 4) -> Lab:
        folder.mkdir(exist_ok=True)
        letter_model(folder, layers, cycles=True)
        models = load_models(Options(str(folder), method="none", precision="fp32"))
        return cls(folder, models, TargetWeights.read(str(folder)))

    def responses(self, count: int = 24, length: int = 20) -> list[Response]:
        """Greedy answers of a target that is asked for a letter."""
        from paceline.llm import LLM
        from paceline.sampling.params import SamplingParams

        llm = LLM(str(self.folder), models=self.models, method="none")
        prompts = [[i % LETTERS, (7 * i) % LETTERS, (3 * i) % LETTERS] for i in range(count)]
        answers = llm.generate(prompts, SamplingParams(max_tokens=length))
        return [
            Response(str(i), prompt, list(answer.token_ids))
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]

    def passages(self, taps: tuple[int, ...], count: int = 24) -> list[Passage]:
        return list(Capture(self.models.target, taps).passages(self.responses(count)))

    def objective(self, kind: str) -> tuple[Objective, tuple[int, ...]]:
        drafter = DRAFTERS[kind]
        taps = drafter.default_taps(self.weights.config)
        return drafter.objective(Given(self.weights, torch.arange(LETTERS), taps)), taps


def write_prompts(path: Path, count: int = 12) -> Path:
    rows = [{"id": f"p{i}", "category": "chat", "prompt": chr(ord("a") + i % LETTERS) * 3} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
