"""Draft trees as lists of parents."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.cache.tree import (
    Parents,
    ancestry,
    branches,
    chain,
    depths,
    from_paths,
    is_chain,
    paths,
    ranks,
    subtree,
)

TREE: Parents = (-1, -1, 0, 0, 1, 3, 3)


def random_trees() -> list[Parents]:
    chance = random.Random(0)
    return [tuple(chance.randint(-1, node - 1) for node in range(chance.randint(1, 40))) for _ in range(50)]


def test_a_chain_is_a_tree_with_one_branch() -> None:
    assert chain(4) == (-1, 0, 1, 2)
    assert is_chain(chain(4))
    assert is_chain(())
    assert branches(chain(4)) == ((0, 1, 2, 3),)
    assert not is_chain(TREE)


def test_what_follows_from_parents() -> None:
    assert depths(TREE) == (1, 1, 2, 2, 2, 3, 3)
    assert paths(TREE)[6] == (0, 3, 6)
    assert ranks(TREE) == (0, 1, 0, 1, 0, 0, 1)
    assert ancestry(TREE)[6].nonzero().flatten().tolist() == [0, 3, 6]
    assert torch.equal(ancestry(TREE), torch.tensor([[j in path for j in range(7)] for path in paths(TREE)]))


@pytest.mark.parametrize("parents", random_trees())
def test_branches_written_over_one_another_leave_every_node_its_ancestors(parents: Parents) -> None:
    place: dict[int, int] = {}
    for run in branches(parents):
        for node in run:
            place[depths(parents)[node]] = node
            assert [place[d] for d in range(1, depths(parents)[node] + 1)] == list(paths(parents)[node])
    assert sorted(node for run in branches(parents) for node in run) == list(range(len(parents)))


def test_a_subtree_is_renumbered() -> None:
    assert subtree(TREE, [0, 3, 6]) == (-1, 0, 1)
    assert subtree(TREE, [1, 4]) == (-1, 0)


def test_a_static_tree_is_given_as_paths_of_ranks() -> None:
    parents, taken = from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
    assert parents == (-1, -1, 0, 0, 1, 3)
    assert taken == (0, 1, 0, 1, 0, 0)
    with pytest.raises(ValueError, match=r"path \(2, 0\) of the tree lacks its beginning \(2,\)"):
        from_paths([(0,), (2, 0)])
