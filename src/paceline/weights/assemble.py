"""Converted tensors to a `Decoder`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paceline.device import Backend
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.linear import DenseLinear, Int4Linear, Int8Linear, Linear
from paceline.model.norm import LayerNorm, RMSNorm
from paceline.model.sublayers import Layer, Norm
from paceline.native.assemble import assemble_native
from paceline.native.packed import Packed


def assemble(
    config: ModelConfig, tensors: Mapping[str, Tensor | Packed], backend: Backend, head_ids: Tensor | None = None
) -> Decoder:
    """`head_ids` [n]: score only these token ids, in this order (a draft's reduced vocabulary)."""
    if backend.native:
        return assemble_native(config, tensors, backend, head_ids)
    dense = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Packed)}
    build = _Builder(config, dense, backend)
    return Decoder(
        config=config,
        embedding=build.tensor("embedding"),
        positions=build.optional("positions"),
        layers=[build.layer(f"layers.{i}.") for i in range(config.num_layers)],
        final_norm=build.norm("final_norm"),
        head=build.linear("head", head_ids),
        head_ids=None if head_ids is None else head_ids.to(backend.device),
        device=backend.device,
        dtype=backend.dtype,
    )


class _Builder:
    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], backend: Backend) -> None:
        self.config, self.tensors, self.backend = config, tensors, backend

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name].to(self.backend.device)

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self.tensors else None

    def layer(self, at: str) -> Layer:
        qk, post = self.config.qk_norm, self.config.post_norms
        return Layer(
            attention_norm=self.norm(at + "attention_norm"),
            qkv=self.linear(at + "qkv"),
            output=self.linear(at + "output"),
            mlp_norm=self.norm(at + "mlp_norm"),
            up=self.linear(at + "up"),
            down=self.linear(at + "down"),
            query_norm=self.rms(at + "query_norm") if qk else None,
            key_norm=self.rms(at + "key_norm") if qk else None,
            post_attention_norm=self.norm(at + "post_attention_norm") if post else None,
            post_mlp_norm=self.norm(at + "post_mlp_norm") if post else None,
        )

    def norm(self, name: str) -> Norm:
        if self.config.norm == "rms":
            return self.rms(name)
        return LayerNorm(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"), self.config.norm_eps)

    def rms(self, name: str) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight"), self.config.norm_eps)

    def linear(self, name: str, rows: Tensor | None = None) -> Linear:
        """`rows`: keep only these output channels."""

        def part(kind: str) -> Tensor | None:
            stored = self.optional(f"{name}.{kind}")
            if stored is None or rows is None:
                return stored
            return stored[:, rows] if kind == "groups" else stored[rows]

        weight, scale, bias = part("weight"), part("scale"), part("bias")
        assert weight is not None
        if scale is None:
            return DenseLinear(weight, bias)
        nibbles, groups = part("nibbles"), part("groups")
        if nibbles is not None and groups is not None:
            return Int4Linear(nibbles, groups, Int8Linear(weight, scale, split=False), bias)
        return Int8Linear(weight, scale, bias)
