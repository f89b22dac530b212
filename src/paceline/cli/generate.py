"""`paceline generate`: one answer, streamed; or plain and speculative side by side."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options as opt
from paceline.cli.console import note, summary
from paceline.cli.groups import ModelChoice, Sampling, grouped
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.result import GenerationResult
    from paceline.sampling.params import SamplingParams


@grouped
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads standard input.")],
    models: ModelChoice,
    sampling: Sampling,
    method: opt.Method = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run plain decoding too and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Answer one prompt."""
    prompt = read_prompt(prompt)
    params = sampling.params()
    from paceline.llm import LLM

    # A comparison runs one prompt several times: remembered answers would be found again.
    history = {"suffix_history": 0} if compare else {}
    llm = LLM(**vars(models.options(method=method, progress=not quiet, **history)))
    ids = prompt_ids(llm, prompt, raw=raw)
    if compare:
        from paceline.cli.compare import compare as run_compare

        run_compare(llm, ids, params, as_json=as_json, quiet=quiet)
    else:
        _answer(llm, ids, params, as_json=as_json, quiet=quiet)


def read_prompt(given: str) -> str:
    """The argument, or standard input for `-`. Raises PacelineError for a prompt of nothing."""
    text = sys.stdin.read() if given == "-" else given
    if not text.strip():
        raise PacelineError("the prompt is empty: give some text")
    return text


def prompt_ids(llm: LLM, prompt: str, *, raw: bool) -> list[int]:
    """As a chat message where the model has a template, else (or if `raw`) the text itself."""
    if raw or llm.tokenizer.chat_template is None:
        return llm.encode(prompt)
    return llm.chat_prompt([{"role": "user", "content": prompt}])


def _answer(llm: LLM, ids: list[int], params: SamplingParams, *, as_json: bool, quiet: bool) -> None:
    result = None
    text, token_ids = "", list[int]()
    try:
        for chunk in llm.stream(ids, params):
            text, token_ids = text + chunk.text, token_ids + chunk.token_ids
            if not as_json:
                print(chunk.text, end="", flush=True)
            result = chunk.result
    except KeyboardInterrupt:
        stopped = {"text": text, "token_ids": token_ids, "finish_reason": "aborted"}
        print(json.dumps(stopped, ensure_ascii=False) if as_json else "", flush=True)
        note("stopped", quiet=quiet)
        raise
    assert result is not None
    if as_json:
        print(json.dumps(_as_json(result, llm.options.chosen_method), ensure_ascii=False))
        return
    print()
    note(summary(result.stats), quiet=quiet)
    if result.lossy:
        note("typical acceptance is lossy: this answer need not be the model's own", quiet=quiet)


def _as_json(result: GenerationResult, method: str) -> dict[str, Any]:
    stats = result.stats
    row: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "method": method,
        "lossy": result.lossy,
        "seed": result.seed,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "tokens_per_second": stats.tokens_per_second,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_per_position": stats.acceptance_per_position,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "target_forwards": stats.target_forwards,
        "draft_seconds": stats.draft_seconds,
        "target_seconds": stats.target_seconds,
        "other_seconds": stats.other_seconds,
    }
    if result.logprobs is not None:
        row["logprobs"] = [{"id": lp.token_id, "logprob": lp.logprob, "top": lp.top} for lp in result.logprobs]
    return row
