"""The quantiser: scales, transform, layout of V, and what becomes of zeros, outliers and values that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashhopper import quantize_fp8
from flashhopper.reference_fp8 import (
    E4M3,
    E5M2,
    channel_statistics,
    hadamard,
    hadamard_block,
    inverse_hadamard,
    key_of_slot,
    quantize_rows,
    quantize_values,
    restore_values,
    scales_of,
    sign_bits,
    to_fp8,
    transpose_values,
)

BF16, FP16 = torch.bfloat16, torch.float16
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
MANTISSA_BITS = {E4M3: 3, E5M2: 2}
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
each_type = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def of(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32)


def rounding_error(x: torch.Tensor, scale: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """What rounding may cost: half a unit of the mantissa, or of the smallest number."""
    return torch.maximum(x.abs() * 2.0 ** -(MANTISSA_BITS[fp8] + 1), scale * SMALLEST[fp8] / 2) * 1.001


@each_type
@given(exponent=st.integers(-84, 110), mantissa=st.sampled_from([1.0, 1.25, 1.5, 1.75]))
def test_the_scale_is_the_smallest_power_of_two_that_fits(exponent: int, mantissa: float, fp8: torch.dtype) -> None:
    amax = mantissa * 2.0**exponent
    scale, inverse = scales_of(of(amax), "power_of_two", fp8)
    assert amax / scale.item() <= LARGEST[fp8] < 2 * amax / scale.item()
    assert math.frexp(scale.item())[0] == 0.5
    assert scale.item() * inverse.item() == 1.0


@each_type
def test_the_scale_changes_just_above_the_largest_number(fp8: torch.dtype) -> None:
    largest = LARGEST[fp8]
    values = torch.tensor([largest, largest * (1 + 2**-23), largest * 0.9998])
    assert scales_of(values, "power_of_two", fp8)[0].tolist() == [1.0, 2.0, 1.0]


@each_type
def test_the_scale_of_amax_is_its_part_of_the_largest_number(fp8: torch.dtype) -> None:
    largest = LARGEST[fp8]
    scale, inverse = scales_of(torch.tensor([largest, 1.0, 3.0e38]), "amax", fp8)
    assert scale.tolist() == [1.0, of(1.0).div(largest).item(), of(3.0e38).div(largest).item()]
    assert inverse.tolist() == [1.0, of(1.0).div(scale[1]).item(), of(1.0).div(scale[2]).item()]


@each_type
@pytest.mark.parametrize("kind", ["power_of_two", "amax"])
def test_scales_of_nothing_and_of_next_to_nothing(kind: str, fp8: torch.dtype) -> None:
    scale, inverse = scales_of(torch.tensor([0.0, 1e-45, 1e-38, 3.4e38]), kind, fp8)
    assert scale[0] == inverse[0] == 1.0
    assert scale[1] == scale[2] == 2.0**-100
    assert scale.isfinite().all()
    assert inverse.isfinite().all()
    assert (inverse >= torch.finfo(torch.float32).tiny).all()


def test_rounding_saturates_and_marks_what_is_not_finite() -> None:
    x = torch.tensor([500.0, -1e30, math.inf, -math.inf, math.nan, 2.0**-10, 3 * 2.0**-10, -0.0, 17.0, 19.0])
    rounded = to_fp8(x, E4M3).float()
    assert rounded[:2].tolist() == [448.0, -448.0]
    assert rounded[2:5].isnan().all()
    assert rounded[5:].tolist() == [0.0, 2.0**-8, 0.0, 16.0, 20.0]  # halves go to even
    assert math.copysign(1, rounded[7].item()) == -1


def test_rounding_to_e5m2_saturates_and_marks_what_is_not_finite() -> None:
    x = torch.tensor([6e4, -1e30, math.inf, -math.inf, math.nan, 2.0**-17, 3 * 2.0**-17, -0.0, 9.0, 11.0])
    rounded = to_fp8(x, E5M2).float()
    assert rounded[:2].tolist() == [57344.0, -57344.0]
    assert (to_fp8(x, E5M2)[2:5].view(torch.uint8) == 0x7F).all()  # infinities too, as in e4m3
    assert rounded[2:5].isnan().all()
    assert rounded[5:].tolist() == [0.0, 2.0**-15, 0.0, 8.0, 12.0]  # halves go to even
    assert math.copysign(1, rounded[7].item()) == -1


def test_e5m2_is_a_float16_without_its_lower_byte() -> None:
    """Every finite float16, rounded by integer arithmetic: half of the lower byte goes to the even upper one."""
    bits = torch.arange(2**16, dtype=torch.int32)
    magnitude = bits & 0x7FFF
    upper = magnitude >> 8
    rounded = upper + ((magnitude & 0xFF) + (upper & 1) > 0x80).int()
    expected = rounded.clamp_max(0x7B) | bits >> 8 & 0x80  # 0x7b is 57344
    finite = magnitude < 0x7C00
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(FP16)
    found = to_fp8(numbers[finite].float(), E5M2).view(torch.uint8)
    assert torch.equal(found.int(), expected[finite])


@pytest.mark.parametrize("head_dim, block", [(16, 16), (64, 64), (80, 16), (96, 32), (128, 128), (192, 64), (256, 256)])
def test_the_transform_is_the_matrix_of_signs_and_hadamard_blocks(head_dim: int, block: int) -> None:
    assert hadamard_block(head_dim) == block
    bits = sign_bits(3, head_dim)
    matrix = torch.zeros(head_dim, head_dim, dtype=torch.float64)
    for i in range(head_dim):
        for j in range(i // block * block, i // block * block + block):
            parity = bin(i % block & j % block).count("1") % 2
            matrix[i, j] = (-1.0 if bits >> i & 1 else 1.0) * (-1.0) ** parity / block**0.5
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim, dtype=torch.float64))
    x = torch.randn(5, head_dim)
    torch.testing.assert_close(hadamard(x, 3).double(), x.double() @ matrix, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(inverse_hadamard(hadamard(x, 3), 3), x, atol=1e-5, rtol=1e-5)
    assert 0 < bits.bit_count() < head_dim
    assert bits != sign_bits(4, head_dim)


@each_type
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_one_product_with_the_norm_and_a_power_of_two_gives_what_two_give(block: int, fp8: torch.dtype) -> None:
    """The kernel has one. They differ below 2**-126 alone, where the largest values of a block may be too."""
    exponent = torch.arange(-149, 128)
    largest = torch.ldexp(1 + torch.rand(len(exponent)), exponent)
    x = torch.cat((largest[:, None], torch.randn(len(exponent), 200).clamp(-1, 1) * largest[:, None]), dim=1)
    norm = of(block**-0.5)
    inverse = scales_of((x * norm).abs().amax(1), "power_of_two", fp8)[1][:, None]
    assert torch.equal((largest * norm), (x * norm).abs().amax(1))
    one, two = to_fp8(x * (norm * inverse), fp8), to_fp8(x * norm * inverse, fp8)
    assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@each_type
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kind", ["power_of_two", "amax"])
@pytest.mark.parametrize("rows", [64, 128])
def test_rows_get_a_scale_per_block_and_head(rows: int, kind: str, dtype: torch.dtype, fp8: torch.dtype) -> None:
    x = (torch.randn(2, 300, 3, 48) * torch.logspace(-2, 2, 300)[:, None, None]).to(dtype)
    data, scale = quantize_rows(x, rows, kind, None, fp8)
    blocks = -(-300 // rows)
    assert (data.shape, data.dtype, scale.shape) == (x.shape, fp8, (2, 3, blocks))
    for b, h, j in ((0, 0, 0), (1, 2, blocks - 1)):
        block = x[b, j * rows : (j + 1) * rows, h].float()
        assert scale[b, h, j] == scales_of(block.abs().amax()[None], kind, fp8)[0]
        error = (data[b, j * rows : (j + 1) * rows, h].float() * scale[b, h, j] - block).abs()
        assert (error <= rounding_error(block, scale[b, h, j], fp8)).all()


def test_a_block_of_zeros_has_scale_1() -> None:
    q, k, v = quantize_fp8(*(torch.zeros(1, 130, 2, 64, dtype=BF16) for _ in range(3)))
    for x in (q, k, v):
        assert (x.scale == 1).all()
        assert (x.data.float() == 0).all()
        assert torch.equal(x.dequantize(), torch.zeros(1, 130, 2, 64))


@each_type
def test_values_that_are_not_finite_stay_where_they_are(fp8: torch.dtype) -> None:
    x = torch.randn(1, 200, 2, 64).to(BF16)
    spoilt = x.clone()
    spoilt[0, 3, 0, 5], spoilt[0, 150, 1, 7], spoilt[0, 4, 0, 6] = math.inf, math.nan, -math.inf
    hidden = spoilt.isfinite().logical_not()
    data, scale = quantize_rows(spoilt, 128, "power_of_two", None, fp8)
    assert torch.equal(data.float().isnan(), hidden)
    assert torch.equal(scale, quantize_rows(spoilt.masked_fill(hidden, 0.0), 128, "power_of_two", None, fp8)[1])
    transformed, scale = quantize_rows(spoilt, 128, "power_of_two", 0, fp8)
    assert torch.equal(transformed.float().isnan(), hidden.any(-1, keepdim=True).expand(x.shape))
    assert scale.isfinite().all()
    values, scale, mean = quantize_values(spoilt, "power_of_two", True, fp8)
    assert torch.equal(restore_values(values, 200).float().isnan(), hidden)
    assert scale.isfinite().all()
    assert mean.isfinite().all()


@pytest.mark.parametrize("seed", [None, 1])
def test_a_huge_outlier_costs_its_block_and_no_other(seed: int | None) -> None:
    x = torch.randn(1, 256, 1, 64).to(BF16)
    spoilt = x.clone()
    spoilt[0, 10, 0, 3] = 1e30
    data, scale = quantize_rows(spoilt, 128, "power_of_two", seed)
    clean_data, clean_scale = quantize_rows(x, 128, "power_of_two", seed)
    assert torch.equal(data[:, 128:].view(torch.uint8), clean_data[:, 128:].view(torch.uint8))
    assert scale[0, 0, 1] == clean_scale[0, 0, 1]
    assert data.float().abs().max() <= 448
    recovered = (
        inverse_hadamard(data.float()[0, 10, 0] * scale[0, 0, 0], 1)
        if seed
        else data.float()[0, 10, 0] * scale[0, 0, 0]
    )
    assert abs(recovered[3].item() / 1e30 - 1) < 0.07


def test_the_largest_bfloat16_does_not_overflow_without_a_transform() -> None:
    largest = torch.finfo(BF16).max
    x = torch.full((1, 64, 1, 64), largest, dtype=BF16)
    data, scale = quantize_rows(x, 64, "power_of_two", None)
    assert scale.item() == 2.0**120  # 255 / 128 · 2**127 is over 1.75 · 2**127
    assert abs(data.float().mean().item() * scale.item() / largest - 1) < 0.07


def test_slots_hold_the_keys_that_a_thread_has_as_accumulators() -> None:
    """PTX ISA, wgmma: thread t of a quad accumulates columns 8 j + 2 t + {0, 1}; as an 8-bit operand its registers hold
    k = 4 t + {0 … 3} and 16 + 4 t + {0 … 3}."""
    keys = key_of_slot(64).tolist()
    assert sorted(keys) == list(range(64))
    for t in range(4):
        accumulated = [8 * j + 2 * t + i for j in range(8) for i in range(2)]
        operand = [
            32 * block + 16 * half + 4 * t + byte for block in range(2) for half in range(2) for byte in range(4)
        ]
        assert [keys[slot] for slot in operand] == accumulated


@each_type
def test_transposing_values_loses_nothing(fp8: torch.dtype) -> None:
    data = torch.randint(256, (2, 333, 3, 48), dtype=torch.uint8).view(fp8)
    slots = transpose_values(data)
    assert slots.shape == (2, 3, 48, 384)
    assert torch.equal(restore_values(slots, 333).view(torch.uint8), data.view(torch.uint8))
    keys = key_of_slot(384)
    assert (slots[..., keys >= 333].view(torch.uint8) == 0).all()
    assert slots.dtype == fp8
    assert slots.view(torch.uint8)[1, 2, 5, 6] == data.view(torch.uint8)[1, keys[6], 2, 5]


@pytest.mark.parametrize("seqlen", [1, 7, 512, 1300])
def test_statistics_of_channels(seqlen: int) -> None:
    v = (torch.randn(2, seqlen, 2, 32) + 3).to(BF16)
    total, lowest, highest = channel_statistics(v)
    torch.testing.assert_close(total.double(), v.double().sum(1), atol=1e-3, rtol=1e-5)
    assert torch.equal(lowest, v.float().amin(1))
    assert torch.equal(highest, v.float().amax(1))


@each_type
@pytest.mark.parametrize("center", [False, True])
def test_values_get_a_scale_and_a_mean_per_channel(center: bool, fp8: torch.dtype) -> None:
    v = (torch.randn(1, 400, 2, 32) * torch.logspace(-3, 3, 32) + 5).to(BF16)
    data, scale, mean = quantize_values(v, "power_of_two", center, fp8)
    expected = v.double().mean(1) if center else torch.zeros(1, 2, 32).double()
    spacing = spacing_of(v)
    assert ((mean - expected).abs() <= spacing / 2 + 1e-5 * expected.abs()).all()
    assert torch.equal(mean, (mean / spacing).round() * spacing)
    centred = v.float() - mean[:, None]
    assert torch.equal(scale, scales_of(centred.abs().amax(1), "power_of_two", fp8)[0])
    error = (restore_values(data, 400).float() * scale[:, None] - centred).abs()
    assert (error <= rounding_error(centred, scale[:, None], fp8)).all()


def spacing_of(v: torch.Tensor) -> torch.Tensor:
    """Of v's dtype at the largest value of each channel, ``(batch, heads, head_dim)``."""
    return torch.finfo(v.dtype).eps * v.float().abs().amax(1).log2().floor().exp2()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "factor, mean",
    [(0.01, 0.0), (0.6, 1.0), (-0.4, 0.0), (-1.6, -2.0), (37.0, 37.0)],
)
def test_a_mean_is_a_multiple_of_the_spacing_at_the_largest_value(
    dtype: torch.dtype, factor: float, mean: float
) -> None:
    """Whose values less the mean are values of v's dtype again: roundings to FP8 then cancel over the keys."""
    spacing = torch.finfo(dtype).eps * 2  # from 2 to 4
    v = torch.tensor([2.0, -2.0, factor * spacing * 3], dtype=dtype).view(1, 3, 1, 1).expand(1, 3, 1, 16)
    assert torch.equal(quantize_values(v, "power_of_two", True)[2], torch.full((1, 1, 16), mean * spacing))


def test_a_channel_that_is_nearly_as_large_as_its_dtype_allows_has_a_mean() -> None:
    v = torch.full((1, 3, 1, 16), torch.finfo(BF16).max, dtype=BF16)
    assert torch.equal(quantize_values(v, "power_of_two", True)[2], torch.zeros(1, 1, 16))  # the sum is not finite
    v = torch.full((1, 3, 1, 16), 2.0**125, dtype=BF16)
    assert torch.equal(quantize_values(v, "power_of_two", True)[2], torch.full((1, 1, 16), 2.0**125))


@each_type
def test_containers_say_what_they_are(fp8: torch.dtype) -> None:
    x = torch.randn(2, 150, 3, 64).to(FP16)
    q, k, v = quantize_fp8(x, x, x[..., :48], seed=9, dtype=fp8)
    assert {t.dtype for t in (q, k, v)} == {t.data.dtype for t in (q, k, v)} == {fp8}
    assert (q.role, k.role, v.role) == ("q", "k", "v")
    assert (q.shape, v.shape) == ((2, 150, 3, 64), (2, 150, 3, 48))
    assert (q.scale.shape, k.scale.shape, v.scale.shape) == ((2, 3, 3), (2, 3, 2), (2, 3, 48))
    assert (q.rows_per_scale, k.rows_per_scale, q.hadamard_seed, v.hadamard_seed) == (64, 128, 9, None)
    assert v.data.shape == (2, 3, 48, 256)
    assert {t.source_dtype for t in (q, k, v)} == {FP16}
    for quantised, source in ((q, x), (k, x), (v, x[..., :48])):
        error = (quantised.dequantize() - source.float()).square().mean().sqrt()
        assert 0.08 < error * 2 ** MANTISSA_BITS[fp8] < 0.28  # of normal values
    assert quantize_fp8(k=x)._asdict().keys() == {"q", "k", "v"}
    assert quantize_fp8(k=x).q is None
    with pytest.raises(AttributeError):
        q.scale = v.scale


@pytest.mark.parametrize(
    "change, error, fragment",
    [
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"k": torch.ones(1, 4, 2, 64)}, TypeError, "k has dtype torch.float32; accepted are torch.bfloat16"),
        ({"v": torch.ones(4, 2, 64, dtype=BF16)}, ValueError, "v must have 4 dimensions"),
        (
            {"v": torch.ones(1, 4, 2, 24, dtype=BF16)},
            ValueError,
            "v has head_dim 24; accepted with FP8 are multiples of 16",
        ),
        ({"q": torch.ones(1, 4, 2, 272, dtype=BF16)}, ValueError, "q has head_dim 272"),
        ({"q": torch.ones(1, 4, 64, 2, dtype=BF16).mT}, ValueError, "the last dimension (head_dim) must be contiguous"),
        ({"q": torch.ones(1, 4, 2, 64, dtype=BF16, device="meta")}, ValueError, "q is on device meta"),
        ({"scales": "block"}, ValueError, "scales is 'block'; accepted are 'power_of_two' and 'amax'"),
        ({"hadamard": 1}, TypeError, "hadamard must be a bool, got int"),
        ({"center_v": None}, TypeError, "center_v must be a bool, got NoneType"),
        ({"seed": 1.0}, TypeError, "seed must be an int, got float"),
        ({"dtype": BF16}, TypeError, "dtype is torch.bfloat16; accepted are torch.float8_e4m3fn and torch.float8_e5m2"),
        ({"dtype": "e5m2"}, TypeError, "dtype is 'e5m2'; accepted are torch.float8_e4m3fn and torch.float8_e5m2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments(change: dict[str, object], error: type[Exception], fragment: str) -> None:
    with pytest.raises(error) as raised:
        quantize_fp8(**change)
    assert fragment in str(raised.value)
