"""EAGLE heads against speculators' own modules (golden files) and against the papers' equations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import (
    CONFIG,
    GOLDEN,
    HEADS,
    HIDDEN,
    KV_HEADS,
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
from safetensors.torch import load_file
from tiny import ATTENTIONS, FP32, assert_close, dirty_pool, pair, prompt, use_attention
from torch import Tensor
from transformers import LlamaConfig

from paceline.cache.pool import BlockPool
from paceline.heads.eagle import Eagle1Head, EagleHead
from paceline.heads.eagle3 import Eagle3Head
from paceline.heads.load import load_head
from paceline.model.attention import Span
from paceline.model.decoder import Batch
from paceline.model.linear import DenseLinear

VARIANTS = sorted(path.name for path in GOLDEN.glob("eagle3*"))
ROWS, STEPS = 10, 3


@pytest.fixture(autouse=True, params=ATTENTIONS)
def _attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_attention(monkeypatch, request.param)
    torch.manual_seed(0)


def golden(name: str) -> tuple[Eagle3Head, dict[str, Tensor], Tensor, Tensor]:
    """The head, what speculators computed, and the first step's embeddings and features."""
    head, given = load_golden(name)
    assert isinstance(head, Eagle3Head)
    embeds = head.embed(given["tokens"], torch.empty(0).__getitem__)
    return head, given, embeds, head.fuse(given["taps"].chunk(len(head.taps), dim=1))


def rows_of(head: EagleHead, embeds: Tensor, features: Tensor) -> Compute:
    def compute(rows: Sequence[int], spans: list[Span], pool: BlockPool) -> Tensor:
        return head.forward(embeds[rows], features[rows], spans, pool)

    return compute


# speculators


def test_every_variant_has_a_golden_file() -> None:
    assert VARIANTS == [
        "eagle3",
        "eagle3-input-norm",
        "eagle3-qwen3",
        "eagle3-residual-normed",
        "eagle3-two-layers",
    ]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("sizes", [[ROWS], [3, 1, 6]])
def test_first_step_against_speculators(name: str, sizes: list[int]) -> None:
    """All rows at once, and cut so that later ones read what earlier ones left in the cache."""
    head, given, embeds, features = golden(name)
    run, parts, start = fresh(head), [], 0
    for size in sizes:
        parts.append(run.feed(range(start, start + size), rows_of(head, embeds, features)))
        start += size
    hidden = torch.cat(parts)
    assert_close(hidden, given["hidden.0"])
    assert_close(head.logits(hidden), given["logits.0"])


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("last", [0, 4, ROWS - 1])
def test_several_steps_against_speculators(name: str, last: int) -> None:
    """A chain of drafts behind row `last`: each step feeds what the one before returned."""
    head, given, embeds, features = golden(name)
    run = fresh(head)
    hidden = run.feed(range(last + 1), rows_of(head, embeds, features))[-1:]
    for step in range(1, STEPS):
        following = given["tokens"][last + step : last + step + 1]
        token = following if following.numel() else torch.zeros(1, dtype=torch.int64)
        embed = head.embed(token, torch.empty(0).__getitem__)
        hidden = run.feed([0], rows_of(head, embed, hidden))
        assert_close(hidden, given[f"hidden.{step}"][last : last + 1])
        assert_close(head.logits(hidden), given[f"logits.{step}"][last : last + 1])


@pytest.mark.parametrize("name", VARIANTS)
def test_several_sequences_in_one_forward_against_speculators(name: str) -> None:
    """The golden rows twice over in one flat batch, as sequences of different lengths."""
    head, given, embeds, features = golden(name)
    long, short = fresh(head), fresh(head)
    short.pool, short.cache = long.pool, long.pool.open([], room=1)
    spans = [long.span(ROWS), short.span(4, start=ROWS)]
    rows = [*range(ROWS), *range(4)]
    hidden = head.forward(embeds[rows], features[rows], spans, long.pool)
    assert_close(hidden, given["hidden.0"][rows])


@pytest.mark.parametrize("name", ["eagle3", "eagle3-two-layers"])
def test_a_draft_tree_gives_each_branch_what_a_chain_gives(name: str) -> None:
    head, _, embeds, features = golden(name)
    branches = [[0, 1], [2, 3]]  # two chains of two drafts behind the first rows; nodes 0, 2 | 1, 3 by level
    tokens = head.embed(torch.tensor([5, 17, 90, 33]), torch.empty(0).__getitem__)
    state = torch.stack([features[6], features[7], features[8], features[9]])
    chains = []
    for branch in branches:
        run = fresh(head)
        run.feed(range(5), rows_of(head, embeds, features))
        chains.append(run.feed(branch, rows_of(head, tokens, state)))
    run = fresh(head)
    run.feed(range(5), rows_of(head, embeds, features))
    run.cache.append(4)
    span = Span(run.cache, 0, 4, 5, parents=(-1, -1, 0, 1))
    nodes = [0, 2, 1, 3]
    tree = head.forward(tokens[nodes], state[nodes], [span], run.pool)
    assert_close(tree[[0, 2, 1, 3]], torch.cat(chains))


@pytest.mark.parametrize("name", VARIANTS)
def test_draft_vocabulary_maps_to_the_targets_ids(name: str) -> None:
    head, _, _, _ = golden(name)
    stored = load_file(GOLDEN / name / "model.safetensors")
    if "t2d" not in stored:
        assert head.target_ids is None
        return
    assert head.target_ids is not None
    assert head.target_ids.tolist() == stored["t2d"].nonzero().flatten().tolist()
    assert head.target_ids.tolist() != stored["d2t"].tolist(), "offsets and ids must differ to tell them apart"


# The EAGLE authors' layouts, from the equations


@dataclass(frozen=True)
class Kind:
    """Of EAGLE-1 head: biases, layers, and the norms that HASS heads add."""

    bias: bool = False
    layers: int = 1
    norms: bool = False


PLAIN = Kind()
NORMS = ("embed_layernorm.weight", "hidden_layernorm.weight", "lm_head_layernorm.weight")


def eagle1(folder: Path, kind: Kind = PLAIN) -> tuple[Eagle1Head, Weights]:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN), "embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(kind.layers):
        shapes |= layer_shapes(f"layers.{i}.", bias=kind.bias)
        shapes |= {f"layers.{i}.input_layernorm.weight": (HIDDEN,)} if i else {}
    shapes |= {"fc.bias": (HIDDEN,)} if kind.bias else {}
    shapes |= dict.fromkeys(NORMS, (HIDDEN,)) if kind.norms else {}
    weights = random_weights(shapes)
    config = CONFIG | {"bias": kind.bias, "qkv_bias": kind.bias, "num_hidden_layers": kind.layers}
    head = load_head(str(write_head(folder, config, weights)), target_config(), FP32)
    assert isinstance(head, Eagle1Head)
    return head, weights


def norm_if(w: Weights, name: str, x: Tensor) -> Tensor:
    return rms(x, w[name]) if name in w else x


def eagle1_reference(w: Weights, tokens: Tensor, features: Tensor) -> Tensor:
    """f_{t+1} of all rows. The first layer has no first norm, so what it attends with is what it adds to."""
    embeds = norm_if(w, NORMS[0], w["embed_tokens.weight"][tokens])
    x = torch.cat((embeds, features), dim=1) @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(()))
    x = layer(w, "layers.0.", norm_if(w, NORMS[1], x), x)
    if "layers.1.input_layernorm.weight" in w:
        x = layer(w, "layers.1.", rms(x, w["layers.1.input_layernorm.weight"]), x)
    return x


def eagle3(folder: Path) -> tuple[Eagle3Head, Weights]:
    """Without an embedding of its own, as the authors' Llama 3.1 head; a target wider than the head would need one."""
    draft = 120
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 3 * HIDDEN), "lm_head.weight": (draft, HIDDEN)}
    shapes |= {"norm.weight": (HIDDEN,)}
    shapes |= {f"midlayer.{name}.weight": (HIDDEN,) for name in ("hidden_norm", "input_layernorm")}
    weights = random_weights(shapes | layer_shapes("midlayer.", inputs=2 * HIDDEN))
    ids = torch.arange(draft) + 40
    maps = {"d2t": ids - torch.arange(draft), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}
    config = CONFIG | {"draft_vocab_size": draft}
    head = load_head(str(write_head(folder, config, weights | maps)), target_config(), FP32)
    assert isinstance(head, Eagle3Head)
    return head, weights


def eagle3_reference(w: Weights, embeds: Tensor, features: Tensor) -> Tensor:
    normed = rms(embeds, w["midlayer.input_layernorm.weight"]), rms(features, w["midlayer.hidden_norm.weight"])
    return layer(w, "midlayer.", torch.cat(normed, dim=1), features)


@pytest.mark.parametrize("kind", [PLAIN, Kind(bias=True), Kind(layers=2), Kind(norms=True)], ids=str)
def test_eagle1_against_the_equations(kind: Kind, tmp_path: Path) -> None:
    head, w = eagle1(tmp_path, kind)
    tokens, features = torch.tensor(prompt(ROWS + STEPS)) % VOCAB, torch.randn(ROWS, HIDDEN)
    embeds, output = (
        head.embed(tokens, torch.empty(0).__getitem__),
        DenseLinear(torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5),
    )
    run = fresh(head)
    ours = run.feed(range(ROWS), rows_of(head, embeds, head.fuse([features])))
    assert_close(ours, eagle1_reference(w, tokens[:ROWS], features))
    for step in range(ROWS, ROWS + STEPS):
        features = torch.cat((features, ours[-1:]))
        expected = eagle1_reference(w, tokens[: step + 1], features)[-1:]
        ours = run.feed([step], rows_of(head, embeds, features))
        assert_close(ours, expected)
        assert_close(head.logits(ours, output), norm_if(w, NORMS[2], expected) @ output.weight.T)


def test_eagle3_against_the_equations(tmp_path: Path) -> None:
    head, w = eagle3(tmp_path)
    table = torch.randn(VOCAB, HIDDEN)
    tokens, taps = torch.tensor(prompt(ROWS + STEPS)) % VOCAB, [torch.randn(ROWS, HIDDEN) for _ in range(3)]
    embeds, run = head.embed(tokens, table.__getitem__), fresh(head)
    features = torch.cat(taps, dim=1) @ w["fc.weight"].T
    ours = run.feed(range(ROWS), rows_of(head, embeds, head.fuse(taps)))
    assert_close(ours, eagle3_reference(w, table[tokens[:ROWS]], features))
    for step in range(ROWS, ROWS + STEPS):
        features = torch.cat((features, ours[-1:]))
        expected = eagle3_reference(w, table[tokens[: step + 1]], features)[-1:]
        ours = run.feed([step], rows_of(head, embeds, features))
        assert_close(ours, expected)
        assert_close(head.logits(ours), rms(expected, w["norm.weight"]) @ w["lm_head.weight"].T)
    assert head.target_ids is not None
    assert head.target_ids.tolist() == list(range(40, 160))


def test_eagle1_without_an_output_head_asks_for_the_targets(tmp_path: Path) -> None:
    head, _ = eagle1(tmp_path)
    with pytest.raises(ValueError, match="pass the target's"):
        head.logits(torch.zeros(1, HIDDEN))


# Which of the target's hidden states


@pytest.fixture(scope="module")
def target() -> tuple[Any, Any]:
    sizes = {key: value for key, value in CONFIG.items() if key not in ("model_type", "num_hidden_layers")}
    config = LlamaConfig(**sizes, num_hidden_layers=TARGET_LAYERS, head_dim=HIDDEN // HEADS)
    assert config.num_key_value_heads == KV_HEADS
    with torch.inference_mode():
        return pair(config)


def tapped(target: tuple[Any, Any], taps: Sequence[int], tokens: Sequence[int]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Paceline's taps, and transformers' `hidden_states`."""
    model, decoder = target
    pool = dirty_pool(decoder.config)
    cache = pool.open([], room=len(tokens))
    span = Span(cache, 0, len(tokens), 0)
    _, found = decoder.forward(Batch(torch.tensor(tokens), [span], pool, taps=taps))
    theirs = model(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    return [found[tap] for tap in taps], theirs.hidden_states


def test_eagle3_reads_the_inputs_of_an_early_a_middle_and_a_late_layer(target: Any, tmp_path: Path) -> None:
    """The authors' code keeps `hidden_states` before layers 2, n/2 and n - 3."""
    head, _ = eagle3(tmp_path)
    ours, states = tapped(target, head.taps, [token % VOCAB for token in prompt(9)])
    for state, index in zip(ours, (2, TARGET_LAYERS // 2, TARGET_LAYERS - 3), strict=True):
        assert_close(state, states[index][0])


def test_eagle1_reads_the_targets_last_hidden_state_after_its_norm(target: Any, tmp_path: Path) -> None:
    head, _ = eagle1(tmp_path)
    ours, states = tapped(target, head.taps, [token % VOCAB for token in prompt(9)])
    assert_close(ours[0], states[-1][0])
