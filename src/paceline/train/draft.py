"""A draft model in training: KL to the target on the target's own text (DistillSpec, Zhou et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.model.config import ModelConfig
from paceline.model.rope import Rope
from paceline.train.batches import TrainingBatch
from paceline.train.export import Card, export_draft
from paceline.train.modules import Angles, Attention, Mlp, RmsNorm, layer_config, layer_weights
from paceline.train.rows import RowGuesses
from paceline.train.target import TargetWeights

if TYPE_CHECKING:
    from paceline.train.drafters import Given
    from paceline.train.trainer import Objective

LAYERS = 4


class DraftLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, hidden: Tensor, rows: Tensor, turn: Angles) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rows, turn, [])
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class DraftModule(nn.Module):
    """A Llama decoder whose embedding is its output, too."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.rope is not None
        self.config, self.rope = config, Rope(config.rope, config.head_dim, torch.device("cpu"))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=config.hidden_size**-0.5)
        self.layers = nn.ModuleList([DraftLayer(config) for _ in range(config.num_layers)])
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)

    @torch.no_grad()
    def begin_as(self, target: TargetWeights) -> None:
        """Begin as some of the target's layers, its first and its last among them, with its output and norm."""
        count, chosen = target.config.num_layers, len(self.layers)
        self.embed_tokens.weight.copy_(target.output)
        self.norm.weight.copy_(target.final_norm)
        for index, layer in enumerate(self.layers):
            own = target.layer(index * (count - 1) // max(chosen - 1, 1))
            if own:
                layer.input_layernorm.weight.copy_(own["input_norm"])  # type: ignore[union-attr, operator]
                layer.self_attn.begin_as(own)  # type: ignore[union-attr, operator]
                layer.post_attention_layernorm.weight.copy_(own["mlp_norm"])  # type: ignore[union-attr, operator]
                layer.mlp.begin_as(own)  # type: ignore[union-attr, operator]

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids [B, S] -> hidden states [B, S, H] after the final norm."""
        rows = torch.arange(tokens.shape[1])
        turn = self.rope.table(rows, len(rows))
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, rows, turn)
        out: Tensor = self.norm(hidden)
        return out


@dataclass
class DraftObjective(RowGuesses):
    """The loss looks at the commonest tokens alone, and the draft scores no others (`weights/draft_vocab.py`)."""

    module: DraftModule

    def hidden(self, batch: TrainingBatch) -> Tensor:
        found: Tensor = self.module(batch.tokens)
        return found

    def score(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.module.embed_tokens.weight[self.vocabulary])


def default_taps(target: ModelConfig) -> tuple[int, ...]:
    return ()


def weights(target: ModelConfig, scored: int) -> int:
    return target.hidden_size * target.vocab_size + LAYERS * layer_weights(target, target.hidden_size)


def objective(given: Given) -> DraftObjective:
    """Of the target's width and a few of its layers."""
    module = DraftModule(replace(layer_config(given.target.config, LAYERS), tie_embeddings=True))
    module.begin_as(given.target)
    return DraftObjective(module, given.target, given.vocabulary, steps=1)


def export(folder: Path, card: Card, trained: Objective) -> None:
    assert isinstance(trained, DraftObjective)
    export_draft(folder, replace(card, config=trained.module.config), trained.module.state_dict(), trained.vocabulary)
