"""Make the golden heads: tiny random ones of the speculators package, in its own files, with what its modules compute.

Run where speculators is installed (0.9.0 made these, with transformers 5.19 and torch 2.13, on a CPU):

    python tests/parity/golden/make_golden.py

Each folder holds config.json and model.safetensors as the package saves them, and golden.safetensors: the inputs, and
for each step of its training-time forward (token by token, the head's own hidden states fed back) `hidden.{step}`
[T, H] as fed back and `logits.{step}` [T, D]. Weights are rounded to fp16, which halves the files and is exact in fp32.
"""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent
VOCAB, DRAFT_VOCAB, HIDDEN, ROWS, STEPS, TARGET_LAYERS = 200, 100, 32, 10, 3, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}


@dataclass(frozen=True)
class Variant:
    """One golden EAGLE-3 head: kind of layer, the layers' further settings, the head's flags."""

    kind: str = "llama"
    layer: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    draft_vocab: int = DRAFT_VOCAB


EAGLE3 = {
    "eagle3": Variant(),
    "eagle3-residual-normed": Variant(flags={"norm_before_residual": True}),
    "eagle3-input-norm": Variant(flags={"norm_before_fc": True, "norm_output": True}),
    "eagle3-qwen3": Variant("qwen3", {"head_dim": 16}, {"norm_before_residual": True, "fc_norm": True}),
    "eagle3-two-layers": Variant(
        layer={"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True},
        flags={"fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 9, 12]},
        draft_vocab=VOCAB,
    ),
}
MTP = {"mtp-qwen3": {"head_dim": 16}}


def module(name: str) -> Any:
    return importlib.import_module(f"speculators.{name}")


def layer_config(kind: str, settings: dict[str, Any]) -> Any:
    classes = importlib.import_module("transformers")
    config = {"llama": classes.LlamaConfig, "qwen3": classes.Qwen3Config}[kind]
    made = config(**SIZES | {"num_hidden_layers": 1} | settings)
    made._attn_implementation = "eager"
    return made


def speculators_config(algorithm: str) -> Any:
    config = module("config")
    method = module("proposals.greedy").GreedyTokenProposalConfig(speculative_tokens=STEPS)
    verifier = config.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    return config.SpeculatorsConfig(
        algorithm=algorithm, proposal_methods=[method], default_proposal_method="greedy", verifier=verifier
    )


def randomize(model: Any) -> None:
    """Every weight and norm random, so that one dropped or swapped shows; exact in fp16."""
    for weight in model.parameters():
        noise = torch.randn_like(weight)
        value = 1 + 0.3 * noise if weight.dim() == 1 else 1.5 * noise / weight.shape[-1] ** 0.5
        weight.copy_(value.half().float())


def save(name: str, model: Any, golden: dict[str, Tensor]) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.half().save_pretrained(folder)
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    save_file({key: value.contiguous() for key, value in golden.items()}, str(folder / "golden.safetensors"))


def vocabulary_maps(size: int) -> tuple[Tensor, Tensor]:
    """A random draft vocabulary: t2d bool [V], d2t offsets [D]."""
    ids = torch.randperm(VOCAB)[:size].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return t2d, ids - torch.arange(size)


def make_eagle3(name: str, variant: Variant) -> None:
    eagle3 = module("models.eagle3")
    ids = variant.flags.get("eagle_aux_hidden_state_layer_ids", [2, TARGET_LAYERS // 2, TARGET_LAYERS - 3])
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(variant.kind, variant.layer),
        draft_vocab_size=variant.draft_vocab,
        speculators_config=speculators_config("eagle3"),
        **variant.flags | {"eagle_aux_hidden_state_layer_ids": ids},
    )
    model = eagle3.Eagle3DraftModel(config).eval()
    randomize(model)
    if variant.draft_vocab != VOCAB:
        model.load_vocab_mappings(*vocabulary_maps(variant.draft_vocab))
    taps = torch.randn(1, ROWS, len(ids) * HIDDEN)
    tokens = torch.randint(0, VOCAB, (1, ROWS))
    fed, scored = [], []
    model.layers[-1].register_forward_hook(lambda m, i, out: fed.append(out))
    model.norm.register_forward_hook(lambda m, i, out: fed.append(out) if config.norm_output else None)
    model.lm_head.register_forward_hook(lambda m, i, out: scored.append(out))
    model(taps, tokens, torch.zeros(1, ROWS, dtype=torch.long), position_ids=torch.arange(ROWS)[None], ttt_steps=STEPS)
    hidden = fed[1::2] if config.norm_output else fed
    save(name, model, {"taps": taps[0], "tokens": tokens[0]} | steps(hidden, scored))


def steps(hidden: list[Tensor], logits: list[Tensor]) -> dict[str, Tensor]:
    assert len(hidden) == len(logits) == STEPS
    named = {f"hidden.{i}": value[0] for i, value in enumerate(hidden)}
    return named | {f"logits.{i}": value[0] for i, value in enumerate(logits)}


def make_mtp(name: str, settings: dict[str, Any]) -> None:
    mtp = module("models.mtp")
    layers = layer_config("qwen3", settings | {"num_hidden_layers": TARGET_LAYERS})
    config = mtp.MTPSpeculatorConfig(transformer_layer_config=layers, speculators_config=speculators_config("mtp"))
    model = mtp.MTPDraftModel(config).eval()
    randomize(model)
    last = torch.randn(1, ROWS + STEPS + 1, HIDDEN)
    tokens = torch.randint(0, VOCAB, (1, ROWS + STEPS + 1))
    fed: list[Tensor] = []
    model.mtp_layers[0].register_forward_hook(lambda m, i, out: fed.append(out))
    logits, _, _ = model(tokens, last)
    shared = {"embedding": model.embed_tokens.weight.clone(), "head": model.lm_head.weight.clone()}
    given = {"last_hidden": last[0, :ROWS], "tokens": tokens[0]}
    save(name, model, given | {key: value.half() for key, value in shared.items()} | steps(fed, logits))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.no_grad():
        for title, variant in EAGLE3.items():
            make_eagle3(title, variant)
        for title, settings in MTP.items():
            make_mtp(title, settings)
