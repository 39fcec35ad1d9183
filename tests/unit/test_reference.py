"""The oracle itself, against PyTorch's attention in fp64 with explicit masks, and against closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from flashhopper import reference
from flashhopper.reference import attention

# batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v
SHAPES = [
    (2, 33, 33, 3, 3, 16, 16),
    (1, 20, 57, 6, 1, 8, 24),  # GQA 6:1, sq < sk, dv > d
    (2, 57, 20, 4, 2, 32, 8),  # sq > sk: causal rows without keys, dv < d
    (1, 1, 40, 12, 2, 16, 16),
    (3, 40, 1, 2, 1, 8, 8),
    (1, 2, 9, 2, 1, 8, 8),
]

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> Tensors:
    batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v = shape
    sizes = ((seqlen_q, heads, head_dim), (seqlen_k, heads_k, head_dim), (seqlen_k, heads_k, head_dim_v))
    q, k, v = (torch.randn(batch, *size, dtype=dtype).requires_grad_(requires_grad) for size in sizes)
    return q, k, v


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, ...]:
    """PyTorch's math attention in fp64 on the rows that see a key, and logsumexp of their masked scores."""
    group = q.shape[2] // k.shape[2]
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        mask = mask.tril(seqlen_k - seqlen_q)
    seeing = mask.any(dim=1)
    q, mask = q[:, :, seeing], mask[seeing]
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, -math.inf)
    return out.transpose(1, 2), scores.logsumexp(-1), seeing


def gradients(loss: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, tensors))


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, tol: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, atol=tol, rtol=tol)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_gradients_match_pytorch(shape: tuple[int, ...], causal: bool) -> None:
    q, k, v = inputs(shape, requires_grad=True)
    out, lse = attention(q, k, v, softmax_scale=0.3, causal=causal)
    ref_out, ref_lse, seeing = oracle(q, k, v, 0.3, causal)
    assert out.dtype == lse.dtype == torch.float64
    assert_equal(out[:, seeing], ref_out)
    assert_equal(lse[:, :, seeing], ref_lse)
    assert out[:, ~seeing].count_nonzero() == 0
    assert lse[:, :, ~seeing].eq(-math.inf).all()

    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    actual = gradients((out * grad_out).sum() + (lse * grad_lse)[:, :, seeing].sum(), q, k, v)
    ref_loss = (ref_out * grad_out[:, seeing]).sum() + (ref_lse * grad_lse[:, :, seeing]).sum()
    for gradient, expected in zip(actual, gradients(ref_loss, q, k, v), strict=True):
        assert_equal(gradient, expected)
    assert actual[0][:, ~seeing].count_nonzero() == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_inputs_are_computed_in_fp32(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = inputs((2, 40, 60, 4, 2, 32, 16), dtype)
    out, lse = attention(q, k, v, softmax_scale=32**-0.5, causal=causal)
    ref_out, ref_lse, _ = oracle(q, k, v, 32**-0.5, causal)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    half_ulp = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), ref_out, atol=1e-6, rtol=half_ulp + 1e-6)  # rounded once, at the end
    torch.testing.assert_close(lse.double(), ref_lse, atol=2e-6, rtol=1e-6)


def test_compute_dtype_sets_the_precision() -> None:
    q, k, v = inputs((1, 50, 50, 2, 2, 64, 64), torch.bfloat16)
    _, ref_lse, _ = oracle(q, k, v, 0.125, True)
    _, lse64 = attention(q, k, v, softmax_scale=0.125, causal=True, compute_dtype=torch.float64)
    assert lse64.dtype == torch.float64
    assert_equal(lse64, ref_lse)
    out16, lse16 = attention(q, k, v, softmax_scale=0.125, causal=True, compute_dtype=torch.bfloat16)
    assert (out16.dtype, lse16.dtype) == (torch.bfloat16, torch.float32)
    error = (lse16 - ref_lse).abs().max().item()
    assert 1e-4 < error < 0.1  # scores rounded to 8 bits


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch, seqlen_q, seqlen_k", [(2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 5, 7)])
def test_zero_lengths(batch: int, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    q, k, v = inputs((batch, seqlen_q, seqlen_k, 4, 2, 8, 16), requires_grad=True)
    out, lse = attention(q, k, v, softmax_scale=1.0, causal=causal)
    assert out.shape == (batch, seqlen_q, 4, 16)
    assert lse.shape == (batch, 4, seqlen_q)
    assert out.count_nonzero() == 0
    assert lse.eq(-math.inf).all()
    for gradient, x in zip(gradients(out.sum() + lse.exp().sum(), q, k, v), (q, k, v), strict=True):
        assert gradient.shape == x.shape
        assert gradient.count_nonzero() == 0


GRADCHECK_SHAPES = [(1, 2, 4, 2, 1, 3, 2), (1, 4, 2, 2, 2, 2, 3)]  # the second: causal rows without keys


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", GRADCHECK_SHAPES)
@pytest.mark.parametrize("budget", [2**24, 8])  # whole, and cut into chunks of 1 row
def test_gradcheck(shape: tuple[int, ...], causal: bool, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK_SCORES", budget)
    seeing = slice(max(shape[1] - shape[2], 0) if causal else 0, None)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention(q, k, v, softmax_scale=0.7, causal=causal)
        return out, lse[:, :, seeing]  # -inf has no finite difference

    q, k, v = inputs(shape, requires_grad=True)
    assert torch.autograd.gradcheck(run, (q, k, v))
    if budget > 8:
        assert torch.autograd.gradgradcheck(run, (q, k, v))


def test_rows_without_keys_pass_no_gradient_whatever_arrives() -> None:
    q, k, v = inputs((1, 7, 4, 2, 1, 8, 8), requires_grad=True)
    out, lse = attention(q, k, v, softmax_scale=0.5, causal=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v), (grad_out, grad_lse), retain_graph=True)
    for poison in (math.nan, math.inf):
        grad_out[:, :3], grad_lse[:, :, :3] = poison, poison
        actual = torch.autograd.grad((out, lse), (q, k, v), (grad_out, grad_lse), retain_graph=True)
        assert actual[0][:, :3].count_nonzero() == 0
        for gradient, clean in zip(actual, expected, strict=True):
            assert torch.equal(gradient, clean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scale_zero_is_uniform_attention(dtype: torch.dtype) -> None:
    q, k, v = inputs((2, 6, 9, 2, 1, 8, 8), dtype)
    out, lse = attention(q * 100, k * 100, v, softmax_scale=0.0, causal=True)
    counts = torch.arange(4, 10)
    means = torch.stack([v[:, :n].double().mean(1) for n in counts.tolist()], 1).expand(2, 6, 2, 8)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), means, atol=eps, rtol=eps)
    torch.testing.assert_close(lse.double(), counts.double().log().expand(2, 2, 6), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("size", [1e5, -1e5])
def test_large_logits(size: float) -> None:
    q, k, v = inputs((1, 30, 30, 2, 2, 8, 8))
    q[..., 0] = 1.0
    k[..., 0] = size * torch.rand(30, 1, dtype=torch.float64)
    out, lse = attention(q, k, v, softmax_scale=1.0, causal=True)
    ref_out, ref_lse, _ = oracle(q, k, v, 1.0, True)
    assert_equal(out, ref_out, 1e-9)
    assert_equal(lse, ref_lse)


def test_any_strides() -> None:
    packed = torch.randn(2, 21, 8, 16, dtype=torch.float64)  # 4 q heads, 2 k heads, 2 v heads
    heads_first = torch.randn(2, 4, 21, 32, dtype=torch.float64)
    one_key_head = torch.randn(2, 21, 1, 16, dtype=torch.float64)
    q, k, v = packed[:, :, :4], packed[:, :, 4:6], packed[:, :, 6:]
    cases = (
        (q, k, v),
        (heads_first.transpose(1, 2)[..., 8:24], k, v),
        (q.flip(1)[:, ::3], k[:, ::2], v[:, ::2]),
        (q, one_key_head.expand(2, 21, 2, 16), v),
    )
    for strided in cases:
        dense = [x.clone(memory_format=torch.contiguous_format) for x in strided]
        for x, y in zip(
            attention(*strided, softmax_scale=0.25, causal=True),
            attention(*dense, softmax_scale=0.25, causal=True),
            strict=True,
        ):
            assert_equal(x, y, 1e-13)
        assert_equal(attention(*strided, softmax_scale=0.25, causal=True)[0], oracle(*dense, 0.25, True)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 32, 33])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(33, 33), (33, 50), (33, 12)])
def test_chunks_change_nothing(
    seqlen_q: int, seqlen_k: int, rows: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs((2, seqlen_q, seqlen_k, 4, 2, 8, 16), requires_grad=True)
    grad_out = torch.randn(2, seqlen_q, 4, 16, dtype=torch.float64)
    grad_lse = torch.randn(2, 4, seqlen_q, dtype=torch.float64)

    def run() -> tuple[torch.Tensor, ...]:
        out, lse = attention(q, k, v, softmax_scale=0.5, causal=causal)
        return out, lse, *torch.autograd.grad((out, lse), (q, k, v), (grad_out, grad_lse))

    whole = run()
    monkeypatch.setattr(reference, "CHUNK_SCORES", rows * 2 * 4 * seqlen_k)
    for x, y in zip(run(), whole, strict=True):
        assert_equal(x, y, 1e-12)


class LargestTensor(TorchDispatchMode):
    """Records how many elements the largest tensor has that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_memory_stays_within_the_chunk_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor, forward or backward, is larger than the budget (here q's size); the scores are 64 times as large.

    Nor does autograd keep them: what it saves between forward and backward is of the size of the inputs.
    """
    monkeypatch.setattr(reference, "CHUNK_SCORES", 2**17)
    q, k, v = inputs((1, 1024, 1024, 8, 1, 16, 16), torch.float32, requires_grad=True)
    saved: dict[int, int] = {}  # bytes by address

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out, lse = attention(q, k, v, softmax_scale=0.25, causal=False)
        grad_q, _, _ = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert largest.numel == 2**17 == q.numel()
    assert 0 < sum(saved.values()) <= 2 * q.nbytes
    assert grad_q.isfinite().all()
