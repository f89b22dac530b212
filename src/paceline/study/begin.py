"""How a draft of another width than its target's begins."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.train.draft import DraftModule
from paceline.train.target import TargetWeights


@torch.no_grad()
def begin_rebuilt(module: DraftModule, target: TargetWeights) -> None:
    """The target's output, turned to its principal directions and cut to the draft's width; layers stay random.

    Of all embeddings of this width it keeps most of the target's inner products between tokens, hence of its logits
    (Eckart-Young). A draft that is wider than its target has small random features behind them. The final norm cannot
    be turned: it begins as one number, the root mean square of the target's. What layers add to the residual stream is
    made smaller with depth (GPT-2), so that 32 begin as gently as one.
    """
    table, wide = principal(target.output.float()), module.embed_tokens.weight
    width = min(table.shape[1], wide.shape[1])
    wide.normal_(std=0.1 * float(table.std()))
    wide[:, :width] = table[:, :width]
    module.norm.weight.fill_(float(target.final_norm.square().mean().sqrt()))
    shrink = (2 * len(module.layers)) ** -0.5
    for layer in module.layers:
        layer.self_attn.o_proj.weight.mul_(shrink)  # type: ignore[union-attr, operator]
        layer.mlp.down_proj.weight.mul_(shrink)  # type: ignore[union-attr, operator]


def principal(table: Tensor) -> Tensor:
    """[V, H] turned so that its columns fall in size; not centred, so that all inner products stay."""
    _, directions = torch.linalg.eigh(table.T @ table)  # ascending
    turned: Tensor = table @ directions.flip(1)
    return turned
