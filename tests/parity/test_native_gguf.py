"""GGUF weights as stored, on the native kernels: close to transformers with the dequantised weights, equal to the twin.

Only activations are rounded here. And `load_model`, from the file to logits, with and without its converted copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import K_QUANTS, MODELS, WIDE, Array, Encode, random_blocks, with_type, write
from native_lab import NATIVE, needs_kernels
from native_models import TOKENS, Model, assert_close_to_the_original, assert_halves_equal_the_twin, from_source
from tiny import reference_logits, tiny_model
from torch import Tensor
from transformers import LlamaConfig

from paceline import device
from paceline.native.packed import Format, Packed
from paceline.weights import load
from paceline.weights.cache_dir import converted_dir
from paceline.weights.gguf import GGUFSource
from paceline.weights.load import LoadedModel

pytestmark = needs_kernels

STORED = replace(NATIVE, precision="stored")
BY_32 = [form.name for form in Format if form.block_columns == 32]
WIDE_LLAMA = LlamaConfig(**WIDE, tie_word_embeddings=False)


def formats(model: Model) -> set[Format]:
    return {each.format for each in model.tensors.values() if isinstance(each, Packed)}


def in_turn(*encoders: Encode) -> Encode:
    """One matrix with each of `encoders`, round and round; the embedding and the head in Q8_0."""
    turn, outside = cycle(encoders), with_type("Q8_0")

    def encode(values: Array) -> tuple[Array, gguf.GGMLQuantizationType]:
        return outside(values) if values.shape[0] == WIDE["vocab_size"] else next(turn)(values)

    return encode


def assert_as_good_as_the_file(path: Path, original: object, expected: set[Format]) -> None:
    model = from_source(GGUFSource(path), STORED)
    assert formats(model) == expected
    # Measured: 4e-5 to 2e-3 (Q6_K of random bytes).
    assert_close_to_the_original(model.logits(), reference_logits(original, TOKENS), mean=3e-3, most=2e-2)
    assert_halves_equal_the_twin(model)


@pytest.mark.parametrize("name", MODELS)
def test_families_as_stored(name: str, tmp_path: Path) -> None:
    original = tiny_model(MODELS[name])
    path = write(tmp_path / "tiny.gguf", original, with_type("Q8_0"))
    assert_as_good_as_the_file(path, original, {Format.Q8_0})


@pytest.mark.parametrize("kind", BY_32)
def test_formats_of_blocks_of_32_as_stored(kind: str, tmp_path: Path) -> None:
    original = tiny_model(MODELS["llama"])
    path = write(tmp_path / "tiny.gguf", original, with_type(kind))
    assert_as_good_as_the_file(path, original, {Format[kind]})


@pytest.mark.parametrize("kind", [name for name in K_QUANTS if name in Format.__members__])
def test_k_quants_as_stored(kind: str, tmp_path: Path) -> None:
    original = tiny_model(WIDE_LLAMA)
    path = write(tmp_path / "tiny.gguf", original, in_turn(random_blocks(kind)))
    assert_as_good_as_the_file(path, original, {Format[kind], Format.Q8_0})


def test_a_mixture_as_stored(tmp_path: Path) -> None:
    """As llama.cpp's "M" files: queries, keys and values of one layer in three formats, gate and up in two."""
    original = tiny_model(WIDE_LLAMA)
    mixture = [random_blocks("Q4_K"), random_blocks("Q5_K"), random_blocks("Q6_K"), with_type("Q5_0")]
    path = write(tmp_path / "tiny.gguf", original, in_turn(*mixture))
    expected = {Format.Q4_K, Format.Q5_K, Format.Q6_K, Format.Q5_0, Format.Q8_0}
    assert_as_good_as_the_file(path, original, expected)


@pytest.mark.parametrize("encode", [random_blocks("Q2_K"), random_blocks("Q3_K"), with_type("F16"), with_type("F32")])
def test_what_the_kernels_do_not_read_becomes_8_bits(encode: Encode, tmp_path: Path) -> None:
    original = tiny_model(WIDE_LLAMA)
    path = write(tmp_path / "tiny.gguf", original, in_turn(with_type("Q4_0"), encode))
    assert_as_good_as_the_file(path, original, {Format.Q4_0, Format.Q8_0})


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[LoadedModel, Tensor]]:
    """Loads a quantised file, with a cache of converted weights that is empty at first: the model and its logits."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "load_tokenizer", lambda checkpoint: None)
    monkeypatch.setattr(device, "has_kernels", lambda: True)
    path = write(tmp_path / "tiny.gguf", tiny_model(MODELS["qwen3"]), with_type("Q4_1"))

    def load_again() -> tuple[LoadedModel, Tensor]:
        model = load.load_model(str(path), device="cpu")
        return model, Model(model.config, {}, model.decoder).logits()

    return load_again


def opened_never(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(checkpoint: object) -> None:
        raise AssertionError("the GGUF file was opened")

    monkeypatch.setattr(load, "open_source", refuse)


Loaded = Callable[[], tuple[LoadedModel, Tensor]]


def test_a_gguf_file_is_loaded_as_stored(loaded: Loaded, tmp_path: Path) -> None:
    model, logits = loaded()
    assert model.backend == STORED
    assert torch.equal(logits, from_source(GGUFSource(tmp_path / "tiny.gguf"), STORED).logits())


def test_the_second_load_reads_the_converted_copy_and_gives_the_same_bits(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, logits = loaded()
    opened_never(monkeypatch)
    again, same = loaded()
    assert (again.key, again.backend) == (first.key, first.backend)
    assert torch.equal(same, logits)


def test_a_lost_or_damaged_copy_is_made_again(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    _, logits = loaded()
    (copy,) = converted_dir().glob("*-stored-native.safetensors")
    whole = copy.read_bytes()
    for damaged in (None, b"", whole[:1000], whole[:-64]):
        copy.unlink()
        if damaged is not None:
            copy.write_bytes(damaged)
        assert torch.equal(loaded()[1], logits)
        with monkeypatch.context() as patched:
            opened_never(patched)
            assert torch.equal(loaded()[1], logits)
