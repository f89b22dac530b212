"""What each step did to a request that is to be explained."""

from __future__ import annotations

from paceline.engine.verification import Candidate
from paceline.types import Origin, TracedStep


def record_step(
    candidate: Candidate, path: tuple[int, ...], tokens: list[int], method: str, draft_seconds: float,
    target_seconds: float,
) -> None:  # fmt: skip
    """Call it once the step's tokens were appended: what truncation took away is left out."""
    draft, sequence = candidate.draft, candidate.sequence
    assert sequence.trace is not None
    added = sequence.stats.generated_tokens - sum(len(step.emitted) for step in sequence.trace)
    accepted: Origin = "accepted"
    origins = [accepted] * len(path) + [_last(candidate, path)]
    sequence.trace.append(
        TracedStep(
            method=draft.source or method,
            tokens=draft.tokens.tolist(),
            parents=draft.parents,
            confidence=None if draft.confidence is None else list(draft.confidence),
            path=path[:added],
            emitted=tokens[:added],
            origins=origins[:added],
            draft_seconds=draft_seconds,
            target_seconds=target_seconds,
        )
    )


def _last(candidate: Candidate, path: tuple[int, ...]) -> Origin:
    """How the token after the accepted ones came: a bonus at a leaf, a correction where children were refused."""
    if not candidate.draft.size:
        return "plain"
    return "bonus" if path and path[-1] not in candidate.draft.parents else "correction"
