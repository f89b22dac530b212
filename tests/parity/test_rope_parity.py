"""RoPE scaling rules against the original library, past the positions the model was trained for."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tiny import (
    SIZES,
    SLIDING_FULL,
    WINDOW,
    assert_close,
    assert_parity,
    contiguous,
    dirty_pool,
    pair,
    prompt,
    reference_logits,
    run_in_chunks,
    tiny_model,
)
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config

TRAINED = 32  # positions; the prompts are longer
LENGTH = 90
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": TRAINED},
    "llama3-uneven": LLAMA3 | {"original_max_position_embeddings": 48, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
    "yarn": YARN,
    "yarn-attention-factor": YARN | {"attention_factor": 1.7},
    "yarn-betas": YARN | {"beta_fast": 3.0, "beta_slow": 0.5},
    "yarn-not-truncated": YARN | {"truncate": False, "beta_fast": 4.0},
}


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, MistralConfig])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaling_against_transformers(scaling: str, kind: Any) -> None:
    rope = SCALINGS[scaling] | {"rope_theta": 500.0}
    model, decoder = pair(kind(**SIZES, head_dim=32, rope_parameters=rope))
    assert_parity(decoder, model, prompt(LENGTH))


@cache
def _theirs(scaling: str) -> Tensor:
    config = LlamaConfig(**SIZES, head_dim=32, rope_parameters=SCALINGS[scaling] | {"rope_theta": 500.0})
    return reference_logits(tiny_model(config), prompt(LENGTH))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaling_changes_the_logits(scaling: str) -> None:
    """The parity above means something: each rule moves the logits away from every other rule's."""
    others = [(_theirs(name) - _theirs(scaling)).abs().max().item() for name in SCALINGS if name != scaling]
    assert min(others) > 1e-2


@pytest.mark.parametrize("scaling", ["none", "linear", "yarn", "llama3"])
def test_gemma3_scales_its_global_layers_only(scaling: str) -> None:
    rope = {
        "full_attention": SCALINGS[scaling] | {"rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    config = Gemma3TextConfig(
        **SIZES, head_dim=32, sliding_window=WINDOW, layer_types=SLIDING_FULL, rope_parameters=rope
    )
    model, decoder = pair(config)
    assert_parity(decoder, model, prompt(LENGTH))


def test_scaled_positions_one_by_one() -> None:
    """A table that grows while decoding gives the values a whole prompt gets."""
    rope = SCALINGS["yarn"] | {"rope_theta": 500.0}
    model, decoder = pair(LlamaConfig(**SIZES | {"max_position_embeddings": 2048}, rope_parameters=rope))
    tokens = prompt(1100)
    ours = run_in_chunks(decoder, contiguous(dirty_pool(decoder.config, blocks=128), tokens), [500, 500, 1, 50])
    # Transformers multiplies position and frequency in fp32, Paceline in fp64: at 1,100 the angles differ by 6e-5.
    assert_close(ours, reference_logits(model, tokens), tolerance=5e-4)
