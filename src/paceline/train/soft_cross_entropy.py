"""Cross-entropy against whole distributions, in as few passes over [rows, vocabulary] as will do.

A head's loss reads and writes more numbers than its layer: at 8,192 scores a row, PyTorch's own composition (cast,
log-softmax, product, and both of them backwards) takes two fifths of a training step on a CPU with bf16 products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, law: Tensor) -> Tensor:
        chance = torch.softmax(scores, dim=-1, dtype=torch.float32)
        largest, at = chance.max(dim=-1)
        total = scores.gather(1, at[:, None]).squeeze(1).float() - largest.log()  # log of the sum of exp(scores)
        loss = (total * law.sum(-1) - (law * scores).sum(-1)).mean()
        ctx.save_for_backward(chance.mul_(law.sum(-1, keepdim=True)).sub_(law).to(scores.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return slope * (grads[0] / slope.shape[0]).to(slope.dtype), None


def soft_cross_entropy(scores: Tensor, law: Tensor) -> Tensor:
    """The mean over rows of -sum(law * log_softmax(scores)): scores [R, D] of any dtype, law [R, D] fp32, which gets no
    gradient. As `torch.nn.functional.cross_entropy` with probabilities."""
    with torch.autocast(scores.device.type, enabled=False):
        loss: Tensor = _SoftCrossEntropy.apply(scores, law)  # type: ignore[no-untyped-call]
    return loss
