"""`paceline chat`: a conversation; the cache keeps its past between turns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as opt
from paceline.cli.console import note, summary
from paceline.cli.groups import ModelChoice, Sampling, grouped
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.sampling.params import SamplingParams


@grouped
def chat(
    models: ModelChoice,
    sampling: Sampling,
    method: opt.Method = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Talk with a model. /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."""
    params = sampling.params()
    from paceline.llm import LLM

    llm = LLM(**vars(models.options(method=method, progress=not quiet)))
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    note("/reset forgets, /exit ends, Ctrl-C stops an answer", quiet=quiet)
    while (said := _listen()) is not None:
        if said == "/reset":
            messages = list(start)
        elif said:
            messages.append({"role": "user", "content": said})
            try:
                messages.append({"role": "assistant", "content": _answer(llm, messages, params, quiet)})
            except PacelineError as error:  # the conversation outgrew the context: it is the user's to shorten
                messages.pop()
                print(f"error: {error} (/reset starts over)", file=sys.stderr)


def _listen() -> str | None:
    """The next line, or None at the end of the conversation."""
    try:
        said = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if said in ("/exit", "/quit") else said


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, quiet: bool) -> str:
    """Stream one answer; Ctrl-C keeps what came so far."""
    text = ""
    try:
        for chunk in llm.stream(llm.chat_prompt(messages), params):
            print(chunk.text, end="", flush=True)
            text += chunk.text
            if chunk.result is not None:
                print()
                stats = chunk.result.stats
                note(
                    f"{summary(stats)}, {stats.cached_tokens} of {stats.prompt_tokens} prompt tokens reused",
                    quiet=quiet,
                )
    except KeyboardInterrupt:
        print()
        note("stopped", quiet=quiet)
    return text
