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


def letter_model(folder: Path) -> Path:
    torch.manual_seed(0)
    layer = "model.layers.0."
    tensors = {f"{layer}{name}.weight": torch.randn(shape) * 0.3 for name, shape in SHAPES.items()}
    for norm in (f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm"):
        tensors[f"{norm}.weight"] = torch.ones(16)
    tensors["model.embed_tokens.weight"] = torch.randn(26, 16)
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(SIZES))
    tokenizer = Tokenizer(BPE({chr(ord("a") + i): i for i in range(26)}, []))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
