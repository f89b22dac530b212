"""`make gpu-check`: the lossless suite on CUDA, and the time of a step of 1 to 64 rows in Llama 3.1 8B's shape.

No downloads: weights are random. Writes benchmarks/results/gpu-check-<device>.json with its provenance.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.device import Backend
from paceline.model.attention import Span
from paceline.model.config import ModelConfig, RopeConfig
from paceline.model.decoder import Batch, Decoder
from paceline.weights.assemble import assemble

ROOT = Path(__file__).parent.parent
LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128_256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=14_336, max_positions=8192, rope=RopeConfig(theta=500_000.0), tie_embeddings=False,
)  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 512


def random_tensors(config: ModelConfig, backend: Backend) -> dict[str, Tensor]:
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = {
        "qkv": (heads, config.hidden_size),
        "output": (config.hidden_size, config.num_heads * config.head_dim),
        "up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=backend.dtype, device=backend.device) * 0.02

    tensors = {f"layers.{i}.{n}.weight": draw(*s) for i in range(config.num_layers) for n, s in shapes.items()}
    norms = [f"layers.{i}.{n}" for i in range(config.num_layers) for n in ("attention_norm", "mlp_norm")]
    tensors |= {f"{n}.weight": torch.ones(config.hidden_size, device=backend.device) for n in (*norms, "final_norm")}
    vocabulary = (config.vocab_size, config.hidden_size)
    return tensors | {"embedding": draw(*vocabulary), "head.weight": draw(*vocabulary)}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def step_times(decoder: Decoder, backend: Backend, repeats: int) -> dict[int, float]:
    """Median milliseconds of one sequence's forward and output head, by rows, at position CONTEXT."""
    pool = BlockPool(decoder.config, (CONTEXT + max(ROWS)) // 16 + 1, backend.device, backend.cache_dtype)
    cache = pool.open([], CONTEXT + max(ROWS))
    cache.append(CONTEXT + max(ROWS))
    times = {}
    for rows in ROWS:
        tokens = torch.arange(rows, device=backend.device)
        taken = []
        for _ in range(repeats + 3):
            wait(backend.device)
            started = time.perf_counter()
            hidden, _ = decoder.forward(Batch(tokens, [Span(cache, 0, rows, CONTEXT)], pool))
            decoder.logits(hidden)
            wait(backend.device)
            taken.append(time.perf_counter() - started)
        times[rows] = statistics.median(taken[3:]) * 1e3
    return times


def lossless_suite(device: str) -> bool:
    environment = {**os.environ, "PACELINE_TEST_DEVICE": device}
    command = [sys.executable, "-m", "pytest", "tests/lossless", "-m", "not real_model", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode == 0


def provenance(device: torch.device) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    return {
        "command": " ".join(sys.argv), "device": name, "torch": torch.__version__, "python": platform.python_version(),
        "commit": commit or None, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=LLAMA_8B.num_layers, help="fewer to try the script on a CPU")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("error: no GPU found; run this where PyTorch sees one, or give --device cpu --layers 1", file=sys.stderr)
        return 2
    backend = Backend(device, "bf16", torch.bfloat16)
    config = ModelConfig(**{**vars(LLAMA_8B), "num_layers": options.layers})
    decoder = assemble(config, random_tensors(config, backend), backend)
    times = step_times(decoder, backend, options.repeats)
    for rows, milliseconds in times.items():
        print(f"{rows:3d} rows  {milliseconds:8.3f} ms  {milliseconds / times[1]:.2f} x one row")
    passed = None if options.skip_tests else lossless_suite(options.device)
    report = {
        "provenance": provenance(device), "layers": options.layers, "context": CONTEXT, "step_ms": times,
        "lossless_suite_passed": passed,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"gpu-check-{device.type}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {path}")
    return 0 if passed in (True, None) else 1


if __name__ == "__main__":
    sys.exit(main())
