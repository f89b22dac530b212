"""Multi-token prediction in training (DeepSeek-V3, section 2.2): one block, unrolled on its own hidden states."""

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
from paceline.train.export import Card, export_mtp
from paceline.train.modules import Angles, Attention, Mlp, Past, RmsNorm, layer_config, layer_weights
from paceline.train.objective import Guesses, Scores
from paceline.train.target import TargetWeights
from paceline.train.unroll import unroll

if TYPE_CHECKING:
    from paceline.train.drafters import Given
    from paceline.train.trainer import Objective


class MtpBlock(nn.Module):
    """norm(Layer(M [norm(e); norm(h)])): the halves in speculators' order, the layer of a kind that it knows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.token_layernorm = RmsNorm(hidden, eps)
        self.hidden_layernorm = RmsNorm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = RmsNorm(hidden, eps)
        self.self_attn = Attention(config, hidden)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = Mlp(config)
        self.final_layernorm = RmsNorm(hidden, eps)

    def forward(self, embeds: Tensor, hidden: Tensor, rows: Tensor, turn: Angles, past: Past) -> Tensor:
        both = torch.cat((self.token_layernorm(embeds), self.hidden_layernorm(hidden)), dim=-1)
        stream = self.input_proj(both)
        stream = stream + self.self_attn(self.input_layernorm(stream), rows, turn, past)
        out: Tensor = self.final_layernorm(stream + self.mlp(self.post_attention_layernorm(stream)))
        return out


class MtpModule(nn.Module):
    """One depth, applied again for tokens further ahead; the output is the target's own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.rope is not None
        self.rope = Rope(config.rope, config.head_dim, torch.device("cpu"))
        self.mtp_layers = nn.ModuleList([MtpBlock(config)])

    @property
    def block(self) -> MtpBlock:
        (block,) = self.mtp_layers
        assert isinstance(block, MtpBlock)
        return block

    @torch.no_grad()
    def begin_as(self, target: TargetWeights) -> None:
        """As the target's own last layer and final norm over the hidden state, like `Eagle3Module.begin_as`."""
        block, hidden = self.block, target.config.hidden_size
        block.input_proj.weight.zero_()
        block.input_proj.weight[:, hidden:] = torch.eye(hidden)
        block.final_layernorm.weight.copy_(target.final_norm)
        if own := target.layer(target.config.num_layers - 1):
            block.input_layernorm.weight.copy_(own["input_norm"])
            block.self_attn.begin_as(own)
            block.post_attention_layernorm.weight.copy_(own["mlp_norm"])
            block.mlp.begin_as(own)


@dataclass
class MtpObjective(Guesses):
    """The loss looks at the commonest tokens alone: the target's whole output would cost more than the block."""

    module: MtpModule

    def guesses(self, batch: TrainingBatch, steps: int) -> Iterator[Scores]:
        module, embeds = self.module, self.target.embed(batch.tokens)
        for hidden in unroll(module.block, batch.last, batch, embeds, module.rope, steps):
            yield partial(self._scores, hidden)

    def _scores(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        return nn.functional.linear(hidden if rows is None else hidden[rows], self.output)


def default_taps(target: ModelConfig) -> tuple[int, ...]:
    return ()


def weights(target: ModelConfig, scored: int) -> int:
    return 2 * target.hidden_size**2 + layer_weights(target, target.hidden_size)


def objective(given: Given) -> MtpObjective:
    module = MtpModule(layer_config(given.target.config, family="qwen3"))
    module.begin_as(given.target)
    return MtpObjective(module, given.target, given.vocabulary)


def export(folder: Path, card: Card, trained: Objective) -> None:
    assert isinstance(trained, MtpObjective)
    export_mtp(folder, replace(card, config=layer_config(card.config, family="qwen3")), trained.module.state_dict())
