"""int8 products: exact integer sums, rows that do not depend on each other, and what the split buys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.model.linear import Int4Linear, Int8Linear, quantize_groups, quantize_rows

SHAPES = [(96, 64), (33, 67), (130, 256)]  # out, in
TOP = {True: 127 * 256 + 127, False: 127}  # activation levels each side of zero

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_vnni_supported(),
    reason="without VNNI oneDNN's sums may saturate; such machines never choose int8",
)


def activations(rows: int, width: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=random)
    return x * torch.logspace(-3, 3, rows)[:, None] if rows > 1 else x


def weights(out: int, width: int) -> tuple[Tensor, Tensor]:
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(1))
    return quantize_rows(weight * torch.logspace(-1, 1, out)[:, None])


def on_levels(rows: int, width: int, split: bool) -> Tensor:
    """Rows that lie on the quantiser's levels (their largest value on the last), so that no tie is close."""
    random = torch.Generator().manual_seed(4)
    levels = torch.randint(-TOP[split], TOP[split] + 1, (rows, width), generator=random)
    levels[:, 5] = TOP[split]
    return levels * (torch.logspace(-3, 3, rows)[:, None] / TOP[split])


def exact(x: Tensor, weight: Tensor, scale: Tensor, split: bool) -> Tensor:
    """The nearest levels, summed in int64 and scaled in fp64."""
    step = x.double().abs().amax(dim=1, keepdim=True) / TOP[split]
    sums = torch.round(x.double() / step).long() @ weight.long().t()
    return sums.double() * scale.double() * step


def magnitude(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Per output: what the sum of absolute values would be, the yardstick for rounding."""
    return x.abs().double() @ weight.abs().double().t() * scale.double()


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_rows_do_not_depend_on_each_other(out: int, width: int, split: bool) -> None:
    linear = Int8Linear(*weights(out, width), torch.randn(out), split=split)
    x = activations(40, width)
    alone = torch.cat([linear(x[i : i + 1]).clone() for i in range(40)])
    for rows in range(1, 41):
        assert bits_equal(linear(x[:rows]), alone[:rows]), rows
        assert bits_equal(linear(x[40 - rows :]), alone[40 - rows :]), rows
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert bits_equal(linear(x[order]), alone[order])


@pytest.mark.parametrize("split", [True, False])
def test_a_call_leaves_nothing_for_the_next(split: bool) -> None:
    """Few rows are padded in a buffer that is kept."""
    linear = Int8Linear(*weights(96, 64), split=split)
    x = activations(3, 64)
    before = linear(x[:1]).clone()
    linear(x * 1000)
    assert bits_equal(linear(x[:1]), before)


@pytest.mark.parametrize("split", [True, False])
def test_results_are_not_overwritten_by_the_next_call(split: bool) -> None:
    linear = Int8Linear(*weights(96, 64), split=split)
    x = activations(2, 64)
    first = linear(x[:1])
    kept = first.clone()
    linear(x[1:])
    assert bits_equal(first, kept)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_integer_sums_are_exact(out: int, width: int, rows: int, split: bool) -> None:
    """Only the last few fp32 roundings are left; one level too many or too few would show."""
    weight, scale = weights(out, width)
    x = on_levels(rows, width, split)
    error = (Int8Linear(weight, scale, split=split)(x) - exact(x, weight, scale, split)).abs()
    assert (error / magnitude(x, weight, scale)).max() < 3e-7


def test_sums_as_large_as_they_get() -> None:
    """Every product at its extreme, of one sign: where int32 or a saturating instruction would give way."""
    width = 16_384
    weight, scale = torch.full((8, width), 127, dtype=torch.int8), torch.ones(8)
    weight[1] = -127
    for x in (torch.ones(1, width), -torch.ones(3, width)):
        for split in (True, False):
            error = (Int8Linear(weight, scale, split=split)(x) - exact(x, weight, scale, split)).abs()
            assert error.max() <= 127 * width * 1e-6


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_split_is_much_closer_to_fp32(out: int, width: int) -> None:
    weight, scale = weights(out, width)
    x = activations(16, width)
    reference = x.double() @ (weight.double() * scale.double()[:, None]).t()
    size = magnitude(x, weight, scale)

    def error(split: bool) -> float:
        return float(((Int8Linear(weight, scale, split=split)(x) - reference) / size).square().mean().sqrt())

    assert error(True) * 10 < error(False)
    assert error(True) < 3e-5


@pytest.mark.parametrize("split", [True, False])
def test_zero_row(split: bool) -> None:
    bias = torch.randn(96)
    weight, scale = weights(96, 64)
    x = activations(3, 64)
    x[1] = 0
    assert torch.equal(Int8Linear(weight, scale, split=split)(x)[1], torch.zeros(96))
    assert torch.equal(Int8Linear(weight, scale, bias, split=split)(x)[1], bias)


@pytest.mark.parametrize("value", [1e30, -1e30, 1e4])
@pytest.mark.parametrize("split", [True, False])
def test_huge_outlier(split: bool, value: float) -> None:
    """One activation that dwarfs its row: the row is that activation's, the other rows are untouched."""
    weight, scale = weights(96, 64)
    linear = Int8Linear(weight, scale, split=split)
    x = activations(3, 64)
    expected = linear(x).clone()
    x[1, 7] = value
    out = linear(x)
    assert out.isfinite().all()
    assert bits_equal(out[[0, 2]], expected[[0, 2]])
    assert ((out[1] - exact(x, weight, scale, split)[1]).abs() / magnitude(x, weight, scale)[1]).max() < 3e-7


@pytest.mark.parametrize("split", [True, False])
def test_activations_round_to_the_nearest_level(split: bool) -> None:
    x = activations(20, 64)
    error = (Int8Linear(*quantize_rows(torch.eye(64)), split=split)(x) - x).abs()
    step = x.abs().amax(dim=1, keepdim=True) / TOP[split]
    assert (error / step).max() < 0.51
    assert (error / step).max() > 0.45  # and no finer than that


@pytest.mark.parametrize("split", [True, False])
def test_extremes_of_a_row_keep_their_sign(split: bool) -> None:
    """+max and -max are levels of the same size: neither wraps around."""
    linear = Int8Linear(*quantize_rows(torch.eye(64)), split=split)
    random = torch.Generator().manual_seed(0)
    for span in torch.rand(200, generator=random) * 10 + 1e-3:
        x = torch.zeros(1, 64)
        x[0, 3], x[0, 9] = span, -span
        assert torch.allclose(linear(x), x, rtol=1e-6)


@pytest.mark.parametrize("split", [True, False])
def test_bias_is_added_in_fp32(split: bool) -> None:
    weight, scale = weights(96, 64)
    x, bias = activations(5, 64), torch.randn(96)
    plain = Int8Linear(weight, scale, split=split)(x)
    assert torch.equal(Int8Linear(weight, scale, bias, split=split)(x), plain + bias)
    assert torch.equal(Int8Linear(weight, scale, split=split)(x), plain)


def test_weights_round_to_the_nearest_of_255_levels() -> None:
    weight = torch.randn(20, 300, generator=torch.Generator().manual_seed(3))
    weight[4] = 0
    quantized, scale = quantize_rows(weight)
    assert quantized.dtype == torch.int8
    assert quantized.abs().amax(dim=1).tolist() == [0 if i == 4 else 127 for i in range(20)]
    assert ((quantized * scale[:, None] - weight).abs() <= scale[:, None] * 0.50001).all()


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 40])
def test_int4_weights_are_close_to_the_original_for_few_rows_and_many(rows: int) -> None:
    """Both kernels of `Int4Linear` compute the same layer; 70 outputs are no multiple of what the packed one wants."""
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(1))
    wide = Int8Linear(*quantize_rows(weight), split=False)
    bias = torch.ones(70).to(torch.bfloat16)
    linear = Int4Linear(*quantize_groups(weight), wide, bias)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    expected = x.float() @ weight.t() + 1
    error = (linear(x).float() - expected).norm() / expected.norm()
    assert linear(x).shape == (rows, 70)
    assert 0.0001 < error < 0.12
