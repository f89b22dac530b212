"""Typical acceptance: what is accepted follows from p alone, and the longest accepted path is taken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.cache.tree import Parents, paths
from paceline.sampling.noise import Purpose, key
from paceline.verify.trees import Trees, line_up
from paceline.verify.typical import verify_typical

VOCAB = 8
DEVICE = torch.device("cpu")


def trees(*each: tuple[list[int], Parents]) -> Trees:
    starts = [sum(len(tokens) + 1 for tokens, _ in each[:b]) for b in range(len(each))]
    return line_up(starts, [torch.tensor(t, dtype=torch.int64) for t, _ in each], [p for _, p in each], DEVICE)


def keys(rows: int, seed: int = 0) -> Tensor:
    return torch.tensor([key(seed, row, Purpose.RESIDUAL) for row in range(rows)])


def law(**chances: float) -> Tensor:
    """Log-probabilities [VOCAB]: t3=0.5 is token 3's, the rest is shared by the others."""
    rest = (1 - sum(chances.values())) / (VOCAB - len(chances))
    return torch.tensor([chances.get(f"t{token}", rest) for token in range(VOCAB)]).log()


SURE = law(t0=0.5, t1=0.45)  # entropy 0.93: the bar is min(0.09, 0.3 * 0.39) = 0.09
FLAT = law()  # entropy log 8: the bar is 0.3 / 8 = 0.0375, and every token has 0.125


def by_hand(
    scores: Tensor, tokens: list[int], parents: Parents, epsilon: float, delta: float
) -> list[tuple[int, float]]:
    """(length, log-likelihood) of every path that is accepted whole."""
    found = []
    for path in paths(parents):
        likelihood = 0.0
        for node in path:
            p = scores[parents[node] + 1].double().softmax(0).tolist()
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            if p[tokens[node]] <= min(epsilon, delta * math.exp(-entropy)):
                break
            likelihood += math.log(p[tokens[node]])
        else:
            found.append((len(path), likelihood))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_it_takes_the_longest_accepted_path_and_of_several_the_likeliest(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents: Parents = (-1, -1, 0, 0, 1, 2, 2, 4, 3, 8)
    tokens = torch.randint(VOCAB, (10,), generator=generator).tolist()
    scores = torch.randn(11, VOCAB, generator=generator) * 1.5
    last, _ = verify_typical(scores, trees((tokens, parents)), keys(11), epsilon=0.12, delta=0.6)
    accepted = by_hand(scores, tokens, parents, 0.12, 0.6)
    if not accepted:
        assert last.tolist() == [0]
        return
    path = paths(parents)[int(last) - 1]
    chances = [float(scores[parents[node] + 1].double().log_softmax(0)[tokens[node]]) for node in path]
    longest, likelihood = max(accepted)
    assert len(path) == longest
    assert sum(chances) == pytest.approx(likelihood)


def test_the_bar_is_epsilon_where_the_target_is_sure_and_lower_where_it_is_not() -> None:
    sure, flat = (verify_typical(torch.stack((p, FLAT)), trees(([2], (-1,))), keys(2))[0] for p in (SURE, FLAT))
    assert float(SURE.exp()[2]) < 0.0375 < float(FLAT.exp()[2])
    assert (int(sure), int(flat)) == (0, 1)
    between = law(t0=0.5, t1=0.45, t2=0.04)
    lower = verify_typical(torch.stack((between, FLAT)), trees(([2], (-1,))), keys(2), epsilon=0.03)[0]
    higher = verify_typical(torch.stack((between, FLAT)), trees(([2], (-1,))), keys(2))[0]
    assert (int(lower), int(higher)) == (1, 0)


def test_a_longer_path_of_a_less_likely_first_token_wins() -> None:
    """Rejection and coupled verification would follow the first token to its leaf."""
    tokens, parents = [0, 1, 2], (-1, -1, 1)
    last, _ = verify_typical(torch.stack((SURE, FLAT, FLAT, FLAT)), trees((tokens, parents)), keys(4))
    assert int(last) == 3


def test_a_token_below_a_refused_one_is_not_accepted() -> None:
    last, _ = verify_typical(torch.stack((SURE, FLAT, FLAT)), trees(([5, 0], (-1, 0))), keys(3))
    assert int(last) == 0


def test_impossible_tokens_are_refused_and_leave_numbers_finite() -> None:
    scores = torch.full((2, VOCAB), float("-inf"))
    scores[:, 4] = 0.0
    refused, token = verify_typical(scores, trees(([3], (-1,))), keys(2))
    accepted, _ = verify_typical(scores, trees(([4], (-1,))), keys(2))
    assert (int(refused), int(token), int(accepted)) == (0, 4, 1)


def test_the_next_token_is_drawn_from_p_behind_the_accepted_ones() -> None:
    behind = law(t6=0.7)
    scores = torch.stack((SURE, behind)).repeat(4000, 1)
    many = trees(*[([0], (-1,))] * 4000)
    noise = torch.tensor([key(seed, 3, Purpose.RESIDUAL) for seed in range(8000)])
    last, tokens = verify_typical(scores, many, noise)
    assert bool((last == 1).all())
    counts = tokens.bincount(minlength=VOCAB) / 4000
    assert float((counts - behind.exp()).abs().max()) < 0.03


def test_trees_of_a_batch_are_judged_apart() -> None:
    """One without a draft, one of a chain, one of siblings: as each alone."""
    each: list[tuple[list[int], Parents]] = [([], ()), ([0, 3], (-1, 0)), ([7, 1], (-1, -1))]
    rows = [torch.stack([SURE] + [FLAT] * len(tokens)) for tokens, _ in each]
    last, tokens = verify_typical(torch.cat(rows), trees(*each), keys(7))
    assert last.tolist() == [0, 2, 2]
    start = 0
    for b, (tree, scores) in enumerate(zip(each, rows, strict=True)):
        alone = verify_typical(scores, trees(tree), keys(7)[start : start + len(scores)])
        assert (int(alone[0]), int(alone[1])) == (int(last[b]), int(tokens[b]))
        start += len(scores)


def test_a_step_without_drafts_samples() -> None:
    last, tokens = verify_typical(SURE[None], trees(([], ())), keys(1))
    assert last.tolist() == [0]
    assert tokens.shape == (1,)
