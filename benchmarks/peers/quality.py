"""How far llama.cpp and we are from the model itself, its weights dequantised and computed in fp32.

    python -m benchmarks.peers.quality -m qwen2.5-coder-1.5b --llama-server PATH

The positions are those of `paceline quality`. llama-server is asked for every token's log-probability after each
prefix, one row a step as it decodes; its sums over the vocabulary are in fp32, so they are normalised again here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from benchmarks.peers.llama_cpp import Server, version
from torch import Tensor

from paceline.bench.quality import log_probabilities, passages_of
from paceline.bench.tasks import builtin_prompts, load_prompts
from paceline.device import available_cpus, set_threads
from paceline.errors import PacelineError
from paceline.weights.load import load_model
from paceline.weights.resolve import resolve

PROBABILITIES = "completion_probabilities"


@dataclass(frozen=True)
class Distance:
    """Mean KL(fp32 || engine) in nats and share of equal argmaxes, over positions.

    kl_after_first leaves out the first position of each passage, whose row alone can outweigh hundreds of others:
    first tokens have very large activations, beside which few bits are left. Nothing is generated from that row.
    """

    engine: str
    positions: int
    kl: float
    kl_after_first: float
    top1: float


def distance(engine: str, truth: Sequence[Tensor], found: Iterable[Tensor]) -> Distance:
    """Of log-probabilities [n, vocabulary] of each passage, from fp32's."""
    divergences, agreed = [], 0
    for expected, got in zip(truth, found, strict=True):
        divergences.append((expected.exp() * (expected - got)).sum(dim=1, dtype=torch.float64))
        agreed += int((expected.argmax(dim=1) == got.argmax(dim=1)).sum())
    every, later = torch.cat(divergences), torch.cat([each[1:] for each in divergences])
    return Distance(engine, len(every), float(every.mean()), float(later.mean()), agreed / len(every))


class Completes(Protocol):
    def completion(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]: ...


def of_server(server: Completes, ids: Sequence[int], rows: int, vocabulary: int) -> Tensor:
    """Log-probabilities [len(ids), vocabulary] after each prefix of `ids`; the model has `rows` output rows.

    The server keeps the prefix, so each request computes one new row.
    """
    return torch.stack([_after(server, ids[:length], rows)[:vocabulary] for length in range(1, len(ids) + 1)])


def _after(server: Completes, prefix: Sequence[int], rows: int) -> Tensor:
    reply = server.completion(prefix, 1, cache_prompt=True, n_probs=rows)
    scores = torch.full((rows,), float("-inf"), dtype=torch.float64)
    listed = reply[PROBABILITIES][0]["top_logprobs"]
    scores[torch.tensor([each["id"] for each in listed])] = torch.tensor([each["logprob"] for each in listed]).double()
    return scores


def measure(options: argparse.Namespace) -> list[Distance]:
    """llama.cpp first, then each precision of ours."""
    set_threads(options.threads)
    checkpoint = resolve(options.model)
    if checkpoint.kind != "gguf":
        raise PacelineError(f"'{options.model}' is no GGUF file, which llama.cpp is to read; give a preset or a file")
    tasks = load_prompts(options.prompts) if options.prompts else builtin_prompts()
    texts = ["\n".join(message["content"] for message in task.messages) for task in tasks]
    reference = load_model(options.model, device="cpu", precision="fp32")
    passages, rows = passages_of(reference, texts, options.positions), reference.config.vocab_size
    truth = [log_probabilities(reference, ids) for ids in passages]
    del reference
    server = Server(Path(options.llama_server), server_arguments(str(checkpoint.path), options.threads, passages))
    try:
        vocabulary = truth[0].shape[1]
        answers = (of_server(server, ids, rows, vocabulary).log_softmax(dim=1).float() for ids in passages)
        found = [distance("llama.cpp", truth, answers)]
    finally:
        server.close()
    for precision in options.precisions.split(","):
        model = load_model(options.model, device="cpu", precision=precision)
        found.append(
            distance(f"paceline {model.backend.precision}", truth, (log_probabilities(model, ids) for ids in passages))
        )
    return found


def server_arguments(model: str, threads: int, passages: Sequence[Sequence[int]]) -> list[str]:
    context = max(map(len, passages)) + 1
    return [
        "-m", model, "-t", str(threads), "-c", str(context), "-np", "1", "-ngl", "0", "--cache-ram", "0", "-lv", "1",
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.quality", description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="qwen2.5-coder-1.5b", help="preset or GGUF file")
    parser.add_argument("--llama-server", metavar="PATH", required=True, help="its libraries beside it")
    parser.add_argument("--precisions", default="auto", help="ours, comma separated")
    parser.add_argument("--positions", type=int, default=400)
    parser.add_argument("--prompts", type=Path, help="prompts file (default: the built-in ones)")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        found = measure(options)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("| | positions | mean KL, nats | without first tokens | top-1 agreement |\n| --- | --- | --- | --- | --- |")
    for row in found:
        print(f"| {row.engine} | {row.positions} | {row.kl:.5f} | {row.kl_after_first:.5f} | {row.top1:.1%} |")
    if options.json:
        origin = {"model": options.model, "llama.cpp": version(Path(options.llama_server))}
        options.json.write_text(json.dumps({**origin, "rows": [asdict(row) for row in found]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
