"""The presets against transformers, both in fp32 from the same GGUF file: real weights, real scales, real K-quants.

Largest difference of 40 x vocabulary logits, measured with torch 2.13 and transformers 5.24:

    smollm2-135m        6.7e-05   (logits up to 31)
    gemma3-270m         3.4e-04   (up to 169)
    qwen2.5-coder-0.5b  9.3e-05   (up to 15)
    qwen2.5-coder-1.5b  7.7e-05   (up to 20; run by hand)
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import assert_close, contiguous, dirty_pool, from_source, reference_logits, run_in_chunks
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from paceline.weights.gguf import GGUFSource
from paceline.weights.presets import preset_is_cached, preset_path

pytestmark = pytest.mark.real_model

TOLERANCE = 1e-3
OPTIONAL = ["qwen2.5-coder-0.5b", "gemma3-270m"]
TOKENS = [int(n) for n in torch.randint(5, 30_000, (40,), generator=torch.Generator().manual_seed(0))]


def theirs(path: Path) -> Tensor:
    """What `from_pretrained(gguf_file=...)` gives; that call itself wants another library, accelerate."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    unmatched = model.load_state_dict(weights, strict=False)
    assert set(unmatched.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return reference_logits(model, TOKENS)


def ours(path: Path, sizes: list[int]) -> Tensor:
    decoder = from_source(GGUFSource(path))
    return run_in_chunks(decoder, contiguous(dirty_pool(decoder.config, blocks=8), TOKENS), sizes)


def check(name: str) -> None:
    path = preset_path(name)
    assert_close(ours(path, [20, 1, 2, 3, 5, 8]), theirs(path), TOLERANCE)


def test_smollm2_against_transformers() -> None:
    check("smollm2-135m")


@pytest.mark.parametrize("name", OPTIONAL)
def test_cached_preset_against_transformers(name: str) -> None:
    if not preset_is_cached(name):
        pytest.skip(f"{name} is not in the cache")
    check(name)
