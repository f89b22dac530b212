"""EAGLE-3 in training (Li et al. 2025): the head unrolled on its own features as in drafting (training-time test)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.model.config import ModelConfig
from paceline.model.rope import Rope
from paceline.train.batches import TrainingBatch
from paceline.train.export import Card, export_eagle3
from paceline.train.modules import Angles, Attention, Mlp, Past, RmsNorm, layer_config, layer_weights
from paceline.train.objective import Guesses, Scores
from paceline.train.target import TargetWeights
from paceline.train.unroll import unroll

if TYPE_CHECKING:
    from paceline.train.drafters import Given
    from paceline.train.trainer import Objective


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RmsNorm(hidden, eps)
        self.hidden_norm = RmsNorm(hidden, eps)
        self.self_attn = Attention(config, 2 * hidden)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = Mlp(config)

    def forward(self, embeds: Tensor, features: Tensor, rows: Tensor, turn: Angles, past: Past) -> Tensor:
        both = torch.cat((self.input_layernorm(embeds), self.hidden_norm(features)), dim=-1)
        hidden = features + self.self_attn(both, rows, turn, past)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Module(nn.Module):
    """The head with the names of its file. `scored`: tokens that it scores."""

    def __init__(self, config: ModelConfig, taps: int, scored: int) -> None:
        super().__init__()
        assert config.rope is not None
        self.config, self.rope = config, Rope(config.rope, config.head_dim, torch.device("cpu"))
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])  # a list for the names' sake
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, scored, bias=False)

    @property
    def layer(self) -> Layer:
        (layer,) = self.layers
        assert isinstance(layer, Layer)
        return layer

    @torch.no_grad()
    def begin_as(self, target: TargetWeights, vocabulary: Tensor) -> None:
        """Begin as the target's own last layer, norm and output rows, fed with the highest tap.

        A head that begins so has a scale of features and an attention that make sense; what it has to learn is to take
        the next token into account, for which its half of the projections begins at zero.
        """
        layer, hidden = self.layer, self.config.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:] = torch.eye(hidden)
        self.norm.weight.copy_(target.final_norm)
        self.lm_head.weight.copy_(target.rows(vocabulary))
        if own := target.layer(target.config.num_layers - 1):
            layer.hidden_norm.weight.copy_(own["input_norm"])
            layer.self_attn.begin_as(own)
            layer.post_attention_layernorm.weight.copy_(own["mlp_norm"])
            layer.mlp.begin_as(own)

    def score(self, features: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(features))
        return logits


@dataclass
class Eagle3Objective(Guesses):
    module: Eagle3Module

    def guesses(self, batch: TrainingBatch, steps: int) -> Iterator[Scores]:
        module, embeds = self.module, self.target.embed(batch.tokens)
        fused = module.fc(batch.taps.flatten(2))
        for features in unroll(module.layer, fused, batch, embeds, module.rope, steps):
            yield partial(self._scores, features)

    def _scores(self, features: Tensor, rows: Tensor | None) -> Tensor:
        return self.module.score(features if rows is None else features[rows])


def default_taps(target: ModelConfig) -> tuple[int, ...]:
    """A low, a middle and a high layer's input, those of the EAGLE authors."""
    return tuple(sorted({min(2, target.num_layers), target.num_layers // 2, max(target.num_layers - 3, 0)}))


def weights(target: ModelConfig, scored: int) -> int:
    hidden = target.hidden_size
    return hidden * (len(default_taps(target)) * hidden + scored) + layer_weights(target, 2 * hidden)


def objective(given: Given) -> Eagle3Objective:
    module = Eagle3Module(layer_config(given.target.config), len(given.taps), len(given.vocabulary))
    module.begin_as(given.target, given.vocabulary)
    return Eagle3Objective(module, given.target, given.vocabulary)


def export(folder: Path, card: Card, trained: Objective) -> None:
    assert isinstance(trained, Eagle3Objective)
    config = layer_config(card.config)
    export_eagle3(folder, replace(card, config=config), trained.module.state_dict(), trained.vocabulary)
