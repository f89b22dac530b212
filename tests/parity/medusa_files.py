"""Medusa heads with random weights, and the folders that they come in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.device import Backend
from paceline.heads.load import load_head
from paceline.heads.medusa import MedusaHead
from paceline.model.config import ModelConfig

FP32 = Backend(torch.device("cpu"), "fp32", torch.float32)
TARGET = ModelConfig("llama", 60, 32, 2, 4, 2, 8, 48, max_positions=512)
Weights = dict[str, Tensor]


def random_heads(heads: int, blocks: int, *, outputs: bool = True, seed: int = 0) -> Weights:
    """Under the names of the authors' checkpoints, for `TARGET`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    hidden, weights = TARGET.hidden_size, {}
    for head in range(heads):
        for block in range(blocks):
            weights[f"{head}.{block}.linear.weight"] = draw(hidden, hidden)
            weights[f"{head}.{block}.linear.bias"] = draw(hidden)
        if outputs:
            weights[f"{head}.{blocks}.weight"] = draw(TARGET.vocab_size, hidden)
    return weights


def as_vllm(weights: Weights) -> Weights:
    """The same heads under vLLM's names."""
    renamed = {}
    for name, weight in weights.items():
        head, block, *rest = name.split(".")
        linear = rest[0] == "linear"
        renamed[f"blocks.{head}.layers.{block}.{rest[1]}" if linear else f"lm_heads.{head}.weight"] = weight
    return renamed


def authors_config(heads: int, blocks: int) -> dict[str, Any]:
    return {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": "org/base"}


def vllm_config(heads: int, blocks: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": TARGET.hidden_size, "vocab_size": TARGET.vocab_size}
    counts = {"num_heads": heads, "num_hidden_layers": blocks, "medusa_fc_bias": True}
    return {"model_type": "medusa", "architectures": ["MedusaModel"]} | sizes | counts | more


def write(folder: Path, config: Mapping[str, Any], weights: Weights, file: str = "medusa_lm_head.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if file.endswith(".safetensors"):
        save_file(weights, str(folder / file))
    else:
        torch.save(weights, folder / file)
    return folder


def load(folder: Path, target: ModelConfig = TARGET, backend: Backend = FP32) -> MedusaHead:
    head = load_head(str(folder), target, backend)
    assert isinstance(head, MedusaHead)
    return head
