"""EAGLE-3: features fused from several of the target's layers, a wide first projection, a reduced vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.heads.block import Rows
from paceline.heads.eagle import EagleHead
from paceline.model.attention import Span
from paceline.model.linear import Linear


@dataclass(kw_only=True)
class Eagle3Head(EagleHead):
    """EAGLE-3 (2503.01840): g_t = fc([low; middle; high]), then a layer over [norm(e(x_{t+1})); norm(g_t)].

    The variants that heads come in: `before_fc`, one norm of the concatenation; `fc_norms`, one of each part;
    `residual_norm`, the norm of g_t where the residual stream carries the normed g_t (else the layer norms it alone);
    `feeds_normed`, where the next feature is what the output head reads (EAGLE-3.1) and not the layer's raw output.
    """

    version = "eagle3"
    before_fc: Rows
    fc_norms: Sequence[Rows] | None
    residual_norm: Rows
    output_norm: Rows
    feeds_normed: bool

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        return self.fc(self.joined(taps))

    def joined(self, taps: Sequence[Tensor]) -> Tensor:
        """What `fc` reads."""
        parts = [tap.to(self.dtype) for tap in taps]
        if self.fc_norms is not None:
            parts = [norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)]
        return self.before_fc(torch.cat(parts, dim=1))

    def forward(self, embeds: Tensor, features: Tensor, spans: Sequence[Span], pool: BlockPool) -> Tensor:
        hidden = self.block.run(self.residual_norm(features), spans, pool, beside=embeds)
        return self.output_norm(hidden) if self.feeds_normed else hidden

    def logits(self, features: Tensor, target_output: Linear | None = None) -> Tensor:
        return self._score(features if self.feeds_normed else self.output_norm(features), target_output)
