"""From a head's tensors to what its modules compute with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.device import Backend
from paceline.heads.tensors import HeadTensors
from paceline.model.config import ModelConfig
from paceline.model.linear import DenseLinear, Linear
from paceline.model.norm import RMSNorm
from paceline.model.sublayers import Layer, Norm


@dataclass(frozen=True)
class Builder:
    """Dense linears in the backend's dtype, norms in fp32. The tensors were checked before."""

    tensors: HeadTensors
    config: ModelConfig
    backend: Backend

    def tensor(self, name: str) -> Tensor:
        return self.tensors.get(name).to(self.backend.device, self.backend.dtype)

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self.tensors else None

    def norm(self, module: str) -> RMSNorm:
        weight = self.tensors.get(f"{module}.weight")
        return RMSNorm(weight.to(self.backend.device, torch.float32), self.config.norm_eps)

    def linear(self, *modules: str) -> Linear:
        """Several modules become one, side by side."""
        weight = torch.cat([self.tensor(f"{module}.weight") for module in modules])
        biases = [self.tensor(f"{module}.bias") for module in modules if f"{module}.bias" in self.tensors]
        return DenseLinear(weight, torch.cat(biases) if biases else None)

    def layer(self, at: str, attention_norm: Norm) -> Layer:
        qk = self.config.qk_norm
        return Layer(
            attention_norm=attention_norm,
            qkv=self.linear(*(f"{at}self_attn.{name}_proj" for name in "qkv")),
            output=self.linear(f"{at}self_attn.o_proj"),
            mlp_norm=self.norm(f"{at}post_attention_layernorm"),
            up=self.linear(f"{at}mlp.gate_proj", f"{at}mlp.up_proj"),
            down=self.linear(f"{at}mlp.down_proj"),
            query_norm=self.norm(f"{at}self_attn.q_norm") if qk else None,
            key_norm=self.norm(f"{at}self_attn.k_norm") if qk else None,
        )
