"""vLLM on the CPU, in bf16: plain decoding and n-gram speculation of 5 tokens. One mode a process.

What its own documentation asks for on a CPU is done where it can be: threads bound to cores, Intel's OpenMP preloaded.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Answer, Settings, serve

SPECULATION = {
    "plain": None,
    "ngram-5": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
}
CACHE_GIGABYTES = "1"


class Vllm:
    def start(self, settings: Settings) -> dict[str, str]:
        openmp = prepare_environment(settings.threads)
        import vllm  # reads the environment, so not before

        (mode,) = settings.modes
        self.vllm, self.eos_ids, self.asked = vllm, list(settings.eos_ids), 0
        self.engine: Any = vllm.LLM(
            model=settings.model, dtype="bfloat16", max_model_len=settings.context, max_num_seqs=1,
            skip_tokenizer_init=True, enable_prefix_caching=False, speculative_config=SPECULATION[mode],
        ).llm_engine  # fmt: skip
        return {"vllm": vllm.__version__, "precision": "bf16", "openmp": openmp}

    def generate(self, mode: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        params = self.vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, stop_token_ids=self.eos_ids, detokenize=False
        )
        self.asked += 1
        started = time.perf_counter()
        self.engine.add_request(str(self.asked), {"prompt_token_ids": list(prompt)}, params)
        steps: list[tuple[float, list[int]]] = []  # when, and all ids so far
        while self.engine.has_unfinished_requests():
            steps += [(time.perf_counter(), list(each.outputs[0].token_ids)) for each in self.engine.step()]
        (first_at, first), (last_at, last) = steps[0], steps[-1]
        return Answer(last, first_at - started, last_at - first_at, len(first), {"forwards": len(steps)})

    def step_costs(self, rows: Sequence[int]) -> dict[str, float]:
        """Its engine does not let a caller choose how many rows a step has."""
        return {}

    def close(self) -> None:
        self.engine = None


def prepare_environment(threads: int) -> str:
    """For the engine's own processes, which start with it; tells which OpenMP they will use.

    By itself it would keep one core free, which of two is half of the machine.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = CACHE_GIGABYTES
    intel = Path(sys.prefix) / "lib" / "libiomp5.so"  # where `pip install intel-openmp` puts it
    if not intel.exists():
        return "the system's"
    os.environ["LD_PRELOAD"] = " ".join(filter(None, (str(intel), os.environ.get("LD_PRELOAD"))))
    return "Intel's"


if __name__ == "__main__":
    serve(Vllm())
