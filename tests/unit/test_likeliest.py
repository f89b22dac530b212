"""The likeliest token: the lowest id on a tie, the same by the kernels and by PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from native_lab import needs_kernels
from torch import Tensor

from paceline.sampling.best import likeliest, likeliest_with_chance
from paceline.sampling.transform import NEVER


@pytest.fixture(autouse=True, params=["pytorch", pytest.param("kernels", marks=needs_kernels)])
def _computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.sampling.best._has_kernels", lambda: request.param == "kernels")


def scores(rows: int, width: int) -> Tensor:
    return 5 * torch.randn(rows, width, generator=torch.Generator().manual_seed(width))


@pytest.mark.parametrize("width", [1, 5, 16, 31, 1000, 1003])
def test_the_largest_score_of_each_row_and_its_probability(width: int) -> None:
    for rows in (1, 3, 40):
        x = scores(rows, width)
        best, chance = likeliest_with_chance(x)
        assert torch.equal(best, x.argmax(dim=1))
        assert torch.equal(likeliest(x), best)
        assert chance == pytest.approx(x.double().softmax(dim=1).amax(dim=1).tolist(), rel=2e-6)


@pytest.mark.parametrize("width", [2, 17, 1003])
def test_of_equals_the_lowest_id_is_taken(width: int) -> None:
    x = scores(20, width).round().clamp(-3, 3)
    x[0], x[1] = 0, -1.5
    expected = [row.index(max(row)) for row in x.tolist()]
    assert likeliest(x).tolist() == expected
    assert likeliest_with_chance(x)[0].tolist() == expected


@pytest.mark.parametrize("place", [0, 7, 15, 16, 1002])
def test_what_can_never_come_is_never_taken_and_counts_nothing(place: int) -> None:
    x = torch.full((2, 1003), NEVER)
    x[0, place], x[1, place], x[1, 500] = -80.0, 3.0, 3.0
    best, chance = likeliest_with_chance(x)
    assert best.tolist() == [place, min(place, 500)]
    assert chance == pytest.approx([1.0, 0.5], rel=1e-6)
    assert likeliest(x).tolist() == best.tolist()


def test_no_rows() -> None:
    best, chance = likeliest_with_chance(torch.empty(0, 50))
    assert (best.shape, chance) == ((0,), [])
    assert likeliest(torch.empty(0, 50)).shape == (0,)


@pytest.mark.parametrize("view", ["transposed", "part of wider rows", "double", "bf16"])
def test_scores_may_be_held_in_any_way(view: str) -> None:
    x = scores(6, 40).to(torch.bfloat16).float()
    held = {
        "transposed": x.t().contiguous().t(),
        "part of wider rows": torch.cat((x, 100 + x), dim=1)[:, :40],
        "double": x.double(),
        "bf16": x.to(torch.bfloat16),
    }[view]
    assert torch.equal(likeliest(held), x.argmax(dim=1))
    assert likeliest_with_chance(held)[1] == pytest.approx(x.softmax(dim=1).amax(dim=1).tolist(), rel=0.1)


def test_a_row_of_nothing_possible_has_no_chance() -> None:
    best, chance = likeliest_with_chance(torch.full((1, 40), NEVER))
    assert 0 <= int(best) < 40
    assert math.isnan(chance[0])
