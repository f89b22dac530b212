"""transformers in bf16, on the same weights dequantised: plain decoding and prompt lookup."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import cast

import torch
import transformers
from benchmarks.peers.protocol import Answer, Settings, serve
from transformers import DynamicCache

from paceline.bench.peer_transformers import TokenTimes, TransformersRunner, load_peers
from paceline.build import Options

RUNNERS = {"plain": "transformers", "lookup-10": "transformers-lookup"}
POSITION, REPEATS = 200, 9


class Transformers:
    def __init__(self) -> None:
        self.runners: dict[str, TransformersRunner] = {}

    def start(self, settings: Settings) -> dict[str, str]:
        torch.set_num_threads(settings.threads)
        loaded = load_peers([RUNNERS[mode] for mode in settings.modes], Options(settings.model), 1, settings.eos_ids)
        self.runners = {mode: cast(TransformersRunner, loaded[RUNNERS[mode]]) for mode in settings.modes}
        return {"transformers": transformers.__version__, "torch": torch.__version__, "precision": "bf16"}

    @torch.inference_mode()
    def generate(self, mode: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        runner, ids = self.runners[mode], torch.tensor([list(prompt)])
        times = TokenTimes(started=time.perf_counter())
        runner.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, streamer=times,
            **runner.arguments,
        )  # fmt: skip
        first, rest = times.first_at - times.started, times.last_at - times.first_at
        return Answer(times.token_ids, first, rest, times.in_first_step)

    @torch.inference_mode()
    def step_costs(self, rows: Sequence[int]) -> dict[str, float]:
        model = next(iter(self.runners.values())).model
        cache = DynamicCache(config=model.config)
        model(torch.arange(POSITION)[None], past_key_values=cache, logits_to_keep=1)
        seconds = {}
        for count in rows:
            taken = []
            for _ in range(REPEATS):
                started = time.perf_counter()
                model(torch.arange(count)[None], past_key_values=cache)
                taken.append(time.perf_counter() - started)
                cache.crop(-count)
            seconds[str(count)] = statistics.median(taken)
        return seconds

    def close(self) -> None:
        self.runners.clear()


if __name__ == "__main__":
    serve(Transformers())
