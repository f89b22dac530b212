"""`generate --compare`: plain and speculative in turn, both rates, and whether the tokens are the same."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import replace
from typing import Any

from paceline.cli.console import note, origins
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.result import GenerationResult
from paceline.sampling.params import SamplingParams

WARM_UP_TOKENS = 8


def compare(llm: LLM, ids: list[int], params: SamplingParams, *, as_json: bool, quiet: bool) -> None:
    """Print the answer and the comparison. Without a seed one is drawn, so that sampled runs can be compared at all."""
    if llm.options.chosen_method == "none":
        raise PacelineError("--compare needs a method to compare with plain decoding; give --method ngram or draft")
    if not params.greedy and params.seed is None:
        params = replace(params, seed=secrets.randbits(31))
    plain = LLM(**_plain_options(llm), models=llm.models)
    engines = {"none": plain, llm.options.chosen_method: llm}
    results = {name: _run(engine, ids, params) for name, engine in engines.items()}
    base, fast = results["none"], results[llm.options.chosen_method]
    identical = base.token_ids == fast.token_ids
    speedup = fast.stats.tokens_per_second / base.stats.tokens_per_second if base.stats.tokens_per_second else 0.0
    margin = None if identical or not params.coupled else _margin_at_difference(plain, ids, params, fast)
    if as_json:
        print(json.dumps(_as_json(results, fast, identical, speedup, margin), ensure_ascii=False))
        return
    print(fast.text)
    _table(results, identical, speedup, params.coupled)
    if margin is not None:
        note(
            f"first difference where plain decoding's two best tokens are {margin:.4f} apart in log probability",
            quiet=quiet,
        )


def _plain_options(llm: LLM) -> dict[str, Any]:
    options = llm.options
    return {"model": options.model, "method": "none", "device": options.device, "engine": options.engine}


def _run(llm: LLM, ids: list[int], params: SamplingParams) -> GenerationResult:
    """The first forwards of a process pay for set-up; a short run takes that out of the comparison."""
    llm.generate([ids], replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens)))
    return llm.generate([ids], params)[0]


def _margin_at_difference(plain: LLM, ids: list[int], params: SamplingParams, fast: GenerationResult) -> float | None:
    again = plain.generate([ids], replace(params, logprobs=2))[0]
    pairs = zip(again.token_ids, fast.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None or again.logprobs is None:
        return None
    best = sorted(again.logprobs[at].top.values(), reverse=True)
    return best[0] - best[1]


def _as_json(
    results: dict[str, GenerationResult], fast: GenerationResult, identical: bool, speedup: float, margin: float | None
) -> dict[str, Any]:
    runs = [
        {
            "method": name,
            "token_ids": result.token_ids,
            "tokens_per_second": result.stats.tokens_per_second,
            "acceptance_rate": result.stats.acceptance_rate,
            "mean_acceptance_length": result.stats.mean_acceptance_length,
        }
        for name, result in results.items()
    ]
    head = {"text": fast.text, "token_ids": fast.token_ids, "identical": identical, "speedup": speedup}
    return head | ({} if margin is None else {"margin": margin}) | {"runs": runs}


def _table(results: dict[str, GenerationResult], identical: bool, speedup: float, coupled: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("method", "tokens/s", "tokens a forward", "accepted", "tokens"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name, result in results.items():
        stats = result.stats
        accepted = f"{stats.acceptance_rate:.0%}" if stats.drafted else "-"
        table.add_row(
            name,
            f"{stats.tokens_per_second:.1f}",
            f"{stats.mean_acceptance_length:.2f}",
            accepted,
            str(len(result.token_ids)),
        )
    console = Console(file=sys.stdout, highlight=False)
    console.print()
    console.print(table)
    verdict = "tokens identical" if identical else "tokens differ"
    if not identical and not coupled:
        verdict += " (rejection keeps the distribution, not the tokens of a seed; use --verify coupled)"
    pace = f"{speedup:.2f}x the speed of plain decoding" if speedup else "too short an answer to time"
    drafts = origins(list(results.values())[-1].stats)
    console.print(f"\n{verdict}; {pace}" + (f"; accepted drafts from {drafts}" if drafts else ""), style="bold")
