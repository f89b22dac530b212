"""Our best mode against the peers' best, kind by kind, from runs paired by prompt and repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.peers.engines import MODES, OURS
from benchmarks.peers.timing import PREFILL, Run

from paceline.bench.speedup import Speedup, Values, resampled_medians, speedup, timed, typical, values

PLAIN = f"{OURS}:{MODES[OURS][0]}"


@dataclass(frozen=True)
class KindRow:
    """A mode on the prompts of one kind: its typical decode rate, and our best mode's rate over it.

    like_ours: how much of its answers is, from their beginning, what our plain decoding says. Other roundings make
    other texts, easier or harder to draft; where it is near 0 everywhere, something is wrong with the comparison.
    """

    kind: str
    label: str
    tokens_per_second: float | None
    ours_over_it: Speedup | None
    like_ours: float | None


@dataclass(frozen=True)
class Ratio:
    """Ours over theirs."""

    kind: str
    ours: str
    theirs: str
    ratio: Speedup


def rates(runs: Sequence[Run]) -> dict[str, dict[str, Values]]:
    """Decode rates by kind and mode, [prompts, repeats]; modes in the order in which they first ran."""
    labels = list(dict.fromkeys(run.label for run in runs))
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for run in runs:
        if run.task.kind != PREFILL:
            modes = found.setdefault(run.task.kind, {label: {} for label in labels})
            modes[run.label].setdefault(run.task.id, []).append(run.answer.tokens_per_second)
    return {
        kind: {label: values(list(prompts.values())) for label, prompts in modes.items()}
        for kind, modes in found.items()
    }


def best(modes: Mapping[str, Values], ours: bool) -> str | None:
    """The mode with the highest typical rate, among ours or the peers'."""
    typicals = {label: typical(rate) for label, rate in modes.items() if is_ours(label) == ours}
    timed_ones = {label: rate for label, rate in typicals.items() if rate is not None}
    return max(timed_ones, key=timed_ones.__getitem__, default=None)


def is_ours(label: str) -> bool:
    return label.startswith(f"{OURS}:")


def kind_rows(runs: Sequence[Run]) -> list[KindRow]:
    rows = []
    for kind, modes in rates(runs).items():
        ours = best(modes, ours=True)
        for label, rate in modes.items():
            ratio = None if ours is None else speedup(modes[ours], rate)
            rows.append(KindRow(kind, label, typical(rate), ratio, like_ours(runs, kind, label)))
    return rows


def like_ours(runs: Sequence[Run], kind: str, label: str) -> float | None:
    """Mean over the mode's answers of the share of ids before the first difference from our plain decoding."""
    plain = {run.task.id: run.answer.token_ids for run in runs if run.label == PLAIN and run.repeat == 0}
    answers = [run for run in runs if run.task.kind == kind and run.label == label and run.task.id in plain]
    shares = [common(run.answer.token_ids, plain[run.task.id]) / len(run.answer.token_ids) for run in answers]
    return sum(shares) / len(shares) if shares else None


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def against_best(by_kind: Mapping[str, Mapping[str, Values]], ours: str | None = None) -> list[Ratio]:
    """By kind, our best mode (or the mode `ours`) over the peers' best. Kinds without a pair are left out."""
    ratios = []
    for kind, modes in by_kind.items():
        mine, theirs = ours or best(modes, ours=True), best(modes, ours=False)
        if mine is None or theirs is None or mine not in modes:
            continue
        ratio = speedup(modes[mine], modes[theirs])
        if ratio is not None:
            ratios.append(Ratio(kind, mine, theirs, ratio))
    return ratios


def geometric_mean(by_kind: Mapping[str, Mapping[str, Values]], ratios: Sequence[Ratio]) -> Speedup | None:
    """Of the kinds' ratios. The interval resamples each kind's prompts, and within each its repeats, by itself."""
    if not ratios:
        return None
    pairs = [_paired(by_kind[each.kind][each.ours], by_kind[each.kind][each.theirs]) for each in ratios]
    resampled = [resampled_medians(pair, seed) for seed, pair in enumerate(pairs)]
    low, high = np.quantile(np.exp(np.mean(np.log(resampled), axis=0)), (0.025, 0.975))
    middle = np.exp(np.mean(np.log([each.ratio.median for each in ratios])))
    return Speedup(float(middle), float(low), float(high))


def _paired(mine: Values, theirs: Values) -> Values:
    """Ratios of runs of one prompt in one repeat, without prompts that were never timed."""
    ratios = timed(mine) / timed(theirs)
    return ratios[~np.isnan(ratios).all(axis=1)]
