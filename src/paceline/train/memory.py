"""Does a run fit into memory? Told before anything is loaded, with numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

from paceline.errors import PacelineError
from paceline.model.config import ModelConfig
from paceline.weights.load import open_source
from paceline.weights.resolve import Checkpoint, resolve

GB = 1e9
OPTIMISED = 16  # bytes a trained weight: itself, its gradient, Adam's two moments, all fp32
UNROLLED = 4  # steps whose logits are kept for the gradient
ITSELF = 2.5 * GB  # Python, PyTorch, the data that is being read, what lies between allocations
Weights = Callable[[ModelConfig, int], int]
"""How many weights are trained for a target, of a drafter that scores so many tokens."""


def needed_bytes(
    checkpoint: Checkpoint, config: ModelConfig, weights: Weights, draft_vocab: int, rows: int
) -> dict[str, float]:
    """What takes most of the memory of a run, by name."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    scored = min(draft_vocab, vocab)
    tables = 1 if config.tie_embeddings else 2
    return {
        "target": 1.1 * size_on_disk(checkpoint),
        "its embedding": 2.0 * tables * vocab * hidden,
        "drafter and optimiser": float(OPTIMISED * weights(config, scored)),
        "a batch": rows * UNROLLED * 4.0 * (4 * scored + 4 * inner + 16 * hidden),
        "the rest": ITSELF,
    }


def size_on_disk(checkpoint: Checkpoint) -> int:
    if checkpoint.kind == "gguf":
        return checkpoint.path.stat().st_size
    return sum(file.stat().st_size for file in Path(checkpoint.path).glob("*.safetensors"))


def check_memory(target: str, weights: Weights, draft_vocab: int, rows: int) -> None:
    """Raises PacelineError where more would be needed than is free."""
    checkpoint = resolve(target)
    parts = needed_bytes(checkpoint, open_source(checkpoint).config, weights, draft_vocab, rows)
    free = psutil.virtual_memory().available
    if sum(parts.values()) > free:
        told = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items())
        raise PacelineError(
            f"training for '{target}' needs about {sum(parts.values()) / GB:.1f} GB of memory ({told}), "
            f"{free / GB:.1f} GB are free; lower --rows or --draft-vocab, or take a smaller target"
        )
