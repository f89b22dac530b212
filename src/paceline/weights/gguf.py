"""A GGUF file: metadata to a Hugging Face style config, tensors dequantised under Hugging Face names."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.model.config import config_from_hf
from paceline.native.packed import Format
from paceline.weights.source import Stored

# Hugging Face module -> GGUF module, inside a layer and outside.
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA3_LAYER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
_FLOAT_TYPES = ("F32", "F16", "BF16", "F64")


class GGUFSource:
    gemma_norm_offset = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = open_gguf(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self._required("general.architecture"))
        if self.architecture not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise PacelineError(f"unsupported architecture '{self.architecture}' in {path}; GGUF support: {known}")
        self.config = config_from_hf(self._hf_config())
        self.quantized = any(
            tensor.tensor_type.name not in _FLOAT_TYPES for tensor in self._reader.tensors if len(tensor.shape) > 1
        )

    def __contains__(self, name: str) -> bool:
        return self._gguf_name(name) in self._tensors

    def get(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        stored = self._stored(self._gguf_name(name))
        try:
            values = dequantize(stored.data, stored.tensor_type)
        except NotImplementedError:
            raise PacelineError(f"tensor type {stored.tensor_type.name} in {self.path} cannot be dequantised") from None
        return self._rows_in_order(name, torch.from_numpy(np.array(values, dtype=np.float32)))

    def stored(self, name: str) -> Stored | None:
        tensor = self._stored(self._gguf_name(name))
        form = Format.of_gguf(tensor.tensor_type.name)
        if form is None:
            return None
        columns, rows = (int(size) for size in tensor.shape)
        with warnings.catch_warnings(action="ignore"):  # the file is mapped read-only, and only read
            data = torch.from_numpy(tensor.data)
        return Stored(form, rows, columns, self._rows_in_order(name, data))

    def _rows_in_order(self, name: str, rows: Tensor) -> Tensor:
        if self.architecture == "llama" and re.search(r"\.(q|k)_proj\.", name):
            return unpermute(rows, self.config.num_heads if ".q_proj." in name else self.config.num_kv_heads)
        return rows

    def _stored(self, name: str) -> Any:
        stored = self._tensors.get(name)
        if stored is None:
            raise PacelineError(f"tensor '{name}' is missing in {self.path}")
        return stored

    def _gguf_name(self, name: str) -> str:
        module, _, kind = name.rpartition(".")
        inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        if inside is None:
            return f"{_OUTSIDE.get(module, module)}.{kind}"
        table = _LAYER | _GEMMA3_LAYER if self.architecture == "gemma3" else _LAYER
        return f"blk.{inside[1]}.{table.get(inside[2], inside[2])}.{kind}"

    def _field(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _required(self, key: str) -> Any:
        value = self._field(key)
        if value is None:
            raise PacelineError(f"metadata '{key}' is missing in {self.path}; fetch or convert the file again")
        return value

    def _size(self, key: str) -> int:
        value = self._required(f"{self.architecture}.{key}")
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int):
            raise PacelineError(f"unsupported '{self.architecture}.{key}' of {value} in {self.path}; needs one number")
        return value

    def _arch(self, key: str, default: Any = None) -> Any:
        return self._field(f"{self.architecture}.{key}", default)

    def _hf_config(self) -> dict[str, Any]:
        heads, hidden = self._size("attention.head_count"), self._size("embedding_length")
        head_dim = int(self._arch("attention.key_length", hidden // heads))
        kv = "attention.head_count_kv"
        raw: dict[str, Any] = {
            "model_type": "gemma3_text" if self.architecture == "gemma3" else self.architecture,
            "vocab_size": int(self._stored("token_embd.weight").shape[1]),
            "hidden_size": hidden,
            "num_hidden_layers": self._size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": heads if self._arch(kv) is None else self._size(kv),
            "head_dim": head_dim,
            "intermediate_size": self._size("feed_forward_length"),
            "max_position_embeddings": self._size("context_length"),
            "rms_norm_eps": float(self._required(f"{self.architecture}.attention.layer_norm_rms_epsilon")),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": self.architecture == "llama" and "blk.0.attn_q.bias" in self._tensors,
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "rope_parameters": self._rope(),
        }
        return raw | self._gemma3(head_dim) if self.architecture == "gemma3" else raw

    def _rope(self) -> dict[str, Any]:
        theta = float(self._arch("rope.freq_base", 10_000.0))
        kind = str(self._arch("rope.scaling.type", "none"))
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        if kind != "none":
            rope |= {
                "rope_type": kind,
                "factor": float(self._arch("rope.scaling.factor", 1.0)),
                "original_max_position_embeddings": self._arch("rope.scaling.original_context_length"),
            }
        if "rope_freqs.weight" in self._tensors:
            divisors = np.array(self._tensors["rope_freqs.weight"].data, dtype=np.float32)
            # The divisors are the whole of llama3's rule: a linear scaling of 1 carries them.
            rope |= {"rope_type": "linear", "factor": 1.0, "frequency_divisors": tuple(divisors.tolist())}
        return rope

    def _gemma3(self, head_dim: int) -> dict[str, Any]:
        full = self._rope()
        # Gemma 3 27B divides by hidden / heads instead of the head's own width.
        layers, heads, hidden = (self._size(k) for k in ("block_count", "attention.head_count", "embedding_length"))
        scalar = hidden // heads if layers == 62 else head_dim
        local = {"rope_type": "default", "rope_theta": float(self._arch("rope.freq_base_swa", 10_000.0))}
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": self._size("attention.sliding_window"),
            "query_pre_attn_scalar": scalar,
            "rope_parameters": {"full_attention": full, "sliding_attention": local},
        }


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader`, or one clear line for a file that is missing, cut short, or not GGUF."""
    from gguf import GGUFReader

    if not path.is_file():
        raise PacelineError(f"cannot read {path}: no such file")
    try:
        reader = GGUFReader(str(path))
    except Exception as error:  # the reader raises whatever its arrays raise on a damaged file
        raise PacelineError(f"cannot read {path}: damaged or not GGUF ({error}); fetch the file again") from None
    size = path.stat().st_size
    end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    if end > size:
        raise PacelineError(f"cannot read {path}: truncated, {size:,} of {end:,} bytes; fetch the file again")
    return reader


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's interleaving of rotary pairs in q and k: back to the half-split order."""
    rows = weight.shape[0]
    return weight.view(heads, rows // heads // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
