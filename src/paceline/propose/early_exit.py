"""The target's first layers draft for it (LayerSkip, Elhoushi et al. 2024; Kangaroo, Liu et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.errors import PacelineError
from paceline.model.decoder import Decoder
from paceline.model.norm import LayerNorm, RMSNorm
from paceline.model.sublayers import Norm
from paceline.propose.base import Budget, Needs, Proposer
from paceline.propose.rollout import CHAIN, Shape
from paceline.propose.self_draft import Part, SelfDraft
from paceline.types import Draft, View


class EarlyExitProposer(Proposer):
    """Layers 0 .. `layers` - 1, the final norm, the output head. A token's confidence is the exit's own probability.

    exit_norm: weights [H] trained for this exit in place of the final norm's (a LayerNorm keeps the final norm's bias).
    `vocab_size`, `width`, `stop_below`: see `Rollout`. Raises PacelineError for an exit that the target does not have.
    """

    name = "early-exit"

    def __init__(
        self, decoder: Decoder, layers: int, exit_norm: Tensor | None = None, *, vocab_size: int, width: int,
        stop_below: Callable[[], float], shape: Shape = CHAIN,
    ) -> None:  # fmt: skip
        count = decoder.config.num_layers
        if not 1 <= layers < count:
            raise PacelineError(f"an early exit of a target of {count} layers is after 1 to {count - 1}, not {layers}")
        self.part = Part(range(layers), norm=None if exit_norm is None else norm_like(decoder, exit_norm))
        self.needs = Needs(runs_target_layers=True, trees=shape.width > 1)
        self.drafter = SelfDraft(decoder, vocab_size=vocab_size, width=width, stop_below=stop_below, shape=shape)

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        return self.drafter.draft(views, budgets, self.part)


def norm_like(decoder: Decoder, weight: Tensor) -> Norm:
    """The final norm with other weights [H]. Raises PacelineError for weights of another shape."""
    config = decoder.config
    if weight.shape != (config.hidden_size,):
        raise PacelineError(f"the exit norm has shape {tuple(weight.shape)}, the target wants ({config.hidden_size},)")
    weight = weight.to(decoder.device)
    if isinstance(decoder.final_norm, LayerNorm):
        return LayerNorm(weight.to(decoder.final_norm.weight.dtype), decoder.final_norm.bias, config.norm_eps)
    return RMSNorm(weight, config.norm_eps)
