"""A target on the native kernels answers token for token as without drafts, whatever reads its layers to draft.

Hidden states are changed in place there: what a head was given must be what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from lab import CONFIG, FP32, RandomSource, engine, letters, output, run
from lab_heads import Watched, assert_drafts_from_scratch, head, head_proposer
from native_lab import NATIVE, needs_kernels

from paceline.model.decoder import Sublayer
from paceline.propose.base import Proposer
from paceline.propose.early_exit import EarlyExitProposer
from paceline.propose.layer_skip import LayerSkipProposer
from paceline.propose.none import NoProposer
from paceline.propose.rollout import CHAIN, Shape
from paceline.sampling.params import SamplingParams
from paceline.weights.assemble import assemble
from paceline.weights.convert import convert
from paceline.weights.load import LoadedModel

pytestmark = needs_kernels

WIDE = replace(CONFIG, vocab_size=40, max_positions=256, hidden_size=32, head_dim=16, intermediate_size=32)
TINY = replace(WIDE, vocab_size=3)  # so few tokens that an untrained head often guesses right
SHAPES = {"chain": CHAIN, "tree": Shape(3, 3, 12)}
PROMPTS = [[1, 5, 9, 1, 5], [3], [7, 7, 7, 7], list(range(30)), [2, 4] * 20]
KINDS = [
    SamplingParams(max_tokens=30), SamplingParams(temperature=0.9, seed=3, max_tokens=30),
    SamplingParams(temperature=1.2, top_k=7, seed=4, verify="coupled", max_tokens=25),
    SamplingParams(frequency_penalty=0.5, max_tokens=33), SamplingParams(max_tokens=3),
]  # fmt: skip
HEADS = {
    f"{kind}{where}": (kind, backend)
    for kind in ("eagle-1", "eagle-3", "eagle-3 own embedding", "mtp 1", "mtp 2")
    for where, backend in (("", NATIVE), (" in PyTorch", FP32))
}
SELF = ["early exit", "layer skip"]


@cache
def target(words: int, layers: int = 2) -> LoadedModel:
    config = replace(WIDE if words == WIDE.vocab_size else TINY, num_layers=layers)
    decoder = assemble(config, dict(convert(RandomSource(1, config=config), NATIVE)), NATIVE)
    return LoadedModel("native", decoder, letters(words), NATIVE, f"native-{words}-{layers}")


@cache
def alone(layers: int) -> list[list[int]]:
    """Plain decoding, one request after the other."""
    machine = engine(target(40, layers), NoProposer())
    return [output(run(machine, [prompt], [params])[0]) for prompt, params in zip(PROMPTS, KINDS, strict=True)]


def proposer(kind: str, shape: Shape) -> Proposer:
    if kind in HEADS:
        name, backend = HEADS[kind]
        return head_proposer(target(40), head(name, target(40), backend), shape)
    deep = target(40, layers=4)
    if kind == "early exit":
        return EarlyExitProposer(deep.decoder, 2, vocab_size=40, width=40, stop_below=lambda: 0.0, shape=shape)
    skip: frozenset[Sublayer] = frozenset({(1, "attention"), (1, "mlp"), (2, "mlp")})
    return LayerSkipProposer(
        deep.decoder,
        vocab_size=40,
        width=40,
        stop_below=lambda: 0.0,
        skip=skip,
        shape=shape,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [*HEADS, *SELF])
def test_answers_are_those_of_plain_decoding(kind: str, shape: str) -> None:
    """Requests of every kind and length share steps, joining and leaving, their prompts in chunks of eight."""
    layers = 4 if kind in SELF else 2
    machine = engine(target(40, layers), proposer(kind, SHAPES[shape]), k=4, max_batch=3, chunk=8)
    requests = run(machine, PROMPTS, KINDS)
    assert [output(request) for request in requests] == alone(layers)
    assert sum(request.stats.drafted for request in requests) > 0
    assert machine.pool.available == machine.pool.blocks


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3", "mtp 1", "eagle-3 in PyTorch"])
def test_a_head_reads_the_hidden_states_of_the_layers_it_asked_for(kind: str, shape: str) -> None:
    """After every mixture of acceptances its drafts are what one forward over the whole text gives."""
    small, (name, backend) = target(3), HEADS[kind]
    own = head(name, small, backend)
    watched = Watched(head_proposer(small, own, SHAPES[shape]))
    texts: list[Sequence[int]] = [[1, 2, 0, 1, 2], [2, 2, 2, 1] * 5, [0, 1], [1, 2, 0] * 3]
    sampled = [SamplingParams(max_tokens=20, temperature=1.0, seed=seed) for seed in range(3)]
    run(engine(small, watched, k=4, chunk=8), texts, [SamplingParams(max_tokens=20), *sampled])
    assert len(watched.drafts) > 20
    assert_drafts_from_scratch(watched, small, own, SHAPES[shape])
