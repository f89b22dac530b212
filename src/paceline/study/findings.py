"""The published findings held against what was measured. Every verdict is computed; none is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from paceline.study.correlation import Correlation, spearman
from paceline.study.latency import TimedShape
from paceline.study.measures import Measures
from paceline.study.throughput import Rate, best

Verdict = Literal["reproduced", "contradicted", "undecided"]
FEWEST = 5  # of which no rank correlation could be sure
MATTERS = 1.1  # deepest over shallowest at equal parameters: less is no effect worth a design
WEAK = 0.5  # a rank correlation below it predicts little


@dataclass(frozen=True)
class TrainedDraft:
    """step_seconds: of the draft's own step; rates: of the target with it, by draft length."""

    name: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    parameters: int
    step_seconds: float
    tokens: int
    measures: Measures
    rates: tuple[Rate, ...] = ()


@dataclass(frozen=True)
class Finding:
    claim: str
    verdict: Verdict
    why: str
    correlations: tuple[Correlation, ...]


def latency_findings(shapes: Sequence[TimedShape]) -> list[Finding]:
    """One for each group: those of several sizes, and those of one."""
    found = []
    for group in dict.fromkeys(shape.group for shape in shapes):
        own = [shape for shape in shapes if shape.group == group]
        depths, seconds = [shape.layers for shape in own], [shape.seconds for shape in own]
        weights = [shape.parameters for shape in own]
        if max(weights) > MATTERS * min(weights):
            finding = depth_or_weights(f"the {group}'s shapes", depths, weights, seconds)
        else:
            finding = depth_alone(f"the {group} of equal weights", depths, seconds)
        byte, layer = step_costs(own)
        paid = f"{finding.why}; fitted, a MB costs {1e12 * byte:.1f} us, a layer {1e6 * layer:.0f} us beside"
        found.append(replace(finding, why=paid))
    return found


def step_costs(shapes: Sequence[TimedShape]) -> tuple[float, float]:
    """Seconds of a byte and of a layer in step = byte * bytes + layer * layers, by least squares of relative errors."""
    seconds = np.array([shape.seconds for shape in shapes])
    parts = np.array([[shape.bytes, shape.layers] for shape in shapes])
    (byte, layer), *_ = np.linalg.lstsq(parts / seconds[:, None], np.ones(len(shapes)), rcond=None)
    return float(byte), float(layer)


def draft_findings(drafts: Sequence[TrainedDraft]) -> list[Finding]:
    """`drafts`: trained and timed."""
    equal = [draft for draft in drafts if draft.family == "rebuilt"]
    found = []
    if equal:
        depths, seconds = [draft.layers for draft in equal], [draft.step_seconds for draft in equal]
        found.append(depth_alone("trained drafts of equal weights", depths, seconds))
    rated = [draft for draft in drafts if draft.rates]
    if rated:
        found.append(throughput_follows_latency(rated))
    return [*found, accuracy_and_acceptance(drafts)] if drafts else found


def depth_or_weights(of: str, depths: Sequence[int], weights: Sequence[int], seconds: Sequence[float]) -> Finding:
    """Which of the two a step's time follows."""
    by_depth = spearman("layers", depths, "step time", seconds)
    by_weights = spearman("parameters", weights, "step time", seconds)
    verdict: Verdict = "undecided"
    if by_depth.sure and by_depth.rho > max(by_weights.rho, 0.0):
        verdict = "reproduced"
    elif by_weights.sure and by_weights.rho > max(by_depth.rho, 0.0):
        verdict = "contradicted"
    why = f"of {of}, step time goes with layers at rho {by_depth.rho:+.2f}, with parameters at {by_weights.rho:+.2f}"
    return _finding("Draft latency follows depth rather than parameter count.", verdict, why, by_depth, by_weights)


def depth_alone(of: str, depths: Sequence[int], seconds: Sequence[float]) -> Finding:
    """Whether a step of equal weights takes longer with more layers."""
    found = spearman("layers", depths, "step time", seconds)
    ends = sorted(zip(depths, seconds, strict=True))
    ratio = ends[-1][1] / ends[0][1]
    verdict: Verdict = "undecided"
    if found.sure and found.rho > 0 and ratio >= MATTERS:
        verdict = "reproduced"
    elif (found.sure and found.rho < 0) or (len(depths) >= FEWEST and ratio < MATTERS):
        verdict = "contradicted"
    why = f"of {of}, {ends[-1][0]} layers take {ratio:.2f} times as long a step as {ends[0][0]}"
    return _finding("At equal parameters a deeper draft is slower.", verdict, why, found)


def throughput_follows_latency(drafts: Sequence[TrainedDraft]) -> Finding:
    """Rather than acceptance: what a draft costs decides more than how often it is right."""
    speed = [best(draft.rates).speedup for draft in drafts]
    by_time = spearman("draft step time", [draft.step_seconds for draft in drafts], "throughput", speed)
    by_acceptance = spearman("acceptance", [draft.measures.acceptance_length for draft in drafts], "throughput", speed)
    verdict: Verdict = "undecided"
    if by_time.sure and by_time.rho < 0 and -by_time.rho >= abs(by_acceptance.rho):
        verdict = "reproduced"
    elif (by_time.sure and by_time.rho > 0) or (by_acceptance.sure and by_acceptance.rho > max(-by_time.rho, 0.0)):
        verdict = "contradicted"
    why = (
        f"throughput at each draft's best draft length goes with its step time at rho {by_time.rho:+.2f}, "
        f"with its acceptance at {by_acceptance.rho:+.2f}"
    )
    return _finding("Throughput follows draft latency.", verdict, why, by_time, by_acceptance)


def accuracy_and_acceptance(drafts: Sequence[TrainedDraft]) -> Finding:
    """No relation cannot be shown by a few drafts, so it is held against one that is: that of perplexity."""
    accepted = [draft.measures.acceptance_length for draft in drafts]
    accuracy = spearman("task accuracy", [draft.measures.accuracy for draft in drafts], "acceptance", accepted)
    perplexity = spearman("perplexity", [draft.measures.perplexity for draft in drafts], "acceptance", accepted)
    verdict: Verdict = "undecided"
    if accuracy.sure and accuracy.rho > 0:
        verdict = "contradicted"
    elif perplexity.sure and perplexity.rho < 0 and accuracy.rho < WEAK:
        verdict = "reproduced"
    why = (
        f"acceptance goes with the draft's own accuracy at rho {accuracy.rho:+.2f}, with its perplexity on the "
        f"target's text at {perplexity.rho:+.2f}"
    )
    return _finding("Task accuracy of the draft does not predict acceptance.", verdict, why, accuracy, perplexity)


def _finding(claim: str, verdict: Verdict, why: str, *correlations: Correlation) -> Finding:
    count = correlations[0].count
    if count < FEWEST:
        return Finding(claim, "undecided", f"{why}; {count} are too few to tell", correlations)
    return Finding(claim, verdict, f"{why}; {count} of them, which is few", correlations)
