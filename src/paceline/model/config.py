"""What a decoder looks like, as named flags: one frozen dataclass for every family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import PacelineError

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions. `scaling` is one of none, linear, llama3, yarn; the other fields are read by that rule."""

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    frequency_divisors: tuple[float, ...] = ()  # llama.cpp stores llama3 scaling as one divisor a frequency


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. Sizes in units of features, heads, layers, positions."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    gated_mlp: bool = True
    rope: RopeConfig | None = RopeConfig()
    local_rope: RopeConfig | None = None  # sliding layers, where they differ (Gemma 3)
    position_offset: int = 0  # learned positions start here (OPT: 2)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # default: head_dim ** -0.5
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    tie_embeddings: bool = True
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in positions, or None for full attention."""
        return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else None


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face `config.json`. Raises PacelineError for an architecture outside the family list."""
    if raw.get("text_config"):
        # A multimodal model's end tokens stand outside its text part.
        raw = dict(raw["text_config"]) | {k: raw[k] for k in ("eos_token_id", "bos_token_id") if raw.get(k) is not None}
    family = str(raw.get("model_type", ""))
    reader = _READERS.get(family)
    if reader is None:
        known = ", ".join(sorted(_READERS))
        raise PacelineError(f"unsupported architecture '{family or raw.get('architectures')}'; supported: {known}")
    try:
        return reader(raw)
    except KeyError as missing:
        raise PacelineError(f"config of a '{family}' model lacks {missing}; is the config.json complete?") from None


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)


def _rope(raw: Mapping[str, Any], kind: str | None = None) -> RopeConfig:
    """Both layouts: `rope_theta` with `rope_scaling` (older), and `rope_parameters` (transformers 5)."""
    params = dict(raw.get("rope_parameters") or {})
    if kind is not None and kind in params:
        params = dict(params[kind])
    params = params | dict(raw.get("rope_scaling") or {})
    scaling = str(params.get("rope_type", params.get("type", "default")))
    theta = float(params.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    if scaling == "default":
        return RopeConfig(theta=theta)
    if scaling not in ("linear", "llama3", "yarn"):
        raise PacelineError(f"unsupported rope scaling '{scaling}'; supported: linear, llama3, yarn")
    return RopeConfig(
        theta=theta,
        scaling=scaling,  # type: ignore[arg-type]
        factor=float(params.get("factor", 1.0)),
        original_max_positions=int(params.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
        low_freq_factor=float(params.get("low_freq_factor", 1.0)),
        high_freq_factor=float(params.get("high_freq_factor", 4.0)),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        attention_factor=params.get("attention_factor"),
        truncate=bool(params.get("truncate", True)),
        frequency_divisors=tuple(params.get("frequency_divisors", ())),
    )


def _shared(raw: Mapping[str, Any]) -> dict[str, Any]:
    heads = int(raw["num_attention_heads"])
    return {
        "family": str(raw["model_type"]),
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": int(raw["hidden_size"]),
        "num_layers": int(raw["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        "max_positions": int(raw["max_position_embeddings"]),
        "eos_ids": _as_ids(raw.get("eos_token_id")),
        "bos_id": raw.get("bos_token_id"),
    }


def _gated_rms(raw: Mapping[str, Any]) -> dict[str, Any]:
    activation = str(raw.get("hidden_act") or raw.get("hidden_activation") or "silu")
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise PacelineError(f"unsupported activation '{activation}' in a '{raw['model_type']}' model")
    return _shared(raw) | {
        "intermediate_size": int(raw["intermediate_size"]),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "activation": "gelu_tanh" if activation == "gelu_pytorch_tanh" else "silu",
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }


def _window(raw: Mapping[str, Any]) -> dict[str, Any]:
    kinds = raw.get("layer_types")
    width = raw.get("sliding_window")
    layers = int(raw["num_hidden_layers"])
    if not width or not raw.get("use_sliding_window", True):
        return {}
    if kinds is None:
        first = int(raw.get("max_window_layers", 0))  # Qwen2: layers from here on slide
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return {"sliding_window": int(width), "sliding_layers": tuple(k == "sliding_attention" for k in kinds)}


def _llama(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    mlp_bias = bool(raw.get("mlp_bias", False))
    flags = {"rope": _rope(raw), "qkv_bias": bias, "output_bias": bias, "mlp_bias": mlp_bias}
    return ModelConfig(**_gated_rms(raw) | flags)


def _mistral(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"sliding_window": 4096, **raw}
    return ModelConfig(**_gated_rms(raw) | {"rope": _rope(raw)} | _window(raw))


def _qwen2(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"use_sliding_window": False, "max_window_layers": 28, **raw}
    return ModelConfig(**_gated_rms(raw) | {"rope": _rope(raw), "qkv_bias": True} | _window(raw))


def _qwen3(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"use_sliding_window": False, "max_window_layers": 28, "head_dim": 128, **raw}
    bias = bool(raw.get("attention_bias", False))
    flags = {"rope": _rope(raw), "qkv_bias": bias, "output_bias": bias, "qk_norm": True}
    return ModelConfig(**_gated_rms(raw) | flags | _window(raw))


# Published configs (google/gemma-3-4b-it) leave out whatever equals these.
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_theta": 1_000_000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def _gemma3(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {**_GEMMA3_DEFAULTS, **raw}
    layers = int(raw["num_hidden_layers"])
    pattern = int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6)
    kinds = raw.get("layer_types") or [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)
    ]
    local = RopeConfig(theta=float(raw.get("rope_local_base_freq", 10_000.0)))
    if "sliding_attention" in (raw.get("rope_parameters") or {}):
        local = _rope(raw, "sliding_attention")
    flags: dict[str, Any] = {
        "rope": _rope(raw, "full_attention"),
        "local_rope": local,
        "qk_norm": True,
        "post_norms": True,
        "embedding_scale": float(raw["hidden_size"]) ** 0.5,
        "attention_scale": float(raw.get("query_pre_attn_scalar") or raw["head_dim"]) ** -0.5,
        "sliding_window": int(raw["sliding_window"]),
        "sliding_layers": tuple(k == "sliding_attention" for k in kinds),
    }
    return ModelConfig(**_gated_rms(raw) | flags)


def _opt(raw: Mapping[str, Any]) -> ModelConfig:
    if raw.get("word_embed_proj_dim", raw["hidden_size"]) != raw["hidden_size"] or not raw.get(
        "do_layer_norm_before", True
    ):
        raise PacelineError("unsupported OPT variant (projected embeddings or post-norm, as in OPT-350m); use another")
    flags: dict[str, Any] = {
        "intermediate_size": int(raw["ffn_dim"]),
        "norm": "layer",
        "activation": _plain_activation(raw.get("activation_function", "relu")),
        "position_offset": 2,
    }
    return ModelConfig(**_shared(raw) | flags | _PLAIN)


def _gpt2(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {
        "hidden_size": raw["n_embd"],
        "num_hidden_layers": raw["n_layer"],
        "num_attention_heads": raw["n_head"],
        "max_position_embeddings": raw["n_positions"],
        **raw,
    }
    flags: dict[str, Any] = {
        "intermediate_size": int(raw.get("n_inner") or 4 * int(raw["n_embd"])),
        "norm": "layer",
        "norm_eps": float(raw.get("layer_norm_epsilon", 1e-5)),
        "activation": _plain_activation(raw.get("activation_function", "gelu_new")),
    }
    return ModelConfig(**_shared(raw) | flags | _PLAIN)


_PLAIN: dict[str, Any] = {
    "gated_mlp": False,
    "rope": None,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "tie_embeddings": True,
}


def _plain_activation(name: str) -> Activation:
    known: dict[str, Activation] = {
        "relu": "relu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    }
    if name not in known:
        raise PacelineError(f"unsupported activation '{name}'; supported: {', '.join(known)}")
    return known[name]


_READERS = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "mimo": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "opt": _opt,
    "gpt2": _gpt2,
}
