"""`paceline explain`: an answer whose tokens show how they came, and a page that steps through the drafts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as opt
from paceline.cli.console import note, summary
from paceline.cli.generate import prompt_ids, read_prompt
from paceline.cli.groups import ModelChoice, Sampling, grouped
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.explain.record import Record, Recorder, Token
    from paceline.llm import LLM
    from paceline.sampling.params import SamplingParams
    from paceline.types import Sequence

    Show = Callable[[list[Token]], None]


@grouped
def explain(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads standard input.")],
    models: ModelChoice,
    sampling: Sampling,
    method: opt.Method = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write a page that steps through the draft trees.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole record as JSON on standard output.")] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Answer one prompt and show how each token came: drafted and accepted, corrected, or the target's own."""
    require_place(trace)
    prompt = read_prompt(prompt)
    params = sampling.params()
    from paceline.llm import LLM

    llm = LLM(**vars(models.options(method=method, progress=not quiet)))
    ids = prompt_ids(llm, prompt, raw=raw)
    console = _console(as_json)
    sequence, recorder = _run(llm, ids, params, _shown_on(console, as_json))
    record = recorder.record(sequence, prompt, _setup(llm, sequence))
    _report(record, sequence, console, as_json=as_json, quiet=quiet)
    if trace is not None:
        _write(record, trace, quiet)
    if record.finish_reason == "aborted":
        raise typer.Exit(130)


def require_place(file: Path | None) -> None:
    """An answer that took minutes should not end with a page that cannot be written. Raises PacelineError."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise PacelineError(f"cannot write '{file}': there is no folder '{file.parent}'; make it or name another")
    if file.is_dir():
        raise PacelineError(f"cannot write '{file}': it is a folder; give a file name")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PacelineError(f"cannot write '{file}': no permission; name another place")


def _console(as_json: bool) -> Console | None:
    """None where colours are of no use: standard output is no terminal, or JSON."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal and not as_json else None


def _shown_on(console: Console | None, as_json: bool) -> Show:
    from paceline.explain.terminal import coloured

    if as_json:
        return lambda tokens: None
    if console is None:
        return lambda tokens: print("".join(token.text for token in tokens), end="", flush=True)
    return lambda tokens: console.print(coloured(tokens), end="", soft_wrap=True)


def _run(llm: LLM, ids: list[int], params: SamplingParams, show: Show) -> tuple[Sequence, Recorder]:
    """Step the engine until the request ends; Ctrl-C ends it early and keeps what there is."""
    from paceline.explain.record import Recorder

    recorder = Recorder(llm.tokenizer)
    sequence = llm.engine.add(ids, params)
    sequence.trace = []
    try:
        while sequence.finish_reason is None:
            llm.engine.step()
            for step in sequence.trace[len(recorder.steps) :]:
                recorder.push(step)
            show(recorder.read(len(sequence.output.text)))
    except KeyboardInterrupt:
        pass
    finally:
        llm.engine.abort(sequence)
    recorder.finish()
    show(recorder.read(len(sequence.output.text)))
    return sequence, recorder


def _setup(llm: LLM, sequence: Sequence) -> dict[str, str]:
    from paceline import __version__

    target, draft, options = llm.models.target, llm.models.draft, llm.options
    setup = {
        "model": target.name,
        "draft model": None if draft is None else draft.name,
        "head": options.head_name,
        "method": options.chosen_method,
        "tree": options.tree,
        "precision": target.backend.precision,
        "device": str(target.backend.device),
        "temperature": f"{sequence.params.temperature:g}",
        "verify": "typical (lossy)" if sequence.params.lossy else None,
        "seed": None if sequence.params.greedy else str(sequence.seed),
        "paceline": __version__,
    }
    return {name: value for name, value in setup.items() if value is not None}


def _report(record: Record, sequence: Sequence, console: Console | None, *, as_json: bool, quiet: bool) -> None:
    from paceline.explain.terminal import print_summary

    if as_json:
        print(json.dumps(record.as_json(), ensure_ascii=False))
        return
    print()
    if record.finish_reason == "aborted":
        note("stopped", quiet=quiet)
    if sequence.params.lossy:
        note("typical acceptance is lossy: this answer need not be the model's own", quiet=quiet)
    if console is None:
        note(summary(sequence.stats), quiet=quiet)
    elif not quiet:
        print_summary(console, record.totals)


def _write(record: Record, trace: Path, quiet: bool) -> None:
    from paceline.explain.page import write

    write(record, trace)
    note(f"wrote {trace}: open it in a browser", quiet=quiet)
