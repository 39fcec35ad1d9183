"""FP8 on a card: the quantiser bit by bit against the CPU's, attention against what was quantised, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fp8_checks import assert_quantised_alike, compare, same_bits, source
from tolerance import root_mean_square

from flashhopper import flash_attn_fp8_func, flash_attn_func, fp8, launch, launch_fp8, quantize_fp8, reference_fp8
from flashhopper.fp8 import Descales
from flashhopper.heuristics_fp8 import FP8_TABLE
from flashhopper.options import AttentionOptions
from flashhopper.reference import attention
from flashhopper.reference_fp8 import E4M3

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [(2, 300, 555, 4, 2), (1, 128, 1024, 2, 2), (1, 700, 129, 2, 1), (3, 1, 77, 3, 3)]


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("kind, dtype", [("power_of_two", BF16), ("amax", FP16), ("amax", BF16)])
@pytest.mark.parametrize(
    "head_dim, seqlen", [(16, 130), (64, 513), (80, 300), (96, 200), (128, 1100), (192, 640), (256, 257)]
)
def test_the_quantisers_agree_in_every_bit(
    head_dim: int, seqlen: int, kind: Any, dtype: torch.dtype, spoilt: bool, layout: str
) -> None:
    x = source(seqlen, head_dim, dtype, spoilt)
    on_card = x.cuda()
    if layout == "strided":
        buffer = torch.empty(2, 3, seqlen, head_dim + 16, dtype=dtype, device="cuda")
        on_card = buffer[..., 8:-8].transpose(1, 2).copy_(on_card)
    assert_quantised_alike(x, on_card, kind)


@pytest.mark.parametrize("seqlen", [1, 128, 333])
def test_raw_values_are_transposed(seqlen: int) -> None:
    data = torch.randn(2, seqlen, 3, 80).to(E4M3)
    assert same_bits(launch_fp8.transpose_values(data.cuda()), reference_fp8.transpose_values(data))


def test_strides_of_extents_of_1_do_not_matter() -> None:
    """A decoding step out of a larger tensor: contiguous, with strides that TMA would not take."""
    q, k, v = (torch.randn(1, s, 2, 64, device="cuda").to(E4M3) for s in (1, 300, 300))
    apart = torch.zeros(4, 1, 136, device="cuda").to(E4M3)[:, :, :128].view(4, 1, 2, 64)[:1].copy_(q)
    assert (apart.stride(), apart.is_contiguous()) == ((136, 128, 64, 1), True)
    assert torch.equal(flash_attn_func(apart, k, v), flash_attn_func(q, k, v))


@pytest.mark.parametrize("accumulate", ["two_level", "fast"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("row", FP8_TABLE, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}")
def test_attention(row: Any, causal: bool, accumulate: Any) -> None:
    for dtype in (BF16, FP16) if row.head_dim == 128 else (BF16,):
        for batch, seqlen_q, seqlen_k, heads, heads_k in SHAPES:
            dims = (
                (seqlen_q, heads, row.head_dim),
                (seqlen_k, heads_k, row.head_dim),
                (seqlen_k, heads_k, row.head_dim_v),
            )
            q, k, v = (torch.randn(batch, *dim, device="cuda").to(dtype) for dim in dims)
            quantised = quantize_fp8(q, k, v + 1)
            out, lse = flash_attn_func(*quantised, causal=causal, fp8_accumulate=accumulate, return_lse=True)
            assert out.dtype == dtype
            plain = (x.dequantize() for x in quantised)
            ref, ref_lse = attention(*plain, softmax_scale=row.head_dim**-0.5, causal=causal)
            compare(out, lse, ref, ref_lse)
            assert out.transpose(1, 2)[ref_lse == -math.inf].count_nonzero() == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["two_level", "centered", "fast"])
@pytest.mark.parametrize("row", FP8_TABLE, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}-{row.max_seqlen_k}")
def test_each_configuration(row: Any, kind: str, causal: bool) -> None:
    """Whatever the length: calls choose by it, and up to 2k keys all take the one for fast accumulation."""
    config = getattr(row, kind)
    for seqlen_q, seqlen_k in ((300, 4500), (700, 129), (1, 2048)):
        shapes = (seqlen_q, 4, row.head_dim), (seqlen_k, 2, row.head_dim), (seqlen_k, 2, row.head_dim_v)
        q, k, v = (torch.randn(2, *shape, device="cuda").to(BF16) for shape in shapes)
        quantised = quantize_fp8(q, k, v, center_v=kind != "two_level")
        inputs = fp8._quantized_inputs(tuple(quantised), AttentionOptions(causal=causal), Descales(), None)
        out, lse = launch_fp8.forward(inputs.operands(), inputs.problem.validate(), kind == "fast", config)
        plain = (x.dequantize() for x in quantised)
        compare(out, lse, *attention(*plain, softmax_scale=row.head_dim**-0.5, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("row", FP8_TABLE, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}")
def test_long_sequences_and_moving_references(row: Any, causal: bool) -> None:
    """O is flushed several times, and references move between two flushes."""
    q, k, v = (
        torch.randn(1, s, 2, d, device="cuda")
        for s, d in ((700, row.head_dim), (4500, row.head_dim), (4500, row.head_dim_v))
    )
    ramp = torch.linspace(2, 0, 4500, device="cuda")[:, None, None]
    quantised = quantize_fp8(*(x.to(BF16) for x in (q.abs(), k + ramp, v + 1)))
    out, lse = flash_attn_func(*quantised, causal=causal, return_lse=True)
    ref, ref_lse = attention(*(x.dequantize() for x in quantised), softmax_scale=row.head_dim**-0.5, causal=causal)
    error = root_mean_square(out.double() - ref)
    assert error <= 0.01 * root_mean_square(ref), error
    # Scores of one sign: each of head_dim / 32 additions cuts them to 14 bits.
    torch.testing.assert_close(lse, ref_lse, atol=1e-2, rtol=row.head_dim / 32 * 2.0**-13)


@pytest.mark.parametrize("head_dim, head_dim_v", [(16, 16), (48, 80), (112, 144), (176, 208)])
def test_head_dims_that_are_padded(head_dim: int, head_dim_v: int) -> None:
    q, k, v = (torch.randn(2, 200, 2, dim, device="cuda").to(BF16) for dim in (head_dim, head_dim, head_dim_v))
    quantised = quantize_fp8(q, k, v)
    out, lse = flash_attn_func(*quantised, causal=True, return_lse=True)
    ref, ref_lse = attention(*(x.dequantize() for x in quantised), softmax_scale=head_dim**-0.5, causal=True)
    compare(out, lse, ref, ref_lse)


@pytest.mark.parametrize("per_head", [False, True])
def test_raw_e4m3_tensors(per_head: bool) -> None:
    q, k, v = (torch.randn(2, s, h, 128).to(E4M3) for s, h in ((257, 4), (390, 2), (390, 2)))
    factors = {f"{name}_descale": 0.5 + torch.rand((2, 2) if per_head else (1,)) for name in "qkv"}
    expected, expected_lse = flash_attn_func(q, k, v, causal=True, return_lse=True, **factors)
    on_card = {name: factor.cuda() for name, factor in factors.items()}
    out, lse = flash_attn_func(q.cuda(), k.cuda(), v.cuda(), causal=True, return_lse=True, **on_card)
    compare(out.cpu(), lse.cpu(), expected.double(), expected_lse)


def test_lazy_references_move_and_failed_tiles_are_redone() -> None:
    before = launch.redone_tiles()
    q, k, v = (torch.randn(1, 1024, 2, 128, device="cuda").to(BF16) for _ in range(3))
    ramp = (k.float() + 3 * torch.linspace(1, 0, 1024, device="cuda")[:, None, None]).to(BF16)
    for keys, redone in ((ramp, 0), (k, 1)):
        if redone:
            q, keys = torch.ones_like(q), keys.clone()
            keys[0, 5] = 200.0  # a score over 2**128 times the others', in the block visited last
        quantised = quantize_fp8(q, keys, v)
        out, lse = flash_attn_func(*quantised, return_lse=True)
        ref, ref_lse = attention(*(x.dequantize() for x in quantised), softmax_scale=128**-0.5, causal=False)
        error = root_mean_square(out.double() - ref) / root_mean_square(ref)
        assert error < 0.035, error
        # S is off by up to 2**-13 of itself in a short accumulator.
        torch.testing.assert_close(lse, ref_lse, atol=2e-2, rtol=2.0**-12)
        assert (launch.redone_tiles() - before > 0) == bool(redone)


def test_values_that_are_not_finite_reach_the_rows_that_see_them() -> None:
    q, k, v = (torch.randn(1, 640, 2, 128, device="cuda").to(BF16) for _ in range(3))
    k[0, 300, 0, 3], q[0, 5, 1, 0] = math.inf, math.nan
    out = flash_attn_fp8_func(q, k, v, causal=True)
    hidden = torch.zeros_like(out, dtype=torch.bool)
    hidden[0, 300:, 0], hidden[0, 5, 1] = True, True
    assert torch.equal(out.isnan(), hidden)


def outliers(seqlen: int, generator: torch.Generator) -> torch.Tensor:
    """N(0, 1) + N(0, 100) · Bernoulli(0.001)."""
    normal = [torch.randn(1, seqlen, 4, 128, device="cuda", generator=generator) for _ in range(2)]
    rare = torch.rand(1, seqlen, 4, 128, device="cuda", generator=generator) < 0.001
    return (normal[0] + 10 * normal[1] * rare).to(BF16)


def test_the_accuracy_bar_on_outliers(seed: int) -> None:
    """4k keys, head_dim 128: at most 9.1e-3, and half of one scale per tensor.

    The mean of 32 seeds. Of seeds 0 to 95 it is 8.7e-3, of their eights 8.3e-3 to 9.0e-3 (0.42 to 0.45 of one scale
    per tensor); of eight others it was 9.42e-3 once (0.45), so that eight decide too little.
    """
    errors: dict[str, list[float]] = {"ours": [], "per tensor": []}
    for number in range(32):
        generator = torch.Generator("cuda").manual_seed(seed + number)
        q, k, v = (outliers(4096, generator) for _ in range(3))
        ref, _ = attention(q.double(), k.double(), v.double(), softmax_scale=128**-0.5, causal=False)
        errors["ours"].append(root_mean_square(flash_attn_fp8_func(q, k, v) - ref))
        scales = [x.float().abs().max() / 448 for x in (q, k, v)]
        raw = [(x.float() / scale).to(E4M3) for x, scale in zip((q, k, v), scales, strict=True)]
        factors = {f"{name}_descale": scale.view(1) for name, scale in zip("qkv", scales, strict=True)}
        errors["per tensor"].append(root_mean_square(flash_attn_func(*raw, **factors) - ref))
    ours, theirs = (sum(values) / len(values) for values in errors.values())
    print(f"RMSE {ours:.2e}, per tensor {theirs:.2e}")
    assert ours <= 9.1e-3
    assert ours <= theirs / 2


@pytest.mark.parametrize("head_dim, bound", [(64, 2e-2), (128, 5e-3), (192, 2e-2), (256, 2e-2)])
def test_values_that_are_not_centred_lose_little_at_any_length(head_dim: int, bound: float) -> None:
    """Raw e4m3 values with a mean of 1, 64k keys: one accumulator of 14 bits would lose half of it."""
    q, k, v = (torch.randn(1, s, 2, head_dim, device="cuda") for s in (256, 65536, 65536))
    raw = [x.to(E4M3) for x in (q, k, v + 1)]
    ref, _ = attention(*(x.double() for x in raw), softmax_scale=head_dim**-0.5, causal=False)
    assert root_mean_square(flash_attn_func(*raw) - ref) <= bound
    assert root_mean_square(flash_attn_func(*raw, fp8_accumulate="fast") - ref) > 0.2


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_contexts_lose_nothing(head_dim: int) -> None:
    """Values with a mean of 1: the error at 128k keys is at most 1.5 times that at 4k."""
    errors = {}
    for keys in (4096, 131072):
        shapes = (256, 2), (keys, 2), (keys, 2)
        q, k, v = (torch.randn(1, *shape, head_dim, device="cuda").to(BF16) for shape in shapes)
        v = v + 1
        ref, _ = attention(q.double(), k.double(), v.double(), softmax_scale=head_dim**-0.5, causal=False)
        errors[keys] = root_mean_square(flash_attn_fp8_func(q, k, v) - ref)
    print(errors)
    assert errors[131072] <= 1.5 * errors[4096]


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal: bool) -> None:
    """Those of 16-bit attention up to what FP8's out and LSE change in delta and P: 2 % were seen."""
    q, k, v = (torch.randn(2, 500, h, 128, device="cuda").to(BF16).requires_grad_() for h in (4, 2, 2))
    weights = torch.randn(2, 500, 4, 128, device="cuda")
    gradients = torch.autograd.grad((flash_attn_fp8_func(q, k, v, causal=causal).float() * weights).sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    ref, _ = attention(*exact, softmax_scale=128**-0.5, causal=causal)
    expected = torch.autograd.grad((ref * weights.double()).sum(), exact)
    for given, reference in zip(gradients, expected, strict=True):
        assert given.isfinite().all()
        assert root_mean_square(given.double() - reference) <= 0.04 * root_mean_square(reference)


def test_repeats_are_bitwise_equal() -> None:
    q, k, v = (torch.randn(2, 1000, 4, 128, device="cuda").to(BF16) for _ in range(3))
    first, first_lse = flash_attn_fp8_func(q, k, v, causal=True, return_lse=True)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        out, lse = flash_attn_fp8_func(q, k, v, causal=True, return_lse=True)
        differing += (out.view(torch.int16) != first.view(torch.int16)).sum()
        differing += (lse.view(torch.int32) != first_lse.view(torch.int32)).sum()
    assert differing.item() == 0


def test_calls_can_be_captured(no_synchronisation: None) -> None:
    q, k, v = (torch.randn(1, 256, 2, 128, device="cuda").to(BF16) for _ in range(3))
    expected = flash_attn_fp8_func(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_fp8_func(q, k, v)
    torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    assert torch.equal(out, expected)


def test_options_that_are_not_there_yet() -> None:
    quantised = quantize_fp8(*(torch.randn(1, 64, 2, 128, device="cuda").to(BF16) for _ in range(3)))
    for name, value in (("softcap", 5.0), ("learnable_sink", torch.zeros(2, device="cuda"))):
        with pytest.raises(NotImplementedError, match=f"{name}.* is not there yet"):
            flash_attn_func(*quantised, **{name: value})


@pytest.mark.parametrize("accumulate", ["two_level", "fast"])
@pytest.mark.parametrize("lengths", [(1, 1025), (191, 1100), (192, 2048), (193, 2049), (1000, 4500)])
@pytest.mark.parametrize("causal", [False, True])
def test_three_warpgroups_at_head_dim_128(causal: bool, lengths: tuple[int, int], accumulate: Any) -> None:
    """Tiles of 192 rows and 64 keys, O flushed each 2048 keys of centred values."""
    for dtype, heads_k in ((BF16, 6), (FP16, 2)):
        q = torch.randn(2, lengths[0], 6, 128, device="cuda").to(dtype)
        k, v = (torch.randn(2, lengths[1], heads_k, 128, device="cuda").to(dtype) for _ in range(2))
        quantised = quantize_fp8(q, k, v + 1)
        out, lse = flash_attn_func(*quantised, causal=causal, fp8_accumulate=accumulate, return_lse=True)
        ref, ref_lse = attention(*(x.dequantize() for x in quantised), softmax_scale=128**-0.5, causal=causal)
        compare(out, lse, ref, ref_lse)
