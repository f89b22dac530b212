"""Tree attention gives every node what its branch gives when it is run alone."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from tiny import ATTENTIONS, FAMILIES, dirty_pool, family, prompt, scattered, use_attention
from torch import Tensor

from paceline.cache.pool import BlockPool, SequenceCache
from paceline.cache.tree import Parents, depths, from_paths, paths
from paceline.model.attention import Span
from paceline.model.decoder import Batch, Decoder

NODES = 64
PROMPT = 40  # past the sliding window of the tiny models


def random_tree(nodes: int, seed: int) -> Parents:
    chance = random.Random(seed)
    return tuple(chance.randint(max(-1, node - 9), node - 1) for node in range(nodes))


TREES = {
    "chain": tuple(range(-1, NODES - 1)),
    "star": (-1,) * NODES,
    "random": random_tree(NODES, 0),
    "bushy": from_paths([p for n in range(1, 6) for p in itertools.product(range(2), repeat=n)])[0],
}


def prefilled(decoder: Decoder, pool: BlockPool, tokens: list[int], *, in_pieces: bool = False) -> SequenceCache:
    cache = scattered(pool, [0] * (PROMPT + NODES + 2)).cache if in_pieces else pool.open([], PROMPT + NODES + 2)
    rows(decoder, pool, cache, tokens)
    cache.commit(range(len(tokens)), [])
    return cache


def rows(
    decoder: Decoder, pool: BlockPool, cache: SequenceCache, tokens: list[int], parents: Parents | None = None,
    first: int = 0,
) -> Tensor:  # fmt: skip
    """Logits of rows behind the committed ones; of a tree, those from node `first` on."""
    count = len(tokens) - first
    cache.append(len(tokens))
    span = Span(cache, 0, count, cache.length + first, parents)
    hidden, _ = decoder.forward(Batch(torch.tensor(tokens[first:]), [span], pool))
    return decoder.logits(hidden)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_node_of_a_tree_has_the_logits_of_its_branch_run_alone(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_attention(monkeypatch, attention)
    decoder = family(name)[1]
    for kind, parents in TREES.items():
        pool = dirty_pool(decoder.config)
        cache = prefilled(decoder, pool, prompt(PROMPT), in_pieces=kind == "random")
        drafted = prompt(len(parents), seed=3)
        together = rows(decoder, pool, cache, drafted, parents)
        for path in paths(parents)[:: 1 if kind == "random" else 7]:
            alone = rows(decoder, pool, cache, [drafted[node] for node in path])
            torch.testing.assert_close(together[list(path)], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["llama-tied", "mistral-window", "gemma3", "gpt2"])
def test_a_tree_computed_level_by_level_equals_the_tree_at_once(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_attention(monkeypatch, attention)
    decoder = family(name)[1]
    order = sorted(range(NODES), key=lambda node: depths(TREES["random"])[node])
    number = {-1: -1} | {node: i for i, node in enumerate(order)}
    parents = tuple(number[TREES["random"][node]] for node in order)
    pool, drafted = dirty_pool(decoder.config), prompt(NODES, seed=3)
    cache = prefilled(decoder, pool, prompt(PROMPT))
    at_once = rows(decoder, pool, cache, drafted, parents)
    level, first = depths(parents), 0
    for last in [*(i for i in range(1, NODES) if level[i] > level[i - 1]), NODES]:
        part = rows(decoder, pool, cache, drafted[:last], parents[:last], first)
        torch.testing.assert_close(part, at_once[first:last], atol=1e-5, rtol=1e-5)
        first = last


def test_a_batch_of_trees_chains_and_prompts_equals_each_alone() -> None:
    decoder = family("mistral-window")[1]
    pool = dirty_pool(decoder.config, blocks=128)
    shapes: list[Parents | None] = [random_tree(20, 1), None, random_tree(33, 2), None]
    tokens = [prompt(20, seed=4), prompt(1, seed=5), prompt(33, seed=6), prompt(50, seed=7)]
    caches = [prefilled(decoder, pool, prompt(10 + 7 * i, seed=i)) for i in range(4)]
    alone = [rows(decoder, pool, c, t, s) for c, t, s in zip(caches, tokens, shapes, strict=True)]
    spans, start = [], 0
    for cache, own, shape in zip(caches, tokens, shapes, strict=True):
        cache.append(len(own))
        spans.append(Span(cache, start, len(own), cache.length, shape))
        start += len(own)
    hidden, _ = decoder.forward(Batch(torch.tensor([token for each in tokens for token in each]), spans, pool))
    torch.testing.assert_close(decoder.logits(hidden), torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_an_accepted_branch_is_moved_to_where_a_chain_would_have_left_it() -> None:
    decoder = family("gemma3")[1]
    parents, drafted = TREES["random"], prompt(NODES, seed=3)
    path = max(paths(parents), key=len)
    assert list(path) != list(range(len(path)))
    pools = [dirty_pool(decoder.config) for _ in range(2)]
    tree, straight = (prefilled(decoder, pool, prompt(PROMPT)) for pool in pools)
    rows(decoder, pools[0], tree, drafted, parents)
    tree.commit(path, [])
    rows(decoder, pools[1], straight, [drafted[node] for node in path])
    straight.commit(range(len(path)), [])
    following = [
        rows(decoder, pool, cache, prompt(5, seed=9)) for pool, cache in zip(pools, (tree, straight), strict=True)
    ]
    torch.testing.assert_close(*following, atol=1e-5, rtol=1e-5)
