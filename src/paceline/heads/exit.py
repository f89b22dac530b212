"""The trained norm of an early exit."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExitHead:
    """norm [H]: in place of the final norm's weights behind the target's first `layers` layers."""

    layers: int
    norm: Tensor
