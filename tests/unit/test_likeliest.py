"""The likeliest token: the lowest id on a tie, the same by the kernels and by PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from native_lab import needs_kernels
from torch import Tensor

from paceline.sampling.best import likeliest, likeliest_with_total
from paceline.sampling.transform import NEVER


@pytest.fixture(autouse=True, params=["pytorch", pytest.param("kernels", marks=needs_kernels)])
def _computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.sampling.best.has_kernels", lambda: request.param == "kernels")


def scores(rows: int, width: int) -> Tensor:
    return 5 * torch.randn(rows, width, generator=torch.Generator().manual_seed(width))


@pytest.mark.parametrize("width", [1, 5, 16, 31, 1000, 1003])
def test_the_largest_score_and_the_total_of_each_row(width: int) -> None:
    for rows in (1, 3, 40):
        x = scores(rows, width)
        best, total = likeliest_with_total(x)
        assert torch.equal(best, x.argmax(dim=1))
        assert torch.equal(likeliest(x), best)
        torch.testing.assert_close(total.double(), x.double().logsumexp(dim=1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [2, 17, 1003])
def test_of_equals_the_lowest_id_is_taken(width: int) -> None:
    x = scores(20, width).round().clamp(-3, 3)
    x[0], x[1] = 0, -1.5
    expected = [row.index(max(row)) for row in x.tolist()]
    assert likeliest(x).tolist() == expected
    assert likeliest_with_total(x)[0].tolist() == expected


@pytest.mark.parametrize("place", [0, 7, 15, 16, 1002])
def test_what_can_never_come_is_never_taken_and_counts_nothing(place: int) -> None:
    x = torch.full((2, 1003), NEVER)
    x[0, place], x[1, place], x[1, 500] = -80.0, 3.0, 3.0
    best, total = likeliest_with_total(x)
    assert best.tolist() == [place, min(place, 500)]
    torch.testing.assert_close(total, torch.tensor([-80.0, 3.0 + math.log(2)]), rtol=1e-6, atol=0)
    assert likeliest(x).tolist() == best.tolist()


def test_no_rows() -> None:
    best, total = likeliest_with_total(torch.empty(0, 50))
    assert (best.shape, total.shape) == ((0,), (0,))
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
    torch.testing.assert_close(likeliest_with_total(held)[1].float(), x.logsumexp(dim=1), rtol=1e-2, atol=1e-2)
