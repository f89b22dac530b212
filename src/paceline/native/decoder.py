"""The decoder on the native kernels: one call for all layers, the same loop around it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from paceline.model.config import ModelConfig
from paceline.model.decoder import Batch, Decoder
from paceline.model.sublayers import Sublayers
from paceline.native.layers import ACTIVATIONS, NativeLayer, NativeLayers
from paceline.native.packed import Packed


def runs_natively(config: ModelConfig) -> bool:
    """Whether the kernels have all that this decoder is made of."""
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    return (
        config.norm == "rms"
        and config.gated_mlp
        and config.activation in ACTIVATIONS
        and config.rope is not None
        and config.head_dim % 16 == 0
        and all(width % 32 == 0 for width in widths)
    )


@dataclass
class NativeDecoder(Decoder):
    """`embedding` stays quantised: rows are dequantised as they are looked up."""

    packed_embedding: Packed = field(kw_only=True)
    native_layers: list[NativeLayer] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stack = NativeLayers(self.config, self.native_layers, self.ropes)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.packed_embedding.dequantize(tokens)

    def plan(self, batch: Batch) -> Sublayers:
        return self.stack.plan(batch.spans, batch.pool)
