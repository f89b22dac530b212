"""The ways in which the same weights are stored: sharded, renamed, in 16 bits, with older or shorter configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, SIZES, WINDOW, assert_parity, from_folder, prompt, tiny_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from paceline.errors import PacelineError

BY_NAME = ["llama-untied", "qwen2", "gemma3", "opt", "gpt2"]


@pytest.mark.parametrize("name", BY_NAME)
def test_sharded_checkpoint(name: str, tmp_path: Path) -> None:
    model = tiny_model(FAMILIES[name])
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_parity(from_folder(tmp_path), model, prompt(40))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_model(FAMILIES["llama-untied"]).save_pretrained(tmp_path, max_shard_size="60KB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(PacelineError, match=shard.name):
        from_folder(tmp_path)


def test_files_outside_the_index_are_not_read(tmp_path: Path) -> None:
    """Some repositories carry the same weights twice (consolidated.safetensors)."""
    model = tiny_model(FAMILIES["llama-untied"])
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "zz-extra.safetensors")
    assert_parity(from_folder(tmp_path), model, prompt(40))


def _without_outer(name: str) -> str:
    return name.removeprefix("transformer.").removeprefix("model.")


def _multimodal_old(name: str) -> str:
    return f"language_model.{name}"


def _multimodal_new(name: str) -> str:
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("gpt2", _without_outer),
        ("opt", _without_outer),
        ("llama-untied", _without_outer),
        ("gemma3", _multimodal_old),
        ("gemma3", _multimodal_new),
    ],
)
def test_renamed_modules(name: str, rename: Callable[[str], str], tmp_path: Path) -> None:
    model = tiny_model(FAMILIES[name])
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {rename(key): tensor for key, tensor in load_file(file).items()}
    tensors["vision_tower.weight"] = torch.zeros(3)
    save_file(tensors, file)
    assert_parity(from_folder(tmp_path), model, prompt(40))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BY_NAME)
def test_sixteen_bit_checkpoint(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Computed in fp32 from the stored weights, as transformers does when asked for fp32."""
    tiny_model(FAMILIES[name]).to(dtype).save_pretrained(tmp_path)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    assert_parity(from_folder(tmp_path), stored, prompt(40))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tiny_model(FAMILIES["qwen3"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    save_file(tensors, file)
    with pytest.raises(PacelineError, match=r"'model\.layers\.1\.self_attn\.q_norm\.weight' is missing in") as caught:
        from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def _rewrite_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _older_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` as transformers 4 wrote them."""
    rope = raw.pop("rope_parameters")
    if raw["model_type"] == "gemma3_text":
        full, local = rope["full_attention"], rope["sliding_attention"]
        raw |= {"rope_local_base_freq": local["rope_theta"], "sliding_window_pattern": 6}
        raw.pop("layer_types")
        rope = full
    return raw | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}


def test_older_config_of_llama(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0}
    model = tiny_model(LlamaConfig(**SIZES, rope_parameters=rope))
    model.save_pretrained(tmp_path)
    _rewrite_config(tmp_path, _older_rope)
    assert_parity(from_folder(tmp_path), model, prompt(60))


GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _tiny_gemma3(layers: int, **changes: Any) -> Any:
    sizes = SIZES | {"num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4}
    return tiny_model(Gemma3TextConfig(**sizes | changes, sliding_window=WINDOW, rope_parameters=GEMMA3_ROPE))


def test_older_config_of_gemma3(tmp_path: Path) -> None:
    model = _tiny_gemma3(6, head_dim=32)
    model.save_pretrained(tmp_path)
    _rewrite_config(tmp_path, _older_rope)
    assert_parity(from_folder(tmp_path), model, prompt(60))


def test_short_config_of_gemma3(tmp_path: Path) -> None:
    """google/gemma-3-4b-it: a `text_config` of six keys; transformers' defaults are meant for all others."""
    model = _tiny_gemma3(6, vocab_size=211, head_dim=256, max_position_embeddings=131_072)
    model.save_pretrained(tmp_path)
    kept = ("hidden_size", "intermediate_size", "model_type", "num_hidden_layers", "sliding_window", "vocab_size")

    def shorten(raw: dict[str, Any]) -> dict[str, Any]:
        text = {key: raw[key] for key in kept} | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        return {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "bos_token_id": 2}

    _rewrite_config(tmp_path, shorten)
    decoder = from_folder(tmp_path)
    assert_parity(decoder, model, prompt(60))
    assert decoder.config.eos_ids == (1, 106)


def test_untied_head_that_is_not_stored_is_the_embedding(tmp_path: Path) -> None:
    """Checkpoints exist whose config says untied and whose files say tied."""
    model = tiny_model(FAMILIES["llama-tied"])
    model.save_pretrained(tmp_path)
    _rewrite_config(tmp_path, lambda raw: raw | {"tie_word_embeddings": False})
    assert_parity(from_folder(tmp_path), model, prompt(40))


@pytest.mark.parametrize("value", ["mamba", ""])
def test_unsupported_architecture_is_named(value: str, tmp_path: Path) -> None:
    tiny_model(FAMILIES["llama-tied"]).save_pretrained(tmp_path)
    _rewrite_config(tmp_path, lambda raw: raw | {"model_type": value, "architectures": ["MambaForCausalLM"]})
    with pytest.raises(PacelineError, match=r"unsupported architecture '.*[mM]amba.*'; supported: .*qwen3"):
        from_folder(tmp_path)


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"config\.json does not exist"):
        from_folder(tmp_path)


def test_directory_without_safetensors(tmp_path: Path) -> None:
    tiny_model(FAMILIES["llama-tied"]).config.save_pretrained(tmp_path)
    with pytest.raises(PacelineError, match=r"no \.safetensors file in"):
        from_folder(tmp_path)


def test_truncated_safetensors_is_named(tmp_path: Path) -> None:
    tiny_model(FAMILIES["llama-tied"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(PacelineError, match=r"model\.safetensors: .*is the file complete"):
        from_folder(tmp_path)
