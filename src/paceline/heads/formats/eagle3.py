"""EAGLE-3 heads on disk: speculators' layout, and the EAGLE authors' (also SpecForge's and ModelOpt's)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.device import Backend
from paceline.errors import PacelineError
from paceline.heads.block import same
from paceline.heads.build import Builder, Place
from paceline.heads.config import HeadFolder, check_target, eagle3_taps, layer_config
from paceline.heads.eagle3 import Eagle3Head
from paceline.heads.expected import check_tensors, layer_shapes
from paceline.heads.tensors import HeadTensors, Shape
from paceline.model.config import ModelConfig

# Parts of the target that training frameworks leave behind, and what follows from `d2t`.
_DROPPED = ("verifier_", "rotary_emb.", "t2d")


def matches(folder: HeadFolder) -> bool:
    if folder.speculators_type is not None:
        return folder.speculators_type == "eagle3"
    names = folder.tensors.rename(_rename)
    return "d2t" in names or "layers.0.hidden_norm.weight" in names


def load(folder: HeadFolder, target: ModelConfig, backend: Backend) -> Eagle3Head:
    """Flags that config.json leaves out are off, as in speculators' own configuration.

    Raises PacelineError for a head of another model and for tensors that are missing or too many.
    """
    tensors = folder.tensors.rename(_rename)
    config = layer_config(folder, target, _count(folder))
    width = check_target(folder, config, target)
    taps = eagle3_taps(folder, target)
    own = width != config.hidden_size  # then the target's embeddings do not fit either
    embedding: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    required = _required(folder, config, tensors, [width] * len(taps)) | (embedding if own else {})
    check_tensors(folder.name, tensors, required, embedding)
    build = Builder(tensors, config, backend)
    normed_residual = bool(folder.raw.get("norm_before_residual"))
    return Eagle3Head(
        config=config,
        taps=taps,
        block=build.block(_places(config.num_layers, normed_residual)),
        fc=build.linear("fc"),
        embedding=build.optional("embed_tokens.weight"),
        output=build.linear("lm_head"),
        target_ids=_target_ids(folder, tensors, target, backend),
        before_fc=build.norm("input_norm") if folder.raw.get("norm_before_fc") else same,
        fc_norms=[build.norm(f"fc_norm.{i}") for i in range(len(taps))] if folder.raw.get("fc_norm") else None,
        residual_norm=build.norm("layers.0.hidden_norm") if normed_residual else same,
        output_norm=build.norm("norm"),
        feeds_normed=bool(folder.raw.get("norm_output")),
    )


def _count(folder: HeadFolder) -> int:
    """The authors' `midlayer` is one layer, whatever config.json says of the target."""
    if any("midlayer." in name for name in folder.tensors.entries):
        return 1
    return int(folder.layer_raw.get("num_hidden_layers", 1))


def _rename(name: str) -> str | None:
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    return None if any(part in name for part in _DROPPED) else name


def _required(folder: HeadFolder, config: ModelConfig, tensors: HeadTensors, taps: list[int]) -> dict[str, Shape]:
    """`taps`: the width of each."""
    hidden, raw = config.hidden_size, folder.raw
    stored = tensors.shape("d2t")[0] if "d2t" in tensors else config.vocab_size
    draft_vocab = int(raw.get("draft_vocab_size") or stored)
    shapes: dict[str, Shape] = {"fc.weight": (hidden, sum(taps)), "layers.0.hidden_norm.weight": (hidden,)}
    for i in range(config.num_layers):
        shapes |= layer_shapes(config, f"layers.{i}.", hidden if i else 2 * hidden)
        shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
    if raw.get("norm_before_fc"):
        shapes["input_norm.weight"] = (sum(taps),)
    if raw.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (width,) for i, width in enumerate(taps)}
    if draft_vocab != config.vocab_size or "d2t" in tensors:
        shapes["d2t"] = (draft_vocab,)
    return shapes | {"norm.weight": (hidden,), "lm_head.weight": (draft_vocab, hidden)}


def _places(layers: int, normed_residual: bool) -> list[Place]:
    """The first layer attends with [norm(e); norm(g)], those behind it with the normed hidden states alone."""
    hidden_norm = None if normed_residual else "layers.0.hidden_norm"  # there the stream itself is normed
    behind = [Place(f"layers.{i}.", f"layers.{i}.input_layernorm") for i in range(1, layers)]
    return [Place("layers.0.", hidden_norm, embed_norm="layers.0.input_layernorm"), *behind]


def _target_ids(folder: HeadFolder, tensors: HeadTensors, target: ModelConfig, backend: Backend) -> Tensor | None:
    """i + d2t[i]: the file holds offsets, not ids."""
    if "d2t" not in tensors:
        return None
    offsets = tensors.get("d2t").to(torch.int64)
    ids = offsets + torch.arange(offsets.shape[0])
    outside = (ids < 0) | (ids >= target.vocab_size)
    if bool(outside.any()):
        first = int(outside.nonzero()[0])
        raise PacelineError(
            f"head '{folder.name}' maps its token {first} to {int(ids[first])}, outside this model's vocabulary of "
            f"{target.vocab_size}; d2t must hold offsets (target id minus draft id)"
        )
    return ids.to(backend.device)
