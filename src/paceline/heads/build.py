"""From a head's tensors to what its modules compute with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.device import Backend
from paceline.heads.block import Block, Rows, TorchBlock, as_norm, same, widen
from paceline.heads.tensors import HeadTensors
from paceline.model.config import ModelConfig
from paceline.model.linear import DenseLinear, Linear
from paceline.model.norm import RMSNorm
from paceline.model.sublayers import Layer
from paceline.native.block import NativeBlock
from paceline.native.decoder import runs_natively
from paceline.native.layers import NativeLayer
from paceline.native.linear import NativeLinear
from paceline.native.memory import Arena
from paceline.native.norm import NativeNorm
from paceline.native.packed import Format, packed_bytes, quantize

# Of a head's matrices on the kernels. Rounding a draft costs acceptance, never exactness: in 8 bits the head of
# smollm2-135m brings 1.83 tokens a forward, in 4 bits, half as much to read, 1.80 (docs/heads.md).
FORMAT = Format.Q4_1


@dataclass(frozen=True)
class Place:
    """A layer in the file: the modules of its norms, None where its attention takes the rows as they are.

    embed_norm: of the embeddings that a head's first layer reads beside the hidden states; None in other layers.
    """

    at: str
    attention_norm: str | None
    embed_norm: str | None = None


@dataclass(frozen=True)
class Builder:
    """On the kernels where the target runs on them and they have what the head is made of, with weights in `FORMAT`.
    Else dense linears in the backend's dtype, norms in fp32.

    The tensors were checked before.
    """

    tensors: HeadTensors
    config: ModelConfig
    backend: Backend

    @property
    def native(self) -> bool:
        return self.backend.native and runs_natively(self.config)

    def tensor(self, name: str) -> Tensor:
        return self.tensors.get(name).to(self.backend.device, self.backend.dtype)

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self.tensors else None

    def norm(self, module: str) -> RMSNorm:
        kind = NativeNorm if self.native else RMSNorm
        return kind(self._scales(module), self.config.norm_eps)

    def linear(self, *modules: str) -> Linear:
        """Several modules become one, side by side."""
        if self.native:
            return self._packed(*modules)
        return DenseLinear(torch.cat([self.tensor(f"{module}.weight") for module in modules]), self._bias(*modules))

    def block(self, places: Sequence[Place]) -> Block:
        """The head's layers; the first reads what is beside the hidden states where its place names an `embed_norm`."""
        if self.native:
            return NativeBlock(self.config, [self._native_layer(place) for place in places])
        layers = [self._layer(place) for place in places]
        if places[0].embed_norm is not None:
            layers = [self._wide(layer, place) for layer, place in zip(layers, places, strict=True)]
        return TorchBlock.of(self.config, layers, self.backend)

    def _layer(self, place: Place) -> Layer:
        at, qk = place.at, self.config.qk_norm
        return Layer(
            attention_norm=as_norm(self._norm_or_same(place.attention_norm)),
            qkv=self.linear(*(f"{at}self_attn.{name}_proj" for name in "qkv")),
            output=self.linear(f"{at}self_attn.o_proj"),
            mlp_norm=self.norm(f"{at}post_attention_layernorm"),
            up=self.linear(f"{at}mlp.gate_proj", f"{at}mlp.up_proj"),
            down=self.linear(f"{at}mlp.down_proj"),
            query_norm=self.norm(f"{at}self_attn.q_norm") if qk else None,
            key_norm=self.norm(f"{at}self_attn.k_norm") if qk else None,
        )

    def _wide(self, layer: Layer, place: Place) -> Layer:
        """The layer over [embeddings; hidden states]; without an `embed_norm` it attends with the latter alone."""
        hidden, norm = self.config.hidden_size, layer.attention_norm
        if place.embed_norm is None:
            return widen(layer, lambda stream: norm(stream[:, hidden:]), hidden)
        embed_norm = self.norm(place.embed_norm)
        return widen(
            layer, lambda stream: torch.cat((embed_norm(stream[:, :hidden]), norm(stream[:, hidden:])), dim=1), hidden
        )

    def _native_layer(self, place: Place) -> NativeLayer:
        at, qk = place.at, self.config.qk_norm
        return NativeLayer(
            qkv=self._packed(*(f"{at}self_attn.{name}_proj" for name in "qkv")),
            output=self._packed(f"{at}self_attn.o_proj"),
            gate_up=self._packed(f"{at}mlp.gate_proj", f"{at}mlp.up_proj"),
            down=self._packed(f"{at}mlp.down_proj"),
            attention_norm=None if place.attention_norm is None else self._scales(place.attention_norm),
            embed_norm=None if place.embed_norm is None else self._scales(place.embed_norm),
            mlp_norm=self._scales(f"{at}post_attention_layernorm"),
            query_norm=self._scales(f"{at}self_attn.q_norm") if qk else None,
            key_norm=self._scales(f"{at}self_attn.k_norm") if qk else None,
        )

    def _norm_or_same(self, module: str | None) -> Rows:
        return same if module is None else self.norm(module)

    def _scales(self, module: str) -> Tensor:
        return self.tensors.get(f"{module}.weight").to(self.backend.device, torch.float32).contiguous()

    def _bias(self, *modules: str) -> Tensor | None:
        biases = [self.tensor(f"{module}.bias") for module in modules if f"{module}.bias" in self.tensors]
        return torch.cat(biases) if biases else None

    def _packed(self, *modules: str) -> NativeLinear:
        weights = [self.tensors.get(f"{module}.weight") for module in modules]
        return NativeLinear([quantize(weight, FORMAT, self._arena) for weight in weights], self._bias(*modules))

    @cached_property
    def _arena(self) -> Arena:
        """Room for every matrix of the head, in huge pages; what is not taken from it costs nothing."""
        shapes = [entry.shape for entry in self.tensors.entries.values()]
        sizes = [packed_bytes(FORMAT, *shape) for shape in shapes if len(shape) == 2]
        return Arena(sum(Arena.rounded(size) for size in sizes))
