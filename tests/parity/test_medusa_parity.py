"""Medusa heads against the paper's equations, written out one head, one block and one row at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from medusa_files import TARGET, Weights, as_vllm, authors_config, load, random_heads, vllm_config, write
from torch import Tensor

from paceline.model.linear import DenseLinear

SIZES = [(1, 1), (3, 1), (4, 2), (5, 3), (2, 0)]  # heads, residual blocks
ROWS = torch.randn(7, TARGET.hidden_size, generator=torch.Generator().manual_seed(9))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def by_the_paper(weights: Weights, heads: int, blocks: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Section 2.1.1: W2 (SiLU(W1 h) + h), with the bias of the authors' code; (states, logits) [rows, heads, ..]."""
    states, logits = [], []
    for row in rows:
        for head in range(heads):
            state = row
            for block in range(blocks):
                weight, bias = weights[f"{head}.{block}.linear.weight"], weights[f"{head}.{block}.linear.bias"]
                state = silu(weight @ state + bias) + state
            states.append(state)
            logits.append(weights[f"{head}.{blocks}.weight"] @ state)
    return torch.stack(states).view(len(rows), heads, -1), torch.stack(logits).view(len(rows), heads, -1)


@pytest.mark.parametrize(("heads", "blocks"), SIZES)
def test_hidden_states_and_logits_are_the_papers(heads: int, blocks: int, tmp_path: Path) -> None:
    weights = random_heads(heads, blocks)
    head = load(write(tmp_path, authors_config(heads, blocks), weights))
    states, logits = by_the_paper(weights, heads, blocks, ROWS)
    assert head.count == heads
    torch.testing.assert_close(head.hidden(ROWS), states, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head.logits(ROWS), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("heads", "blocks"), [(1, 1), (4, 2), (5, 3)])
def test_both_formats_give_equal_results(heads: int, blocks: int, tmp_path: Path) -> None:
    weights = random_heads(heads, blocks)
    theirs = load(write(tmp_path / "authors", authors_config(heads, blocks), weights, "medusa_lm_head.pt"))
    vllms = load(write(tmp_path / "vllm", vllm_config(heads, blocks), as_vllm(weights), "model.safetensors"))
    assert torch.equal(theirs.hidden(ROWS), vllms.hidden(ROWS))
    assert torch.equal(theirs.logits(ROWS), vllms.logits(ROWS))


def test_the_first_heads_alone_score_as_they_do_among_all(tmp_path: Path) -> None:
    """A short budget asks for fewer heads."""
    head = load(write(tmp_path, authors_config(4, 1), random_heads(4, 1)))
    torch.testing.assert_close(head.logits(ROWS, heads=2), head.logits(ROWS)[:, :2], atol=1e-5, rtol=1e-5)


def test_heads_without_outputs_are_scored_by_the_targets(tmp_path: Path) -> None:
    """Medusa's version 2 trains the residual blocks alone."""
    weights, shared = random_heads(3, 1), torch.randn(TARGET.vocab_size, TARGET.hidden_size)
    blocks = {name: weight for name, weight in weights.items() if "linear" in name}
    head = load(write(tmp_path, authors_config(3, 1) | {"version": "2"}, blocks))
    same = blocks | {f"{k}.1.weight": shared for k in range(3)}
    _, logits = by_the_paper(same, 3, 1, ROWS)
    torch.testing.assert_close(head.logits(ROWS, None, DenseLinear(shared)), logits, atol=1e-4, rtol=1e-4)


def test_a_truncated_vocabulary_scores_the_mapped_tokens(tmp_path: Path) -> None:
    """vLLM's `token_map`: rows of the whole vocabulary, or of the mapped tokens alone, in the map's order."""
    weights, mapped = random_heads(2, 1), torch.tensor([3, 59, 0, 17])
    _, logits = by_the_paper(weights, 2, 1, ROWS)
    config = vllm_config(2, 1, truncated_vocab_size=4, logit_scale=0.5)
    whole = as_vllm(weights) | {"token_map": mapped}
    cut = {name: weight[mapped] if name.startswith("lm_heads.") else weight for name, weight in whole.items()}
    for name, stored in (("whole", whole), ("cut", cut)):
        head = load(write(tmp_path / name, config, stored))
        assert head.target_ids is not None
        assert head.target_ids.tolist() == mapped.tolist()
        torch.testing.assert_close(head.logits(ROWS), 0.5 * logits[:, :, mapped], atol=1e-4, rtol=1e-4)
