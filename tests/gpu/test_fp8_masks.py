"""FP8 with windows and chunks on a card: against attention on what was quantised, and 16-bit gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fp8_checks import compare
from tolerance import root_mean_square

from flashhopper import flash_attn_fp8_func, flash_attn_func, quantize_fp8
from flashhopper.heuristics_fp8 import FP8_TABLE
from flashhopper.reference import attention
from flashhopper.reference_fp8 import E4M3

BF16, FP16 = torch.bfloat16, torch.float16
MASKS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (100, 37)},
    "left": {"window_size": (300, -1)},
    "right": {"window_size": (-1, 50)},
    "narrow": {"window_size": (3, 2)},
    "own key": {"window_size": (0, 0)},
    "causal window": {"window_size": (128, 0), "causal": True},
    "wide causal window": {"window_size": (700, 300), "causal": True},
    "chunks": {"attention_chunk": 100},
    "causal chunks": {"attention_chunk": 192, "causal": True},
    "chunks in a window": {"attention_chunk": 256, "window_size": (90, 20)},
}
# Equal; fewer queries; more, so that rows see nothing; long enough for blocks that no mask cuts; one query; one key.
LENGTHS = [(333, 333), (200, 777), (777, 200), (1300, 1500), (1, 513), (513, 1)]


def normal(seqlen: int, heads: int, head_dim: int, dtype: torch.dtype = BF16, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, seqlen, heads, head_dim, device="cuda").to(dtype)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, accumulate: Any = "two_level", **masks: Any) -> Any:
    """Values have no mean, which would hide a key too many or too few. Returns out and LSE."""
    quantised = quantize_fp8(q, k, v)
    out, lse = flash_attn_func(*quantised, fp8_accumulate=accumulate, return_lse=True, **masks)
    assert out.dtype == q.dtype
    ref, ref_lse = attention(
        *(x.dequantize() for x in quantised), softmax_scale=q.shape[-1] ** -0.5, **({"causal": False} | masks)
    )
    compare(out, lse, ref, ref_lse)
    assert out.transpose(1, 2)[ref_lse == -math.inf].count_nonzero() == 0
    return out, lse


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
def test_masks(masks: dict[str, Any], lengths: tuple[int, int]) -> None:
    q, k, v = normal(lengths[0], 4, 128), normal(lengths[1], 2, 128), normal(lengths[1], 2, 128)
    check(q, k, v, **masks)


@pytest.mark.parametrize("accumulate", ["two_level", "fast"])
@pytest.mark.parametrize("masks", ["window", "wide causal window", "causal chunks"])
@pytest.mark.parametrize("row", FP8_TABLE, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}")
def test_head_dims(row: Any, masks: str, accumulate: Any) -> None:
    for dtype in (BF16, FP16) if row.head_dim == 128 else (BF16,):
        for seqlen_q, seqlen_k in ((555, 555), (1300, 1500)):
            q = normal(seqlen_q, 6, row.head_dim, dtype)
            k, v = (normal(seqlen_k, 2, dim, dtype) for dim in (row.head_dim, row.head_dim_v))
            check(q, k, v, accumulate, **MASKS[masks])


@pytest.mark.parametrize("left", [0, 1, 62, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_windows_around_tiles(head_dim: int, left: int) -> None:
    q, k, v = (normal(700, heads, head_dim) for heads in (4, 2, 2))
    check(q, k, v, window_size=(left, 0))


@pytest.mark.parametrize("chunk", [1, 2, 63, 64, 65, 127, 128, 129, 500, 10_000])
@pytest.mark.parametrize("causal", [False, True])
def test_chunks_around_tiles(causal: bool, chunk: int) -> None:
    q, k, v = (normal(700, heads, 128) for heads in (4, 2, 2))
    check(q, k, v, attention_chunk=chunk, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_long_windows_that_flush_and_move_references(head_dim: int) -> None:
    """Windows of 2000 keys in 6000: O is flushed several times, unmasked blocks move the reference, and masked blocks
    follow them on the left."""
    q = normal(900, 2, head_dim, batch=1).abs()
    ramp = torch.linspace(2, 0, 6000, device="cuda")[:, None, None]
    k, v = (normal(6000, 2, head_dim, batch=1).float() + ramp).to(BF16), normal(6000, 2, head_dim, batch=1) + 1
    quantised = quantize_fp8(q, k, v)
    out, lse = flash_attn_func(*quantised, window_size=(2000, 100), return_lse=True)
    plain = [x.dequantize() for x in quantised]
    ref, ref_lse = attention(*plain, softmax_scale=head_dim**-0.5, causal=False, window_size=(2000, 100))
    error = root_mean_square(out.double() - ref)
    assert error <= 0.01 * root_mean_square(ref), error
    # Scores of one sign: each of head_dim / 32 additions cuts them to 14 bits.
    torch.testing.assert_close(lse, ref_lse, atol=1e-2, rtol=head_dim / 32 * 2.0**-13)


@pytest.mark.parametrize("masks", [{"window_size": (40, 3)}, {"attention_chunk": 64}], ids=str)
def test_rows_that_see_nothing_are_zero_whatever_the_values_mean(masks: dict[str, Any]) -> None:
    q, k, v = normal(300, 4, 128), normal(100, 2, 128), normal(100, 2, 128) + 3
    out, lse = flash_attn_fp8_func(q, k, v, return_lse=True, **masks)
    blind = lse == -math.inf
    assert blind.sum() == 2 * 4 * (197 if "window_size" in masks else 200)
    assert out.transpose(1, 2)[blind].count_nonzero() == 0
    assert out.isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("masks", [{"window_size": (200, 0)}, {"attention_chunk": 256}], ids=str)
def test_keys_that_no_row_sees_are_not_loaded(masks: dict[str, Any], head_dim: int) -> None:
    q, k, v = normal(64, 4, head_dim), normal(2048, 2, head_dim), normal(2048, 2, head_dim)
    q8, k8, v8 = quantize_fp8(q, k, v)
    expected = flash_attn_func(q8, k8, v8, return_lse=True, **masks)
    k8.data[:, :1600].view(torch.uint8).fill_(0x7F)
    v8.data[..., :1600].view(torch.uint8).fill_(0x7F)
    for given, found in zip(flash_attn_func(q8, k8, v8, return_lse=True, **masks), expected, strict=True):
        assert torch.equal(given, found)


def test_raw_e4m3_tensors() -> None:
    q, k, v = (torch.randn(2, s, h, 128).to(E4M3) for s, h in ((257, 4), (390, 2), (390, 2)))
    factor = 0.5 + torch.rand(2, 2)
    for masks in (MASKS["window"], MASKS["causal chunks"]):
        expected, expected_lse = flash_attn_func(q, k, v, q_descale=factor, return_lse=True, **masks)
        on_card = (x.cuda() for x in (q, k, v))
        out, lse = flash_attn_func(*on_card, q_descale=factor.cuda(), return_lse=True, **masks)
        compare(out.cpu(), lse.cpu(), expected.double(), expected_lse)


@pytest.mark.parametrize("masks", ["window", "causal window", "causal chunks"])
def test_gradients(masks: str) -> None:
    """Those of 16-bit attention up to what FP8's out and LSE change in delta and P."""
    q, k, v = (normal(500, heads, 128).requires_grad_() for heads in (4, 2, 2))
    weights = torch.randn(2, 500, 4, 128, device="cuda")
    out = flash_attn_fp8_func(q, k, v, **MASKS[masks])
    gradients = torch.autograd.grad((out.float() * weights).sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    ref, _ = attention(*exact, softmax_scale=128**-0.5, **({"causal": False} | MASKS[masks]))
    expected = torch.autograd.grad((ref * weights.double()).sum(), exact)
    for given, reference in zip(gradients, expected, strict=True):
        assert given.isfinite().all()
        assert root_mean_square(given.double() - reference) <= 0.04 * root_mean_square(reference)


@pytest.mark.parametrize("masks", ["wide causal window", "chunks"])
def test_repeats_are_bitwise_equal(masks: str) -> None:
    q, k, v = (normal(1000, 4, 128) for _ in range(3))
    first, first_lse = flash_attn_fp8_func(q, k, v, return_lse=True, **MASKS[masks])
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        out, lse = flash_attn_fp8_func(q, k, v, return_lse=True, **MASKS[masks])
        differing += (out.view(torch.int16) != first.view(torch.int16)).sum()
        differing += (lse.view(torch.int32) != first_lse.view(torch.int32)).sum()
    assert differing.item() == 0


def test_more_tiles_than_multiprocessors() -> None:
    q, k, v = normal(2000, 16, 64), normal(2000, 4, 64), normal(2000, 4, 64)
    check(q, k, v, window_size=(256, 0))
