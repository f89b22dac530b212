"""Packed weights: the numbers of the GGUF file, where formats.h says they lie, and how well fp32 is rounded."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from gguf.quants import quantize as plain_quantize
from torch import Tensor

from paceline.errors import PacelineError
from paceline.native.library import library
from paceline.native.packed import Format, Packed, pack, quantize

pytestmark = pytest.mark.skipif(library() is None, reason="the native library was not built")

Array = np.ndarray[Any, Any]

FORMATS = list(Format)
HALVES = {Format.Q4_1: (0, 2), Format.Q5_1: (0, 2), Format.Q4_K: (0, 2), Format.Q5_K: (0, 2), Format.Q6_K: (208,)}
LEVEL_BITS = dict(zip(FORMATS, (4, 4, 5, 5, 8, 4, 5, 6), strict=True))
WITH_MINIMUM = (Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K)
SECTIONS = {  # (count, bytes) of the table in formats.h
    Format.Q4_0: [(1, 2), (4, 4)],
    Format.Q4_1: [(1, 2), (1, 2), (4, 4)],
    Format.Q5_0: [(1, 2), (1, 4), (4, 4)],
    Format.Q5_1: [(1, 2), (1, 2), (1, 4), (4, 4)],
    Format.Q8_0: [(1, 2), (8, 4)],
    Format.Q4_K: [(1, 2), (1, 2), (8, 1), (8, 1), (32, 4)],
    Format.Q5_K: [(1, 2), (1, 2), (8, 1), (8, 1), (40, 4)],
    Format.Q6_K: [(1, 2), (16, 1), (48, 4)],
}
MOST_GROWTH = {Format.Q4_K: 1.028, Format.Q5_K: 1.023}  # scales of 6 bits kept in a byte


def stored_blocks(format: Format, rows: int, columns: int, seed: int = 0) -> Array:
    """Random blocks [rows, bytes] whose fp16 scales are normal numbers of either sign, zero or subnormal."""
    random = np.random.default_rng(seed)
    blocks = rows * columns // format.block_columns
    stored = random.integers(0, 256, (blocks, format.stored_bytes(1, format.block_columns)), dtype=np.uint8)
    for offset in HALVES.get(format, (0,)):
        halves = random.normal(scale=10.0 ** random.integers(-4, 1, blocks)).astype(np.float16)
        halves[::13], halves[5::13] = 0, np.float16(3e-7)
        stored[:, offset : offset + 2] = halves.view(np.uint8).reshape(blocks, 2)
    return stored.reshape(rows, -1)


def as_gguf(format: Format, stored: Array) -> Tensor:
    return torch.from_numpy(dequantize(stored, gguf.GGMLQuantizationType[format.name]))


def all_rows(packed: Packed) -> Tensor:
    return packed.dequantize(torch.arange(packed.rows))


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def lanes(packed: Packed) -> Array:
    """Each channel's bytes in the order of the sections: [padded rows, superblocks, bytes]."""
    blocks = -(-packed.rows // 16)
    left = packed.data.numpy().reshape(blocks, packed.columns // packed.format.block_columns, -1)
    parts = []
    for count, bytes in SECTIONS[packed.format]:
        section, left = np.split(left, [16 * count * bytes], axis=-1)
        apart = section.reshape(*left.shape[:2], count, 16, bytes).transpose(0, 3, 1, 2, 4)
        parts.append(apart.reshape(16 * blocks, left.shape[1], -1))
    assert left.size == 0
    return np.concatenate(parts, axis=-1)


def levels_as_documented(format: Format, lane: Array) -> Array:
    """q of every weight [padded rows, columns / 32, 32]."""
    bits, groups = LEVEL_BITS[format], format.block_columns // 32
    words = lane[..., -groups * bits * 4 :].reshape(len(lane), -1, bits, 4)
    if bits == 8:
        return words.reshape(*words.shape[:2], 32)
    low = words[:, :, bits - 4 :].reshape(*words.shape[:2], 16)
    levels: Array = np.concatenate([low & 15, low >> 4], axis=-1)
    if bits > 4:
        shifts = np.arange(0, 8, bits - 4, dtype=np.uint8)[:, None]
        high = words[:, :, : bits - 4, None, :] >> shifts & (2 ** (bits - 4) - 1)
        levels |= high.reshape(levels.shape) << 4
    return levels


def half_as_documented(lane: Array, offset: int) -> Array:
    """The fp16 at a byte of each lane, as fp32 [padded rows, superblocks, 1]."""
    halves: Array = np.ascontiguousarray(lane[..., offset : offset + 2]).view(np.float16)
    return halves.astype(np.float32)


def weights_as_documented(packed: Packed) -> Array:
    """Every weight [padded rows, columns] by the table at the top of formats.h."""
    format, lane = packed.format, lanes(packed)
    levels = levels_as_documented(format, lane).astype(np.float32)
    d = half_as_documented(lane, 0)
    m = half_as_documented(lane, 2) if format in WITH_MINIMUM else np.zeros_like(d)
    if format not in WITH_MINIMUM:
        levels -= 2 ** (LEVEL_BITS[format] - 1)
    if format is Format.Q6_K:
        d, m = d * lane[..., 2:18].view(np.int8), np.repeat(m, 16)
    elif format in (Format.Q4_K, Format.Q5_K):
        d, m = d * lane[..., 4:12], -(m * lane[..., 12:20])
    scaled: Array = d.reshape(len(lane), -1, 1) * levels.reshape(len(lane), d[0].size, -1)
    return (scaled + m.reshape(len(lane), -1, 1)).reshape(len(lane), -1)


@pytest.mark.parametrize("supers", [1, 3])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights_dequantise_to_the_bits_of_the_gguf_package(format: Format, rows: int, supers: int) -> None:
    # No tolerance: every product of a scale and a level is exact in fp32, or rounded once by both.
    columns = supers * format.block_columns
    stored = stored_blocks(format, rows, columns)
    packed = pack(stored, format, rows, columns)
    assert bits_equal(all_rows(packed), as_gguf(format, stored))


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_lie_where_the_layout_says(format: Format) -> None:
    columns = 2 * format.block_columns
    stored = stored_blocks(format, 33, columns)
    weights = weights_as_documented(pack(stored, format, 33, columns))
    np.testing.assert_array_equal(weights[:33], as_gguf(format, stored).numpy())


@pytest.mark.parametrize("format", FORMATS)
def test_channels_past_the_last_are_zero_bytes(format: Format) -> None:
    columns = 2 * format.block_columns
    stored = stored_blocks(format, 17, columns)
    packed = pack(stored, format, 17, columns)
    assert lanes(packed)[16].any()
    assert not lanes(packed)[17:].any()


@pytest.mark.parametrize("format", FORMATS)
def test_a_packed_matrix_takes_hardly_more_room_than_the_file(format: Format) -> None:
    columns = 2 * format.block_columns
    packed = pack(stored_blocks(format, 32, columns), format, 32, columns)
    assert packed.data.data_ptr() % 64 == 0
    assert packed.data.numel() <= MOST_GROWTH.get(format, 1.0) * format.stored_bytes(32, columns)


@pytest.mark.parametrize("format", FORMATS)
def test_block_sizes_are_those_of_the_gguf_package(format: Format) -> None:
    span, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format.name]]
    assert (format.block_columns, format.stored_bytes(3, 2 * span)) == (span, 6 * size)
    assert Format.of_gguf(format.name) is format
    assert Format.of_gguf("IQ2_XS") is None


@pytest.mark.parametrize("format", [Format.Q4_0, Format.Q6_K])
def test_a_matrix_packed_by_several_threads_is_the_same(format: Format) -> None:
    rows, columns = 5003, 1024  # over 2 MB: shared out
    stored = stored_blocks(format, rows, columns)
    packed = pack(stored, format, rows, columns)
    assert bits_equal(all_rows(packed), as_gguf(format, stored))


def test_packing_does_not_ask_how_the_bytes_are_held() -> None:
    stored = stored_blocks(Format.Q4_K, 16, 512)
    expected = pack(stored, Format.Q4_K, 16, 512).data
    apart = np.asfortranarray(stored)
    apart.setflags(write=False)
    assert torch.equal(pack(apart, Format.Q4_K, 16, 512).data, expected)
    assert torch.equal(pack(torch.from_numpy(stored).reshape(-1), Format.Q4_K, 16, 512).data, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_taken_are_the_same_bytes_as_rows_packed(format: Format) -> None:
    columns = 2 * format.block_columns
    stored = stored_blocks(format, 40, columns)
    ids = torch.tensor([39, 0, 16, 15, 16, 31, 32, 7, 8, 9, 1, 2, 3, 4, 5, 6, 38, 17])  # more than a block, one twice
    taken = pack(stored, format, 40, columns).take_rows(ids)
    packed = pack(stored[ids.numpy()], format, len(ids), columns)
    assert (taken.rows, taken.columns, taken.format) == (len(ids), columns, format)
    assert torch.equal(taken.data, packed.data)


def test_dequantised_rows_keep_the_shape_of_the_ids() -> None:
    stored = stored_blocks(Format.Q6_K, 20, 256)
    ids = torch.tensor([[3, 19, 0], [7, 7, 16]], dtype=torch.int32)
    rows = pack(stored, Format.Q6_K, 20, 256).dequantize(ids)
    assert bits_equal(rows, as_gguf(Format.Q6_K, stored)[ids])
    assert pack(stored, Format.Q6_K, 20, 256).dequantize(ids[:0]).shape == (0, 3, 256)


@pytest.mark.parametrize("ids", [[0, 20], [-1, 3]])
def test_ids_outside_the_matrix_are_refused(ids: list[int]) -> None:
    packed = pack(stored_blocks(Format.Q8_0, 20, 32), Format.Q8_0, 20, 32)
    with pytest.raises(IndexError, match="20 rows"):
        packed.dequantize(torch.tensor(ids))
    with pytest.raises(IndexError, match="20 rows"):
        packed.take_rows(torch.tensor(ids))


def test_bytes_of_another_size_are_refused() -> None:
    with pytest.raises(PacelineError, match="144 bytes of Q4_K weights where 2 x 256 take 288"):
        pack(stored_blocks(Format.Q4_K, 1, 256), Format.Q4_K, 2, 256)


def test_columns_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(PacelineError, match="576 columns cannot be Q6_K; need a multiple of 256"):
        quantize(torch.zeros(2, 576), Format.Q6_K)


def test_only_formats_with_a_rounding_are_quantised_to() -> None:
    with pytest.raises(PacelineError, match="cannot quantise to Q4_K"):
        quantize(torch.zeros(2, 256), Format.Q4_K)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = torch.zeros(2, 32)
    weight[1, 5] = bad
    with pytest.raises(PacelineError, match="NaN or infinity"):
        quantize(weight, Format.Q8_0)


def weight_kinds() -> dict[str, Tensor]:
    """Matrices [50, 96], each hard in a way of its own."""
    random = torch.Generator().manual_seed(3)
    normal = torch.randn(50, 96, generator=random)
    sizes = torch.logspace(-9, 4, 50)[:, None]
    return {
        "normal": normal,
        "small": 0.02 * normal,
        "heavy-tailed": torch.from_numpy(np.random.default_rng(3).standard_t(2, (50, 96)).astype(np.float32)),
        "of every size": normal * sizes,
        "constant": sizes.expand(50, 96) * torch.where(torch.arange(50) % 2 == 0, 1.0, -1.0)[:, None],
        "zero": torch.zeros(50, 96),
        "tiny": 3e-8 * normal,
        "subnormal": 1e-41 * normal,
        "one-sided": 5 + 0.1 * normal,
        "one outlier": torch.where(torch.arange(96) % 32 == 7, 40.0, 0.01) * normal,
    }


KINDS = weight_kinds()


@pytest.mark.parametrize("kind", KINDS)
def test_q8_0_is_within_half_a_step_of_the_smallest_scale_that_reaches(kind: str) -> None:
    weight = KINDS[kind]
    packed = quantize(weight, Format.Q8_0)
    step = torch.from_numpy(half_as_documented(lanes(packed), 0)[:50, :, 0]).double()
    off = (all_rows(packed).double() - weight.double()).abs().reshape(50, -1, 32).amax(-1)
    assert (off <= step / 2 * (1 + 1e-5)).all()
    ideal = weight.double().abs().reshape(50, -1, 32).amax(-1) / 127
    assert (step <= ideal * (1 + 2**-10) + 2**-24).all()  # 2^-24: the least fp16


def squared_error(rounded: Tensor, weight: Tensor) -> Tensor:
    """Per group, fp64."""
    return (rounded.double() - weight.double()).square().reshape(len(weight), -1, 32).sum(-1)


def plain_error(weight: Tensor) -> Tensor:
    """With the scale and minimum that span each group from its least to its largest weight."""
    kind = gguf.GGMLQuantizationType.Q4_1
    with np.errstate(all="ignore"):  # it divides by scales that vanish
        stored = plain_quantize(weight.numpy(), kind)
    return squared_error(torch.from_numpy(dequantize(stored, kind)), weight)


@pytest.mark.parametrize("kind", KINDS)
def test_q4_1_is_nowhere_worse_than_the_plain_range(kind: str) -> None:
    weight = KINDS[kind]
    error = squared_error(all_rows(quantize(weight, Format.Q4_1)), weight)
    assert (error <= plain_error(weight) * (1 + 1e-5)).all()


@pytest.mark.parametrize("kind", ["normal", "small", "heavy-tailed"])
def test_q4_1_search_lowers_the_squared_error_by_a_sixth(kind: str) -> None:
    weight = KINDS[kind]
    error = squared_error(all_rows(quantize(weight, Format.Q4_1)), weight)
    assert error.sum() <= 5 / 6 * plain_error(weight).sum()


@pytest.mark.parametrize("format", [Format.Q8_0, Format.Q4_1])
def test_weights_beyond_fp16_scales_become_the_largest_that_fit(format: Format) -> None:
    weight = torch.full((2, 32), 3e38)
    weight[:, ::2] = -3e38
    rows = all_rows(quantize(weight, format))
    assert rows.isfinite().all()
    assert (rows[:, 1::2] > 60_000).all()
    assert (rows[:, ::2] < -60_000).all()


def test_quantised_padding_is_zero_bytes() -> None:
    assert not lanes(quantize(torch.ones(17, 64), Format.Q8_0))[17:].any()
