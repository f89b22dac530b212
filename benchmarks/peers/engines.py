"""Which engines take part, with which modes, and where each runs."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.peers.protocol import Settings

from paceline.errors import PacelineError
from paceline.weights.resolve import resolve

OURS = "ours"
MODES = {
    OURS: ("none", "ngram", "suffix", "draft", "auto"),
    "llama_cpp": ("plain", "draft-4", "ngram-simple-12-48", "ngram-simple-4-16"),
    "openvino": ("plain", "prompt-lookup-5", "prompt-lookup-10"),
    "hf": ("plain", "lookup-10"),
    "vllm": ("plain", "ngram-5"),
}
"""The first of each is plain decoding."""


@dataclass(frozen=True)
class Engine:
    """A process to be started with `python -m benchmarks.peers.NAME`."""

    name: str
    python: str
    settings: Settings

    @property
    def labels(self) -> list[str]:
        return [f"{self.name}:{mode}" for mode in self.settings.modes]

    @property
    def plain(self) -> str | None:
        """The mode of plain decoding, if it takes part."""
        label = f"{self.name}:{MODES[self.name][0]}"
        return label if label in self.labels else None


def chosen_engines(options: Namespace, settings: Settings, only: Sequence[str] | None) -> list[Engine]:
    """Ours first, then the peers that were given. Raises PacelineError for a mode in `only` that nobody has."""
    engines = [cut for engine in _given(options, settings) if (cut := _only(engine, only)).settings.modes]
    labels = {label for engine in engines for label in engine.labels}
    for label in only or ():
        if label not in labels:
            raise PacelineError(f"no mode '{label}' among the engines given; a mode is ENGINE:MODE, such as ours:auto")
    return engines


def _given(options: Namespace, settings: Settings) -> Iterator[Engine]:
    modes = tuple(mode for mode in MODES[OURS] if mode != "draft" or settings.draft)
    yield Engine(OURS, sys.executable, replace(settings, modes=modes))
    if options.llama_server:
        yield Engine("llama_cpp", sys.executable, _llama_cpp(options.llama_server, settings))
    if options.openvino_python:
        gguf = replace(settings, model=_gguf(settings.model), modes=MODES["openvino"])
        yield Engine("openvino", options.openvino_python, gguf)
    if options.transformers:
        model = options.bf16_model or settings.model
        yield Engine("hf", sys.executable, replace(settings, model=model, modes=MODES["hf"]))
    if options.vllm_python:
        if not options.bf16_model:
            raise PacelineError("vLLM reads no GGUF file: give --bf16-model, which benchmarks.peers.dequantise writes")
        for mode in MODES["vllm"]:  # each has the model to itself
            yield Engine("vllm", options.vllm_python, replace(settings, model=options.bf16_model, modes=(mode,)))


def _llama_cpp(program: str, settings: Settings) -> Settings:
    modes = tuple(mode for mode in MODES["llama_cpp"] if not mode.startswith("draft") or settings.draft)
    draft = settings.draft and _gguf(settings.draft)
    return replace(settings, model=_gguf(settings.model), draft=draft, program=program, modes=modes)


def _gguf(name: str) -> str:
    checkpoint = resolve(name)
    if checkpoint.kind != "gguf":
        raise PacelineError(
            f"'{name}' is no GGUF file, which llama.cpp and OpenVINO are to read; give a preset or file"
        )
    return str(checkpoint.path)


def _only(engine: Engine, only: Sequence[str] | None) -> Engine:
    if only is None:
        return engine
    modes = tuple(mode for mode in engine.settings.modes if f"{engine.name}:{mode}" in only)
    return replace(engine, settings=replace(engine.settings, modes=modes))
