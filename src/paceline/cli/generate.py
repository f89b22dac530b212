"""`paceline generate`: one answer, streamed; or plain and speculative side by side."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options as opt
from paceline.cli.console import note, summary
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.result import GenerationResult
    from paceline.sampling.params import SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads standard input.")],
    model: opt.Model = "smollm2-135m",
    draft: opt.Draft = None,
    method: opt.Method = None,
    k: opt.K = None,
    ngram_min: opt.NgramMin = 2,
    ngram_max: opt.NgramMax = 16,
    verify: opt.Verify = "auto",
    precision: opt.Precision = "auto",
    draft_precision: opt.DraftPrecision = None,
    draft_vocab: opt.DraftVocab = None,
    threads: opt.Threads = None,
    device: opt.Device = None,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    logit_bias: opt.Bias = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    stop_token_id: opt.StopToken = None,
    max_tokens: opt.MaxTokens = 256,
    ignore_eos: opt.IgnoreEos = False,
    logprobs: opt.Logprobs = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run plain decoding too and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Answer one prompt."""
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise PacelineError("the prompt is empty: give some text")
    bias = parse_bias(logit_bias or [])
    from paceline.llm import LLM
    from paceline.sampling.params import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, logit_bias=bias, seed=seed,
        stop=stop or (), stop_token_ids=stop_token_id or (), max_tokens=max_tokens, ignore_eos=ignore_eos,
        logprobs=logprobs, verify=verify,  # type: ignore[arg-type]
    )  # fmt: skip
    llm = LLM(
        model, draft=draft, method=method, k=k, precision=precision, draft_precision=draft_precision,
        draft_vocab=draft_vocab, threads=threads, device=device, ngram_min=ngram_min, ngram_max=ngram_max,
        progress=not quiet,
    )  # fmt: skip
    ids = prompt_ids(llm, prompt, raw=raw)
    if compare:
        from paceline.cli.compare import compare as run_compare

        run_compare(llm, ids, params, as_json=as_json, quiet=quiet)
    else:
        _answer(llm, ids, params, as_json=as_json, quiet=quiet)


def prompt_ids(llm: LLM, prompt: str, *, raw: bool) -> list[int]:
    """As a chat message where the model has a template, else (or if `raw`) the text itself."""
    if raw or llm.tokenizer.chat_template is None:
        return llm.encode(prompt)
    return llm.chat_prompt([{"role": "user", "content": prompt}])


def parse_bias(entries: list[str]) -> dict[int, float]:
    try:
        return {int(token): float(value) for token, _, value in (entry.partition("=") for entry in entries)}
    except ValueError:
        raise PacelineError(f"logit bias must be ID=VALUE, for example 50=-5, not {' '.join(entries)}") from None


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


def _as_json(result: GenerationResult, method: str) -> dict[str, Any]:
    stats = result.stats
    row: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "method": method,
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
