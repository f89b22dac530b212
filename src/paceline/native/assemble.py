"""Converted tensors to a decoder on the native kernels."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paceline.device import Backend
from paceline.model.config import ModelConfig
from paceline.native.decoder import NativeDecoder
from paceline.native.layers import NativeLayer
from paceline.native.linear import NativeLinear
from paceline.native.norm import NativeNorm
from paceline.native.packed import Packed


def assemble_native(
    config: ModelConfig, tensors: Mapping[str, Tensor | Packed], backend: Backend, head_ids: Tensor | None
) -> NativeDecoder:
    """See `weights/assemble.py`. Without a head of its own the embedding serves."""
    build = _Builder(config, tensors)
    embedding = build.matrix("embedding.0")
    head = build.linear("head") if "head.0" in tensors else NativeLinear([embedding])
    final_norm = NativeNorm(build.tensor("final_norm.weight"), config.norm_eps)
    return NativeDecoder(
        config=config,
        embedding=embedding.data,
        layers=[],
        final_norm=final_norm,
        head=head if head_ids is None else head.rows(head_ids),
        device=backend.device,
        dtype=backend.dtype,
        head_ids=head_ids,
        packed_embedding=embedding,
        native_layers=[build.layer(f"layers.{index}.") for index in range(config.num_layers)],
    )


class _Builder:
    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor | Packed]) -> None:
        self.config, self.tensors = config, tensors

    def layer(self, at: str) -> NativeLayer:
        qk, post = self.config.qk_norm, self.config.post_norms
        return NativeLayer(
            qkv=self.linear(at + "qkv"),
            output=self.linear(at + "output"),
            gate_up=self.linear(at + "up"),
            down=self.linear(at + "down"),
            attention_norm=self.tensor(at + "attention_norm.weight"),
            mlp_norm=self.tensor(at + "mlp_norm.weight"),
            query_norm=self.tensor(at + "query_norm.weight") if qk else None,
            key_norm=self.tensor(at + "key_norm.weight") if qk else None,
            post_attention_norm=self.tensor(at + "post_attention_norm.weight") if post else None,
            post_mlp_norm=self.tensor(at + "post_mlp_norm.weight") if post else None,
        )

    def linear(self, name: str) -> NativeLinear:
        parts = [self.matrix(f"{name}.{i}") for i in range(3) if f"{name}.{i}" in self.tensors]
        return NativeLinear(parts, self.tensor(f"{name}.bias") if f"{name}.bias" in self.tensors else None)

    def matrix(self, name: str) -> Packed:
        found = self.tensors[name]
        assert isinstance(found, Packed)
        return found

    def tensor(self, name: str) -> Tensor:
        found = self.tensors[name]
        assert not isinstance(found, Packed)
        return found.float().contiguous()
