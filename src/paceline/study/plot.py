"""A study as one picture. matplotlib is optional: `pip install paceline[plots]`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.study.findings import TrainedDraft
from paceline.study.report import Study
from paceline.study.throughput import best
from paceline.train.disk import said_plainly

MISSING = "no picture: matplotlib is not installed (pip install 'paceline[plots]')"


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def plot(study: Study, path: Path) -> None:
    """Step time by depth; throughput by step time; acceptance by accuracy and by perplexity, as far as measured."""
    from matplotlib.figure import Figure

    side = 2 if study.drafts else 1
    figure = Figure(figsize=(6 * side, 4.5 * side), layout="constrained")
    axes = figure.subplots(side, side, squeeze=False).flatten()
    _latency(axes[0], study)
    if study.drafts:
        _throughput(axes[1], study.drafts)
        _scatter(axes[2], study.drafts, "accuracy", "next-token accuracy on text by people")
        _scatter(axes[3], study.drafts, "perplexity", "perplexity on the target's text")
    with said_plainly(path):
        figure.savefig(path, dpi=120)


def _latency(axis: Any, study: Study) -> None:
    for group in dict.fromkeys(shape.group for shape in study.shapes):
        own = sorted((each for each in study.shapes if each.group == group), key=lambda each: each.layers)
        axis.plot([each.layers for each in own], [1e3 * each.seconds for each in own], "o", label=group)
        for each in own:
            axis.annotate(f"{each.parameters / 1e6:,.0f}M", (each.layers, 1e3 * each.seconds), fontsize=7)
    equal = [draft for draft in study.drafts if draft.family == "rebuilt"]
    if equal:
        axis.plot([each.layers for each in equal], [1e3 * each.step_seconds for each in equal], "s", label="drafts")
    axis.set(xlabel="layers", ylabel="ms a step", xscale="log", yscale="log", title="Step time and depth")
    if axis.has_data():
        axis.legend()


def _throughput(axis: Any, drafts: Any) -> None:
    rated = [draft for draft in drafts if draft.rates]
    _points(axis, rated, [1e3 * draft.step_seconds for draft in rated], [best(draft.rates).speedup for draft in rated])
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set(xlabel="ms a draft step", ylabel="speed-up at the best draft length", title="Throughput and draft latency")


def _scatter(axis: Any, drafts: Any, measure: str, label: str) -> None:
    accepted = [draft.measures.acceptance_length for draft in drafts]
    _points(axis, drafts, [getattr(draft.measures, measure) for draft in drafts], accepted)
    axis.set(xlabel=label, ylabel="held-out acceptance length", title=f"Acceptance and {measure}")


def _points(axis: Any, drafts: list[TrainedDraft], x: list[float], y: list[float]) -> None:
    axis.plot(x, y, "o")
    for draft, at in zip(drafts, zip(x, y, strict=True), strict=True):
        axis.annotate(draft.name, at, fontsize=7)
