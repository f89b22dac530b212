"""What a head's config.json says: its layers, and which hidden states of the target it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import PacelineError
from paceline.heads.tensors import HeadTensors
from paceline.model.config import ModelConfig, config_from_hf

FAMILIES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "mimo": "qwen2"}
"""Kinds of layers that heads are made of, and the family whose config reads the same."""


@dataclass(frozen=True)
class HeadFolder:
    """A head on disk. `name` is what the user typed, `raw` its config.json."""

    name: str
    raw: Mapping[str, Any]
    tensors: HeadTensors

    @property
    def layer_raw(self) -> Mapping[str, Any]:
        """The part of config.json that describes the layers: nested in speculators' files, all of it in others."""
        nested: Mapping[str, Any] | None = self.raw.get("transformer_layer_config")
        return self.raw if nested is None else nested

    @property
    def speculators_type(self) -> str | None:
        return self.raw.get("speculators_model_type")

    @property
    def made_for(self) -> str:
        """The target's name, where the head tells."""
        verifier = (self.raw.get("speculators_config") or {}).get("verifier") or {}
        return verifier.get("name_or_path") or "another model"

    def misfit(self, what: str) -> PacelineError:
        return PacelineError(f"head '{self.name}' was made for {self.made_for}: {what}; give a head of this model")


def layer_config(folder: HeadFolder, target: ModelConfig, layers: int) -> ModelConfig:
    """The head's own `layers` layers. Positions reach as far as the target's: rotary heads do not end at a table.

    Biases are there when the file has them, whatever the family does elsewhere, and required when config.json says so.
    Raises PacelineError.
    """
    raw = dict(folder.layer_raw)
    family = str(raw.get("model_type", "llama"))
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise PacelineError(f"head '{folder.name}' has layers of kind '{family}'; supported: {known}")
    # A head attends to all there is unless its own config says otherwise (transformers' Mistral would assume a window).
    raw = {"sliding_window": None} | raw | {"model_type": FAMILIES[family], "num_hidden_layers": layers}
    if raw.get("layer_types"):
        raw["layer_types"] = raw["layer_types"][:layers]
    try:
        config = config_from_hf(raw)
    except PacelineError as error:
        raise PacelineError(f"head '{folder.name}': {error}") from None
    stored = folder.tensors.entries

    def has(module: str, *flags: str) -> bool:
        return any(raw.get(flag) for flag in flags) or any(name.endswith(f"{module}.bias") for name in stored)

    return replace(
        config,
        max_positions=max(config.max_positions, target.max_positions),
        qkv_bias=has("q_proj", "attention_bias", "qkv_bias"),
        output_bias=has("o_proj", "attention_bias"),
        mlp_bias=has("down_proj", "mlp_bias"),
    )


def check_target(folder: HeadFolder, config: ModelConfig, target: ModelConfig) -> int:
    """The target's hidden size, once it and the vocabulary are those that the head was made for, else PacelineError."""
    hidden = int(folder.raw.get("target_hidden_size") or config.hidden_size)
    check_sizes(folder, hidden, config.vocab_size, target)
    return hidden


def check_sizes(folder: HeadFolder, hidden: int, vocabulary: int, target: ModelConfig) -> None:
    """Raises PacelineError unless the target has hidden states and a vocabulary of these sizes."""
    if hidden != target.hidden_size:
        raise folder.misfit(f"it reads hidden states of size {hidden}, this model's are {target.hidden_size}")
    if vocabulary != target.vocab_size:
        raise folder.misfit(f"its vocabulary has {vocabulary} tokens, this model's {target.vocab_size}")


def eagle3_taps(folder: HeadFolder, target: ModelConfig) -> tuple[int, ...]:
    """Which hidden states of the target an EAGLE-3 head reads, ascending; tap i is the input of layer i.

    Three ways of counting are in use:
    - the EAGLE authors' code keeps the inputs of layers 2, n/2 and n - 3. These are taps as they stand, and the default
      of all the others where a config names none;
    - vLLM and speculators put `eagle_aux_hidden_state_layer_ids` at the top of config.json and mean inputs of layers,
      too (n itself: the last layer's output);
    - SGLang, SpecForge and ModelOpt put these ids inside `eagle_config` and count outputs of layers, one less: the
      default reads 1, n/2 - 1, n - 4. But some heads' nested ids are inputs. Like SGLang, let the first id tell: 1 (or
      0) can only be an output, since nobody reads the bare embeddings or their first layer's input.

    Raises PacelineError for ids that the target does not have.
    """
    nested = (folder.raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    direct = folder.raw.get("eagle_aux_hidden_state_layer_ids")
    layers = target.num_layers
    if direct:
        taps = sorted(int(i) for i in direct)
    elif nested:
        offset = 1 if min(nested) <= 1 else 0
        taps = sorted(int(i) + offset for i in nested)
    else:
        taps = [2, layers // 2, layers - 3]
    _check_taps(folder, taps, layers)
    return tuple(taps)


def _check_taps(folder: HeadFolder, taps: Sequence[int], layers: int) -> None:
    inside = all(0 <= tap <= layers for tap in taps)
    if not inside or list(taps) != sorted(set(taps)):
        raise folder.misfit(
            f"it reads the inputs of layers {', '.join(map(str, taps))}, this model has {layers} layers"
        )
