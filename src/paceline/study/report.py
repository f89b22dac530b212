"""A study as JSON and as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.noise import noise_warning
from paceline.bench.provenance import origin
from paceline.study.findings import Finding, TrainedDraft
from paceline.study.latency import TimedShape
from paceline.study.throughput import best

FIXED = 4  # the draft length that is shown beside each draft's best


@dataclass(frozen=True)
class Study:
    """What was found. target_seconds: of the target's own step."""

    provenance: Mapping[str, Any]
    shapes: Sequence[TimedShape]
    drafts: Sequence[TrainedDraft]
    target_seconds: float | None
    findings: Sequence[Finding]

    def as_json(self) -> dict[str, Any]:
        return {
            "provenance": dict(self.provenance),
            "target_seconds": self.target_seconds,
            "shapes": [asdict(shape) for shape in self.shapes],
            "drafts": [asdict(draft) for draft in self.drafts],
            "findings": [asdict(finding) for finding in self.findings],
        }

    def as_markdown(self) -> str:
        parts = ["# Draft study", *_source(self.provenance)]
        if self.shapes:
            parts.append("## Step time of random weights\n\n" + _table(SHAPE_COLUMNS, map(_shape, self.shapes)))
        if self.drafts:
            parts.append("## Drafts\n\n" + self._target() + _table(DRAFT_COLUMNS, map(_draft, self.drafts)))
        parts.append("## Findings\n\n" + _table(("claim", "verdict", "why", "statistics"), map(_found, self.findings)))
        return "\n\n".join(parts) + "\n"

    def _target(self) -> str:
        return "" if self.target_seconds is None else f"A step of the target: {_ms(self.target_seconds)} ms.\n\n"


SHAPE_COLUMNS = ("group", "shape", "layers", "width", "MLP", "M weights", "MB a step", "ms a step", "sizes from")
DRAFT_COLUMNS = (
    "draft", "layers", "width", "M weights", "ms a step", "acceptance length", "perplexity", "accuracy",
    f"speed-up at k {FIXED}", "at its best k", "tokens/s", "identical",
)  # fmt: skip


def provenance(
    command: str, asked: Mapping[str, Any], busy: Mapping[str, float], noted: Iterable[str]
) -> dict[str, Any]:
    """busy: cores that other processes used, by step. noted: warnings of the benchmarks."""
    noisy = [f"{step}: {text}" for step, cores in busy.items() if (text := noise_warning(cores)) is not None]
    return origin(command) | {
        **asked,
        "other_processes_cores": dict(busy),
        "warnings": [*noisy, *dict.fromkeys(noted)],
    }


def _source(provenance: Mapping[str, Any]) -> list[str]:
    lines = [
        f"`{provenance['command']}`",
        f"{provenance['date']}, Paceline {provenance['paceline']} ({provenance['commit'] or 'no commit'}), torch "
        f"{provenance['torch']}, {provenance['processor']}, {provenance['threads']} threads.",
    ]
    return lines + [f"Warning: {text}." for text in provenance["warnings"]]


def _shape(shape: TimedShape) -> tuple[object, ...]:
    return (
        shape.group, shape.name, shape.layers, shape.hidden, shape.intermediate, _millions(shape.parameters),
        f"{shape.bytes / 1e6:,.0f}", _ms(shape.seconds), shape.source,
    )  # fmt: skip


def _draft(draft: TrainedDraft) -> tuple[object, ...]:
    found = draft.measures
    shown = (
        draft.name, draft.layers, draft.hidden, _millions(draft.parameters), _ms(draft.step_seconds),
        f"{found.acceptance_length:.2f}", f"{found.perplexity:.1f}", f"{found.accuracy:.1%}",
    )  # fmt: skip
    if not draft.rates:
        return (*shown, "-", "-", "-", "-")
    top, fixed = best(draft.rates), next((rate for rate in draft.rates if rate.k == FIXED), None)
    same = {True: "yes", False: "NO", None: "-"}[top.identical]
    at_fixed = "-" if fixed is None else f"{fixed.speedup:.2f}"
    at_best = f"{top.speedup:.2f} ({top.low:.2f} to {top.high:.2f}), k {top.k}"
    return (*shown, at_fixed, at_best, f"{top.tokens_per_second:.1f}", same)


def _found(finding: Finding) -> tuple[object, ...]:
    return finding.claim, f"**{finding.verdict}**", finding.why, "; ".join(map(str, finding.correlations))


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f}"
