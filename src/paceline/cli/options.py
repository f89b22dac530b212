"""Command line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MODEL, _SAMPLING = "Model and method", "Sampling"

Model = Annotated[
    str, typer.Option("--model", "-m", help="Preset, directory, .gguf file or hub id.", rich_help_panel=_MODEL)
]
Draft = Annotated[
    str | None, typer.Option("--draft", "-d", help="Draft model, of any vocabulary.", rich_help_panel=_MODEL)
]
Head = Annotated[
    str | None,
    typer.Option(
        help="EAGLE, Medusa or MTP head: directory or hub id; none: not even the one that comes with Paceline.",
        rich_help_panel=_MODEL,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="none, ngram, suffix, draft, eagle, medusa, mtp, swift, early-exit, or auto (the default): the best of "
        "suffix, ngram and the head or draft given, chosen for each request and step.",
        rich_help_panel=_MODEL,
    ),
]
Tree = Annotated[
    str | None, typer.Option(help="Draft trees: WIDTHxDEPTHxNODES, for example 4x6x32.", rich_help_panel=_MODEL)
]
ExitLayers = Annotated[
    int | None, typer.Option(help="early-exit: layers to draft with (default: half).", rich_help_panel=_MODEL)
]
K = Annotated[
    int | None, typer.Option("--k", help="Draft length (default: adapts to what pays).", rich_help_panel=_MODEL)
]
NgramMin = Annotated[int, typer.Option(help="ngram: shortest ending to look for.", rich_help_panel=_MODEL)]
NgramMax = Annotated[int, typer.Option(help="ngram: longest ending to look for.", rich_help_panel=_MODEL)]
Verify = Annotated[
    str,
    typer.Option(
        help="auto, rejection, coupled (same tokens as plain under a seed), or typical (lossy).", rich_help_panel=_MODEL
    ),
]
Precision = Annotated[str, typer.Option(help="auto, stored, fp32, bf16, int8 or int4.", rich_help_panel=_MODEL)]
DraftPrecision = Annotated[str | None, typer.Option(help="Precision of the draft.", rich_help_panel=_MODEL)]
DraftVocab = Annotated[
    int | None, typer.Option(help="The draft scores only its first N ids and special tokens.", rich_help_panel=_MODEL)
]
Threads = Annotated[
    int | None, typer.Option(help="Threads (default: what the container allows).", rich_help_panel=_MODEL)
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda (default: a GPU if any).", rich_help_panel=_MODEL)]
Prediction = Annotated[
    Path | None,
    typer.Option(help="File with the likely answer, to draft from: the text before an edit.", rich_help_panel=_MODEL),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no statistics.")]

Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest; 0 is off.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float, typer.Option(help="Keep the smallest set of this mass.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option(help="Drop below this share of the maximum.", rich_help_panel=_SAMPLING)]
RepetitionPenalty = Annotated[float, typer.Option(help="1 is off.", rich_help_panel=_SAMPLING)]
PresencePenalty = Annotated[float, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)]
FrequencyPenalty = Annotated[float, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)]
Bias = Annotated[
    list[str] | None, typer.Option("--logit-bias", help="ID=VALUE, may be repeated.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[int | None, typer.Option(help="Fixes the answer.", rich_help_panel=_SAMPLING)]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string, may be repeated.", rich_help_panel=_SAMPLING)]
StopToken = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="May be repeated.", rich_help_panel=_SAMPLING)
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Longest answer.", rich_help_panel=_SAMPLING)]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end.", rich_help_panel=_SAMPLING)]
Logprobs = Annotated[
    int | None, typer.Option(help="Report this many alternatives a token (--json).", rich_help_panel=_SAMPLING)
]
