"""Running heads row by row, and what they should give: one decoder layer written out from its equations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import FP32, dirty_pool
from torch import Tensor

from paceline.cache.pool import BlockPool, SequenceCache
from paceline.heads.eagle import EagleHead
from paceline.heads.load import Head, load_head
from paceline.heads.mtp import MtpHead
from paceline.model.attention import Span
from paceline.model.config import ModelConfig

GOLDEN = Path(__file__).parent / "golden"
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, TARGET_LAYERS = 32, 48, 4, 2, 200, 12
THETA, EPS = 5000.0, 1e-5
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
}
Weights = dict[str, Tensor]


def target_config(hidden: int = HIDDEN, layers: int = TARGET_LAYERS, vocab: int = VOCAB) -> ModelConfig:
    """Of a target that the heads here were made for."""
    return ModelConfig("llama", vocab, hidden, layers, HEADS, KV_HEADS, hidden // HEADS, INNER, 128)


def load_golden(name: str) -> tuple[Head, dict[str, Tensor]]:
    head = load_head(str(GOLDEN / name), target_config(), FP32)
    return head, load_file(GOLDEN / name / "golden.safetensors")


# Running


Compute = Callable[[Sequence[int], list[Span], BlockPool], Tensor]
"""(indices of the rows that are fed, spans, pool) -> hidden states [T, H]."""


@dataclass
class Sequenced:
    """One sequence in a head's own cache."""

    pool: BlockPool
    cache: SequenceCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = self.pool.open([], room=1)

    def span(self, count: int, start: int = 0) -> Span:
        self.cache.append(count)
        return Span(self.cache, start, count, self.cache.length)

    def feed(self, rows: Sequence[int], compute: Compute) -> Tensor:
        """The next rows, which follow one another."""
        span = self.span(len(rows))
        out = compute(rows, [span], self.pool)
        self.cache.commit(range(len(rows)), [])
        return out


def fresh(head: EagleHead | MtpHead) -> Sequenced:
    return Sequenced(dirty_pool(head.config))


# What it should give


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        return 1 + 0.3 * noise if len(shape) == 1 else noise / math.sqrt(shape[-1])

    return {name: draw(shape) for name, shape in shapes.items()}


def layer_shapes(at: str, inputs: int = HIDDEN, bias: bool = False) -> dict[str, tuple[int, ...]]:
    dim = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}self_attn.q_proj.weight": (HEADS * dim, inputs),
        f"{at}self_attn.k_proj.weight": (KV_HEADS * dim, inputs),
        f"{at}self_attn.v_proj.weight": (KV_HEADS * dim, inputs),
        f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * dim),
        f"{at}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{at}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{at}mlp.down_proj.weight": (HIDDEN, INNER),
        f"{at}post_attention_layernorm.weight": (HIDDEN,),
    }
    if bias:
        shapes |= {f"{at}self_attn.{n}_proj.bias": (shapes[f"{at}self_attn.{n}_proj.weight"][0],) for n in "qkv"}
    return shapes


def write_head(folder: Path, config: Mapping[str, Any], weights: Weights) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file(weights, str(folder / "model.safetensors"))
    return folder


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turn(x: Tensor) -> Tensor:
    """Rotary positions 0, 1, .. of x [T, heads, dim], as complex numbers: (x_j + i x_{j + dim/2}) exp(i t theta_j)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[0])[:, None] * THETA ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def attention(w: Weights, at: str, x: Tensor) -> Tensor:
    """Causal self-attention of rows x [T, in] at positions 0, 1, .. -> [T, H]."""
    count, dim = x.shape[0], HIDDEN // HEADS

    def project(name: str, heads: int) -> Tensor:
        out = x @ w[f"{at}self_attn.{name}_proj.weight"].T
        return (out + w.get(f"{at}self_attn.{name}_proj.bias", torch.zeros(()))).view(count, heads, dim)

    q, k, v = turn(project("q", HEADS)), turn(project("k", KV_HEADS)), project("v", KV_HEADS)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
    return mixed @ w[f"{at}self_attn.o_proj.weight"].T


def layer(w: Weights, at: str, x: Tensor, residual: Tensor) -> Tensor:
    """A decoder layer whose attention reads `x` and adds to `residual`."""
    residual = residual + attention(w, at, x)
    x = rms(residual, w[f"{at}post_attention_layernorm.weight"])
    gate, up = (x @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return residual + (torch.nn.functional.silu(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T
