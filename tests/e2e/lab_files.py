"""A checkpoint folder of a tiny model whose vocabulary is single letters."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

SIZES = {
    "model_type": "llama", "vocab_size": 26, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),    "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
}  # fmt: skip


def letter_model(folder: Path, layers: int = 1, cycles: bool = False) -> Path:
    """`cycles`: each letter's likeliest successor is another one, so that greedy answers are not one letter's."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for layer in (f"model.layers.{index}." for index in range(layers)):
        tensors |= {f"{layer}{name}.weight": torch.randn(shape) * 0.3 for name, shape in SHAPES.items()}
        tensors |= {f"{layer}{norm}.weight": torch.ones(16) for norm in ("input_layernorm", "post_attention_layernorm")}
    tensors["model.norm.weight"] = torch.ones(16)
    tensors["model.embed_tokens.weight"] = torch.randn(26, 16)
    if cycles:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(7, 0).contiguous()
    save_file(tensors, str(folder / "model.safetensors"))
    sizes = SIZES | {"num_hidden_layers": layers, "tie_word_embeddings": not cycles}
    (folder / "config.json").write_text(json.dumps(sizes))
    tokenizer = Tokenizer(BPE({chr(ord("a") + i): i for i in range(26)}, []))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
