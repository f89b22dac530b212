"""Parts of drafters in training, with the names that checkpoints use."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.config import ModelConfig, RopeConfig
from paceline.model.rope import rotate
from paceline.train.target import MLP, OUTPUT, QKV

Angles = tuple[Tensor, Tensor]
Past = list[tuple[Tensor, Tensor]]
"""Keys and values [B, heads, R, d] of the steps before; the first step has every row."""


def layer_config(target: ModelConfig, layers: int = 1, family: str = "llama") -> ModelConfig:
    """Layers of the target's own sizes, of family llama or qwen3 (which norms queries and keys)."""
    return ModelConfig(
        family, target.vocab_size, target.hidden_size, layers, target.num_heads, target.num_kv_heads, target.head_dim,
        target.intermediate_size, target.max_positions, norm_eps=target.norm_eps, rope=target.rope or RopeConfig(),
        tie_embeddings=False, qk_norm=family == "qwen3",
    )  # fmt: skip


def layer_weights(target: ModelConfig, width: int) -> int:
    """Of the matrices of one layer whose attention reads `width` features."""
    heads, kv_heads = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    return width * (heads + 2 * kv_heads) + target.hidden_size * (heads + 3 * target.intermediate_size)


class RmsNorm(nn.RMSNorm):
    """In fp32 whatever comes in: PyTorch has one kernel for that, and several where the dtypes differ."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Attention(nn.Module):
    """Causal self-attention of rows of `width` features (EAGLE-3's have twice the hidden size)."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        dim = config.head_dim
        self.heads, self.kv_heads, self.dim, self.scale = config.num_heads, config.num_kv_heads, dim, config.scale
        self.q_proj = nn.Linear(width, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, config.hidden_size, bias=False)
        self.q_norm = RmsNorm(dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RmsNorm(dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rows: Tensor, turn: Angles, past: Past) -> Tensor:
        """Rows [B, R, width] of one step -> [B, R, H]. rows [R]: which of the first step's they continue, itself all of
        them. `past`: keys and values [B, heads, R, d] of the steps before, to which this step's are added.

        Row s of step j continues a draft that began at s, so it sees the first step's rows up to s, and of every later
        step, its own included, only row s.
        """
        query = rotate(self.q_norm(self._split(self.q_proj(x), self.heads)), *turn).transpose(1, 2)
        key = rotate(self.k_norm(self._split(self.k_proj(x), self.kv_heads)), *turn).transpose(1, 2)
        value = self._split(self.v_proj(x), self.kv_heads).transpose(1, 2)
        group = self.heads // self.kv_heads
        past.append((key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)))
        out = self._first(query, past) if len(past) == 1 else self._later(query, rows, past)
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended

    def _first(self, query: Tensor, past: Past) -> Tensor:
        """The step of all rows is causal attention; PyTorch's own keeps no matrix of scores."""
        key, value = past[0]
        query, key = query.to(value.dtype), key.to(value.dtype)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)

    def _later(self, query: Tensor, rows: Tensor, past: Past) -> Tensor:
        (first_key, first_value), *steps = past
        count = first_key.shape[2]
        later = torch.arange(count) > rows[:, None]
        scores = (query @ first_key.transpose(2, 3)).float() * self.scale
        scores = scores.masked_fill(later, -torch.inf)
        own = [(query * key).sum(-1, keepdim=True).float() * self.scale for key, _ in steps]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        out: Tensor = weights[..., :count].to(first_value.dtype) @ first_value
        for index, (_, value) in enumerate(steps):
            out = out + weights[..., count + index, None] * value
        return out

    def begin_as(self, layer: Mapping[str, Tensor]) -> None:
        """A layer's own projections, for the last of the features; those before count for nothing yet."""
        for name in QKV:
            weight, own = getattr(self, name).weight, layer[name]
            weight.zero_()
            weight[:, -own.shape[1] :] = own
        self.o_proj.weight.copy_(layer[OUTPUT])

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.dim)


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out

    def begin_as(self, layer: Mapping[str, Tensor]) -> None:
        for name in MLP:
            getattr(self, name).weight.copy_(layer[name])
