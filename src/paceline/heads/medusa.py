"""Medusa heads (Cai et al. 2024, 2401.10774): several output heads that read one hidden state of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.decoder import NORMED
from paceline.model.linear import Linear


@dataclass(kw_only=True)
class MedusaHead:
    """logits_k = W_k g_k, where g_k is h after one or several residual blocks h <- h + SiLU(A h + b) (section 2.1.1).

    h is the target's hidden state after its final norm, in the row whose own next token is x_{t+1}: head 1 scores
    x_{t+2}, head k scores x_{t+1+k}, each without knowing the tokens between.

    blocks: for each head its A, b. outputs: W of each head, or one that all share, or none where they use the target's.
    target_ids [D]: the target's token of each logit, None where the logits are over the whole vocabulary.
    """

    blocks: Sequence[Sequence[Linear]]
    outputs: Sequence[Linear]
    dtype: torch.dtype
    target_ids: Tensor | None = None
    logit_scale: float = 1.0

    taps = (NORMED,)

    @property
    def count(self) -> int:
        """How many heads, so how many tokens ahead."""
        return len(self.blocks)

    def hidden(self, rows: Tensor, heads: int | None = None) -> Tensor:
        """The target's hidden states [B, H] -> g [B, heads, H] of the first `heads` heads (default: all)."""
        found = []
        for blocks in self.blocks[:heads]:
            state = rows.to(self.dtype)
            for block in blocks:
                state = state + F.silu(block(state))
            found.append(state)
        return torch.stack(found, dim=1)

    def logits(self, rows: Tensor, heads: int | None = None, target_output: Linear | None = None) -> Tensor:
        """The target's hidden states [B, H] -> fp32 logits [B, heads, D] ([B, heads, V] without `target_ids`).

        `target_output`: the target's output head (`Decoder.head`, without its norm), for heads that have none.
        """
        hidden = self.hidden(rows, heads)
        logits = self._score(hidden, target_output).float()
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale

    def _score(self, hidden: Tensor, target_output: Linear | None) -> Tensor:
        if len(self.outputs) > 1:
            outputs = self.outputs[: hidden.shape[1]]
            return torch.stack([output(hidden[:, k]) for k, output in enumerate(outputs)], dim=1)
        output = self.outputs[0] if self.outputs else target_output
        if output is None:
            raise ValueError("these heads have no output of their own: pass the target's")
        return output(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
