"""Activations give a row the same bits whatever is computed beside it, at any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.model.sublayers import ACTIVATIONS, by_rows

GATED = ("silu", "gelu_tanh")


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [96, 1536, 4864, 8960, 1001])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_rows_bits_are_its_own(name: str, width: int, threads: int) -> None:
    fused = torch.randn(40, 2 * width, generator=torch.Generator().manual_seed(width))
    half = fused.chunk(2, dim=-1)[0]
    x = half if name in GATED else half.contiguous()  # gated MLPs see half of a fused product
    alone = torch.cat([by_rows(ACTIVATIONS[name], x[i : i + 1]) for i in range(40)])
    for rows in (2, 7, 8, 16, 17, 20, 40):
        assert torch.equal(by_rows(ACTIVATIONS[name], x[:rows]), alone[:rows])
