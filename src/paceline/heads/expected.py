"""What tensors a head must bring, with their shapes, and one line about what is wrong with those it brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.errors import PacelineError
from paceline.heads.tensors import HeadTensors, Shape
from paceline.model.config import ModelConfig

SHOWN = 3  # names in a message


def layer_shapes(config: ModelConfig, at: str, inputs: int) -> dict[str, Shape]:
    """A decoder layer without its first norm; its query, key and value projections take `inputs` features."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (queries, inputs, config.qkv_bias),
        "self_attn.k_proj": (keys, inputs, config.qkv_bias),
        "self_attn.v_proj": (keys, inputs, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, Shape] = {at + "post_attention_layernorm.weight": (hidden,)}
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{at}{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{at}{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {f"{at}self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def check_tensors(
    head: str, tensors: HeadTensors, required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None
) -> None:
    """Raises PacelineError that names missing tensors, else unexpected ones, else those of another shape."""
    known = {**(optional or {}), **required}
    if missing := [name for name in required if name not in tensors]:
        raise PacelineError(f"head '{head}' lacks {listed(missing)}; is the download complete?")
    if extra := [entry.stored_as for name, entry in tensors.entries.items() if name not in known]:
        raise PacelineError(f"head '{head}' has tensors that its config.json does not account for: {listed(extra)}")
    wrong = [
        f"{tensors.entries[name].stored_as} is {list(tensors.shape(name))} instead of {list(shape)}"
        for name, shape in known.items()
        if name in tensors and tensors.shape(name) != shape
    ]
    if wrong:
        raise PacelineError(f"head '{head}' does not fit its config.json and this model: {listed(wrong)}")


def listed(names: Sequence[str]) -> str:
    """At most a few names, then how many more there are."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
