"""OpenVINO GenAI on the same GGUF file, with a pipeline each for plain decoding and for prompt lookup.

A GGUF draft does not load beside a GGUF target (openvino-genai 2026.4), so there is no draft-model mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from benchmarks.peers.protocol import Answer, Settings, serve

LOOKUP = "prompt-lookup"  # and the number of tokens to draft
LOOKUP_NGRAM = 3


class OpenVino:
    def __init__(self) -> None:
        self.pipelines: dict[str, Any] = {}
        self.eos_ids: set[int] = set()

    def start(self, settings: Settings) -> dict[str, str]:
        self.eos_ids = set(settings.eos_ids)
        for kind in dict.fromkeys(map(_pipeline, settings.modes)):
            self.pipelines[kind] = openvino_genai.LLMPipeline(
                settings.model, "CPU", INFERENCE_NUM_THREADS=settings.threads, **_construction(kind)
            )
        return {
            "openvino-genai": openvino_genai.__version__,
            "openvino": openvino.__version__,
            "model": Path(settings.model).name,
        }

    def generate(self, mode: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        result = self.pipelines[_pipeline(mode)].generate(
            openvino.Tensor(np.array([prompt])), self._config(mode, max_tokens)
        )
        times = result.perf_metrics
        first, whole = times.get_ttft().mean / 1e3, times.get_generate_duration().mean / 1e3
        steps = times.raw_metrics.m_batch_sizes  # tokens that each step brought
        return Answer(list(result.tokens[0]), first, whole - first, steps[0], {"forwards": len(steps)})

    def step_costs(self, rows: Sequence[int]) -> dict[str, float]:
        """Its pipelines do not let a caller choose how many rows a step has."""
        return {}

    def close(self) -> None:
        self.pipelines.clear()

    def _config(self, mode: str, max_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, stop_token_ids=self.eos_ids, include_stop_str_in_output=True
        )
        if _pipeline(mode) == LOOKUP:
            config.num_assistant_tokens, config.max_ngram_size = int(mode.rpartition("-")[2]), LOOKUP_NGRAM
        return config


def _pipeline(mode: str) -> str:
    """How long the drafts are is told with each request, so one pipeline serves all modes that look up."""
    return LOOKUP if mode.startswith(LOOKUP) else mode


def _construction(kind: str) -> dict[str, Any]:
    """By default a pipeline would answer a repeated prompt from its cache; the rest is as it comes."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    chosen: dict[str, Any] = {"scheduler_config": scheduler}
    return chosen | {"prompt_lookup": True} if kind == LOOKUP else chosen


if __name__ == "__main__":
    serve(OpenVino())
