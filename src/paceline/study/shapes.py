"""Drafts of equal parameter budget from deep and narrow to shallow and wide, and the shapes of the paper.

"The paper" is Decoding Speculative Decoding (Yan, Agarwal, Venkataraman, arXiv 2402.01528).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.errors import PacelineError
from paceline.model.config import ModelConfig, RopeConfig
from paceline.train.modules import layer_config, layer_weights

UNIT = 32  # widths that the kernels take are multiples of it
PAPER, LADDER = "paper", "ladder"
VOCABULARY = 32_000  # of LLaMA and Llama 2


@dataclass(frozen=True)
class Shape:
    """A model without weights. group: those that are compared with each other. source: where its sizes are from."""

    name: str
    group: str
    config: ModelConfig
    source: str


def parameters(config: ModelConfig) -> int:
    """Of a Llama: matrices and norms, the embedding once where it is the output, too."""
    tables = 1 if config.tie_embeddings else 2
    layer = layer_weights(config, config.hidden_size) + 2 * config.hidden_size
    return tables * config.vocab_size * config.hidden_size + config.num_layers * layer + config.hidden_size


def named(config: ModelConfig) -> str:
    """Layers by width, as tables call it."""
    return f"{config.num_layers}x{config.hidden_size}"


def paper_shapes() -> list[Shape]:
    """What could be sourced of the paper's LLaMA drafts, and one of ours beside them; see docs/drafts.md."""
    sheared = "LLM-Shearing, princeton-nlp/Sheared-LLaMA-1.3B"
    released = "size of minghaoyan/Wide-Sheared-LLaMA-796M; heads and MLP as its 543M and 290M"
    counted = "the count in its name, with 32 heads of 128 and an MLP of 11,008"
    return [
        _llama("Sheared-1.3B", 24, 2048, 16, 5504, sheared),
        _llama("Wide-796M, as released", 5, 4096, 32, 11_008, released),
        _llama("Deep-796M", 24, 1536, 12, 4288, "ours: as many weights as Wide-796M, as deep as Sheared-1.3B"),
        _llama("Wide-796M", 5, 2560, 32, 11_008, counted),
        _llama("Wide-543M", 3, 2560, 32, 11_008, counted),
        _llama("Wide-290M", 1, 2560, 32, 11_008, counted),
    ]


def _llama(name: str, layers: int, hidden: int, heads: int, inner: int, source: str) -> Shape:
    config = ModelConfig(
        "llama", VOCABULARY, hidden, layers, heads, heads, 128, inner, 4096, rope=RopeConfig(), tie_embeddings=False
    )
    return Shape(name, PAPER, config, source)


def ladder(target: ModelConfig) -> list[Shape]:
    """As many weights as the target's own, from twice its depth down to one layer."""
    like = pruned(target, target.num_layers)
    depths, depth = [2 * target.num_layers], target.num_layers
    while depth >= 1:
        depths.append(depth)
        depth //= 2
    found = (fit(target, depth, parameters(like)) for depth in depths)
    return [Shape(named(config), LADDER, config, "fitted to the target's count") for config in found]


def pruned(target: ModelConfig, layers: int) -> ModelConfig:
    """A draft of some of the target's layers, its embedding its output. Raises PacelineError if it lacks them."""
    if not 1 <= layers <= target.num_layers:
        raise PacelineError(f"cannot keep {layers} layers of a target of {target.num_layers}")
    return replace(layer_config(target, layers), tie_embeddings=True)


def fit(target: ModelConfig, layers: int, budget: int) -> ModelConfig:
    """A Llama of so many layers and `budget` weights, embedding included, in the target's proportions.

    Of all widths, the one at which the MLP that uses up the budget is nearest to the target's as a multiple of the
    width. Query heads to key heads are as in the target. Raises PacelineError where no width is narrow enough.
    """
    wanted = target.intermediate_size / target.hidden_size
    found = list(_fits(target, layers, budget))
    if not found:
        raise PacelineError(f"{layers} layers of this vocabulary do not fit into {budget:,} weights; take fewer layers")
    return min(found, key=lambda config: abs(math.log(config.intermediate_size / config.hidden_size / wanted)))


def _fits(target: ModelConfig, layers: int, budget: int) -> Iterator[ModelConfig]:
    base = pruned(target, 1)
    group, dims = target.num_heads // target.num_kv_heads, _head_dims(target)
    step = math.lcm(group * dims[-1], UNIT)
    for width in range(step, budget // target.vocab_size + 1, step):
        dim = next(dim for dim in dims if width % (group * dim) == 0)
        heads = width // dim
        config = replace(
            base, hidden_size=width, num_layers=layers, num_heads=heads, num_kv_heads=heads // group, head_dim=dim,
            intermediate_size=0, rope=_rope(target, dim),
        )  # fmt: skip
        inner = (budget - parameters(config)) / (3 * layers * width)
        if round(inner / UNIT) >= 1:
            yield replace(config, intermediate_size=round(inner / UNIT) * UNIT)


def _head_dims(target: ModelConfig) -> tuple[int, ...]:
    """The target's, and half of it for widths in between, where the kernels take that."""
    dim = target.head_dim
    return (dim, dim // 2) if dim % 32 == 0 else (dim,)


def _rope(target: ModelConfig, dim: int) -> RopeConfig:
    """Scaling may be stored by frequency, and those depend on the heads' width."""
    own = target.rope or RopeConfig()
    return own if dim == target.head_dim else RopeConfig(theta=own.theta)


@dataclass(frozen=True)
class DraftShape:
    """A draft to train. family: `kept` begins as layers of the target, `rebuilt` with the target's embedding turned to
    its principal directions and new layers."""

    family: str
    config: ModelConfig

    @property
    def name(self) -> str:
        return f"{self.family}-{named(self.config)}"


KEPT, REBUILT = "kept", "rebuilt"


def draft_shapes(
    target: ModelConfig, budget_layers: int, depths: Sequence[int], kept: Sequence[int]
) -> list[DraftShape]:
    """Drafts of as many weights as `budget_layers` layers of the target, one a depth; then layer-pruned ones."""
    budget = parameters(pruned(target, budget_layers))
    rebuilt = [DraftShape(REBUILT, fit(target, depth, budget)) for depth in dict.fromkeys(depths)]
    return rebuilt + [DraftShape(KEPT, pruned(target, layers)) for layers in dict.fromkeys(kept)]
