"""EAGLE-1 heads on disk: the EAGLE authors' layout, and the one that speculators wrote until 0.2."""

from __future__ import annotations

from paceline.device import Backend
from paceline.heads.block import Rows, same
from paceline.heads.build import Builder, Place
from paceline.heads.config import HeadFolder, check_target, layer_config
from paceline.heads.eagle import Eagle1Head
from paceline.heads.expected import check_tensors, layer_shapes
from paceline.heads.tensors import HeadTensors, Shape
from paceline.model.config import ModelConfig
from paceline.model.decoder import NORMED

# What speculators and HASS checkpoints call the authors' modules, and the norms that only they have.
_SPELLINGS = {
    "model.": "",
    "fusion_fc.": "fc.",
    "transformer.": "layers.0.",
    "embedding_layernorm.": "embed_norm.",
    "embed_layernorm.": "embed_norm.",
    "hidden_layernorm.": "layers.0.input_layernorm.",
    "pre_lm_head_layernorm.": "output_norm.",
    "lm_head_layernorm.": "output_norm.",
}
# The output head is the target's; the authors' own loader drops a copy in the file, too.
_DROPPED = ("lm_head.", "rotary_emb.")


def matches(folder: HeadFolder) -> bool:
    if folder.speculators_type is not None:
        return folder.speculators_type == "eagle"
    return "fc.weight" in folder.tensors.rename(_rename)


def load(folder: HeadFolder, target: ModelConfig, backend: Backend) -> Eagle1Head:
    """Raises PacelineError for a head of another model and for tensors that are missing or too many."""
    tensors = folder.tensors.rename(_rename)
    layers = int(folder.layer_raw.get("num_hidden_layers", 1))
    config = layer_config(folder, target, layers)
    check_target(folder, config, target)
    check_tensors(folder.name, tensors, _required(folder, config, tensors), _optional(config))
    build = Builder(tensors, config, backend)
    places = [f"layers.{i}." for i in range(layers)]
    return Eagle1Head(
        config=config,
        taps=(NORMED,),
        block=build.block([Place(at, _if_there(build, at + "input_layernorm")) for at in places]),
        fc=build.linear("fc"),
        embedding=build.optional("embed_tokens.weight"),
        embed_norm=_norm(build, "embed_norm"),
        output_norm=_norm(build, "output_norm"),
    )


def _rename(name: str) -> str | None:
    for theirs, ours in _SPELLINGS.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return None if any(part in name for part in _DROPPED) else name


def _required(folder: HeadFolder, config: ModelConfig, tensors: HeadTensors) -> dict[str, Shape]:
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"fc.weight": (hidden, 2 * hidden)}
    if folder.raw.get("bias") or folder.raw.get("fusion_bias") or "fc.bias" in tensors:
        shapes["fc.bias"] = (hidden,)
    for i in range(config.num_layers):
        shapes |= layer_shapes(config, f"layers.{i}.", hidden)
        if i > 0:
            shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
    return shapes | (_norms(hidden) if folder.raw.get("layernorms") else {})


def _optional(config: ModelConfig) -> dict[str, Shape]:
    return {"embed_tokens.weight": (config.vocab_size, config.hidden_size), **_norms(config.hidden_size)}


def _norms(hidden: int) -> dict[str, Shape]:
    return {f"{name}.weight": (hidden,) for name in ("embed_norm", "output_norm", "layers.0.input_layernorm")}


def _if_there(build: Builder, module: str) -> str | None:
    return module if f"{module}.weight" in build.tensors else None


def _norm(build: Builder, module: str) -> Rows:
    return same if _if_there(build, module) is None else build.norm(module)
