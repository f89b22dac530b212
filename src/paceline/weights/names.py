"""What each family calls its tensors, in Hugging Face checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.model.config import ModelConfig


@dataclass(frozen=True)
class Names:
    """Module names (without `.weight`). Those of a layer come after `layer.format(i)`; fused ones are tuples."""

    embedding: str
    layer: str
    final_norm: str
    attention_norm: str
    qkv: tuple[str, ...]
    output: str
    mlp_norm: str
    up: tuple[str, ...]
    down: str
    head: str = "lm_head"
    positions: str | None = None
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    post_attention_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = "post_feedforward_layernorm"
    transposed: bool = False  # GPT-2 stores [in, out]
    norm_offset: float = 0.0  # Gemma stores weight - 1


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

_LLAMA = Names(
    embedding="model.embed_tokens",
    layer="model.layers.{}.",
    final_norm="model.norm",
    attention_norm="input_layernorm",
    qkv=_QKV,
    output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
)

_GEMMA3 = replace(_LLAMA, mlp_norm="pre_feedforward_layernorm", norm_offset=1.0)

_OPT = Names(
    embedding="model.decoder.embed_tokens",
    layer="model.decoder.layers.{}.",
    final_norm="model.decoder.final_layer_norm",
    attention_norm="self_attn_layer_norm",
    qkv=_QKV,
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
    positions="model.decoder.embed_positions",
)

_GPT2 = Names(
    embedding="transformer.wte",
    layer="transformer.h.{}.",
    final_norm="transformer.ln_f",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    mlp_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    positions="transformer.wpe",
    transposed=True,
)

_BY_FAMILY = {"gemma3": _GEMMA3, "gemma3_text": _GEMMA3, "opt": _OPT, "gpt2": _GPT2}


def names_of(config: ModelConfig) -> Names:
    return _BY_FAMILY.get(config.family, _LLAMA)
