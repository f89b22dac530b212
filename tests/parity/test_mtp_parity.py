"""MTP heads against speculators' own module (golden file) and against the equations, in each checkpoint's layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from heads import (
    CONFIG,
    HIDDEN,
    TARGET_LAYERS,
    VOCAB,
    Compute,
    Weights,
    fresh,
    layer,
    layer_shapes,
    load_golden,
    random_weights,
    rms,
    target_config,
    write_head,
)
from tiny import ATTENTIONS, FP32, assert_close, prompt, use_attention
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.heads.load import load_head
from paceline.heads.mtp import MtpHead
from paceline.model.attention import Span
from paceline.model.decoder import NORMED
from paceline.model.linear import DenseLinear

ROWS, STEPS, DEPTHS = 10, 3, 2
NAMES = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
}


@pytest.fixture(autouse=True, params=ATTENTIONS)
def _attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_attention(monkeypatch, request.param)
    torch.manual_seed(0)


def rows_of(head: MtpHead, depth: int, embeds: Tensor, hidden: Tensor) -> Compute:
    def compute(rows: Sequence[int], spans: list[Span], pool: BlockPool) -> Tensor:
        return head.forward(depth, embeds[rows], hidden[rows], spans, pool)

    return compute


# speculators


@pytest.mark.parametrize("sizes", [[ROWS], [3, 1, 6]])
def test_every_step_against_speculators(sizes: list[int]) -> None:
    """Step k runs over all positions with the tokens k + 1 ahead and the hidden states of step k - 1."""
    head, given = load_golden("mtp-qwen3")
    assert isinstance(head, MtpHead)
    output, hidden = DenseLinear(given["head"].float()), given["last_hidden"]
    for step in range(STEPS):
        embeds = head.embed(given["tokens"][step + 1 : step + 1 + ROWS], given["embedding"].__getitem__)
        run, parts, start = fresh(head), [], 0
        for size in sizes:
            parts.append(run.feed(range(start, start + size), rows_of(head, step, embeds, hidden)))
            start += size
        hidden = torch.cat(parts)
        assert_close(hidden, given[f"hidden.{step}"])
        assert_close(head.logits(hidden, output), given[f"logits.{step}"])


# MiMo's and DeepSeek's own names, from the equations


def place(style: str, depth: int) -> str:
    return f"model.mtp_layers.{depth}." if style == "mimo" else f"model.layers.{TARGET_LAYERS + depth}."


def checkpoint(folder: Path, style: str) -> tuple[MtpHead, Weights]:
    """Two depths inside a model's checkpoint, beside tensors of the model itself."""
    embed_norm, hidden_norm, project, final_norm = NAMES[style]
    shapes: dict[str, tuple[int, ...]] = {}
    for depth in range(DEPTHS):
        at = place(style, depth)
        norms = (embed_norm, hidden_norm, final_norm, "input_layernorm")
        shapes |= {f"{at}{name}.weight": (HIDDEN,) for name in norms}
        shapes |= {f"{at}{project}.weight": (HIDDEN, 2 * HIDDEN)} | layer_shapes(at, bias=style == "mimo")
        if style == "deepseek":
            shapes |= {f"{at}{name}.weight": (VOCAB, HIDDEN) for name in ("embed_tokens", "shared_head.head")}
    shapes |= layer_shapes(f"model.layers.{TARGET_LAYERS - 1}.") | {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    weights = random_weights(shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)})
    config = CONFIG | {"num_hidden_layers": TARGET_LAYERS, "num_nextn_predict_layers": DEPTHS}
    config |= {"model_type": "mimo"} if style == "mimo" else {}
    head = load_head(str(write_head(folder, config, weights)), target_config(), FP32)
    assert isinstance(head, MtpHead)
    return head, weights


def reference(w: Weights, style: str, depth: int, tokens: Tensor, hidden: Tensor) -> Tensor:
    """[h; e] in MiMo, [e; h] in DeepSeek's checkpoints."""
    at, (embed_norm, hidden_norm, project, final_norm) = place(style, depth), NAMES[style]
    e = rms(w["model.embed_tokens.weight"][tokens], w[f"{at}{embed_norm}.weight"])
    h = rms(hidden, w[f"{at}{hidden_norm}.weight"])
    x = torch.cat((h, e) if style == "mimo" else (e, h), dim=1) @ w[f"{at}{project}.weight"].T
    x = layer(w, at, rms(x, w[f"{at}input_layernorm.weight"]), x)
    return rms(x, w[f"{at}{final_norm}.weight"])


@pytest.mark.parametrize("style", NAMES)
def test_each_depth_against_the_equations(style: str, tmp_path: Path) -> None:
    """Two depths over one pool, each with its own layer of the cache; the third goes through the first again."""
    head, w = checkpoint(tmp_path, style)
    assert head.config.num_layers == DEPTHS
    tokens = torch.tensor(prompt(ROWS + 4)) % VOCAB
    run, hidden, output = fresh(head), torch.randn(ROWS, HIDDEN), DenseLinear(w["lm_head.weight"])
    span = run.span(ROWS)
    for depth in range(DEPTHS + 1):
        ahead = tokens[depth + 1 : depth + 1 + ROWS]
        expected = reference(w, style, depth % DEPTHS, ahead, hidden)
        embeds = head.embed(ahead, w["model.embed_tokens.weight"].__getitem__)
        ours = head.forward(depth, embeds, hidden, [span], run.pool)
        assert_close(ours, expected)
        assert_close(head.logits(ours, output), expected @ w["lm_head.weight"].T)
        hidden = ours


@pytest.mark.parametrize("style", NAMES)
def test_depths_do_not_touch_each_others_cache(style: str, tmp_path: Path) -> None:
    head, _ = checkpoint(tmp_path, style)
    embeds, hidden = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    run = fresh(head)
    first = run.feed(range(4), rows_of(head, 0, embeds, hidden))
    before = run.pool.keys[0].clone()
    run.cache.truncate(0)
    run.feed(range(4), rows_of(head, 1, embeds, hidden))
    assert torch.equal(run.pool.keys[0], before)
    assert not torch.equal(run.pool.keys[1][:4], before[:4])
    assert first.std() > 0.3


@pytest.mark.parametrize("style", NAMES)
def test_the_target_is_read_after_its_final_norm(style: str, tmp_path: Path) -> None:
    assert checkpoint(tmp_path, style)[0].taps == (NORMED,)
