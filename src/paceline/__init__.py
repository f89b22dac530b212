"""Paceline: lossless speculative decoding for open-weights language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.engine.engine import EngineConfig
    from paceline.errors import PacelineError
    from paceline.llm import LLM
    from paceline.result import GenerationResult, StreamChunk
    from paceline.sampling.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "EngineConfig", "GenerationResult", "PacelineError", "SamplingParams", "StreamChunk"]

_WHERE = {
    "LLM": "paceline.llm",
    "AsyncLLM": "paceline.async_llm",
    "EngineConfig": "paceline.engine.engine",
    "GenerationResult": "paceline.result",
    "PacelineError": "paceline.errors",
    "SamplingParams": "paceline.sampling.params",
    "StreamChunk": "paceline.result",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `paceline --help` must not wait for torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
