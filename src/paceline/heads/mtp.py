"""Multi-token prediction heads: blocks that a model was trained with, each one token further ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.heads.block import Block, Rows
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.linear import Linear


@dataclass
class MtpDepth:
    """What one depth has besides its decoder layer."""

    embed_norm: Rows
    hidden_norm: Rows
    project: Linear  # [T, 2H] -> [T, H]
    final_norm: Rows


@dataclass
class MtpHead:
    """DeepSeek-V3 (2412.19437, section 2.2): h^k_t = norm(Layer_k(M_k [norm(e(x_{t+k})) ; norm(h^{k-1}_t)])).

    h^0_t is the target's hidden state after its final norm (tap -1; what vLLM and SGLang hand over, and MiMo's own
    code). Each depth ends in a norm of its own, after which its hidden state both feeds the next depth and is scored by
    the target's output head. `hidden_first`: the two halves are joined as [h; e], as in the paper and in MiMo, and not
    as [e; h] (DeepSeek's own checkpoints, speculators).

    config: a layer for each depth, from which the cache is made (layer k holds depth k). A head of one depth is applied
    again for tokens further ahead.
    """

    config: ModelConfig
    taps: tuple[int, ...]
    depths: Sequence[MtpDepth]
    block: Block
    hidden_first: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.block.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.block.cache_dtype

    def embed(self, tokens: Tensor, target_embed: Rows) -> Tensor:
        """Token ids [T] -> [T, H]; the embedding is the target's, by `Decoder.embed`."""
        return target_embed(tokens).to(self.dtype)

    def forward(self, depth: int, embeds: Tensor, hidden: Tensor, spans: Sequence[Span], pool: BlockPool) -> Tensor:
        """Embeddings of x_{t + depth + 1} [T, H] and hidden states h^depth_t [T, H] -> h^{depth + 1}_t [T, H].

        depth counts from 0; past the last trained one they are gone through again. Writes keys and values into layer
        `depth` (modulo the depths) of the pool.
        """
        index = depth % len(self.depths)
        part = self.depths[index]
        halves = [part.embed_norm(embeds), part.hidden_norm(hidden.to(self.dtype))]
        joined = torch.cat(halves[::-1] if self.hidden_first else halves, dim=1)
        return part.final_norm(self.block.run(part.project(joined), spans, pool, layers=[index]))

    def logits(self, hidden: Tensor, target_output: Linear) -> Tensor:
        """What `forward` returned [R, H] -> fp32 logits [R, V]; `target_output` is `Decoder.head`, without its norm."""
        return target_output(hidden).float()
