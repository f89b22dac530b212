"""Paceline itself, as one of the engines. Modes: the drafting methods of `paceline bench`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from benchmarks.peers.protocol import Answer, Settings, serve

import paceline
from paceline.bench.run import BenchConfig, engines
from paceline.bench.step_curve import step_curve
from paceline.build import Options, load_models
from paceline.llm import LLM
from paceline.sampling.params import SamplingParams

REPEATS = 9


class Ours:
    def __init__(self) -> None:
        self.llms: dict[str, LLM] = {}

    def start(self, settings: Settings) -> dict[str, str]:
        options = Options(settings.model, draft=settings.draft, method="none", threads=settings.threads)
        models = load_models(options)
        self.llms = engines(BenchConfig(options, settings.modes, prompts=()), models, longest=settings.context)
        precision = models.target.backend.precision
        return {"paceline": paceline.__version__, "torch": torch.__version__, "precision": precision}

    def generate(self, mode: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        result = self.llms[mode].generate([list(prompt)], SamplingParams(temperature=0, max_tokens=max_tokens))[0]
        stats = result.stats
        counts = {"forwards": stats.target_forwards, "drafted": stats.drafted, "accepted": stats.accepted}
        first, rest = stats.first_token_seconds, stats.decode_seconds
        return Answer(result.token_ids, first, rest, stats.first_step_tokens, counts)

    def step_costs(self, rows: Sequence[int]) -> dict[str, float]:
        costs = step_curve(next(iter(self.llms.values())).models.target, rows, REPEATS)
        return {str(count): costs[count] for count in rows}

    def close(self) -> None:
        self.llms.clear()


if __name__ == "__main__":
    serve(Ours())
