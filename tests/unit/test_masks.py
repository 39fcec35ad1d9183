"""Windows, chunks, softcap, sinks and packed inputs on CPU tensors, against attention row by row in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_by_row import F64, row_by_row, sees

from flashhopper import flash_attn_func, flash_attn_qkvpacked_func
from flashhopper.reference import visible_keys

OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (3, 2)},
    "left alone": {"window_size": (2, -1)},
    "right alone": {"window_size": (-1, 1)},
    "causal window": {"window_size": (4, 9), "causal": True},
    "own key only": {"window_size": (0, 0)},
    "chunks": {"attention_chunk": 4},
    "causal chunks": {"attention_chunk": 5, "causal": True},
    "chunks and window": {"attention_chunk": 6, "window_size": (2, 1)},
    "softcap": {"softcap": 1.5},
    "all": {"attention_chunk": 6, "window_size": (3, -1), "causal": True, "softcap": 0.7},
}


@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(11, 11), (5, 13), (13, 5), (1, 9), (4, 1)])
def test_against_row_by_row(seqlen_q: int, seqlen_k: int, options: dict[str, Any], with_sink: bool) -> None:
    q, k, v = (
        torch.randn(2, n, h, d, dtype=F64).requires_grad_()
        for n, h, d in ((seqlen_q, 4, 16), (seqlen_k, 2, 16), (seqlen_k, 2, 8))
    )
    sink = torch.randn(4, dtype=F64).requires_grad_() if with_sink else None
    inputs = [q, k, v] if sink is None else [q, k, v, sink]
    weights = torch.randn(2, seqlen_q, 4, 8, dtype=F64), torch.randn(2, 4, seqlen_q, dtype=F64)

    def loss(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return (out * weights[0]).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * weights[1]).sum()

    expected = row_by_row(q, k, v, sink, **options)
    actual = flash_attn_func(q, k, v, return_lse=True, learnable_sink=sink, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(loss(*result), inputs, allow_unused=True) for result in (actual, expected))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, torch.zeros_like(mine) if other is None else other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (3, 2), "softcap": 1.5}, {"attention_chunk": 5, "causal": True}],
    ids=["full", "causal", "window softcap", "causal chunks"],
)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(11, 11), (5, 13), (13, 5)])
def test_alibi_against_row_by_row(seqlen_q: int, seqlen_k: int, options: dict[str, Any], per_batch: bool) -> None:
    q, k, v = (
        torch.randn(2, n, h, d, dtype=F64).requires_grad_()
        for n, h, d in ((seqlen_q, 4, 16), (seqlen_k, 2, 16), (seqlen_k, 2, 8))
    )
    options = options | {"alibi_slopes": torch.rand((2, 4) if per_batch else (4,)) + 0.1}
    expected = row_by_row(q, k, v, None, **options)
    actual = flash_attn_func(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    grad_out = torch.randn_like(actual[0])
    ours, theirs = (torch.autograd.grad(result[0], (q, k, v), grad_out) for result in (actual, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    without = flash_attn_func(q, k, v, **(options | {"alibi_slopes": None}))
    assert (actual[0] - without).abs().max() > 1e-3


def test_alibi_depends_on_distance_alone() -> None:
    """Equal scores: weights fall by exp(-slope) from key to key, to either side of where the query stands."""
    q, k, v = torch.zeros(1, 3, 2, 8), torch.zeros(1, 7, 2, 8), torch.eye(8)[:7].view(1, 7, 1, 8).expand(1, 7, 2, 8)
    slopes = torch.tensor([0.5, 0.25])
    out = flash_attn_func(q, k, v, alibi_slopes=slopes)
    for i in range(3):
        weights = torch.exp(-slopes[:, None] * (torch.arange(7) - (i + 4)).abs())
        torch.testing.assert_close(out[0, i, :, :7], weights / weights.sum(dim=1, keepdim=True))


def test_alibi_slopes_of_no_batch_and_with_strides() -> None:
    q, k, v = (torch.randn(2, n, 2, 16) for n in (9, 12, 12))
    assert flash_attn_func(q[:0], k[:0], v[:0], alibi_slopes=torch.zeros(0, 2)).shape == (0, 9, 2, 16)
    slopes = torch.rand(2, 2)
    expected = flash_attn_func(q, k, v, alibi_slopes=slopes.T.contiguous())
    assert torch.equal(flash_attn_func(q, k, v, alibi_slopes=slopes.T), expected)


def test_alibi_slopes_of_zero_are_none() -> None:
    q, k, v = (torch.randn(2, n, 2, 16) for n in (9, 12, 12))
    assert torch.equal(flash_attn_func(q, k, v, alibi_slopes=torch.zeros(2)), flash_attn_func(q, k, v))


def test_causal_is_the_window_without_right_side() -> None:
    q, k, v = (torch.randn(2, n, 2, 16) for n in (9, 12, 12))
    assert torch.equal(flash_attn_func(q, k, v, window_size=(-1, 0)), flash_attn_func(q, k, v, causal=True))
    assert torch.equal(
        flash_attn_func(q, k, v, causal=True, window_size=(3, 5)), flash_attn_func(q, k, v, window_size=(3, 0))
    )


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = (torch.randn(2, n, 2, 16) for n in (12, 9, 9))  # three rows without a key
    nothing = torch.full((2,), -math.inf)
    with_sink = flash_attn_func(q, k, v, causal=True, return_lse=True, learnable_sink=nothing)
    without = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert torch.equal(with_sink[0], without[0])
    assert torch.equal(with_sink[1], without[1])
    assert (without[1][..., :3] == -math.inf).all()


def test_rows_without_keys_have_the_sink_as_lse() -> None:
    q, k, v = (torch.randn(2, n, 2, 16) for n in (12, 9, 9))
    sink = torch.tensor([1.5, -2.0])
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True, learnable_sink=sink)
    assert out[:, :3].count_nonzero() == 0
    assert torch.equal(lse[..., :3], sink[:, None].expand(2, 2, 3))


@settings(deadline=None)
@given(
    seqlen_q=st.integers(0, 12),
    seqlen_k=st.integers(0, 12),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 5), st.integers(-1, 5)),
    chunk=st.integers(0, 5),
)
def test_visible_keys(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int], chunk: int) -> None:
    starts, ends, positions = visible_keys(seqlen_q, seqlen_k, causal=causal, window_size=window, attention_chunk=chunk)
    for i in range(seqlen_q):
        assert int(positions[i]) == i + seqlen_k - seqlen_q
        expected = [j for j in range(seqlen_k) if sees(i, j, seqlen_q, seqlen_k, causal, window, chunk)]
        assert list(range(max(int(starts[i]), 0), min(int(ends[i]), seqlen_k))) == expected


def test_long_sequences_are_cut_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 40, 2, 16, dtype=F64) for _ in range(3))
    options: dict[str, Any] = {"window_size": (6, 1), "attention_chunk": 16, "alibi_slopes": torch.rand(2)}
    options["return_lse"] = True
    whole = flash_attn_func(q, k, v, **options)
    monkeypatch.setattr("flashhopper.reference.CHUNK_SCORES", 2 * 40 * 7)
    torch.testing.assert_close(flash_attn_func(q, k, v, **options), whole, rtol=1e-13, atol=1e-13)


def test_packed_tensors() -> None:
    qkv = torch.randn(2, 9, 3, 4, 16).requires_grad_()
    grouped = torch.randn(2, 9, 4 + 2 * 2, 16).requires_grad_()
    grad_out = torch.randn(2, 9, 4, 16)
    for packed, num_heads_q, parts in (
        (qkv, None, [qkv[:, :, i] for i in range(3)]),
        (grouped, 4, [grouped[:, :, :4], grouped[:, :, 4:6], grouped[:, :, 6:]]),
    ):
        out, lse = flash_attn_qkvpacked_func(packed, 0.3, True, num_heads_q=num_heads_q, return_lse=True)
        expected, expected_lse = flash_attn_func(*parts, 0.3, True, return_lse=True)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        (mine,) = torch.autograd.grad(out, packed, grad_out)
        (other,) = torch.autograd.grad(expected, packed, grad_out)
        assert torch.equal(mine, other)
        assert mine.abs().amin(dim=(0, 3)).count_nonzero() > 0


@pytest.mark.parametrize(
    "shape, num_heads_q, error, fragment",
    [
        ((2, 9, 4, 2, 16), None, ValueError, "with 5 dimensions it is (batch, seqlen, 3, heads, head_dim)"),
        ((2, 9, 3, 2, 16), 2, ValueError, "num_heads_q is 2; with qkv of 5 dimensions it must be None"),
        ((2, 9, 48), None, ValueError, "accepted are 5 dimensions, or 4 with num_heads_q"),
        ((2, 9, 8, 16), None, TypeError, "num_heads_q must be an int for qkv of 4 dimensions, got NoneType"),
        ((2, 9, 8, 16), True, TypeError, "num_heads_q must be an int for qkv of 4 dimensions, got bool"),
        ((2, 9, 8, 16), 5, ValueError, "with 8 heads; num_heads_q=5 leaves no k and v alike"),
        ((2, 9, 8, 16), 8, ValueError, "with 8 heads; num_heads_q=8 leaves no k and v alike"),
        ((2, 9, 8, 16), 0, ValueError, "num_heads_q=0 leaves no k and v alike"),
        ((2, 9, 8, 16), 3, ValueError, "num_heads_q=3 leaves no k and v alike"),
    ],
)
def test_wrong_packed_tensors(shape: tuple[int, ...], num_heads_q: Any, error: type[Exception], fragment: str) -> None:
    with pytest.raises(error) as raised:
        flash_attn_qkvpacked_func(torch.zeros(shape), num_heads_q=num_heads_q)
    assert fragment in str(raised.value)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_packed_tensors_with_any_number_of_heads_compile(fullgraph: bool) -> None:
    """Symbolic numbers have no divmod."""

    def attend(qkv: torch.Tensor, num_heads_q: int) -> torch.Tensor:
        return flash_attn_qkvpacked_func(qkv, num_heads_q=num_heads_q)

    compiled = torch.compile(attend, backend="aot_eager", dynamic=True, fullgraph=fullgraph)
    for num_heads_q, heads_k in ((4, 2), (6, 3), (8, 1)):
        qkv = torch.randn(1, 6, num_heads_q + 2 * heads_k, 16)
        assert torch.equal(compiled(qkv, num_heads_q), attend(qkv, num_heads_q))
