"""GGUF files written as llama.cpp's converter writes them, against transformers with the dequantised weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tiny import FAMILIES, SIZES, WINDOW, assert_parity, from_source, prompt, tiny_model
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from paceline.errors import PacelineError
from paceline.weights.gguf import GGUFSource

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
QUANTIZABLE = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
# Bytes a block of 256 weights, and the byte offsets of its fp16 scale and, where there is one, minimum.
K_QUANTS = {"Q2_K": (84, 80, 82), "Q3_K": (110, 108, None), "Q4_K": (144, 0, 2), "Q5_K": (176, 0, 2), "Q6_K": (210, 208, None)}  # fmt: skip  # noqa: E501
WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
GEMMA3 = Gemma3TextConfig(
    **SIZES | {"num_hidden_layers": 7},
    head_dim=32,
    query_pre_attn_scalar=32,
    sliding_window=WINDOW,
    rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},  # llama.cpp's constant
    },
)
MODELS: dict[str, Any] = {
    "llama": FAMILIES["llama-untied"],
    "llama-tied": FAMILIES["llama-tied"],
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True),
    "llama-head-dim": FAMILIES["llama-head-dim"],
    "qwen2": Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "gemma3": GEMMA3,
}

Array = NDArray[Any]


def hf_tensors(model: Any) -> dict[str, Tensor]:
    """The parameters under their checkpoint names, a tied head left out."""
    tied = model.config.tie_word_embeddings
    return {n: p for n, p in model.state_dict().items() if not (tied and n == "lm_head.weight")}


def gguf_name(config: Any, name: str) -> str:
    table = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def as_llama_cpp_stores(config: Any, name: str, values: Array) -> Array:
    """What convert_hf_to_gguf changes: Llama's rotary pairs are interleaved, Gemma's norms get their 1."""
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return values + 1
    if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return split.swapaxes(1, 2).reshape(values.shape)
    return values


Encode = Callable[[Array], tuple[Array, gguf.GGMLQuantizationType]]


def with_type(name: str) -> Encode:
    kind = gguf.GGMLQuantizationType[name]
    return lambda values: (quantize(values, kind), kind)


def random_blocks(name: str) -> Encode:
    """Random weights of a K-quant, which gguf can read but not make: random bytes with small scales."""
    kind, (size, scale, minimum) = gguf.GGMLQuantizationType[name], K_QUANTS[name]
    random = np.random.default_rng(0)

    def encode(values: Array) -> tuple[Array, gguf.GGMLQuantizationType]:
        blocks = random.integers(0, 256, (values.shape[0], values.shape[1] // 256, size), dtype=np.uint8)
        blocks[..., scale : scale + 2] = np.array([1e-4], dtype=np.float16).view(np.uint8)
        if minimum is not None:
            blocks[..., minimum : minimum + 2] = np.array([7e-4], dtype=np.float16).view(np.uint8)
        return blocks.reshape(values.shape[0], -1), kind

    return encode


def metadata(writer: gguf.GGUFWriter, config: Any, head_counts: list[int] | None) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(head_counts or config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def write(
    path: Path, model: Any, encode: Encode, *,
    extra: Mapping[str, Array] | None = None, drop: str = "", head_counts: list[int] | None = None,
) -> Path:  # fmt: skip
    """Write `model` to a GGUF file, its matrices encoded; the model's own weights become the decoded ones."""
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]])
    metadata(writer, config, head_counts)
    for name, weight in hf_tensors(model).items():
        if weight.dim() == 1:
            stored = as_llama_cpp_stores(config, name, weight.numpy().copy())
            writer.add_tensor(gguf_name(config, name), stored)
            continue
        data, kind = encode(weight.numpy())
        weight.copy_(torch.from_numpy(np.array(dequantize(data, kind), dtype=np.float32)))
        # Blocks run along a row, so that rows can change places in either form.
        if drop != gguf_name(config, name):
            writer.add_tensor(gguf_name(config, name), as_llama_cpp_stores(config, name, data), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_gguf_parity(path: Path, model: Any) -> None:
    assert_parity(from_source(GGUFSource(path)), model, prompt(60))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_families_against_transformers(name: str, kind: str, tmp_path: Path) -> None:
    model = tiny_model(MODELS[name])
    assert_gguf_parity(write(tmp_path / "tiny.gguf", model, with_type(kind)), model)


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_quant_types_against_transformers(kind: str, tmp_path: Path) -> None:
    model = tiny_model(MODELS["llama"])
    path = write(tmp_path / "tiny.gguf", model, with_type(kind))
    assert GGUFSource(path).quantized is (kind not in ("F32", "F16", "BF16"))
    assert_gguf_parity(path, model)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_against_transformers(kind: str, tmp_path: Path) -> None:
    """The reference weights come from gguf's own dequantisation."""
    model = tiny_model(LlamaConfig(**WIDE, tie_word_embeddings=False))
    blocks, embedding = random_blocks(kind), with_type("Q8_0")
    path = write(
        tmp_path / "tiny.gguf", model, lambda w: (embedding if w.shape[0] == WIDE["vocab_size"] else blocks)(w)
    )
    assert model.model.layers[0].self_attn.q_proj.weight.std() > 1e-3
    assert_gguf_parity(path, model)


def _rope_freqs(head_dim: int, rope: Mapping[str, float]) -> Array:
    """The divisor of each frequency, as convert_hf_to_gguf computes it from a llama3 scaling."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    old, low, high = (rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    divisors = []
    for wavelength in 2 * np.pi / frequencies:
        if wavelength < old / high:
            divisors.append(1.0)
        elif wavelength > old / low:
            divisors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_rope_freqs(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}
    rope["original_max_position_embeddings"] = 32
    model = tiny_model(LlamaConfig(**SIZES, head_dim=32, rope_parameters=rope))
    extra = {"rope_freqs.weight": _rope_freqs(32, rope)}  # type: ignore[arg-type]
    assert len(set(extra["rope_freqs.weight"].tolist())) > 3
    assert_gguf_parity(write(tmp_path / "tiny.gguf", model, with_type("F32"), extra=extra), model)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear"}, {"rope_type": "yarn", "original_max_position_embeddings": 32}])  # fmt: skip  # noqa: E501
def test_rope_scaling_in_metadata(scaling: dict[str, Any], tmp_path: Path) -> None:
    config = Qwen2Config(**SIZES, rope_parameters=scaling | {"rope_theta": 500.0, "factor": 4.0})
    model = tiny_model(config)
    assert_gguf_parity(write(tmp_path / "tiny.gguf", model, with_type("F32")), model)


def _refused(path: Path) -> str:
    """The one line a user sees; it names the file."""
    with pytest.raises(PacelineError) as caught:
        from_source(GGUFSource(path))
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kept", [3, 40, 300, 0.5, 0.999])
def test_truncated_file(kept: float, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_model(MODELS["llama"]), with_type("Q8_0"))
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    assert "fetch the file again" in _refused(path)


@pytest.mark.parametrize("content", [b"", b"not a model\n" * 100, b"GGUF", bytes(4096)])
def test_not_gguf(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    assert "not GGUF" in _refused(path)


def test_missing_file(tmp_path: Path) -> None:
    assert "no such file" in _refused(tmp_path / "absent.gguf")


def _write_metadata_only(path: Path, architecture: str | None, **integers: int) -> Path:
    writer = gguf.GGUFWriter(path, architecture or "llama")
    if architecture is None:
        writer.kv_data[0].clear()
    for key, value in integers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["mamba", "qwen2moe", "gemma2", "clip"])
def test_unsupported_architecture(architecture: str, tmp_path: Path) -> None:
    message = _refused(_write_metadata_only(tmp_path / "x.gguf", architecture))
    assert f"unsupported architecture '{architecture}'" in message
    assert "qwen3" in message


def test_no_architecture(tmp_path: Path) -> None:
    assert "general.architecture" in _refused(_write_metadata_only(tmp_path / "x.gguf", None))


def test_head_counts_that_vary_by_layer(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tiny_model(MODELS["llama"]), with_type("F32"), head_counts=[2, 2, 1])
    assert "'llama.attention.head_count_kv' of [2, 2, 1]" in _refused(path)


def test_head_counts_listed_by_layer(tmp_path: Path) -> None:
    model = tiny_model(MODELS["llama"])
    assert_gguf_parity(write(tmp_path / "x.gguf", model, with_type("F32"), head_counts=[2, 2, 2]), model)


def test_missing_metadata(tmp_path: Path) -> None:
    assert "'llama.attention.head_count'" in _refused(_write_metadata_only(tmp_path / "x.gguf", "llama"))


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_q.weight", "blk.2.ffn_down.weight"])
def test_missing_tensor(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_model(MODELS["llama"]), with_type("F32"), drop=name)
    assert f"'{name}' is missing" in _refused(path)
