"""On the native kernels a row has one result: in any company, in any blocks, in a tree, on any threads or instructions.

No tolerance anywhere. The models differ in what their layers have; two have sliding windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from native_lab import (
    CONFIGS,
    NATIVE,
    Noise,
    Place,
    backend,
    dirty_pool,
    each_row,
    in_one_piece,
    in_pieces,
    native,
    needs_kernels,
    opened,
    prompt,
    random_tree,
    rows,
    same_bits,
    threads,
    together,
)
from torch import Tensor

from paceline.cache.pool import SequenceCache
from paceline.cache.tree import depths, paths
from paceline.model.attention import Span
from paceline.model.decoder import NORMED, Batch, Decoder
from paceline.native import interface
from paceline.native.library import library
from paceline.weights.assemble import assemble
from paceline.weights.convert import convert

pytestmark = needs_kernels

MODELS = pytest.mark.parametrize("name", CONFIGS)
BEFORE = prompt(41, seed=1)  # past the sliding windows, and no multiple of the 16 positions of a chunk
NEXT = prompt(33, seed=2)  # two tiles of 16 rows and one row
BACKENDS = [] if library() is None else interface.backends()


@cache
def one_by_one(name: str) -> Tensor:
    """Hidden states of NEXT behind BEFORE, one row a forward."""
    decoder = native(name)
    sequence = opened(decoder, BEFORE)
    found = []
    for token in NEXT:
        found.append(rows(decoder, sequence, [token]))
        sequence.commit([0], [])
    return torch.cat(found)


def in_chunks(decoder: Decoder, tokens: Sequence[int], sizes: Sequence[int], place: Place = in_one_piece) -> Tensor:
    """Hidden states of all tokens, the first `sizes[0]` in one forward, and so on, round and round."""
    pool = dirty_pool(decoder.config, blocks=2 * -(-len(tokens) // 16))
    sequence, found = opened(decoder, [], room=len(tokens), place=place, pool=pool), list[Tensor]()
    while sequence.length < len(tokens):
        size = sizes[len(found) % len(sizes)]
        found.append(rows(decoder, sequence, tokens[sequence.length : sequence.length + size]))
        sequence.commit(range(len(found[-1])), [])
    return torch.cat(found)


@MODELS
def test_a_row_is_the_same_alone_and_among_up_to_33(name: str) -> None:
    decoder = native(name)
    sequence, alone = opened(decoder, BEFORE), one_by_one(name)
    assert alone.std() > 0.1
    for count in range(1, 34):
        assert same_bits(rows(decoder, sequence, NEXT[:count]), alone[:count]), f"{count} rows"


@MODELS
def test_a_rows_logits_are_the_same_alone_and_among_up_to_33(name: str) -> None:
    decoder, hidden = native(name), one_by_one(name)
    alone = torch.cat([decoder.logits(row) for row in each_row(hidden)])
    assert alone.shape == (33, decoder.config.vocab_size)
    assert alone.std() > 0.1
    for count in range(1, 34):
        assert same_bits(decoder.logits(hidden[:count]), alone[:count])
        assert same_bits(decoder.logits(hidden[33 - count :]), alone[33 - count :])


@MODELS
def test_other_sequences_in_the_forward_change_nothing(name: str) -> None:
    decoder = native(name)
    pool = dirty_pool(decoder.config, blocks=64)
    lengths, counts = (41, 7, 64, 1), (9, 1, 20, 3)
    shapes = (None, None, random_tree(20, seed=3), None)
    sequences = [
        opened(decoder, prompt(length, seed=length), pool=pool, place=place)
        for length, place in zip(lengths, (in_one_piece, in_pieces) * 2, strict=True)
    ]
    parts = [
        (sequence, prompt(count, seed=count), shape, 0)
        for sequence, count, shape in zip(sequences, counts, shapes, strict=True)
    ]
    alone = [together(decoder, [part])[0] for part in parts]
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 0), (2, 3), (1, 1, 1)):
        found = together(decoder, [parts[i] for i in order])
        assert all(same_bits(part, alone[i]) for part, i in zip(found, order, strict=True)), order


@MODELS
def test_a_prompt_is_the_same_in_chunks_and_whole(name: str) -> None:
    decoder = native(name)
    tokens = BEFORE + NEXT
    whole = in_chunks(decoder, tokens, [len(tokens)])
    assert same_bits(whole[41:], one_by_one(name))
    for sizes in ([1], [1, 2, 3, 5, 8], [16], [17, 4], [64]):
        assert same_bits(in_chunks(decoder, tokens, sizes), whole), sizes


@MODELS
def test_scattered_blocks_are_the_same_as_consecutive_ones(name: str) -> None:
    decoder = native(name)
    tokens = BEFORE + NEXT
    assert same_bits(in_chunks(decoder, tokens, [7, 30, 1], in_pieces), in_chunks(decoder, tokens, [len(tokens)]))
    small = opened(decoder, BEFORE, pool=dirty_pool(decoder.config, 90, block_size=3), place=in_pieces)
    assert same_bits(rows(decoder, small, NEXT), one_by_one(name))


def test_a_row_is_the_same_before_and_after_a_longer_sequence() -> None:
    """Past a thousand positions, for which the table of rotary angles is made anew."""
    decoder = assemble(CONFIGS["plain"], dict(convert(Noise(CONFIGS["plain"]), NATIVE)), NATIVE)
    sequence, tokens = opened(decoder, BEFORE), prompt(1100, seed=9)
    before = rows(decoder, sequence, NEXT)
    long = opened(decoder, tokens, pool=dirty_pool(decoder.config, 80))
    long.truncate(1090)
    together = rows(decoder, long, tokens[1090:])
    assert same_bits(together, in_chunks(decoder, tokens, [500, 300])[1090:])
    assert same_bits(rows(decoder, sequence, NEXT), before)


@MODELS
@pytest.mark.parametrize(("nodes", "reach"), [(33, 9), (33, 40), (60, 2), (5, 9)])
def test_a_node_of_a_tree_is_the_same_as_in_its_branch_alone(nodes: int, reach: int, name: str) -> None:
    decoder = native(name)
    parents, drafted = random_tree(nodes, nodes + reach, reach), prompt(nodes, seed=nodes)
    for place in (in_one_piece, in_pieces):
        sequence = opened(decoder, BEFORE, place=place)
        tree = rows(decoder, sequence, drafted, parents)
        for path in paths(parents)[:: 3 if nodes > 5 else 1]:
            branch = rows(decoder, sequence, [drafted[node] for node in path])
            assert same_bits(tree[list(path)], branch), path


@MODELS
def test_a_tree_in_an_empty_cache_is_the_same_as_its_branches(name: str) -> None:
    decoder = native(name)
    parents, drafted = random_tree(20, seed=5), prompt(20, seed=5)
    sequence = opened(decoder, [])
    tree = rows(decoder, sequence, drafted, parents)
    for path in paths(parents):
        assert same_bits(tree[list(path)], rows(decoder, sequence, [drafted[node] for node in path])), path


@MODELS
def test_a_tree_computed_level_by_level_is_the_same_as_at_once(name: str) -> None:
    decoder = native(name)
    shape = random_tree(33, seed=6)
    order = sorted(range(33), key=lambda node: depths(shape)[node])
    number = {-1: -1} | {node: i for i, node in enumerate(order)}
    parents, drafted = tuple(number[shape[node]] for node in order), prompt(33, seed=6)
    sequence, level, first = opened(decoder, BEFORE), depths(parents), 0
    at_once = rows(decoder, sequence, drafted, parents)
    sequence = opened(decoder, BEFORE)
    for last in [*(i for i in range(1, 33) if level[i] > level[i - 1]), 33]:
        part = rows(decoder, sequence, drafted[:last], parents[:last], first)
        assert same_bits(part, at_once[first:last]), f"level of node {first}"
        first = last


@MODELS
@pytest.mark.parametrize("place", [in_one_piece, in_pieces])
def test_after_an_accepted_branch_everything_is_as_in_a_fresh_prefill(place: Place, name: str) -> None:
    decoder = native(name)
    parents, drafted = random_tree(33, seed=7), prompt(33, seed=7)
    path = max(paths(parents), key=len)
    assert list(path) != list(range(len(path)))
    sequence = opened(decoder, BEFORE, place=place)
    rows(decoder, sequence, drafted, parents)
    sequence.commit(path, [])
    accepted = [drafted[node] for node in path]
    fresh = opened(decoder, BEFORE + accepted)
    assert sequence.length == fresh.length
    for mine, other in zip(kept(sequence), kept(fresh), strict=True):
        assert torch.equal(mine, other)
    for count in (1, 20):
        assert same_bits(rows(decoder, sequence, NEXT[:count]), rows(decoder, fresh, NEXT[:count]))


def kept(sequence: SequenceCache) -> list[Tensor]:
    """Every layer's keys and values of the committed positions, as integers."""
    slots = sequence.slot_table(sequence.length)
    return [store[slots].view(torch.int16) for store in (*sequence.pool.keys, *sequence.pool.values)]


@MODELS
def test_a_copy_goes_on_as_the_original_would(name: str) -> None:
    decoder = native(name)
    pool = dirty_pool(decoder.config)
    sequence = opened(decoder, BEFORE, pool=pool)
    copy = sequence.fork()
    rows(decoder, copy, prompt(9, seed=8))  # written into a block of its own
    copy.commit(range(9), [])
    assert same_bits(rows(decoder, sequence, NEXT), one_by_one(name))
    fresh = opened(decoder, BEFORE + prompt(9, seed=8))
    assert same_bits(rows(decoder, copy, NEXT), rows(decoder, fresh, NEXT))


def everything(name: str) -> list[Tensor]:
    """A prompt, a tree, single rows and their logits: what threads and instruction sets must agree on."""
    decoder = native(name)
    sequence = opened(decoder, BEFORE, place=in_pieces)
    found = [rows(decoder, sequence, NEXT), rows(decoder, sequence, NEXT, random_tree(33, seed=4))]
    found += [rows(decoder, sequence, NEXT[:count]) for count in (1, 2, 5, 16)]
    return [*found, decoder.logits(found[0]), decoder.logits(found[0][:1]), *(each.float() for each in kept(sequence))]


@MODELS
def test_threads_change_nothing(name: str) -> None:
    alone = everything(name)
    for count in (2, 3):
        with threads(count):
            assert all(map(same_bits, everything(name), alone)), f"{count} threads"


@pytest.mark.skipif(len(BACKENDS) < 2, reason=f"no second instruction set: {', '.join(BACKENDS)}")
@MODELS
def test_every_instruction_set_gives_the_same(name: str) -> None:
    best = everything(name)
    for other in BACKENDS[1:]:
        with backend(other), threads(2):
            assert all(map(same_bits, everything(name), best)), other


@MODELS
def test_taps_are_the_hidden_states_as_they_were(name: str) -> None:
    """The kernels change them in place."""
    decoder = native(name)
    layers = decoder.config.num_layers
    sequence = opened(decoder, BEFORE)
    span = Span(sequence, 0, len(NEXT), sequence.length)
    sequence.append(len(NEXT))

    def forward(**options: Any) -> tuple[Tensor, dict[int, Tensor]]:
        return decoder.forward(Batch(torch.tensor(NEXT), [span], sequence.pool, **options))

    last, taps = forward(taps=[*range(layers + 1), NORMED])
    for index in range(layers + 1):
        assert same_bits(taps[index], forward(layers=range(index))[0]), f"tap {index}"
    assert same_bits(taps[layers], last)
    assert same_bits(taps[NORMED], decoder.final_norm(last))
    skipped = forward(skip={(layers - 1, "attention"), (layers - 1, "mlp")})[0]
    assert same_bits(skipped, taps[layers - 1])
