"""Exit norms on disk: Paceline's own format."""

from __future__ import annotations

from paceline.device import Backend
from paceline.heads.config import HeadFolder, check_sizes
from paceline.heads.exit import ExitHead
from paceline.heads.expected import check_tensors
from paceline.model.config import ModelConfig


def matches(folder: HeadFolder) -> bool:
    return folder.raw.get("model_type") == "early-exit"


def load(folder: HeadFolder, target: ModelConfig, backend: Backend) -> ExitHead:
    """Raises PacelineError for an exit of another model and for tensors that are missing or too many."""
    check_sizes(folder, int(folder.raw["hidden_size"]), int(folder.raw["vocab_size"]), target)
    check_tensors(folder.name, folder.tensors, {"norm.weight": (target.hidden_size,)})
    return ExitHead(int(folder.raw["exit_layers"]), folder.tensors.get("norm.weight").to(backend.device).float())
