"""GGUF files written as llama.cpp's converter writes them, from tiny models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tiny import FAMILIES, SIZES, WINDOW
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

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
