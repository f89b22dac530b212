"""A drafter that was trained before, for training to go on from instead of from the target's own layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.heads.load import find_head
from paceline.heads.shipped import shipped_head
from paceline.heads.tensors import HeadTensors, open_tensors

OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class Init:
    """name: as the user gave it; tensors: under the names of the file that `export` writes."""

    name: str
    tensors: HeadTensors

    @classmethod
    def open(cls, name: str) -> Init:
        """A directory, a hub id, or the preset that a head comes with. Raises PacelineError."""
        return cls(name, open_tensors(find_head(shipped_head(name) or name)))

    @property
    def vocabulary(self) -> Tensor | None:
        """Ids [D] of the target that it scores, None where its kind has no choice of its own."""
        if "d2t" in self.tensors:
            offsets = self.tensors.get("d2t")
            return torch.arange(len(offsets)) + offsets
        return self.tensors.get("token_map") if "token_map" in self.tensors else None

    @torch.no_grad()
    def load_into(self, module: nn.Module) -> None:
        """Its output over the commonest tokens stays as it is from then on: one that learns on does worse (measured:
        docs/heads.md).

        Raises PacelineError if it is of another kind or of another target's sizes.
        """
        for name, weight in module.state_dict().items():
            stored = next((each for each in (name, f"model.{name}") if each in self.tensors), None)
            if stored is None:
                raise PacelineError(f"cannot begin from '{self.name}': it has no tensor {name}; is it of another kind?")
            if self.tensors.shape(stored) != tuple(weight.shape):
                raise PacelineError(
                    f"cannot begin from '{self.name}': {name} is {list(self.tensors.shape(stored))} there, "
                    f"{list(weight.shape)} here; is it another target's?"
                )
            weight.copy_(self.tensors.get(stored))
            if name == OUTPUT:
                module.get_parameter(name).requires_grad_(False)
