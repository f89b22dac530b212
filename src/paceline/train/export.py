"""Stage 4: the head as a directory that Paceline, vLLM, SGLang and the speculators package load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.model.config import ModelConfig, RopeConfig
from paceline.train.disk import write_json, write_whole
from paceline.weights.draft_vocab import FILE as DRAFT_VOCAB
from paceline.weights.load import load_tokenizer
from paceline.weights.presets import PRESETS
from paceline.weights.resolve import resolve

SPECULATORS = "0.9.0"  # whose layout this is
CHAIN = 5  # drafted tokens that other engines begin with


@dataclass(frozen=True)
class Card:
    """What belongs to a head and is no tensor. target: its name; taps: the layers it reads; config: the target's, or
    what the head's own layers look like; run: how it was made."""

    target: str
    taps: tuple[int, ...]
    config: ModelConfig
    run: Mapping[str, Any]


def export_eagle3(folder: Path, card: Card, weights: Mapping[str, Tensor], vocabulary: Tensor) -> None:
    """speculators' `eagle3`: bf16 weights, d2t offsets and the t2d mask. Raises PacelineError on a full disk."""
    mask = torch.zeros(card.config.vocab_size, dtype=torch.bool)
    mask[vocabulary] = True
    tensors = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    tensors |= {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": mask}
    raw = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": len(vocabulary),
        "eagle_aux_hidden_state_layer_ids": list(card.taps),
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "target_hidden_size": None,
    }
    _write(folder, raw | _speculators("eagle3", card), tensors, card)


def export_mtp(folder: Path, card: Card, weights: Mapping[str, Tensor]) -> None:
    """speculators' `mtp`, without copies of the target's embedding and output. Raises PacelineError on a full disk."""
    raw = {"architectures": ["MTPDraftModel"], "num_nextn_predict_layers": card.config.num_layers}
    tensors = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    _write(folder, raw | _speculators("mtp", card), tensors, card)


def export_medusa(folder: Path, card: Card, weights: Mapping[str, Tensor], vocabulary: Tensor, heads: int) -> None:
    """vLLM's Medusa: one output for all heads over a truncated vocabulary. Raises PacelineError on a full disk."""
    target = card.config
    raw = {
        "architectures": ["MedusaModel"],
        "hidden_size": target.hidden_size,
        "medusa_fc_bias": False,
        "model_type": "medusa",
        "num_heads": heads,
        "num_hidden_layers": 1,
        "original_lm_head": True,
        "truncated_vocab_size": len(vocabulary),
        "vocab_size": target.vocab_size,
    }
    tensors = {name: weight.to(torch.bfloat16) for name, weight in weights.items()} | {"token_map": vocabulary}
    _write(folder, raw, tensors, card)


def export_exit(folder: Path, card: Card, weights: Mapping[str, Tensor]) -> None:
    """Our own: no other engine has a format for it. Raises PacelineError on a full disk."""
    (layers,) = card.taps
    raw = {"exit_layers": layers, "hidden_size": card.config.hidden_size, "model_type": "early-exit"}
    raw |= {"vocab_size": card.config.vocab_size}
    _write(folder, raw, dict(weights), card)


def export_draft(folder: Path, card: Card, weights: Mapping[str, Tensor], vocabulary: Tensor) -> None:
    """A Llama checkpoint with the target's tokenizer; with the ids [D] that it was trained to score, where they are not
    all. Raises PacelineError on a full disk."""
    raw = layer_raw(card.config) | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    tokenizer = load_tokenizer(resolve(card.target))
    tensors = {f"model.{name}": weight.to(torch.bfloat16) for name, weight in weights.items()}
    _write(folder, raw | {"eos_token_id": list(tokenizer.eos_ids)}, tensors, card)
    if len(vocabulary) < card.config.vocab_size:
        write_json(folder / DRAFT_VOCAB, vocabulary.tolist())
    write_whole(folder / "tokenizer.json", lambda path: tokenizer.backend.save(str(path)))


def _speculators(algorithm: str, card: Card) -> dict[str, Any]:
    """What all heads of the speculators package say."""
    method = {"proposal_type": "greedy", "speculative_tokens": CHAIN, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": hub_name(card.target)},
        },
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_raw(card.config),
    }


def hub_name(target: str) -> str:
    """What others know the target by."""
    return PRESETS[target].hub_repo if target in PRESETS else target


def layer_raw(config: ModelConfig) -> dict[str, Any]:
    """The config.json of layers."""
    assert config.rope is not None
    return {
        "attention_bias": False,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "mlp_bias": False,
        "model_type": config.family,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_raw(config.rope),
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def rope_raw(rope: RopeConfig) -> dict[str, Any]:
    """`rope_parameters`, as transformers 5 writes them; what has its default stays out."""
    raw: dict[str, Any] = {"rope_type": "default" if rope.scaling == "none" else rope.scaling, "rope_theta": rope.theta}
    if rope.scaling != "none":
        raw["original_max_position_embeddings"] = rope.original_max_positions
    plain = asdict(RopeConfig())
    for name, value in asdict(rope).items():
        if name not in ("theta", "scaling", "original_max_positions") and value != plain[name]:
            raw[name] = value
    return raw


def _write(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], card: Card) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_whole(folder / "model.safetensors", partial(save_file, contiguous, metadata={"format": "pt"}))
    write_json(folder / "config.json", raw, indent=2, sort_keys=True)
    write_json(folder / "training.json", card.run, indent=2, sort_keys=True)
