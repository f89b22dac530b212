"""The target's own weights, as far as drafters begin from them or learn against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from paceline.model.config import ModelConfig
from paceline.weights.load import open_source
from paceline.weights.names import names_of
from paceline.weights.resolve import resolve
from paceline.weights.source import TensorSource

QKV, OUTPUT = ("q_proj", "k_proj", "v_proj"), "o_proj"
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class TargetWeights:
    """embedding, output: fp16 [V, H], perhaps the same. final_norm [H]."""

    config: ModelConfig
    source: TensorSource
    embedding: Tensor
    output: Tensor
    final_norm: Tensor

    @classmethod
    def read(cls, name: str) -> TargetWeights:
        """Of a preset, directory, .gguf file or hub id. Raises PacelineError."""
        source = open_source(resolve(name))
        config, names = source.config, names_of(source.config)
        embedding = source.get(f"{names.embedding}.weight").half()
        untied = not config.tie_embeddings and f"{names.head}.weight" in source
        output = source.get(f"{names.head}.weight").half() if untied else embedding
        norm = source.get(f"{names.final_norm}.weight").float() + _offset(source)
        return cls(config, source, embedding, output, norm)

    def embed(self, tokens: Tensor) -> Tensor:
        """Ids [..] -> fp32 [.., H], as `Decoder.embed` gives them."""
        return F.embedding(tokens, self.embedding).float()

    def rows(self, ids: Tensor) -> Tensor:
        """fp32 [D, H] of the output head."""
        return self.output[ids].float()

    def layer(self, index: int) -> Mapping[str, Tensor]:
        """fp32 weights under the names that Llama checkpoints use: projections, `input_norm`, `mlp_norm`. Empty where
        the target's layers are of another make than a drafter's (no gated MLP, no RMS norm)."""
        config, names = self.config, names_of(self.config)
        if config.norm != "rms" or not config.gated_mlp:
            return {}
        at = names.layer.format(index)
        modules = (*names.qkv, names.output, *names.up, names.down)
        found = {module.rpartition(".")[2]: self._get(at + module) for module in modules}
        found["input_norm"] = self._get(at + names.attention_norm) + _offset(self.source)
        found["mlp_norm"] = self._get(at + names.mlp_norm) + _offset(self.source)
        return found

    def _get(self, module: str) -> Tensor:
        return self.source.get(f"{module}.weight").float()


def _offset(source: TensorSource) -> float:
    return names_of(source.config).norm_offset if source.gemma_norm_offset else 0.0
