"""From timed runs to the figures of the report: a row for each kind and method, and one for all prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.peer_transformers import PEERS
from paceline.bench.run import PLAIN, Outcome, Run
from paceline.bench.speedup import Values, speedup, typical, values

ALL = "all"


@dataclass(frozen=True)
class Row:
    """Rates and times are medians over prompts of medians over repeats; counts of speculation are totals.

    identical: every answer has the ids of the first plain one; None where that is not promised (a peer, whose numbers
    differ, or a temperature without a seed). min_margin: the smallest logit margin along the plain greedy outputs.
    acceptance_rate is 0 when nothing was drafted; it and mean_acceptance_length are None for a peer that does not tell.
    """

    target: str
    kind: str
    method: str
    temperature: float
    tokens_per_second: float | None
    speedup: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    identical: bool | None
    prompts: int
    speedup_low: float | None
    speedup_high: float | None
    first_token_seconds: float | None
    min_margin: float | None


def build_rows(outcome: Outcome) -> list[Row]:
    """Kinds in the order of their prompts, then `all`; methods in the order they were given."""
    kinds = list(dict.fromkeys(prompt.kind for prompt in outcome.config.prompts))
    return [_row(outcome, kind, method) for kind in (*kinds, ALL) for method in outcome.config.methods]


def _row(outcome: Outcome, kind: str, method: str) -> Row:
    ids = [prompt.id for prompt in outcome.config.prompts if kind in (ALL, prompt.kind)]
    answers = _answers(outcome, ids, method)
    runs = [run for repeats in answers for run in repeats]
    rates = _rates(answers)
    gain = speedup(rates, _rates(_answers(outcome, ids, PLAIN)))
    return Row(
        target=outcome.config.options.model,
        kind=kind,
        method=method,
        temperature=outcome.config.temperature,
        tokens_per_second=typical(rates),
        speedup=None if gain is None else gain.median,
        acceptance_rate=None if method in PEERS else _acceptance_rate(runs),
        mean_acceptance_length=None if method in PEERS else _mean_acceptance_length(runs),
        identical=_identical(outcome, method, runs),
        prompts=len(ids),
        speedup_low=None if gain is None else gain.low,
        speedup_high=None if gain is None else gain.high,
        first_token_seconds=typical(values([[run.measured.first_token_seconds for run in r] for r in answers])),
        min_margin=min((outcome.plain[key].margin for key in ids if key in outcome.plain), default=None),
    )


def _answers(outcome: Outcome, ids: Sequence[str], method: str) -> list[list[Run]]:
    """Runs [prompts][repeats]."""
    found: dict[str, list[Run]] = {key: [] for key in ids}
    for run in outcome.runs:
        if run.method == method and run.prompt.id in found:
            found[run.prompt.id].append(run)
    return list(found.values())


def _rates(answers: Sequence[Sequence[Run]]) -> Values:
    return values([[run.measured.tokens_per_second for run in repeats] for repeats in answers])


def _acceptance_rate(runs: Sequence[Run]) -> float:
    drafted = sum(run.measured.drafted or 0 for run in runs)
    return sum(run.measured.accepted or 0 for run in runs) / drafted if drafted else 0.0


def _mean_acceptance_length(runs: Sequence[Run]) -> float:
    forwards = sum(run.measured.target_forwards or 0 for run in runs)
    return sum(len(run.measured.token_ids) for run in runs) / forwards if forwards else 0.0


def _identical(outcome: Outcome, method: str, runs: Sequence[Run]) -> bool | None:
    """No exemption for ties. Plain decoding must repeat itself too, its untimed output included."""
    if method in PEERS or not outcome.config.params.coupled:
        return None
    first = outcome.first_plain_ids()
    if not all(run.measured.token_ids == first[run.prompt.id] for run in runs):
        return False
    again = {run.prompt.id: outcome.plain.get(run.prompt.id) for run in runs} if method == PLAIN else {}
    return all(output is None or output.token_ids == first[key] for key, output in again.items())
