"""A slow twin of the native sublayers, written from the comments in native/: dequantised weights, sums in fp64.

Rounded as the kernels round: activations to int8 in groups of 32, keys and values to fp16. Two roundings of numbers
that differ in the last bit may part, so the twin says which rows hold an activation on the edge between two levels, and
takes the cache as it is given (what the kernels wrote there is compared apart).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.model.config import ModelConfig, RopeConfig
from paceline.native.packed import Packed

EDGE = 1e-4  # levels: what the order of sums may move an activation by, with room to spare


@dataclass
class Rounded:
    """Activations [T, columns] on their levels; `edge` [T]: rows with one that could as well be on the next."""

    values: Tensor
    edge: Tensor


def rounded(x: Tensor) -> Rounded:
    """q = round(x / scale), scale = max|x| / 127, in groups of 32."""
    groups = x.float().view(len(x), -1, 32)
    largest = groups.abs().amax(dim=2, keepdim=True)
    inverse = torch.where(largest < 1e-30, torch.zeros_like(largest), 127 / largest)
    levels = groups * inverse
    from_tie = ((levels - levels.floor()) - 0.5).abs()
    values = levels.round().double() * (largest / 127).double()
    return Rounded(values.flatten(1), (from_tie < EDGE).flatten(1).any(dim=1))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp64."""
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


def angles(rope: RopeConfig, head_dim: int, positions: Tensor) -> Tensor:
    """[T, 1, head_dim / 2]: position times theta^(-2i / head_dim), slower by the factor of a linear scaling."""
    assert rope.scaling in ("none", "linear")
    factor = rope.factor if rope.scaling == "linear" else 1.0
    pairs = torch.arange(head_dim // 2).double()
    return (positions.double()[:, None] / factor * rope.theta ** (-2 * pairs / head_dim))[:, None]


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    """Each pair (i, i + head_dim / 2) as a complex number, turned by its angle (Su et al. 2021)."""
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


@dataclass
class Attended:
    """keys, values [T, kv_heads, head_dim] before they become fp16; delta [T, H] is added to the hidden states."""

    keys: Tensor
    values: Tensor
    delta: Tensor
    edge: Tensor


@dataclass
class Twin:
    """`tensors`: as converted for the kernels."""

    config: ModelConfig
    tensors: Mapping[str, Tensor | Packed]

    def attend(self, layer: int, hidden: Tensor, keys: Tensor, values: Tensor) -> Attended:
        """The attention half for a whole sequence [T, H], attending to `keys` and `values` [T, kv_heads, head_dim]."""
        config, at = self.config, f"layers.{layer}."
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        x = rounded(norm(hidden, self.tensor(at + "attention_norm.weight"), config.norm_eps))
        qkv = self.linear(at + "qkv", x).view(len(hidden), -1, dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if config.qk_norm:
            q = norm(q, self.tensor(at + "query_norm.weight"), config.norm_eps)
            k = norm(k, self.tensor(at + "key_norm.weight"), config.norm_eps)
        rope = self.config.local_rope if config.window(layer) and config.local_rope else config.rope
        assert rope is not None
        angle = angles(rope, dim, torch.arange(len(hidden)))
        q, k = rotated(q, angle), rotated(k, angle)
        mixed = rounded(self._mix(layer, q, keys.double(), values.double()))
        delta = self.linear(at + "output", mixed)
        if config.post_norms:
            delta = norm(delta, self.tensor(at + "post_attention_norm.weight"), config.norm_eps)
        return Attended(k, v, delta, x.edge | mixed.edge)

    def _mix(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """softmax(q k^T scale) v, one head after the other: [T, heads * head_dim]."""
        config = self.config
        query, key = torch.arange(len(q))[:, None], torch.arange(len(q))[None]
        window = config.window(layer)
        seen = (key <= query) if window is None else (key <= query) & (key > query - window)
        scale = 1 / math.sqrt(config.head_dim) if config.attention_scale is None else config.attention_scale
        mixed = []
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            scores = (q[:, head] @ keys[:, shared].t() * scale).masked_fill(~seen, -math.inf)
            mixed.append(scores.softmax(dim=1) @ values[:, shared])
        return torch.cat(mixed, dim=1)

    def mlp(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the MLP half adds to hidden states [T, H], and the rows on an edge."""
        config, at = self.config, f"layers.{layer}."
        x = rounded(norm(hidden, self.tensor(at + "mlp_norm.weight"), config.norm_eps))
        gate, up = self.linear(at + "up", x).chunk(2, dim=1)
        if config.activation == "silu":
            gate = gate / (1 + (-gate).exp())
        else:
            gate = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        inner = rounded(gate * up)
        delta = self.linear(at + "down", inner)
        if config.post_norms:
            delta = norm(delta, self.tensor(at + "post_mlp_norm.weight"), config.norm_eps)
        return delta, x.edge | inner.edge

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of hidden states [T, H], and the rows on an edge."""
        x = rounded(norm(hidden, self.tensor("final_norm.weight"), self.config.norm_eps))
        return self.linear("head" if "head.0" in self.tensors else "embedding", x), x.edge

    def embed(self, tokens: Tensor) -> Tensor:
        return self.matrix("embedding.0")[tokens] * self.config.embedding_scale

    def linear(self, name: str, x: Rounded) -> Tensor:
        parts = [self.matrix(f"{name}.{i}") for i in range(3) if f"{name}.{i}" in self.tensors]
        y = x.values @ torch.cat(parts).t()
        return y + self.tensor(f"{name}.bias").double() if f"{name}.bias" in self.tensors else y

    def matrix(self, name: str) -> Tensor:
        packed = self.tensors[name]
        assert isinstance(packed, Packed)
        return packed.dequantize(torch.arange(packed.rows)).double()

    def tensor(self, name: str) -> Tensor:
        found = self.tensors[name]
        assert not isinstance(found, Packed)
        return found
