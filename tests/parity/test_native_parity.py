"""Every family that runs on the native kernels, in 8 bits: close to the original, and equal to a slow twin.

The twin (native_twin.py) gets each half of each layer's own input, so that one rounding which goes the other way is not
carried on: an error in rotary positions, windows, shared heads, scale, norms or activations has nowhere to hide.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from native_lab import CONFIGS, NATIVE, Noise, needs_kernels
from native_models import TOKENS, Model, assert_close_to_the_original, assert_halves_equal_the_twin, from_source
from tiny import FAMILIES, reference_logits, tiny_model

from paceline.native.decoder import NativeDecoder, runs_natively
from paceline.weights.safetensors import SafetensorsSource

pytestmark = needs_kernels

NOT_NATIVE = ("opt", "opt-gelu", "gpt2", "gpt2-n-inner")  # layer norm, learned positions
NAMES = [name for name in FAMILIES if name not in NOT_NATIVE]


@cache
def family(name: str) -> tuple[Any, Model]:
    """The model of transformers and ours of the same weights."""
    original = tiny_model(FAMILIES[name])
    with TemporaryDirectory() as folder:
        original.save_pretrained(folder)
        return original, from_source(SafetensorsSource(Path(folder)), NATIVE)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_close_to_those_of_transformers(name: str) -> None:
    """What 8 bits of weights and activations cost in random models, measured: 2e-4 to 1e-3, single rows up to 5e-3."""
    original, model = family(name)
    assert isinstance(model.decoder, NativeDecoder)
    assert_close_to_the_original(model.logits(), reference_logits(original, TOKENS), mean=2e-3, most=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_families_equal_the_twin_half_by_half(name: str) -> None:
    model = family(name)[1]
    assert runs_natively(model.config)
    assert_halves_equal_the_twin(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_of_every_make_equal_the_twin_half_by_half(name: str) -> None:
    assert_halves_equal_the_twin(from_source(Noise(CONFIGS[name]), NATIVE))
