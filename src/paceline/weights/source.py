"""Where tensors come from: the protocol that safetensors folders and GGUF files share."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.model.config import ModelConfig
from paceline.native.packed import Format


class Stored(NamedTuple):
    """Rows of quantised blocks: uint8 [rows, bytes of a row]."""

    format: Format
    rows: int
    columns: int
    data: Tensor


class TensorSource(Protocol):
    """Tensors under Hugging Face names."""

    config: ModelConfig
    quantized: bool  # the checkpoint holds fewer bits than 16 a weight
    gemma_norm_offset: bool  # Gemma norms are stored as weight - 1 (Hugging Face), not as weight (GGUF)

    def __contains__(self, name: str) -> bool: ...

    def stored(self, name: str) -> Stored | None:
        """The tensor as it is stored, if that is in a quantised format which the kernels read; else None."""
        ...

    def get(self, name: str) -> Tensor:
        """The tensor in its stored floating dtype, or fp32 when dequantised. Raises PacelineError if missing."""
        ...
