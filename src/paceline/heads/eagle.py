"""EAGLE heads: one forward of the head that a proposer drafts with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.heads.block import Block, Rows
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.linear import Linear


@dataclass(kw_only=True)
class EagleHead(ABC):
    """A head that follows the target's hidden states (EAGLE 2401.15077, EAGLE-2 2406.16858, EAGLE-3 2503.01840).

    The row of token x_{t+1} and feature f_t sits at position t and predicts x_{t+2}; what `forward` returns for it is
    the feature of the next row. The first features of a sequence come from `fuse`.

    config: its own layers (one, as published), from which its cache is made. taps: which hidden states of the target it
    reads (see `Decoder.forward`), in the order in which `fuse` takes them. embedding [V, H]: its own, or None where it
    uses the target's. output: its own output head, or None where it uses the target's. target_ids [D]: the target's
    token of each logit, None where the logits are over the whole vocabulary.
    """

    version: ClassVar[Literal["eagle", "eagle3"]]
    config: ModelConfig
    taps: tuple[int, ...]
    block: Block
    fc: Linear
    embedding: Tensor | None = None
    output: Linear | None = None
    target_ids: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.block.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.block.cache_dtype

    def embed(self, tokens: Tensor, target_embed: Rows) -> Tensor:
        """Token ids [T] -> [T, H], from the head's own embedding or else by `Decoder.embed`, which does not scale."""
        rows = target_embed(tokens) if self.embedding is None else F.embedding(tokens, self.embedding)
        return rows.to(self.dtype)

    @abstractmethod
    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """The target's hidden states, one [T, H_target] for each of `self.taps` -> features [T, H]."""

    @abstractmethod
    def forward(self, embeds: Tensor, features: Tensor, spans: Sequence[Span], pool: BlockPool) -> Tensor:
        """Rows of token embeddings [T, H] and features [T, H] -> features of the next rows [T, H].

        Writes keys and values into the spans' slots, as `Decoder.forward` does; trees are spans with parents.
        """

    @abstractmethod
    def logits(self, features: Tensor, target_output: Linear | None = None) -> Tensor:
        """What `forward` returned [R, H] -> fp32 logits [R, D], or [R, V] where `target_ids` is None.

        `target_output`: the target's output head (`Decoder.head`, without its norm), for heads that have none.
        """

    def _score(self, hidden: Tensor, target_output: Linear | None) -> Tensor:
        output = target_output if self.output is None else self.output
        if output is None:
            raise ValueError("this head has no output head of its own: pass the target's")
        return output(hidden).float()


@dataclass(kw_only=True)
class Eagle1Head(EagleHead):
    """EAGLE-1 (and EAGLE-2, whose trees it drafts): fc([e(x_{t+1}); f_t]) -> decoder layer -> f_{t+1} -> target's head.

    f_t is the target's hidden state after its final norm. The layer has no first norm. HASS variants norm the
    embeddings and what the output head reads.
    """

    version = "eagle"
    embed_norm: Rows
    output_norm: Rows

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        (feature,) = taps
        return feature.to(self.dtype)

    def forward(self, embeds: Tensor, features: Tensor, spans: Sequence[Span], pool: BlockPool) -> Tensor:
        hidden = self.fc(torch.cat((self.embed_norm(embeds), features), dim=1))
        return self.block.run(hidden, spans, pool)

    def logits(self, features: Tensor, target_output: Linear | None = None) -> Tensor:
        return self._score(self.output_norm(features), target_output)
