"""MTP heads on disk: speculators' folders, and MiMo's and DeepSeek's names inside the target's own checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.device import Backend
from paceline.errors import PacelineError
from paceline.heads.build import Builder, Place
from paceline.heads.config import HeadFolder, check_target, layer_config
from paceline.heads.expected import check_tensors, layer_shapes
from paceline.heads.mtp import MtpDepth, MtpHead
from paceline.heads.tensors import Rename, Shape
from paceline.model.config import ModelConfig
from paceline.model.decoder import NORMED

# speculators and MiMo share their names, which are ours too; DeepSeek's, as the last layers of the model:
_DEEPSEEK = {
    "enorm.": "token_layernorm.",
    "hnorm.": "hidden_layernorm.",
    "eh_proj.": "input_proj.",
    "shared_head.norm.": "final_layernorm.",
}
_SHARED = ("embed_tokens.", "shared_head.head.", "rotary_emb.")  # the target's own, kept again in each layer
_LATENT = "kv_a_proj_with_mqa"
_GATED = "mtp.fc.weight"  # Qwen3-Next, Qwen3.5


def matches(folder: HeadFolder) -> bool:
    if folder.speculators_type is not None:
        return folder.speculators_type == "mtp"
    return _GATED in folder.tensors or bool(folder.tensors.rename(_rule(folder)).entries)


def load(folder: HeadFolder, target: ModelConfig, backend: Backend) -> MtpHead:
    """Raises PacelineError for a head of another model and for tensors that are missing or too many."""
    _refuse_other_attention(folder)
    tensors = folder.tensors.rename(_rule(folder))
    config = layer_config(folder, target, _depths(folder))
    check_target(folder, config, target)
    places = [f"mtp_layers.{i}." for i in range(config.num_layers)]
    required: dict[str, Shape] = {}
    for at in places:
        required |= _shapes(config, at)
    check_tensors(folder.name, tensors, required)
    build = Builder(tensors, config, backend)
    return MtpHead(
        config=config,
        taps=(NORMED,),
        depths=[_depth(build, at) for at in places],
        block=build.block([Place(at, at + "input_layernorm") for at in places]),
        hidden_first=folder.speculators_type is None and not _is_deepseek(folder),
    )


def _refuse_other_attention(folder: HeadFolder) -> None:
    if _GATED in folder.tensors:
        raise PacelineError(f"MTP head '{folder.name}' is of the Qwen3-Next kind ({_GATED}), which is not supported")
    if any(_LATENT in name for name in folder.tensors.rename(_rule(folder)).entries):
        raise PacelineError(f"MTP head '{folder.name}' has multi-head latent attention ({_LATENT}): not supported")


def _depths(folder: HeadFolder) -> int:
    return int(folder.raw.get("num_nextn_predict_layers") or 1)


def _is_deepseek(folder: HeadFolder) -> bool:
    return any(".eh_proj." in name or ".enorm." in name for name in folder.tensors.entries)


def _rule(folder: HeadFolder) -> Rename:
    """Names of the head's tensors as `mtp_layers.{depth}.`; in a model's checkpoint all others belong to the target."""
    if folder.speculators_type is not None:
        return lambda name: None if name.startswith(("embed_tokens.", "lm_head.", "verifier_")) else name
    if not _is_deepseek(folder):
        return _mimo
    return lambda name: _deepseek(name, int(folder.raw.get("num_hidden_layers") or 0))


def _mimo(name: str) -> str | None:
    name = name.removeprefix("model.")
    return name if name.startswith("mtp_layers.") and not any(part in name for part in _SHARED) else None


def _deepseek(name: str, first: int) -> str | None:
    """DeepSeek keeps depth i as layer `first` + i, `first` being the number of the target's own layers."""
    found = re.match(r"(?:model\.)?layers\.(\d+)\.(.+)", name)
    if found is None or int(found[1]) < first or any(part in name for part in _SHARED):
        return None
    return f"mtp_layers.{int(found[1]) - first}.{_translate(found[2], _DEEPSEEK)}"


def _translate(name: str, prefixes: Mapping[str, str]) -> str:
    for theirs, ours in prefixes.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _shapes(config: ModelConfig, at: str) -> dict[str, Shape]:
    hidden = config.hidden_size
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
    shapes: dict[str, Shape] = {f"{at}{name}.weight": (hidden,) for name in norms}
    return shapes | {at + "input_proj.weight": (hidden, 2 * hidden)} | layer_shapes(config, at, hidden)


def _depth(build: Builder, at: str) -> MtpDepth:
    return MtpDepth(
        embed_norm=build.norm(at + "token_layernorm"),
        hidden_norm=build.norm(at + "hidden_layernorm"),
        project=build.linear(at + "input_proj"),
        final_norm=build.norm(at + "final_layernorm"),
    )
