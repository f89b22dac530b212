"""Heads on the native kernels: as in PyTorch up to the rounding, and every row's bits its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from lab_heads import Shapes, draw, folder
from lab_heads import layer as layer_shapes
from native_lab import NATIVE, dirty_pool, in_pieces, needs_kernels, same_bits, threads
from tiny import FP32
from torch import Tensor

from paceline.cache.pool import BlockPool, SequenceCache
from paceline.device import Backend
from paceline.heads import build
from paceline.heads.block import TorchBlock
from paceline.heads.eagle import EagleHead
from paceline.heads.formats import eagle1, eagle3, medusa, mtp
from paceline.heads.mtp import MtpHead
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.native.block import NativeBlock
from paceline.native.linear import NativeLinear
from paceline.native.packed import Format

pytestmark = needs_kernels

HIDDEN, VOCAB, ROWS = 64, 90, 24
TARGET = ModelConfig("llama", VOCAB, HIDDEN, 8, 4, 2, 16, 96, max_positions=256)
# Of the outputs' length: 8 bits of weights and activations cost 1% to 2% here, 4 bits up to 16%, a swapped half 100%.
CLOSE = {Format.Q8_0: 0.04, Format.Q4_1: 0.25}
Form = Any  # a module of heads/formats


@dataclass(frozen=True)
class Kind:
    """A head by its format, what its config.json adds, and its tensors."""

    form: Form
    tensors: Shapes
    raw: Mapping[str, Any] = field(default_factory=dict)

    def load(self, backend: Backend, config: ModelConfig = TARGET) -> EagleHead | MtpHead:
        stored = folder(config, self.raw, draw(self.tensors, seed=5))
        head: EagleHead | MtpHead = self.form.load(stored, config, backend)
        return head


def norms(*names: str) -> Shapes:
    return {f"{name}.weight": (HIDDEN,) for name in names}


def biases(at: str) -> Shapes:
    rows = {"q_proj": HIDDEN, "k_proj": HIDDEN // 2, "v_proj": HIDDEN // 2, "o_proj": HIDDEN}
    return {f"{at}self_attn.{name}.bias": (count,) for name, count in rows.items()}


def eagle3_shapes(layers: int = 1) -> Shapes:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 3 * HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes |= norms("norm", "layers.0.hidden_norm", *(f"layers.{i}.input_layernorm" for i in range(layers)))
    for i in range(layers):
        shapes |= layer_shapes(TARGET, f"layers.{i}.", HIDDEN if i else 2 * HIDDEN)
    return shapes


def mtp_shapes(depth: int) -> Shapes:
    at = f"mtp_layers.{depth}."
    own = norms(*(at + name for name in ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")))
    return {**own, at + "input_proj.weight": (HIDDEN, 2 * HIDDEN), **layer_shapes(TARGET, at, HIDDEN)}


EAGLE1: Shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), **layer_shapes(TARGET, "layers.0.", HIDDEN)}
QK_NORMS: Shapes = {f"layers.0.self_attn.{name}.weight": (16,) for name in ("q_norm", "k_norm")}
KINDS = {
    "eagle-1": Kind(eagle1, EAGLE1),
    "eagle-1 with biases": Kind(eagle1, {**EAGLE1, **biases("layers.0."), "fc.bias": (HIDDEN,)}),
    "eagle-1 with norms": Kind(
        eagle1, {**EAGLE1, **norms("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")}, {"layernorms": True}
    ),
    "eagle-3": Kind(eagle3, eagle3_shapes()),
    "eagle-3, residual normed": Kind(eagle3, eagle3_shapes(), {"norm_before_residual": True}),
    "eagle-3, queries and keys normed": Kind(eagle3, {**eagle3_shapes(), **QK_NORMS}, {"model_type": "qwen3"}),
    "eagle-3 of two layers": Kind(eagle3, eagle3_shapes(2), {"num_hidden_layers": 2}),
    "mtp": Kind(mtp, {**mtp_shapes(0), **mtp_shapes(1)}, {"num_nextn_predict_layers": 2}),
}


@cache
def given() -> tuple[Tensor, list[Tensor]]:
    """Embeddings [ROWS, H], and three hidden states of the target."""
    drawn = torch.Generator().manual_seed(8)
    return torch.randn(ROWS, HIDDEN, generator=drawn), [torch.randn(ROWS, HIDDEN, generator=drawn) for _ in range(3)]


class Running:
    """A head over the given rows of one sequence."""

    def __init__(self, head: EagleHead | MtpHead, cache: SequenceCache | None = None) -> None:
        self.head = head
        self.cache = dirty_pool_of(head).open([], ROWS) if cache is None else cache

    def feed(self, rows: Sequence[int]) -> Tensor:
        """The next rows, which follow one another."""
        self.cache.append(len(rows))
        out = forward(self.head, rows, [Span(self.cache, 0, len(rows), self.cache.length)])
        self.cache.commit(range(len(rows)), [])
        return out


def dirty_pool_of(head: EagleHead | MtpHead) -> BlockPool:
    return dirty_pool(head.config, blocks=32, block_size=4, dtype=head.cache_dtype)


def forward(head: EagleHead | MtpHead, rows: Sequence[int], spans: Sequence[Span]) -> Tensor:
    embeds, taps = given()
    chosen = [tap[list(rows)] for tap in taps]
    if isinstance(head, MtpHead):
        return head.forward(1, embeds[list(rows)], chosen[0], spans, spans[0].cache.pool)
    features = head.fuse(chosen[: len(head.taps)])
    return head.forward(embeds[list(rows)], features, spans, spans[0].cache.pool)


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("form", CLOSE)
@pytest.mark.parametrize("kind", KINDS)
def test_close_to_the_same_head_in_pytorch(kind: str, form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows after rows, so that keys and values of earlier calls are read as well."""
    monkeypatch.setattr(build, "FORMAT", form)
    native, dense = KINDS[kind].load(NATIVE), KINDS[kind].load(FP32)
    assert isinstance(native.block, NativeBlock)
    assert isinstance(dense.block, TorchBlock)
    ours, theirs = Running(native), Running(dense)
    for rows in (range(10), range(10, 11), range(11, ROWS)):
        a, b = ours.feed(rows), theirs.feed(rows)
        assert distance(a, b) < CLOSE[form]
        if isinstance(native, EagleHead) and native.output is not None:
            assert isinstance(native.output, NativeLinear)
            assert distance(native.logits(a), dense.logits(b)) < 2 * CLOSE[form]  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_are_its_own(kind: str) -> None:
    """All at once, one by one, by two threads, in scattered blocks, and beside another sequence: the same."""
    head = KINDS[kind].load(NATIVE)
    whole = Running(head).feed(range(ROWS))
    single = Running(head)
    assert same_bits(torch.cat([single.feed([row]) for row in range(ROWS)]), whole)
    with threads(2):
        assert same_bits(Running(head).feed(range(ROWS)), whole)
    pool = dirty_pool_of(head)
    own, other = in_pieces(pool, ROWS), in_pieces(pool, ROWS)
    own.append(ROWS)
    other.append(9)
    both = forward(head, [*range(9), *range(ROWS)], [Span(other, 0, 9, 0), Span(own, 9, ROWS, 0)])
    assert same_bits(both[9:], whole)
    assert same_bits(both[:9], whole[:9])


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_of_a_draft_tree_has_the_bits_of_a_chain(kind: str) -> None:
    """Two branches behind five rows, level by level: nodes 0 and 1, then their children 2 and 3."""
    head = KINDS[kind].load(NATIVE)
    chains = []
    for branch in ([10, 12], [11, 13]):
        run = Running(head)
        run.feed(range(5))
        chains.append(run.feed(branch))
    run = Running(head)
    run.feed(range(5))
    run.cache.append(4)
    first = forward(head, [10, 11], [Span(run.cache, 0, 2, 5, parents=(-1, -1))])
    second = forward(head, [12, 13], [Span(run.cache, 0, 2, 7, parents=(-1, -1, 0, 1))])
    for i, chain in enumerate(chains):
        assert same_bits(torch.stack((first[i], second[i])), chain)


@pytest.mark.parametrize("change", [{"hidden_size": 48, "head_dim": 12}, {"head_dim": 24}, {"intermediate_size": 80}])
def test_what_the_kernels_cannot_run_stays_in_pytorch(change: dict[str, int]) -> None:
    config = replace(TARGET, **change)  # type: ignore[arg-type]
    hidden = config.hidden_size
    shapes = {"fc.weight": (hidden, 2 * hidden), **layer_shapes(config, "layers.0.", hidden)}
    head = Kind(eagle1, shapes).load(NATIVE, config)
    assert isinstance(head.block, TorchBlock)
    assert head.cache_dtype is head.dtype is torch.float32


@pytest.mark.parametrize("form", CLOSE)
def test_medusa_heads_run_on_the_kernels_too(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FORMAT", form)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        shapes |= {f"{head}.0.linear.weight": (HIDDEN, HIDDEN), f"{head}.0.linear.bias": (HIDDEN,)}
        shapes |= {f"{head}.1.weight": (VOCAB, HIDDEN)}
    stored = folder(TARGET, {"medusa_num_heads": 3, "medusa_num_layers": 1}, draw(shapes, seed=5))
    native, dense = (medusa.load(stored, TARGET, backend) for backend in (NATIVE, FP32))
    assert all(isinstance(output, NativeLinear) for output in native.outputs)
    rows = given()[0]
    ours = native.logits(rows)
    assert distance(ours, dense.logits(rows)) < CLOSE[form]
    assert same_bits(torch.cat([native.logits(rows[i : i + 1]) for i in range(ROWS)]).flatten(1), ours.flatten(1))
