"""e5m2 on a card: the quantisers bit by bit against the CPU's, attention against what was quantised, raw tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fp8_checks import assert_quantised_alike, compare, same_bits, source
from ragged import BATCHES, Batch
from tolerance import root_mean_square

from flashhopper import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_varlen_fp8_func,
    flash_attn_varlen_func,
    launch_fp8,
    quantize_fp8,
    reference_fp8,
    reference_fp8_varlen,
)
from flashhopper.fp8_tensor import Fp8Recipe
from flashhopper.heuristics_fp8 import FP8_TABLE
from flashhopper.options import AttentionOptions
from flashhopper.reference import attention
from flashhopper.reference_fp8 import E5M2
from flashhopper.reference_fp8_varlen import Sequences
from flashhopper.torch_library_fp8 import FromSixteenBits

BF16, FP16 = torch.bfloat16, torch.float16
OPERATORS = torch.ops.flashhopper
LARGEST = 57344.0


def normal(seqlen: int, heads: int, head_dim: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, seqlen, heads, head_dim, device="cuda").to(BF16)


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("kind, dtype", [("power_of_two", BF16), ("amax", FP16)], ids=["power_of_two", "amax"])
@pytest.mark.parametrize("head_dim, seqlen", [(16, 130), (64, 513), (96, 200), (128, 1100), (256, 257)])
def test_the_quantisers_agree_in_every_bit(head_dim: int, seqlen: int, kind: Any, dtype: Any, spoilt: bool) -> None:
    x = source(seqlen, head_dim, dtype, spoilt)
    assert_quantised_alike(x, x.cuda(), kind, E5M2)


def test_every_float16_is_rounded_as_on_the_cpu() -> None:
    """With scales of 1, which the largest number in each block and channel makes them."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(FP16)
    numbers = torch.where(numbers.isfinite(), numbers.clamp(-LARGEST, LARGEST), numbers)
    x = torch.full((1, 513, 1, 144), LARGEST, dtype=FP16)
    x[0, :512, 0, :128] = numbers.view(512, 128)
    data, scale = launch_fp8.quantize_rows(x.cuda(), 64, "power_of_two", None, dtype=E5M2)
    expected = reference_fp8.quantize_rows(x, 64, "power_of_two", None, E5M2)
    assert (scale == 1).all()
    assert same_bits(data, expected[0])
    values, value_scale, _ = launch_fp8.quantize_values(x.cuda(), "power_of_two", False, dtype=E5M2)
    assert (value_scale == 1).all()
    assert same_bits(values, reference_fp8.quantize_values(x, "power_of_two", False, E5M2)[0])


@pytest.mark.parametrize("name", ["used", "around tiles"])
def test_the_quantisers_of_ragged_batches_agree_in_every_bit(name: str) -> None:
    side = BATCHES[name].k
    x = torch.randn(side.total, 3, 128).to(BF16)
    x[side.unused] = math.nan
    on_card, on_host = (Sequences("k", side.cu_seqlens(device), side.seqused(device)) for device in ("cuda", "cpu"))
    given = launch_fp8.quantize_rows(x.cuda(), 128, "power_of_two", 5, on_card, E5M2)
    expected = reference_fp8_varlen.quantize_rows(x, 128, "power_of_two", 5, on_host, E5M2)
    assert [same_bits(a, b) for a, b in zip(given, expected, strict=True)] == [True, True]
    values = launch_fp8.quantize_values(x.cuda(), "power_of_two", True, on_card, E5M2)
    expected_values = reference_fp8_varlen.quantize_values(x, "power_of_two", True, on_host, E5M2)
    assert [same_bits(a, b) for a, b in zip(values, expected_values, strict=True)] == [True] * 3


@pytest.mark.parametrize("seqlen", [1, 128, 333])
def test_raw_values_are_transposed_byte_by_byte(seqlen: int) -> None:
    """All bytes, of which 0xff, a NaN, becomes 0x7f, another."""
    data = torch.randint(256, (2, seqlen, 3, 80), dtype=torch.uint8)
    given = launch_fp8.transpose_values(data.view(E5M2).cuda())
    data[data == 0xFF] = 0x7F
    assert same_bits(given, reference_fp8.transpose_values(data.view(E5M2)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("row", FP8_TABLE, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}")
def test_attention(row: Any, causal: bool) -> None:
    """To the tolerance of e4m3: what differs from the reference is P, which is e4m3 here too."""
    for batch, seqlen_q, seqlen_k, heads, heads_k in ((2, 300, 555, 4, 2), (1, 700, 129, 2, 1), (3, 1, 77, 3, 3)):
        q = normal(seqlen_q, heads, row.head_dim, batch)
        k, v = (normal(seqlen_k, heads_k, dim, batch) for dim in (row.head_dim, row.head_dim_v))
        quantised = quantize_fp8(q, k, v + 1, dtype=E5M2)
        for accumulate in ("two_level", "fast") if row.head_dim == 128 else ("two_level",):
            out, lse = flash_attn_func(*quantised, causal=causal, fp8_accumulate=accumulate, return_lse=True)
            plain = (x.dequantize() for x in quantised)
            ref, ref_lse = attention(*plain, softmax_scale=row.head_dim**-0.5, causal=causal)
            compare(out, lse, ref, ref_lse)
            assert out.transpose(1, 2)[ref_lse == -math.inf].count_nonzero() == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences_and_moving_references(head_dim: int) -> None:
    """O is flushed several times, and references move between two flushes."""
    q, k, v = normal(700, 2, head_dim, 1).abs(), normal(4500, 2, head_dim, 1), normal(4500, 2, head_dim, 1) + 1
    ramp = torch.linspace(2, 0, 4500, device="cuda")[:, None, None]
    quantised = quantize_fp8(q, (k.float() + ramp).to(BF16), v, dtype=E5M2)
    out, lse = flash_attn_func(*quantised, return_lse=True)
    ref, ref_lse = attention(*(x.dequantize() for x in quantised), softmax_scale=head_dim**-0.5, causal=False)
    error = root_mean_square(out.double() - ref)
    assert error <= 0.01 * root_mean_square(ref), error
    # Scores of one sign: each of head_dim / 32 additions cuts them to 14 bits.
    torch.testing.assert_close(lse, ref_lse, atol=1e-2, rtol=head_dim / 32 * 2.0**-13)


@pytest.mark.parametrize("masks", [{"window_size": (100, 37)}, {"attention_chunk": 192, "causal": True}], ids=str)
def test_masks(masks: dict[str, Any]) -> None:
    quantised = quantize_fp8(normal(600, 4, 128), normal(777, 2, 128), normal(777, 2, 128), dtype=E5M2)
    out, lse = flash_attn_func(*quantised, return_lse=True, **masks)
    plain = (x.dequantize() for x in quantised)
    compare(out, lse, *attention(*plain, softmax_scale=128**-0.5, **({"causal": False} | masks)))


@pytest.mark.parametrize("per_head", [False, True])
def test_raw_tensors(per_head: bool) -> None:
    q, k, v = (torch.randn(2, s, h, 128).to(E5M2) for s, h in ((257, 4), (390, 2), (390, 2)))
    factors = {f"{name}_descale": 0.5 + torch.rand((2, 2) if per_head else (1,)) for name in "qkv"}
    expected, expected_lse = flash_attn_func(q, k, v, causal=True, return_lse=True, **factors)
    on_card = {name: factor.cuda() for name, factor in factors.items()}
    out, lse = flash_attn_func(q.cuda(), k.cuda(), v.cuda(), causal=True, return_lse=True, **on_card)
    compare(out.cpu(), lse.cpu(), expected.double(), expected_lse)


def test_the_whole_range_of_raw_tensors() -> None:
    """Numbers from 2**-16 to 57344, which e4m3 cannot hold: V by its exponents, Q and K such that scores stay small."""
    q, k = (torch.randn(1, 300, 2, 128) * scale for scale in (2.0**13, 2.0**-13))
    v = torch.randn(1, 300, 2, 128) * 2.0 ** torch.linspace(-12, 13, 128)
    raw = [x.to(E5M2) for x in (q, k, v)]
    out = flash_attn_func(*(x.cuda() for x in raw), causal=True).cpu().double()
    ref, _ = attention(*(x.double() for x in raw), softmax_scale=128**-0.5, causal=True)
    assert out.isfinite().all()
    size = ref.square().mean((0, 1, 2)).sqrt()  # of each channel
    assert ((out - ref).square().mean((0, 1, 2)).sqrt() <= 0.035 * size + torch.finfo(BF16).eps * size).all()


def test_infinities_of_raw_tensors_are_infinities() -> None:
    """A score of minus infinity hides its key, one of plus infinity leaves nothing to compare with."""
    q, k, v = (torch.randn(1, 640, 2, 128).to(E5M2) for _ in range(3))
    k[0, 300, 0, 3] = torch.tensor(math.inf).to(E5M2)
    expected = flash_attn_func(q, k, v, causal=True)
    out = flash_attn_func(q.cuda(), k.cuda(), v.cuda(), causal=True).cpu()
    assert torch.equal(out.isnan(), expected.isnan())
    seen = expected.isnan()[0, 300:, 0].all(-1)
    assert 0 < seen.sum() < 340
    finite = expected.isfinite()
    error = root_mean_square(out[finite].double() - expected[finite])
    assert error <= 0.04 * root_mean_square(expected[finite].double())


def compare_batches(batch: Batch, out: torch.Tensor, lse: torch.Tensor, expected: Any) -> None:
    assert (out[batch.q.unused.cuda()] == 0).all()
    compare(out.cpu(), lse.cpu(), expected[0].double(), expected[1])


@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"window_size": (100, 37)}], ids=str)
def test_ragged_batches(masks: dict[str, Any]) -> None:
    batch = BATCHES["used"]
    q, k, v = (torch.randn(s.total, h, 128).to(BF16) for s, h in ((batch.q, 4), (batch.k, 2), (batch.k, 2)))
    arguments = {"return_lse": True, "dtype": E5M2, **masks}
    expected = flash_attn_varlen_fp8_func(q, k, v, **batch.arguments(), **arguments)
    out, lse = flash_attn_varlen_fp8_func(*(x.cuda() for x in (q, k, v)), **batch.arguments("cuda"), **arguments)
    compare_batches(batch, out, lse, expected)


def test_raw_tensors_of_ragged_batches() -> None:
    batch = BATCHES["used"]
    q, k, v = (torch.randn(s.total, h, 128).to(E5M2) for s, h in ((batch.q, 4), (batch.k, 2), (batch.k, 2)))
    expected = flash_attn_varlen_func(q, k, v, **batch.arguments(), causal=True, return_lse=True)
    on_card = [x.cuda() for x in (q, k, v)]
    out, lse = flash_attn_varlen_func(*on_card, **batch.arguments("cuda"), causal=True, return_lse=True)
    compare_batches(batch, out, lse, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal: bool) -> None:
    """Those of 16-bit attention up to what FP8's out and LSE change in delta and P: twice e4m3's 2 %."""
    q, k, v = (normal(500, heads, 128).requires_grad_() for heads in (4, 2, 2))
    weights = torch.randn(2, 500, 4, 128, device="cuda")
    out = flash_attn_fp8_func(q, k, v, causal=causal, dtype=E5M2)
    gradients = torch.autograd.grad((out.float() * weights).sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    ref, _ = attention(*exact, softmax_scale=128**-0.5, causal=causal)
    expected = torch.autograd.grad((ref * weights.double()).sum(), exact)
    for given, reference in zip(gradients, expected, strict=True):
        assert given.isfinite().all()
        assert root_mean_square(given.double() - reference) <= 0.08 * root_mean_square(reference)


def test_repeats_are_bitwise_equal() -> None:
    q, k, v = (normal(1000, 4, 128) for _ in range(3))
    first, first_lse = flash_attn_fp8_func(q, k, v, causal=True, dtype=E5M2, return_lse=True)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        out, lse = flash_attn_fp8_func(q, k, v, causal=True, dtype=E5M2, return_lse=True)
        differing += (out.view(torch.int16) != first.view(torch.int16)).sum()
        differing += (lse.view(torch.int32) != first_lse.view(torch.int32)).sum()
    assert differing.item() == 0


def test_opcheck() -> None:
    q, k, v = (normal(300, heads, 128) for heads in (4, 2, 2))
    options = AttentionOptions(causal=True, deterministic=True)
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    call = FromSixteenBits(*tensors, Fp8Recipe(dtype=E5M2), options, "two_level")
    torch.library.opcheck(OPERATORS.fp8_attention.default, call.flat())
    torch.library.opcheck(OPERATORS.fp8_quantize_rows.default, (q, 64, "power_of_two", 1, E5M2, "q", None, None))
    torch.library.opcheck(OPERATORS.fp8_quantize_values.default, (v, "power_of_two", True, E5M2, None, None))
    arguments = (*(x.to(E5M2) for x in (q, k, v)), *(None,) * 11, *options, "two_level")
    # Not test_schema: PyTorch lacks the arithmetic on 8-bit floats with which it compares inputs and copies.
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(OPERATORS.fp8_raw_attention.default, arguments, test_utils=checks)


def test_compiled_calls_give_the_same_bits() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from_16_bit = flash_attn_fp8_func(q, k, v, causal=True, dtype=E5M2)
        in_two_steps = flash_attn_func(*quantize_fp8(q, k, v, dtype=E5M2), causal=True)
        return from_16_bit, in_two_steps, flash_attn_func(*(x.to(E5M2) for x in (q, k, v)), causal=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (300, 450):
        tensors = [normal(seqlen, heads, 128) for heads in (4, 2, 2)]
        for mine, expected in zip(compiled(*tensors), attend(*tensors), strict=True):
            assert torch.equal(mine, expected)
            assert mine.count_nonzero() > 0.9 * mine.numel()
