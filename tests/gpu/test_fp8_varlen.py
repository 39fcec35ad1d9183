"""FP8 of ragged batches on a card: the quantiser bit by bit against the CPU's, attention against what was quantised,
gradients, and what lies between the sequences."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from fp8_checks import compare, same_bits
from ragged import BATCHES, Batch, Side
from tolerance import root_mean_square

from flashhopper import (
    flash_attn_fp8_func,
    flash_attn_varlen_fp8_func,
    flash_attn_varlen_func,
    launch_fp8,
    quantize_fp8,
    reference_fp8_varlen,
)
from flashhopper.heuristics_fp8 import FP8_TABLE
from flashhopper.reference import attention
from flashhopper.reference_fp8 import E4M3
from flashhopper.reference_fp8_varlen import Sequences

BF16, FP16 = torch.bfloat16, torch.float16
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 37)},
    "causal window": {"window_size": (64, 0), "causal": True},
    "chunks": {"attention_chunk": 96, "causal": True},
}
OF_FP8: dict[str, Batch] = BATCHES | {"no sequence": Batch(Side([], outside=130), Side([], outside=70))}
NAMES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


def inputs(
    batch: Batch, heads: tuple[int, int] = (6, 2), dims: tuple[int, int] = (128, 128), dtype: torch.dtype = BF16
) -> list[torch.Tensor]:
    """Values have a mean in each sequence's channels; rows that count for nothing are NaN."""
    shapes = (batch.q.total, heads[0], dims[0]), (batch.k.total, heads[1], dims[0]), (batch.k.total, heads[1], dims[1])
    q, k, v = (torch.randn(shape, device="cuda") for shape in shapes)
    for rows in batch.k.slices:
        v[rows] += torch.randn(heads[1], dims[1], device="cuda")
    for x, side in ((q, batch.q), (k, batch.k), (v, batch.k)):
        x[side.unused.cuda()] = math.nan
    return [x.to(dtype) for x in (q, k, v)]


def quantised(tensors: list[torch.Tensor], lengths: dict[str, Any], **recipe: Any) -> Any:
    return quantize_fp8(*tensors, **{name: lengths[name] for name in NAMES}, **recipe)


def leave_nan_behind() -> None:
    """What is allocated next lies where NaN was."""
    buffers = [torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda") for size in (2**26, *[2**18] * 16)]
    del buffers


def check(batch: Batch, tensors: list[torch.Tensor], accumulate: Any = "two_level", **masks: Any) -> None:
    """Each sequence against attention on what was quantised, without its means: they would hide a key too many."""
    leave_nan_behind()
    lengths = batch.arguments("cuda")
    found = quantised(tensors, lengths)
    out, lse = flash_attn_varlen_func(*found, **lengths, **masks, fp8_accumulate=accumulate, return_lse=True)
    assert out.dtype == tensors[0].dtype
    unused = batch.q.unused.cuda()
    assert (out[unused] == 0).all()
    assert (lse[:, unused] == -math.inf).all()
    q, k, v = (x.dequantize() for x in found)
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    outs, refs = [], []
    for i, (q_rows, k_rows) in enumerate(zip(batch.q.slices, batch.k.slices, strict=True)):
        if q_rows.start == q_rows.stop:
            continue
        mean = found.v.mean[i].repeat_interleave(group, 0)
        sequence = q[None, q_rows], k[None, k_rows], v[None, k_rows] - found.v.mean[i]
        ref, ref_lse = attention(*sequence, softmax_scale=scale, **({"causal": False} | masks))
        blind = (ref_lse == -math.inf)[0].t()
        assert (out[q_rows][blind] == 0).all()
        torch.testing.assert_close(lse[:, q_rows].double(), ref_lse[0].double(), atol=4e-3, rtol=1e-5)
        outs.append((out[q_rows].double() - mean).masked_fill(blind[..., None], 0.0))
        refs.append(ref[0])
    if refs:
        centred, ref, whole = torch.cat(outs), torch.cat(refs), out[~unused].double()
        assert whole.isfinite().all()
        allowed = 0.035 * root_mean_square(ref) + torch.finfo(out.dtype).eps * root_mean_square(whole)
        assert root_mean_square(centred - ref) <= allowed


@pytest.mark.parametrize(
    "kind, center, dtype", [("power_of_two", True, BF16), ("amax", True, FP16), ("amax", False, BF16)]
)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("batch", OF_FP8.values(), ids=list(OF_FP8))
def test_the_quantisers_agree_in_every_bit(batch: Batch, head_dim: int, kind: Any, center: bool, dtype: Any) -> None:
    q, _, v = inputs(batch, dims=(head_dim, head_dim), dtype=dtype)
    if batch.k.owned and batch.k.counted[0] > 3:
        v[1, 0, 5], v[2, 1, 3], v[3, 0, 5] = math.nan, math.inf, 3e4
    for x, side, letter in ((q, batch.q, "q"), (v, batch.k, "k")):
        on_card = Sequences(letter, side.cu_seqlens("cuda"), side.seqused("cuda"))
        on_host = Sequences(letter, side.cu_seqlens(), side.seqused())
        for rows in (64, 128):
            for seed in (None, 5):
                leave_nan_behind()
                given = launch_fp8.quantize_rows(x, rows, kind, seed, on_card)
                expected = reference_fp8_varlen.quantize_rows(x.cpu(), rows, kind, seed, on_host)
                assert [same_bits(a, b) for a, b in zip(given, expected, strict=True)] == [True, True]
    leave_nan_behind()
    values = launch_fp8.quantize_values(v, kind, center, on_card)
    expected_values = reference_fp8_varlen.quantize_values(v.cpu(), kind, center, on_host)
    assert [same_bits(a, b) for a, b in zip(values, expected_values, strict=True)] == [True] * 3


@pytest.mark.parametrize("batch", OF_FP8.values(), ids=list(OF_FP8))
def test_raw_values_are_transposed(batch: Batch) -> None:
    data = torch.randn(batch.k.total, 3, 80).to(E4M3)
    leave_nan_behind()
    given = launch_fp8.transpose_values(
        data.cuda(), Sequences("k", batch.k.cu_seqlens("cuda"), batch.k.seqused("cuda"))
    )
    expected = reference_fp8_varlen.transpose_values(data, Sequences("k", batch.k.cu_seqlens(), batch.k.seqused()))
    assert same_bits(given, expected)


@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("batch", OF_FP8.values(), ids=list(OF_FP8))
def test_batches(batch: Batch, masks: dict[str, Any]) -> None:
    check(batch, inputs(batch), **masks)


@pytest.mark.parametrize("accumulate", ["two_level", "fast"])
@pytest.mark.parametrize("row", FP8_TABLE, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}")
def test_head_dims(row: Any, accumulate: Any) -> None:
    batch = Batch(Side([100, 0, 1333, 5], outside=9), Side([130, 20, 1290, 1500]))
    for masks in ("full", "causal", "window"):
        for dtype in (BF16, FP16) if row.head_dim == 128 else (BF16,):
            tensors = inputs(batch, (4, 2), (row.head_dim, row.head_dim_v), dtype)
            check(batch, tensors, accumulate, **MASKS[masks])


@pytest.mark.parametrize("index", range(20))
def test_random_batches(index: int) -> None:
    """Fresh lengths in every run: anything, with some of them 0 or around a tile."""

    def side(sequences: int) -> Side:
        owned = [
            random.choice((0, random.randint(1, 600), 64 * random.randint(1, 6) + random.randint(-1, 1)))
            for _ in range(sequences)
        ]
        used = [random.randint(0, rows) for rows in owned] if random.random() < 0.3 else None
        return Side(owned, used, outside=random.choice((0, random.randint(1, 200))))

    sequences = random.randint(1, 12)
    batch = Batch(side(sequences), side(sequences), slack=random.choice((0, 100)))
    head_dim = (64, 128, 192, 256)[index % 4]
    check(batch, inputs(batch, (4, 2), (head_dim, head_dim)), **list(MASKS.values())[index % len(MASKS)])


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_one_length_are_a_dense_batch(causal: bool) -> None:
    """Whole blocks, so that tiles and scales lie alike: nothing differs but how instructions are ordered."""
    q, k, v = (torch.randn(3, 384, heads, 128, device="cuda").to(BF16) for heads in (4, 2, 2))
    side = Side([384] * 3)
    expected, expected_lse = flash_attn_fp8_func(q, k, v, causal=causal, return_lse=True)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    lengths = Batch(side, side).arguments("cuda")
    out, lse = flash_attn_varlen_fp8_func(*packed, **lengths, causal=causal, return_lse=True)
    torch.testing.assert_close(lse.unflatten(1, (3, 384)).transpose(0, 1), expected_lse, atol=1e-6, rtol=1e-6)
    assert root_mean_square(out.view_as(expected).double() - expected) <= 2**-8 * root_mean_square(expected.double())


@pytest.mark.parametrize("per_sequence", [False, True])
def test_raw_e4m3_tensors(per_sequence: bool) -> None:
    batch = BATCHES["used"]
    shapes = (batch.q.total, 4, 128), (batch.k.total, 2, 128), (batch.k.total, 2, 128)
    q, k, v = (torch.randn(shape).to(E4M3) for shape in shapes)
    factors = {f"{name}_descale": 0.5 + torch.rand((3, 2) if per_sequence else (1,)) for name in "qkv"}
    arguments = {"causal": True, "return_lse": True}
    expected, expected_lse = flash_attn_varlen_func(q, k, v, **batch.arguments(), **factors, **arguments)
    on_card = [x.cuda() for x in (q, k, v)]
    for x, side in zip(on_card, (batch.q, batch.k, batch.k), strict=True):
        x.view(torch.uint8)[side.unused.cuda()] = 0x7F
    factors = {name: factor.cuda() for name, factor in factors.items()}
    leave_nan_behind()
    out, lse = flash_attn_varlen_func(*on_card, **batch.arguments("cuda"), **factors, **arguments)
    compare(out.cpu(), lse.cpu(), expected.double(), expected_lse)


@pytest.mark.parametrize("masks", ["full", "causal", "window"])
def test_gradients(masks: str) -> None:
    """Those of 16-bit attention up to what FP8's out and LSE change in delta and P; 0 where a row is not used."""
    batch = Batch(Side([500, 0, 200], used=[400, 0, 200], outside=3), Side([600, 50, 300], used=[600, 50, 290]))
    tensors = [x.requires_grad_() for x in inputs(batch, (4, 2))]
    out = flash_attn_varlen_fp8_func(*tensors, **batch.arguments("cuda"), **MASKS[masks])
    weights = torch.randn_like(out)
    gradients = torch.autograd.grad(out, tensors, weights)
    sides = batch.q, batch.k, batch.k
    expected = [torch.zeros_like(x, dtype=torch.float64) for x in tensors]
    for at in zip(batch.q.slices, batch.k.slices, batch.k.slices, strict=True):
        exact = [x.detach()[None, rows].double().requires_grad_() for x, rows in zip(tensors, at, strict=True)]
        ref, _ = attention(*exact, softmax_scale=128**-0.5, **({"causal": False} | MASKS[masks]))
        for whole, rows, part in zip(
            expected, at, torch.autograd.grad((ref * weights[None, at[0]]).sum(), exact), strict=True
        ):
            whole[rows] = part[0]
    for given, reference, side in zip(gradients, expected, sides, strict=True):
        assert (given[side.unused.cuda()] == 0).all()
        assert root_mean_square(given.double() - reference) <= 0.04 * root_mean_square(reference)


def test_repeats_are_bitwise_equal() -> None:
    batch = Batch(Side([100, 0, 333, 5, 64], used=[90, 0, 333, 5, 7]), Side([130, 20, 290, 500, 64]))
    tensors, lengths = inputs(batch), batch.arguments("cuda")
    first, first_lse = flash_attn_varlen_fp8_func(*tensors, **lengths, causal=True, return_lse=True)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        out, lse = flash_attn_varlen_fp8_func(*tensors, **lengths, causal=True, return_lse=True)
        differing += (out.view(torch.int16) != first.view(torch.int16)).sum()
        differing += (lse.view(torch.int32) != first_lse.view(torch.int32)).sum()
    assert differing.item() == 0


@pytest.mark.usefixtures("no_synchronisation")  # which leaves the default mode behind
def test_calls_can_be_captured_and_replayed_with_other_lengths() -> None:
    """The lengths are read on the device, at each replay."""
    torch.cuda.set_sync_debug_mode("default")
    first, second = Batch(Side([200, 100, 60]), Side([200, 100, 60])), Batch(Side([10, 290, 60]), Side([10, 290, 60]))
    tensors = inputs(first)
    lengths, others = first.arguments("cuda"), second.arguments("cuda")
    lengths |= {"max_seqlen_q": 360, "max_seqlen_k": 360}
    others |= {"max_seqlen_q": 360, "max_seqlen_k": 360}
    expected = [flash_attn_varlen_fp8_func(*tensors, **given, causal=True) for given in (lengths, others)]
    torch.cuda.set_sync_debug_mode("error")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_varlen_fp8_func(*tensors, **lengths, causal=True)
    torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    assert torch.equal(out, expected[0])
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        lengths[name].copy_(others[name])
    graph.replay()
    assert torch.equal(out, expected[1])


def test_many_sequences_and_more_tiles_than_multiprocessors() -> None:
    lengths = [random.randint(1, 30) for _ in range(400)]
    for batch in (Batch(Side(lengths), Side(lengths)), Batch(Side([900, 20, 4000, 1500]), Side([900, 20, 4000, 1500]))):
        for masks in ("full", "causal"):
            check(batch, inputs(batch, (8, 2)), **MASKS[masks])
