"""The search for a set finds what few tries can find, and stops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.propose.layer_search import GaussianProcess, SearchSettings, SetSearch, speed_up

SIZE = 24
SAVED = torch.tensor([0.01, 0.065] * (SIZE // 2), dtype=torch.float64)  # attention and MLP of twelve layers


def damage(seed: int) -> Tensor:
    """What leaving out each sublayer does to the log of the agreement: most do little, a few do much."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(SIZE, generator=generator, dtype=torch.float64) * 1.5 - 4.5).exp()


def agreement(chosen: Tensor, harm: Tensor) -> float:
    return float((-(chosen.double() * harm).sum()).exp())


def gain(chosen: Tensor, harm: Tensor) -> float:
    cost = 1 - chosen.double() @ SAVED
    return float(speed_up(torch.tensor([agreement(chosen, harm)]), cost[None], 0.06))


def start() -> Tensor:
    return torch.arange(SIZE) % 4 < 2


def searched(seed: int, settings: SearchSettings, window: int = 32) -> SetSearch:
    """A whole search, each try judged on `window` tokens that agree or not by chance."""
    harm, chance = damage(seed), torch.Generator().manual_seed(seed)
    search = SetSearch(SAVED, start(), settings)
    while not search.done:
        tried = search.ask()
        hits = torch.rand(window, generator=chance, dtype=torch.float64) < agreement(tried, harm)
        search.tell(tried, float(hits.double().mean()))
    return search


def test_the_found_set_beats_random_search_and_the_set_it_began_with() -> None:
    seeds, rounds = range(5), 64
    model = SearchSettings(random_rounds=16, limit=rounds, patience=rounds)
    blind = SearchSettings(random_rounds=rounds, limit=rounds, patience=rounds)
    found = sum(gain(searched(seed, model).best, damage(seed)) for seed in seeds) / len(seeds)
    random = sum(gain(searched(seed, blind).best, damage(seed)) for seed in seeds) / len(seeds)
    begun = sum(gain(start(), damage(seed)) for seed in seeds) / len(seeds)
    assert found > random + 0.05
    assert found > begun + 0.2


def test_the_first_try_is_the_start_and_none_comes_twice_once_the_model_chooses() -> None:
    search = searched(0, SearchSettings(random_rounds=4, limit=40, patience=40))
    assert torch.equal(search.tried[0], start())
    rows = [tuple(row.tolist()) for row in search.tried]
    assert len(rows) == 40
    assert all(row not in rows[:i] for i, row in enumerate(rows) if i >= 4)


def test_it_ends_at_its_limit_or_when_its_choice_stays() -> None:
    assert len(searched(1, SearchSettings(limit=7, patience=7)).tried) == 7
    settled = SetSearch(SAVED, start(), SearchSettings(random_rounds=40, limit=40, patience=5))
    tries = 0
    while not settled.done:
        tried = settled.ask()
        settled.tell(tried, 1.0 if torch.equal(tried, start()) else 0.0)
        tries += 1
    assert tries == 5
    assert torch.equal(settled.best, start())


def test_a_lucky_try_is_not_believed_against_its_neighbours() -> None:
    """The choice goes by the model's mean: one high value amid low ones of nearly the same set is noise."""
    search = SetSearch(SAVED, start(), SearchSettings())
    for flip in range(10):
        lucky = start()
        lucky[flip] = ~lucky[flip]
        search.tell(lucky, 0.6 if flip == 0 else 0.3)
    good = ~start()
    for flip in range(10):
        other = good.clone()
        other[flip] = ~other[flip]
        search.tell(other, 0.55)
    assert int((search.best ^ good).sum()) == 1


def test_speed_up_is_the_best_over_draft_lengths() -> None:
    def by_hand(a: float, cost: float, row: float) -> float:
        return max(sum(a**i for i in range(k + 1)) / (1 + k * (cost + row)) for k in range(1, 17))

    cases = [(0.9, 0.5, 0.06), (0.3, 0.5, 0.06), (1.0, 0.2, 0.0), (0.0, 0.5, 0.1)]
    for a, cost, row in cases:
        got = float(speed_up(torch.tensor([a], dtype=torch.float64), torch.tensor([cost], dtype=torch.float64), row))
        assert got == pytest.approx(by_hand(a, cost, row))
    assert by_hand(1.0, 0.2, 0.0) == pytest.approx(17 / 4.2)


def test_the_process_follows_its_values_and_is_unsure_far_from_them() -> None:
    sets = torch.stack([start(), ~start()])
    model = GaussianProcess(sets, torch.tensor([0.9, 0.1], dtype=torch.float64))
    near = start()
    near[0] = ~near[0]
    far = torch.arange(SIZE) % 2 == 0
    mean, deviation = model.predict(torch.stack([start(), near, far, ~start()]))
    assert mean[0] > mean[1] > mean[2] > mean[3]
    assert float(mean[2]) == pytest.approx(0.5, abs=0.02)
    assert deviation[0] < deviation[1] < deviation[2]


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(PacelineError, match=r"between 0 and 1, not 1\.5"):
        SearchSettings(ratio=1.5)
    with pytest.raises(PacelineError, match="at least 1, not 16, 0 and 32"):
        SearchSettings(limit=0)
