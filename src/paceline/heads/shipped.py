"""Heads that come with the package, for its presets."""

from __future__ import annotations

from pathlib import Path

from paceline.weights.presets import PRESETS

FOLDER = Path(__file__).parent / "shipped_heads"


def shipped_head(model: str) -> str | None:
    """The directory of the head that was trained for a model named so, or None."""
    for preset in PRESETS.values():
        if model in (preset.name, preset.hub_repo) and (FOLDER / preset.name).is_dir():
            return str(FOLDER / preset.name)
    return None
