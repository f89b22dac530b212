"""Medusa heads on disk: every layout that is about, and one line for each thing that can be wrong with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_files import TARGET, Weights, as_vllm, authors_config, load, random_heads, vllm_config, write

from paceline.device import Backend
from paceline.errors import PacelineError
from paceline.heads.config import HeadFolder
from paceline.heads.formats import medusa
from paceline.heads.tensors import open_tensors
from paceline.model.config import ModelConfig

ROWS = torch.randn(3, TARGET.hidden_size, generator=torch.Generator().manual_seed(2))
INT8 = Backend(torch.device("cpu"), "int8", torch.float32)


def refused(tmp_path: Path, config: dict[str, Any], weights: Weights, target: ModelConfig = TARGET) -> str:
    with pytest.raises(PacelineError) as caught:
        load(write(tmp_path, config, weights), target)
    message = str(caught.value)
    assert "\n" not in message
    return message


def without(weights: Weights, *names: str) -> Weights:
    return {name: weight for name, weight in weights.items() if name not in names}


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "pytorch_model.bin"])
def test_a_head_reads_the_same_from_every_kind_of_file(file: str, tmp_path: Path) -> None:
    weights = random_heads(2, 1)
    expected = load(write(tmp_path / "a", authors_config(2, 1), weights)).logits(ROWS)
    assert torch.equal(load(write(tmp_path / "b", authors_config(2, 1), weights, file)).logits(ROWS), expected)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("run",))

    write(tmp_path, authors_config(1, 1), random_heads(1, 1))
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    torch.save({"0.0.linear.weight": Harmful()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(PacelineError, match=r"cannot read .*medusa_lm_head\.pt"):
        load(tmp_path)


def test_heads_inside_a_whole_model_are_read_without_it(tmp_path: Path) -> None:
    """Medusa-2 trains the model too and saves both together, with the model's own config.json."""
    weights = random_heads(2, 1)
    model = {f"medusa_head.{name}": weight for name, weight in weights.items()}
    model |= {"model.embed_tokens.weight": torch.ones(60, 32), "lm_head.weight": torch.ones(60, 32)}
    config = {"model_type": "llama", "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2}
    expected = load(write(tmp_path / "alone", authors_config(2, 1), weights)).logits(ROWS)
    assert torch.equal(load(write(tmp_path / "whole", config, model)).logits(ROWS), expected)


def test_vllms_prefix_is_taken_off(tmp_path: Path) -> None:
    weights = as_vllm(random_heads(2, 1))
    expected = load(write(tmp_path / "plain", vllm_config(2, 1), weights)).logits(ROWS)
    prefixed = {f"medusa_heads.{name}": weight for name, weight in weights.items()}
    assert torch.equal(load(write(tmp_path / "prefixed", vllm_config(2, 1), prefixed)).logits(ROWS), expected)


def test_vllms_blocks_need_no_bias(tmp_path: Path) -> None:
    weights = random_heads(2, 1)
    zero = {name: torch.zeros_like(weight) if name.endswith("bias") else weight for name, weight in weights.items()}
    expected = load(write(tmp_path / "zero", authors_config(2, 1), zero)).logits(ROWS)
    bare = {name: weight for name, weight in as_vllm(weights).items() if not name.endswith("bias")}
    config = vllm_config(2, 1) | {"medusa_fc_bias": False}
    torch.testing.assert_close(load(write(tmp_path / "bare", config, bare)).logits(ROWS), expected)
    assert "lacks blocks.0.layers.0.bias" in refused(tmp_path / "flagged", vllm_config(2, 1), bare)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_vllms_shared_output_serves_every_head(name: str, tmp_path: Path) -> None:
    weights, shared = random_heads(3, 1), torch.randn(60, 32)
    each = weights | {f"{k}.1.weight": shared.clone() for k in range(3)}
    expected = load(write(tmp_path / "each", authors_config(3, 1), each)).logits(ROWS)
    blocks = {n: w for n, w in as_vllm(weights).items() if n.startswith("blocks.")}
    head = load(write(tmp_path / "shared", vllm_config(3, 1, original_lm_head=True), blocks | {name: shared}))
    assert len(head.outputs) == 1
    torch.testing.assert_close(head.logits(ROWS), expected)


def test_one_shared_output_is_enough(tmp_path: Path) -> None:
    """A file may hold copies; vLLM passes over them."""
    weights = as_vllm(random_heads(3, 1)) | {"lm_head.weight": torch.randn(60, 32)}
    assert len(load(write(tmp_path, vllm_config(3, 1, original_lm_head=True), weights)).outputs) == 1


def test_a_shared_output_that_is_not_in_the_file_is_the_targets(tmp_path: Path) -> None:
    blocks = {name: w for name, w in as_vllm(random_heads(2, 1)).items() if name.startswith("blocks.")}
    head = load(write(tmp_path, vllm_config(2, 1, original_lm_head=True), blocks))
    assert head.outputs == []
    with pytest.raises(ValueError, match="pass the target's"):
        head.logits(ROWS)


def test_heads_that_the_config_does_not_count_are_used(tmp_path: Path) -> None:
    """What was trained is in the file; config.json must only not promise more."""
    assert load(write(tmp_path, authors_config(2, 1), random_heads(5, 1))).count == 5


def test_a_map_is_passed_over_where_the_vocabulary_is_whole(tmp_path: Path) -> None:
    weights = as_vllm(random_heads(1, 1)) | {"token_map": torch.arange(60)}
    assert load(write(tmp_path, vllm_config(1, 1), weights)).target_ids is None


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="int8 needs VNNI")
def test_beside_an_int8_target_heads_score_nearly_the_same_in_int8(tmp_path: Path) -> None:
    folder = write(tmp_path, authors_config(2, 1), random_heads(2, 1))
    exact, rounded = load(folder).logits(ROWS), load(folder, backend=INT8).logits(ROWS)
    assert 0 < float((exact - rounded).norm() / exact.norm()) < 0.05


def test_only_medusa_heads_are_taken_for_such(tmp_path: Path) -> None:
    def folder(name: str, *tensors: str, **raw: str) -> HeadFolder:
        at = write(tmp_path / name, raw, {tensor: torch.ones(2, 2) for tensor in tensors})
        return HeadFolder(name, raw, open_tensors(at))

    for name in ("0.0.linear.weight", "3.0.weight", "medusa_head.0.0.linear.weight", "blocks.0.layers.0.weight"):
        assert medusa.matches(folder(name, name))
    for name in ("fc.weight", "layers.0.mlp.up_proj.weight", "0.weight", "0.0.weight.scale", "model.layers.0.weight"):
        assert not medusa.matches(folder(name, name))
    assert not medusa.matches(folder("other", "0.0.linear.weight", speculators_model_type="eagle3"))


# What can be wrong


def test_a_head_of_another_hidden_size_is_refused(tmp_path: Path) -> None:
    target = replace(TARGET, hidden_size=64)
    message = refused(tmp_path, authors_config(2, 1), random_heads(2, 1), target)
    assert "reads hidden states of size 32, this model's are 64" in message
    assert f"'{tmp_path}'" in message


@pytest.mark.parametrize("vllm", [False, True])
def test_a_head_of_another_vocabulary_is_refused(vllm: bool, tmp_path: Path) -> None:
    weights, target = random_heads(2, 1), replace(TARGET, vocab_size=70)
    config, stored = (vllm_config(2, 1), as_vllm(weights)) if vllm else (authors_config(2, 1), weights)
    assert "its vocabulary has 60 tokens, this model's 70" in refused(tmp_path, config, stored, target)


@pytest.mark.parametrize("name", ["0.0.linear.weight", "1.0.linear.bias", "1.1.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    assert f"lacks {name};" in refused(tmp_path, authors_config(2, 1), without(random_heads(2, 1), name))


@pytest.mark.parametrize("name", ["blocks.1.layers.0.weight", "lm_heads.0.weight"])
def test_a_missing_tensor_is_named_as_its_format_does(name: str, tmp_path: Path) -> None:
    assert f"lacks {name};" in refused(tmp_path, vllm_config(2, 1), without(as_vllm(random_heads(2, 1)), name))


def test_the_authors_blocks_always_have_a_bias(tmp_path: Path) -> None:
    bare = {name: weight for name, weight in random_heads(2, 1).items() if not name.endswith("bias")}
    assert "lacks 0.0.linear.bias, 1.0.linear.bias;" in refused(tmp_path, authors_config(2, 1), bare)


def test_heads_that_the_config_promises_are_missed(tmp_path: Path) -> None:
    assert "lacks 2.0.linear.weight, 2.0.linear.bias" in refused(tmp_path, authors_config(3, 1), random_heads(2, 1))
    assert "lacks 0.1.linear.weight" in refused(tmp_path, authors_config(2, 2), random_heads(2, 1))


@pytest.mark.parametrize("name", ["norm.weight", "0.2.weight", "token_map"])
def test_an_unexpected_tensor_is_named(name: str, tmp_path: Path) -> None:
    weights = random_heads(2, 1) | {name: torch.ones(4)}
    assert f"does not account for: {name}" in refused(tmp_path, authors_config(2, 1), weights)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    weights = random_heads(2, 1) | {"1.0.linear.weight": torch.ones(32, 16)}
    assert "1.0.linear.weight is [32, 16] instead of [32, 32]" in refused(tmp_path, authors_config(2, 1), weights)


def test_a_truncated_vocabulary_needs_a_sound_map(tmp_path: Path) -> None:
    config, weights = vllm_config(1, 1, truncated_vocab_size=3), as_vllm(random_heads(1, 1))
    assert "lacks token_map" in refused(tmp_path / "none", config, weights)
    short = weights | {"token_map": torch.tensor([1, 2])}
    assert "token_map is [2] instead of [3]" in refused(tmp_path / "short", config, short)
    for name, ids in (("outside", [1, 2, 60]), ("twice", [1, 2, 2]), ("negative", [-1, 2, 3])):
        message = refused(tmp_path / name, config, weights | {"token_map": torch.tensor(ids)})
        assert "token_map that does not list different ids below 60" in message
