"""The same logits however the rows are cut: one at a time, chunks, several sequences, scattered blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import pytest
import torch
from tiny import (
    FAMILIES,
    Run,
    assert_close,
    contiguous,
    dirty_pool,
    family,
    prompt,
    reference_logits,
    run_in_chunks,
    scattered,
    step,
    use_attention,
)

from paceline.cache.pool import BlockPool

pytestmark = pytest.mark.parametrize("attention", ["rows", "padded"])
LENGTH = 70  # past one 64-position bucket and past the sliding windows


@pytest.fixture(autouse=True)
def _attention(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_attention(monkeypatch, attention)


@pytest.mark.parametrize("place", [contiguous, scattered])
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_against_transformers(
    name: str, place: Callable[[BlockPool, Sequence[int]], Run], attention: str
) -> None:
    model, decoder = family(name)
    tokens = prompt(LENGTH, seed=1)
    ours = run_in_chunks(decoder, place(dirty_pool(decoder.config), tokens), [1, 2, 3, 5, 8])
    assert_close(ours, reference_logits(model, tokens))


@pytest.mark.parametrize("name", FAMILIES)
def test_one_token_at_a_time_against_transformers(name: str, attention: str) -> None:
    model, decoder = family(name)
    tokens = prompt(LENGTH, seed=2)
    ours = run_in_chunks(decoder, contiguous(dirty_pool(decoder.config), tokens), [40, *[1] * 30])
    assert_close(ours, reference_logits(model, tokens))


@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_batch_against_transformers(name: str, attention: str) -> None:
    """Four sequences of different lengths in one flat batch, each taking another number of rows a step."""
    model, decoder = family(name)
    pool = dirty_pool(decoder.config)
    prompts = [prompt(length, seed=length) for length in (70, 37, 5, 18)]
    runs = [place(pool, tokens) for place, tokens in zip(cycle([contiguous, scattered]), prompts, strict=False)]
    step(decoder, [(run, len(run.tokens) // 2) for run in runs])
    counts = cycle([1, 3, 2, 8, 5])
    while waiting := [run for run in runs if run.left]:
        step(decoder, [(run, min(next(counts), run.left)) for run in waiting])
    for run in runs:
        assert_close(torch.cat(run.logits), reference_logits(model, run.tokens))
