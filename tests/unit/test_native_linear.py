"""Linears and norms on the native kernels: the numbers of a slow twin, and the same bits in any form and company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from native_lab import backend, each_row, needs_kernels, random_matrix, same_bits, threads
from native_twin import norm, rounded
from torch import Tensor

from paceline.native import interface
from paceline.native.library import library
from paceline.native.linear import NativeLinear
from paceline.native.norm import NativeNorm
from paceline.native.packed import Format, Packed, quantize

pytestmark = needs_kernels

FORMATS = pytest.mark.parametrize("form", list(Format))
BACKENDS = [] if library() is None else interface.backends()
each_backend = pytest.mark.parametrize("name", BACKENDS)
WIDTH = 512


def activations(count: int, width: int = WIDTH, seed: int = 0) -> Tensor:
    """Rows of very different sizes."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=drawn) * torch.logspace(-3, 3, count)[:, None]


def dense(*parts: Packed) -> Tensor:
    return torch.cat([part.dequantize(torch.arange(part.rows)) for part in parts])


def assert_equals_twin(linear: NativeLinear, x: Tensor) -> None:
    """Up to the order of sums, measured on the sum of absolute values."""
    weight, levels = dense(*linear.parts).double(), rounded(x).values
    expected, size = levels @ weight.t(), levels.abs() @ weight.abs().t()
    if linear.bias is not None:
        expected, size = expected + linear.bias.double(), size + linear.bias.abs().double()
    assert ((linear(x) - expected).abs() / size.clamp_min(1e-30)).max() < 1e-6


@FORMATS
@pytest.mark.parametrize("out", [37, 16, 5])
def test_products_equal_those_of_the_dequantised_weights(out: int, form: Format) -> None:
    linear = NativeLinear([random_matrix(form, out, WIDTH)])
    assert linear(activations(1)).std() > 0
    for count in (1, 3, 16, 37):
        assert_equals_twin(linear, activations(count))


@FORMATS
def test_a_row_has_the_same_bits_in_any_company(form: Format) -> None:
    linear, x = NativeLinear([random_matrix(form, 37, WIDTH)]), activations(33)
    alone = torch.cat([linear(row) for row in each_row(x)])
    for count in range(1, 34):
        assert same_bits(linear(x[:count]), alone[:count]), count
        assert same_bits(linear(x[33 - count :]), alone[33 - count :]), count


@each_backend
@FORMATS
def test_every_instruction_set_and_any_threads_give_the_same_bits(form: Format, name: str) -> None:
    linear = NativeLinear([random_matrix(form, 100, WIDTH)], torch.randn(100))
    xs = [activations(count) for count in (1, 2, 3, 4, 7, 16, 40)]
    expected = [linear(x) for x in xs]
    with backend(name):
        for count in (1, 2, 3):
            with threads(count):
                assert all(same_bits(linear(x), y) for x, y in zip(xs, expected, strict=True)), f"{count} threads"


@each_backend
@FORMATS
def test_sums_as_large_as_they_get(form: Format, name: str) -> None:
    """Every level and activation at its extreme and of one sign: where a narrow sum would saturate."""
    linear = NativeLinear([extreme(form, level) for level in (0x00, 0xFF)])
    with backend(name):
        for x in (torch.ones(1, WIDTH), -torch.ones(3, WIDTH), torch.ones(4, WIDTH)):
            assert_equals_twin(linear, x)


def extreme(form: Format, byte: int) -> Packed:
    """All levels are the lowest or the highest."""
    matrix = random_matrix(form, 16, WIDTH)
    blocks = WIDTH // form.block_columns
    levels = {Format.Q8_0: 32, Format.Q4_K: 128, Format.Q5_K: 160, Format.Q6_K: 192}
    size = levels.get(form, {Format.Q4_0: 16, Format.Q4_1: 16}.get(form, 20))
    # One block of channels: in each superblock the levels are its last bytes.
    matrix.data.view(blocks, -1)[:, -16 * size :] = byte
    return matrix


def test_several_parts_are_one_below_the_other() -> None:
    parts = [random_matrix(Format.Q4_K, 48, WIDTH), random_matrix(Format.Q6_K, 16, WIDTH, 1)]
    parts.append(random_matrix(Format.Q5_0, 21, WIDTH, 2))
    bias = torch.randn(85)
    for x in (activations(1), activations(20)):
        apart = torch.cat([NativeLinear([part])(x) for part in parts], dim=1)
        assert same_bits(NativeLinear(parts)(x), apart)
        assert same_bits(NativeLinear(parts[:2])(x), apart[:, :64])
        assert same_bits(NativeLinear(parts, bias)(x), apart + bias)


def test_bias_is_added_in_fp32() -> None:
    matrix, bias = random_matrix(Format.Q8_0, 37, WIDTH), torch.randn(37)
    for x in (activations(1), activations(5)):
        assert same_bits(NativeLinear([matrix], bias)(x), NativeLinear([matrix])(x) + bias)
    assert same_bits(NativeLinear([matrix], bias.half())(x), NativeLinear([matrix])(x) + bias.half().float())


@FORMATS
def test_chosen_rows_have_the_bits_of_the_whole(form: Format) -> None:
    bias, x = torch.randn(100), activations(7)
    linear = NativeLinear([random_matrix(form, 100, WIDTH)], bias)
    for ids in (torch.arange(0, 100, 3), torch.tensor([99, 0, 17, 17, 5]), torch.tensor([31])):
        chosen = linear.rows(ids)
        assert (chosen.out_features, chosen.in_features) == (len(ids), WIDTH)
        assert same_bits(chosen(x), linear(x)[:, ids])


def test_chosen_rows_outlive_the_whole() -> None:
    linear = NativeLinear([random_matrix(Format.Q4_0, 100, WIDTH)])
    expected = linear(activations(2))[:, 50:]
    chosen = linear.rows(torch.arange(50, 100))
    del linear
    random_matrix(Format.Q4_0, 100, WIDTH, 1)  # takes memory that was given back
    assert same_bits(chosen(activations(2)), expected)


def test_no_rows_give_no_rows() -> None:
    linear = NativeLinear([random_matrix(Format.Q4_K, 37, WIDTH)], torch.randn(37))
    for count in (1, 2):
        with threads(count):
            assert linear(torch.empty(0, WIDTH)).shape == (0, 37)
            assert NativeNorm(torch.ones(WIDTH), 1e-6)(torch.empty(0, WIDTH)).shape == (0, WIDTH)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second row": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "every second column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "part of wider rows": lambda x: torch.cat((x, x, x), dim=1)[:, WIDTH : 2 * WIDTH],
    "double": lambda x: x.double(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_how_the_input_is_held_changes_nothing(view: str) -> None:
    linear, x = NativeLinear([random_matrix(Format.Q6_K, 37, WIDTH)]), activations(9)
    scale = NativeNorm(torch.randn(WIDTH), 1e-6)
    held = VIEWS[view](x)
    assert not (held.is_contiguous() and held.dtype == x.dtype)
    assert same_bits(linear(held), linear(x))
    assert same_bits(scale(held), scale(x))


def test_one_row_repeated_by_a_view() -> None:
    linear, x = NativeLinear([random_matrix(Format.Q6_K, 37, WIDTH)]), activations(1)
    assert same_bits(linear(x.expand(5, WIDTH)), linear(x).repeat(5, 1))


def test_the_input_is_left_as_it_was() -> None:
    linear, x = NativeLinear([random_matrix(Format.Q6_K, 37, WIDTH)]), activations(5)
    kept = x.clone()
    linear(x)
    NativeNorm(torch.randn(WIDTH), 1e-6)(x)
    assert same_bits(x, kept)


def test_results_are_not_overwritten_by_the_next_call() -> None:
    linear, x = NativeLinear([random_matrix(Format.Q8_0, 37, WIDTH)]), activations(5)
    first = linear(x[:2])
    kept = first.clone()
    linear(x)
    assert same_bits(first, kept)
    assert same_bits(linear(x[:2]), kept)


@FORMATS
def test_rows_of_zeros_and_of_nearly_nothing(form: Format) -> None:
    """Activations below 1e-30 count as zeros: their inverse would overflow."""
    bias = torch.randn(37)
    linear, x = NativeLinear([random_matrix(form, 37, WIDTH)], bias), activations(4)
    expected = linear(x)
    x[1], x[2] = 0, torch.full((WIDTH,), 1e-35)
    assert torch.equal(linear(x)[1], bias)
    assert torch.equal(linear(x)[2], bias)
    assert same_bits(linear(x)[[0, 3]], expected[[0, 3]])


@pytest.mark.parametrize("value", [1e30, -1e30, 1e4])
def test_an_outlier_coarsens_its_own_group_only(value: float) -> None:
    weight = torch.randn(37, WIDTH, generator=torch.Generator().manual_seed(1))
    linear, x = NativeLinear([quantize(weight, Format.Q8_0)]), activations(3)
    expected = linear(x)
    x[1, 7] = value
    assert linear(x).isfinite().all()
    assert_equals_twin(linear, x)
    assert same_bits(linear(x)[[0, 2]], expected[[0, 2]])
    rest = x.clone()
    rest[:, :32] = 0
    assert_equals_twin(linear, rest)


@pytest.mark.parametrize(("form", "error"), [(Format.Q8_0, 0.01), (Format.Q4_1, 0.08)])
def test_weights_rounded_on_the_way_are_close_to_the_original(form: Format, error: float) -> None:
    weight = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    x = activations(8)
    exact = x @ weight.t()
    apart = (NativeLinear([quantize(weight, form)])(x) - exact).norm(dim=1) / exact.norm(dim=1)
    assert error / 2 < apart.mean() < error


@pytest.mark.parametrize("width", [16, 48, 512])
def test_a_norm_equals_its_definition_and_each_row_is_its_own(width: int) -> None:
    weight, x = torch.randn(width), activations(33, width)
    x[4] = 0
    for eps in (1e-6, 1e-2):
        scale = NativeNorm(weight, eps)
        expected = norm(x, weight, eps)
        assert ((scale(x) - expected).abs() <= 1e-6 * expected.abs()).all()
        alone = torch.cat([scale(row) for row in each_row(x)])
        for count in range(1, 34):
            assert same_bits(scale(x[:count]), alone[:count])


@each_backend
def test_norms_have_the_same_bits_on_every_instruction_set(name: str) -> None:
    x, scale = activations(9), NativeNorm(torch.randn(WIDTH), 1e-5)
    expected = scale(x)
    with backend(name), threads(2):
        assert same_bits(scale(x), expected)


@pytest.mark.parametrize("width", [WIDTH - 32, WIDTH + 32])
def test_rows_of_another_width_are_refused(width: int) -> None:
    linear = NativeLinear([random_matrix(Format.Q8_0, 16, WIDTH)])
    with pytest.raises(ValueError, match=f"rows of {width} features given to a linear of {WIDTH}"):
        linear(activations(2, width))
