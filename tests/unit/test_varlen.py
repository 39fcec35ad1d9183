"""Ragged batches on CPU tensors: against attention row by row, and what lies outside the used rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import I32, Batch, Side, cu
from row_by_row import F64, row_by_row

from flashhopper import flash_attn_func, flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func, ops
from flashhopper import launch_backward as backward_module
from flashhopper.options import AttentionOptions
from flashhopper.plan import Plan
from flashhopper.problem import RaggedTensors, SoftmaxTensors
from flashhopper.reference_varlen import attention

Tensors = tuple[torch.Tensor, ...]


def inputs(q: Side, k: Side, heads: int = 4, heads_k: int = 2, dtype: torch.dtype = F64) -> Tensors:
    shapes = (q.total, heads, 16), (k.total, heads_k, 16), (k.total, heads_k, 8)
    return tuple(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)


def run(tensors: Tensors, q: Side, k: Side, slack: int = 0, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE of the public function; ``slack``: by how much the bounds exceed the longest sequence."""
    result: tuple[torch.Tensor, torch.Tensor] = flash_attn_varlen_func(
        *tensors, **Batch(q, k, slack).arguments(), return_lse=True, **options
    )
    return result


def expected(tensors: Tensors, q: Side, k: Side, sink: torch.Tensor | None, **options: Any) -> Tensors:
    """Sequence by sequence, row by row."""
    qs, ks, vs = tensors
    out = qs.new_zeros(q.total, qs.shape[1], vs.shape[2])
    lse = qs.new_full((qs.shape[1], q.total), -math.inf)
    slopes = options.get("alibi_slopes")
    for i, (q_rows, k_rows) in enumerate(zip(q.slices, k.slices, strict=True)):
        sequence = (x[rows][None] for x, rows in ((qs, q_rows), (ks, k_rows), (vs, k_rows)))
        if slopes is not None:
            options["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[i]
        one_out, one_lse = row_by_row(*sequence, sink, **options)
        out[q_rows], lse[:, q_rows] = one_out[0], one_lse[0]
    return out, lse


CASES = {
    "equal": (Side([5, 5]), Side([5, 5])),
    "empty queries": (Side([0, 0, 7]), Side([0, 1, 9])),
    "empty keys": (Side([3, 4, 2]), Side([0, 5, 0])),
    "uneven": (Side([1, 11, 2, 0]), Side([9, 3, 2, 6])),
    "none": (Side([], outside=0), Side([], outside=0)),
    "all empty": (Side([0, 0]), Side([0, 0])),
    "no keys": (Side([3, 2]), Side([0, 0])),
    "rows outside": (Side([3, 4], outside=3), Side([5, 2], outside=2)),
    "no sequence but rows": (Side([], outside=3), Side([], outside=2)),
    "used": (Side([6, 5, 4], used=[4, 0, 4], outside=1), Side([7, 3, 6], used=[2, 3, 0])),
    "used keys": (Side([3, 3]), Side([8, 8], used=[5, 8], outside=2)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "softmax_scale": 0.25},
    "window": {"window_size": (2, 1)},
    "causal window softcap": {"causal": True, "window_size": (3, -1), "softcap": 1.5},
    "chunks": {"attention_chunk": 4, "causal": True},
}


@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("q, k", CASES.values(), ids=list(CASES))
def test_against_row_by_row(q: Side, k: Side, options: dict[str, Any], with_sink: bool) -> None:
    tensors = inputs(q, k)
    sink = torch.randn(4, dtype=F64).requires_grad_() if with_sink else None
    leaves = tensors if sink is None else (*tensors, sink)
    weights = torch.randn(q.total, 4, 8, dtype=F64), torch.randn(4, q.total, dtype=F64)

    def loss(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return (out * weights[0]).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * weights[1]).sum()

    actual = run(tensors, q, k, slack=2, learnable_sink=sink, **options)
    wanted = expected(tensors, q, k, sink, **{name: x for name, x in options.items() if name != "softmax_scale"})
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(loss(*actual), leaves)
    total = loss(*wanted)
    theirs = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else (None,) * len(leaves)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if other is None else other, rtol=1e-10, atol=1e-12)
    assert actual[0][q.unused].count_nonzero() == 0
    assert (actual[1][:, q.unused] == -math.inf).all()


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("name", ["uneven", "used", "rows outside", "none"])
def test_alibi_against_row_by_row(name: str, per_sequence: bool) -> None:
    q, k = CASES[name]
    tensors = inputs(q, k)
    slopes = torch.rand((len(q.owned), 4) if per_sequence else (4,)) + 0.1
    actual = run(tensors, q, k, causal=True, alibi_slopes=slopes)
    wanted = expected(tensors, q, k, None, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_unused_rows_are_never_read_into_a_result(causal: bool, poison: float) -> None:
    q = Side([6, 5, 4, 3], used=[4, 0, 4, 2], outside=2)
    k = Side([7, 3, 6, 2], used=[2, 3, 0, 2], outside=1)
    tensors = inputs(q, k)
    poisoned = [x.detach().clone() for x in tensors]
    for x, unused in zip(poisoned, (q.unused, k.unused, k.unused), strict=True):
        assert unused.count_nonzero() >= 6
        x[unused] = poison
        x.requires_grad_()
    grad_out, grad_lse = torch.randn(q.total, 4, 8, dtype=F64), torch.randn(4, q.total, dtype=F64)
    results = []
    for each in (tensors, poisoned):
        out, lse = run(tuple(each), q, k, causal=causal)
        results.append((out, lse, *torch.autograd.grad((out, lse), each, (grad_out, grad_lse))))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)
    for gradient, unused in zip(results[1][2:], (q.unused, k.unused, k.unused), strict=True):
        assert gradient.isfinite().all()
        assert gradient[unused].count_nonzero() == 0
        assert gradient.count_nonzero() > 0


def test_one_sequence_is_a_dense_call() -> None:
    q, k = Side([9]), Side([13])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensors = inputs(q, k, dtype=dtype)
        out, lse = run(tensors, q, k, causal=True)
        dense_out, dense_lse = flash_attn_func(*(x[None] for x in tensors), causal=True, return_lse=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        assert torch.equal(out, dense_out[0])
        assert torch.equal(lse, dense_lse[0])


def test_queries_without_keys_have_zero_gradients_and_keys_without_queries_too() -> None:
    q, k = Side([0, 3, 4]), Side([5, 0, 6])
    tensors = inputs(q, k)
    out, lse = run(tensors, q, k)
    assert (lse[:, :3] == -math.inf).all()
    dq, dk, dv = torch.autograd.grad((out.sum() + lse[:, 3:].sum()), tensors)
    assert dq[:3].count_nonzero() == dk[:5].count_nonzero() == dv[:5].count_nonzero() == 0
    assert dq[3:].count_nonzero() == dq[3:].numel()
    assert dv[5:].count_nonzero() == dv[5:].numel()


@settings(deadline=None, max_examples=50)
@given(data=st.data(), causal=st.booleans())
def test_a_sequence_does_not_see_its_neighbours(data: st.DataObject, causal: bool) -> None:
    """Each sequence is what a dense call of it alone gives, bit for bit, whatever lies around it."""
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5))
    q, k = Side([x for x, _ in lengths]), Side([y for _, y in lengths])
    with torch.random.fork_rng():
        torch.manual_seed(len(lengths))
        qs, ks, vs = inputs(q, k, dtype=torch.float32)
    out, lse = run((qs, ks, vs), q, k, causal=causal)
    for q_rows, k_rows in zip(q.slices, k.slices, strict=True):
        alone = flash_attn_func(qs[q_rows][None], ks[k_rows][None], vs[k_rows][None], causal=causal, return_lse=True)
        assert torch.equal(out[q_rows], alone[0][0])
        assert torch.equal(lse[:, q_rows], alone[1][0])


def test_second_derivatives_on_the_cpu() -> None:
    q, k = Side([2, 3], used=[2, 1]), Side([4, 2])
    tensors = inputs(q, k, heads=2, heads_k=1)
    assert torch.autograd.gradgradcheck(lambda *x: run(x, q, k, causal=True)[0], tensors)


def test_packed_tensors() -> None:
    side = Side([4, 0, 6], used=[3, 0, 6], outside=1)
    for shape, num_heads_q, parts in (((11, 3, 4, 16), None, (4, 4)), ((11, 4 + 2 * 2, 16), 4, (4, 2))):
        packed = torch.randn(shape, dtype=F64).requires_grad_()
        flat = packed.flatten(1, 2) if num_heads_q is None else packed
        q, k, v = flat.split([parts[0], parts[1], parts[1]], dim=1)
        out, lse = flash_attn_varlen_qkvpacked_func(
            packed, side.cu_seqlens(), 6, 0.3, True, seqused=side.seqused(), num_heads_q=num_heads_q, return_lse=True
        )
        wanted = run((q, k, v), side, side, softmax_scale=0.3, causal=True)
        assert torch.equal(out, wanted[0])
        assert torch.equal(lse, wanted[1])
        grad_out = torch.randn_like(out)
        (mine,) = torch.autograd.grad(out, packed, grad_out)
        (other,) = torch.autograd.grad(wanted[0], packed, grad_out)
        assert torch.equal(mine, other)
        assert mine[~side.unused].abs().amin(dim=-1).count_nonzero() > 0


@pytest.mark.parametrize(
    "shape, num_heads_q, error, fragment",
    [
        ((9, 4, 2, 16), None, ValueError, "with 4 dimensions it is (total, 3, heads, head_dim)"),
        ((9, 3, 2, 16), 2, ValueError, "num_heads_q is 2; with qkv of 4 dimensions it must be None"),
        ((9, 48), None, ValueError, "accepted are 4 dimensions, or 3 with num_heads_q"),
        ((9, 8, 16), None, TypeError, "num_heads_q must be an int for qkv of 3 dimensions, got NoneType"),
        ((9, 8, 16), 5, ValueError, "with 8 heads; num_heads_q=5 leaves no k and v alike"),
    ],
)
def test_wrong_packed_tensors(shape: tuple[int, ...], num_heads_q: Any, error: type[Exception], fragment: str) -> None:
    with pytest.raises(error) as raised:
        flash_attn_varlen_qkvpacked_func(
            torch.zeros(shape), torch.tensor([0, 9], dtype=I32), 9, num_heads_q=num_heads_q
        )
    assert fragment in str(raised.value)


WRONG_LENGTHS: list[tuple[dict[str, Any], type[Exception], str]] = [
    # types
    ({"cu_seqlens_q": [0, 4, 7]}, TypeError, "cu_seqlens_q must be a torch.Tensor, got list"),
    ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
    ({"seqused_k": 3}, TypeError, "seqused_k must be a torch.Tensor or None, got int"),
    ({"max_seqlen_q": None}, TypeError, "max_seqlen_q must be an int, got NoneType"),
    ({"max_seqlen_k": torch.tensor(9)}, TypeError, "max_seqlen_k must be an int, got Tensor"),
    ({"max_seqlen_q": True}, TypeError, "max_seqlen_q must be an int, got bool"),
    ({"cu_seqlens_q": cu(0, 4, 7, dtype=torch.int64)}, TypeError, "cu_seqlens_q has dtype torch.int64; accepted is"),
    ({"seqused_q": cu(4, 3, dtype=torch.int64)}, TypeError, "seqused_q has dtype torch.int64; accepted is torch.int32"),
    # devices and shapes
    ({"cu_seqlens_k": cu(0, 4, 9, device="meta")}, ValueError, "cu_seqlens_k is on meta, q on cpu"),
    ({"seqused_q": cu(4, 3, device="meta")}, ValueError, "seqused_q is on meta, q on cpu"),
    ({"cu_seqlens_q": cu()}, ValueError, "cu_seqlens_q has shape (0,); it must be (batch + 1,)"),
    ({"cu_seqlens_q": cu(0, 4, 7)[None]}, ValueError, "cu_seqlens_q has shape (1, 3); it must be (batch + 1,)"),
    ({"cu_seqlens_k": cu(0, 9)}, ValueError, "cu_seqlens_k has shape (2,), cu_seqlens_q (3,): it must be (3,)"),
    ({"seqused_k": cu(4, 5, 6)}, ValueError, "seqused_k has shape (3,), cu_seqlens_q (3,): it must be (2,)"),
    ({"cu_seqlens_k": cu(0, 1, 4, 2, 9)[::2]}, ValueError, "cu_seqlens_k has strides (2,); it must be contiguous"),
    ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1; accepted are lengths from 0"),
    ({"max_seqlen_k": 2**31}, ValueError, "max_seqlen_k is 2147483648; accepted are lengths from 0"),
    ({"q": torch.zeros(1, 7, 4, 16)}, ValueError, "q must have 3 dimensions (total, heads, head_dim)"),
    ({"v": torch.zeros(8, 2, 16)}, ValueError, "v has total length 8, k has 9: they must be equal"),
    ({"k": torch.zeros(9, 3, 16), "v": torch.zeros(9, 3, 16)}, ValueError, "q has 4 heads, k has 3"),
    ({"k": torch.zeros(9, 2, 24)}, ValueError, "k has head_dim 24, q has 16"),
    # contents
    ({"cu_seqlens_q": cu(1, 4, 7)}, ValueError, "cu_seqlens_q begins with 1; it must begin with 0"),
    ({"cu_seqlens_k": cu(0, 5, 4)}, ValueError, "cu_seqlens_k falls from 5 to 4; it must never fall"),
    ({"cu_seqlens_q": cu(0, 4, 8)}, ValueError, "cu_seqlens_q ends with 8; there are 7 rows"),
    ({"seqused_q": cu(5, 3)}, ValueError, "seqused_q[0] is 5; accepted are 0 to the sequence's length, 4"),
    ({"seqused_k": cu(4, -1)}, ValueError, "seqused_k[1] is -1; accepted are 0 to the sequence's length, 5"),
    ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q is 3, but sequence 0 has length 4"),
    ({"max_seqlen_k": 4}, ValueError, "max_seqlen_k is 4, but sequence 1 has length 5"),
]


def arguments() -> dict[str, Any]:
    tensors = {"q": torch.zeros(7, 4, 16), "k": torch.zeros(9, 2, 16), "v": torch.zeros(9, 2, 16)}
    lengths = {"cu_seqlens_q": cu(0, 4, 7), "cu_seqlens_k": cu(0, 4, 9), "max_seqlen_q": 4, "max_seqlen_k": 5}
    return tensors | lengths


@pytest.mark.parametrize("replaced, error, fragment", WRONG_LENGTHS, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_lengths(replaced: dict[str, Any], error: type[Exception], fragment: str) -> None:
    assert flash_attn_varlen_func(**arguments()).shape == (7, 4, 16)
    with pytest.raises(error) as raised:
        flash_attn_varlen_func(**(arguments() | replaced))
    assert type(raised.value) is error
    assert fragment in str(raised.value)


def test_bounds_are_of_used_lengths() -> None:
    """A cache's slots are longer than what is in them."""
    used = {"seqused_k": cu(2, 3), "max_seqlen_k": 3}
    assert flash_attn_varlen_func(**(arguments() | used)).shape == (7, 4, 16)
    with pytest.raises(ValueError, match="max_seqlen_k is 2, but sequence 1 has length 3"):
        flash_attn_varlen_func(**(arguments() | used | {"max_seqlen_k": 2}))


class ReferencePlan(Plan):
    def __init__(self) -> None:
        self.options = AttentionOptions(causal=True)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        return attention(q, k, v, rest[1], softmax_scale=0.25, causal=True)


def test_the_lengths_reach_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The autograd function of CUDA tensors, with the reference in place of the kernels."""
    q, k = Side([4, 3]), Side([4, 5], used=[4, 2])
    ragged = RaggedTensors(4, 5, q.cu_seqlens(), k.cu_seqlens(), q.seqused(), k.seqused())
    tensors = inputs(q, k)
    seen: list[RaggedTensors] = []

    def backward(
        dout: torch.Tensor, *saved: Any, ragged: RaggedTensors, softmax_tensors: SoftmaxTensors, mods: None
    ) -> tuple[torch.Tensor | None, ...]:
        seen.append(ragged)
        leaves = [x.detach().requires_grad_() for x in saved[:3]]
        with torch.enable_grad():
            out, _ = attention(leaves[0], leaves[1], leaves[2], ragged, softmax_scale=0.25, causal=True)
        return *torch.autograd.grad(out, leaves, dout), None

    monkeypatch.setattr(backward_module, "backward", backward)
    grad_out = torch.randn(7, 4, 8, dtype=F64)
    results = []
    for result in (
        ops._attention(ReferencePlan(), *tensors, SoftmaxTensors(), ragged),
        run(tensors, q, k, causal=True),
    ):
        results.append(torch.autograd.grad(result[0], tensors, grad_out))
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)
    assert seen[0][:2] == ragged[:2]
    for sent, arrived in zip(ragged[2:], seen[0][2:], strict=True):
        assert (sent is None) == (arrived is None)
        assert sent is None or torch.equal(sent, arrived)
