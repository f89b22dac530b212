"""From a checkpoint to what the decoder computes with: fused, in the backend's precision, under our own names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.device import Backend
from paceline.model.config import ModelConfig
from paceline.model.linear import GROUP, quantize_groups, quantize_rows
from paceline.native.packed import Format, Packed, pack, quantize
from paceline.weights.names import Names, names_of
from paceline.weights.source import TensorSource


def convert(source: TensorSource, backend: Backend) -> Iterator[tuple[str, Tensor | Packed]]:
    """Every tensor that `assemble` needs, by name, one module at a time (so that a large model streams through)."""
    config, names = source.config, names_of(source.config)
    reader = _NativeReader(source, backend, names) if backend.native else _Reader(source, backend, names)
    yield from reader.embedding(config)
    for index in range(config.num_layers):
        yield from reader.layer(config, index)
    yield from reader.norm("final_norm", names.final_norm, config)
    tied = config.tie_embeddings or f"{names.head}.weight" not in source
    yield from reader.head(names.embedding if tied else names.head)


class _Reader:
    def __init__(self, source: TensorSource, backend: Backend, names: Names) -> None:
        self.source, self.backend, self.names = source, backend, names
        self.norm_offset = names.norm_offset if source.gemma_norm_offset else 0.0

    def embedding(self, config: ModelConfig) -> Iterator[tuple[str, Tensor | Packed]]:
        # float16 holds a quantised checkpoint's embeddings to 11 bits at half the bytes.
        dtype = torch.float16 if self.backend.int8 else self.backend.dtype
        yield "embedding", self.source.get(f"{self.names.embedding}.weight").to(dtype)
        if self.names.positions is not None:
            yield "positions", self.source.get(f"{self.names.positions}.weight").to(self.backend.dtype)

    def head(self, module: str) -> Iterator[tuple[str, Tensor | Packed]]:
        yield from self.linear("head", [module], transposed=False)

    def layer(self, config: ModelConfig, index: int) -> Iterator[tuple[str, Tensor | Packed]]:
        names, at, to = self.names, self.names.layer.format(index), f"layers.{index}."
        yield from self.norm(to + "attention_norm", at + names.attention_norm, config)
        yield from self.linear(to + "qkv", [at + n for n in names.qkv])
        yield from self.linear(to + "output", [at + names.output])
        yield from self.norm(to + "mlp_norm", at + names.mlp_norm, config)
        yield from self.linear(to + "up", [at + n for n in names.up])
        yield from self.linear(to + "down", [at + names.down])
        if config.qk_norm:
            yield from self.norm(to + "query_norm", at + names.query_norm, config)
            yield from self.norm(to + "key_norm", at + names.key_norm, config)
        if config.post_norms:
            yield from self.norm(to + "post_attention_norm", at + names.post_attention_norm, config)
            yield from self.norm(to + "post_mlp_norm", at + names.post_mlp_norm, config)

    def norm(self, to: str, module: str, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        # RMSNorm computes in fp32; PyTorch's layer_norm wants its weights in the activations' dtype.
        dtype = torch.float32 if config.norm == "rms" else self.backend.dtype
        yield f"{to}.weight", self.source.get(f"{module}.weight").float().add(self.norm_offset).to(dtype)
        if config.norm == "layer":
            yield f"{to}.bias", self.source.get(f"{module}.bias").to(dtype)

    def linear(
        self, to: str, modules: Sequence[str], *, transposed: bool | None = None
    ) -> Iterator[tuple[str, Tensor | Packed]]:
        flip = self.names.transposed if transposed is None else transposed
        parts = [self.source.get(f"{module}.weight") for module in modules]
        weight = torch.cat([part.t() if flip else part for part in parts]).contiguous()
        four_bits = self.backend.int4 and weight.shape[1] % GROUP == 0
        if four_bits:
            nibbles, groups = quantize_groups(weight)
            yield f"{to}.nibbles", nibbles
            yield f"{to}.groups", groups
        if self.backend.int8 or four_bits:
            quantized, scale = quantize_rows(weight)
            yield f"{to}.weight", quantized
            yield f"{to}.scale", scale
        else:
            yield f"{to}.weight", weight.to(self.backend.dtype)
        if f"{modules[0]}.bias" in self.source:
            yield f"{to}.bias", torch.cat([self.source.get(f"{m}.bias") for m in modules]).to(self.backend.dtype)


class _NativeReader(_Reader):
    """Matrices for the kernels: quantised ones as stored, others in 8 bits (or 4, if asked for; never the embedding and
    the head, where it costs most)."""

    def embedding(self, config: ModelConfig) -> Iterator[tuple[str, Tensor | Packed]]:
        yield "embedding.0", self._matrix(self.names.embedding, Format.Q8_0)

    def head(self, module: str) -> Iterator[tuple[str, Tensor | Packed]]:
        if module != self.names.embedding:
            yield "head.0", self._matrix(module, Format.Q8_0)

    def linear(
        self, to: str, modules: Sequence[str], *, transposed: bool | None = None
    ) -> Iterator[tuple[str, Tensor | Packed]]:
        rounded = Format.Q4_1 if self.backend.precision == "int4" else Format.Q8_0
        for index, module in enumerate(modules):
            yield f"{to}.{index}", self._matrix(module, rounded)
        if f"{modules[0]}.bias" in self.source:
            yield f"{to}.bias", torch.cat([self.source.get(f"{m}.bias").float() for m in modules])

    def _matrix(self, module: str, rounded: Format) -> Packed:
        name = f"{module}.weight"
        stored = self.source.stored(name) if self.backend.precision == "stored" else None
        if stored is None:
            return quantize(self.source.get(name).float(), rounded)
        return pack(stored.data.contiguous(), stored.format, stored.rows, stored.columns)
