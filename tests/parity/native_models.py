"""Models on the native kernels with what they were converted from, and what they are held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from native_lab import dirty_pool, in_pieces, opened, prompt, rows
from native_twin import Twin
from torch import Tensor

from paceline.cache.pool import SequenceCache
from paceline.device import Backend
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.decoder import Batch, Decoder
from paceline.native.packed import Packed
from paceline.weights.assemble import assemble
from paceline.weights.convert import convert
from paceline.weights.source import TensorSource

TOKENS = prompt(70, seed=5)  # past the sliding windows and several chunks of 16
# Relative to a row's largest update. The order of sums moves it by 1e-6 (7e-6 where large terms cancel: Q2_K of random
# bytes), one level of one activation by up to 5e-3.
EXACT, ONE_LEVEL = 2e-5, 0.02


@dataclass
class Model:
    config: ModelConfig
    tensors: Mapping[str, Tensor | Packed]
    decoder: Decoder

    def logits(self) -> Tensor:
        """Of TOKENS, in one forward."""
        return self.decoder.logits(rows(self.decoder, opened(self.decoder, []), TOKENS))


def from_source(source: TensorSource, backend: Backend) -> Model:
    tensors = dict(convert(source, backend))
    return Model(source.config, tensors, assemble(source.config, tensors, backend))


def assert_close_to_the_original(ours: Tensor, theirs: Tensor, *, mean: float, most: float) -> None:
    """Mean and largest KL divergence of a row, nats: what rounding may cost."""
    assert theirs.std() > 0.3, "a reference this flat would hide an error"
    log_p, log_q = theirs.double().log_softmax(dim=1), ours.double().log_softmax(dim=1)
    apart = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    assert apart.mean() < mean
    assert apart.max() < most
    assert torch.cosine_similarity(ours, theirs, dim=1).min() > 1 - most


def assert_halves_equal_the_twin(model: Model) -> None:
    """Each half of each layer on the hidden states that the kernels gave to it."""
    twin, decoder = Twin(model.config, model.tensors), model.decoder
    sequence = in_pieces(dirty_pool(model.config), len(TOKENS))
    tokens = torch.tensor(TOKENS)
    batch = Batch(tokens, [Span(sequence, 0, len(TOKENS), 0)], sequence.pool)
    step, hidden = decoder.plan(batch), decoder._embed(batch)
    torch.testing.assert_close(hidden.double(), twin.embed(tokens), rtol=1e-6, atol=0)
    for layer in range(model.config.num_layers):
        before = hidden.double()
        hidden = step.attend(layer, hidden)
        keys, values = _cached(sequence, layer)
        expected = twin.attend(layer, before, keys, values)
        _assert_fp16_of(keys, expected.keys, expected.edge)
        _assert_fp16_of(values, expected.values, expected.edge)
        _assert_equal(hidden - before, expected.delta, expected.edge)
        before = hidden.double()
        hidden = step.mlp(layer, hidden)
        _assert_equal(hidden - before, *twin.mlp(layer, before))
    _assert_equal(decoder.logits(hidden), *twin.logits(hidden))


def _assert_equal(ours: Tensor, theirs: Tensor, edge: Tensor) -> None:
    """Rows on an edge may differ by one level."""
    assert edge.float().mean() < 0.3, "so few other rows would hide an error"
    apart = (ours - theirs).abs().amax(dim=1) / theirs.abs().amax(dim=1)
    assert apart[~edge].max() < EXACT
    assert apart.max() < ONE_LEVEL


def _assert_fp16_of(halves: Tensor, wide: Tensor, edge: Tensor) -> None:
    """The nearest, but for what the order of sums may do first."""
    assert halves.dtype == torch.float16
    apart, half_a_step = (halves.double() - wide).abs(), (2**-11 * wide.abs()).clamp_min(2**-25)
    assert (apart <= half_a_step + EXACT * wide.abs().amax(dim=(1, 2), keepdim=True))[~edge].all()
    assert apart.max() < ONE_LEVEL * wide.abs().max()


def _cached(sequence: SequenceCache, layer: int) -> tuple[Tensor, Tensor]:
    slots = sequence.slot_table(len(TOKENS))
    return sequence.pool.keys[layer][slots], sequence.pool.values[layer][slots]
