"""Does a run fit into memory? Told before anything is loaded, with numbers."""

from __future__ import annotations

from pathlib import Path

import psutil

from paceline.errors import PacelineError
from paceline.model.config import ModelConfig
from paceline.weights.load import open_source
from paceline.weights.resolve import Checkpoint, resolve

GB = 1e9
OPTIMISED = 16  # bytes a trained weight: itself, its gradient, Adam's two moments, all fp32
UNROLLED = 4  # steps whose logits are kept for the gradient
ITSELF = 0.6 * GB  # Python, PyTorch, what is mapped of the data


def needed_bytes(checkpoint: Checkpoint, config: ModelConfig, draft_vocab: int, rows: int) -> dict[str, float]:
    """What takes most of the memory of a run, by name: an estimate from above for any kind of head."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    weights = hidden * (5 * hidden + 2 * heads + 3 * inner + min(draft_vocab, vocab))
    tables = 1 if config.tie_embeddings else 2
    return {
        "target": 1.1 * size_on_disk(checkpoint),
        "its embedding": 2.0 * tables * vocab * hidden,
        "drafter and optimiser": float(OPTIMISED * weights),
        "a batch": rows * UNROLLED * 4.0 * (4 * min(draft_vocab, vocab) + 4 * inner + 16 * hidden),
        "the rest": ITSELF,
    }


def size_on_disk(checkpoint: Checkpoint) -> int:
    if checkpoint.kind == "gguf":
        return checkpoint.path.stat().st_size
    return sum(file.stat().st_size for file in Path(checkpoint.path).glob("*.safetensors"))


def check_memory(target: str, draft_vocab: int, rows: int) -> None:
    """Raises PacelineError where more would be needed than is free."""
    checkpoint = resolve(target)
    parts = needed_bytes(checkpoint, open_source(checkpoint).config, draft_vocab, rows)
    free = psutil.virtual_memory().available
    if sum(parts.values()) > free:
        told = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items())
        raise PacelineError(
            f"training for '{target}' needs about {sum(parts.values()) / GB:.1f} GB of memory ({told}), "
            f"{free / GB:.1f} GB are free; lower --rows or --draft-vocab, or take a smaller target"
        )
