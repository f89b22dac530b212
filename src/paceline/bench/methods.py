"""What a benchmark's methods are called, and the options that each of them runs with."""

from __future__ import annotations

from dataclasses import replace

from paceline.bench.peer_transformers import PEERS
from paceline.build import Options
from paceline.errors import PacelineError
from paceline.methods import available_methods, known_methods
from paceline.weights.presets import PRESETS

WITH_DRAFT = "draft:"


def all_methods(options: Options) -> list[str]:
    """Every method that can run with what was given; a preset target brings the drafts that fit it."""
    named = available_methods(options.draft, options.known_head)
    known = PRESETS[options.model].drafts if options.model in PRESETS else ()
    named += [f"{WITH_DRAFT}{name}" for name in known if name != options.draft]
    return [*(name for name in named if name != "auto"), "auto"]


def options_of(method: str, options: Options) -> Options:
    """The options of one method. `draft:NAME` is method draft with that model.

    No past answers are remembered, which a repeated prompt would find. Raises PacelineError for a name that is not
    known.
    """
    name, draft = method, options.draft
    if method.startswith(WITH_DRAFT):
        name, draft = "draft", method.removeprefix(WITH_DRAFT)
    if name == "auto" and draft is None and options.model in PRESETS and options.known_head is None:
        draft = next(iter(PRESETS[options.model].drafts), None)
    if name not in known_methods():
        raise PacelineError(
            f"unknown method '{method}'; one of {', '.join(known_methods())}, draft:MODEL, {', '.join(PEERS)}"
        )
    return replace(options, method=name, draft=draft, suffix_history=0)
