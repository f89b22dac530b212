"""Groups of options that several commands share, each a dataclass that a command takes as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from paceline.cli import options as opt
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.build import Options
    from paceline.sampling.params import SamplingParams


@dataclass
class ModelChoice:
    """What to run and how to draft; the method itself is each command's own option."""

    model: opt.Model = "smollm2-135m"
    draft: opt.Draft = None
    head: opt.Head = None
    k: opt.K = None
    tree: opt.Tree = None
    ngram_min: opt.NgramMin = 2
    ngram_max: opt.NgramMax = 16
    exit_layers: opt.ExitLayers = None
    precision: opt.Precision = "auto"
    draft_precision: opt.DraftPrecision = None
    draft_vocab: opt.DraftVocab = None
    threads: opt.Threads = None
    device: opt.Device = None

    def options(self, **more: Any) -> Options:
        from paceline.build import Options

        return Options(**{**vars(self), **more})


@dataclass
class Sampling:
    """How to sample. `prediction` is a file here, its text in the parameters."""

    verify: opt.Verify = "auto"
    temperature: opt.Temperature = 0.0
    top_k: opt.TopK = 0
    top_p: opt.TopP = 1.0
    min_p: opt.MinP = 0.0
    repetition_penalty: opt.RepetitionPenalty = 1.0
    presence_penalty: opt.PresencePenalty = 0.0
    frequency_penalty: opt.FrequencyPenalty = 0.0
    logit_bias: opt.Bias = None
    seed: opt.Seed = None
    stop: opt.Stop = None
    stop_token_id: opt.StopToken = None
    max_tokens: opt.MaxTokens = 256
    ignore_eos: opt.IgnoreEos = False
    logprobs: opt.Logprobs = None
    prediction: opt.Prediction = None

    def params(self) -> SamplingParams:
        from paceline.sampling.params import SamplingParams

        given = dict(vars(self))
        given["logit_bias"] = parse_bias(given["logit_bias"] or [])
        given["stop"] = given["stop"] or ()
        given["stop_token_ids"] = given.pop("stop_token_id") or ()
        given["prediction"] = read_prediction(given["prediction"])
        return SamplingParams(**given)


def parse_bias(entries: list[str]) -> dict[int, float]:
    try:
        return {int(token): float(value) for token, _, value in (entry.partition("=") for entry in entries)}
    except ValueError:
        raise PacelineError(f"logit bias must be ID=VALUE, for example 50=-5, not {' '.join(entries)}") from None


def read_prediction(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PacelineError(f"cannot read the prediction '{path}': {reason}") from None


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer has to see it: each parameter that is a group becomes the group's own options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        inner = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            option = inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=inner[field.name]
            )
            parameters.append(option)

    @wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    del run.__wrapped__  # typer would follow it to the signature behind
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
