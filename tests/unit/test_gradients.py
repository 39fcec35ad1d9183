"""Gradients of flash_attn_func on CPU tensors: against finite differences in fp64, and what autograd does around it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashhopper import flash_attn_func

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v
SHAPES = {
    "equal": (1, 3, 3, 2, 2, 8, 8),
    "GQA, longer keys, dv > d": (1, 2, 5, 4, 2, 8, 16),
    "MQA, longer queries, dv < d": (2, 4, 2, 3, 1, 16, 8),  # causal: rows without keys
    "one query": (2, 1, 4, 2, 1, 8, 8),
    "one key": (1, 3, 1, 2, 1, 8, 8),
}
MEDIUM = (2, 33, 50, 4, 2, 16, 24)
SUBSETS = [n for size in (1, 2, 3) for n in itertools.combinations(range(3), size)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensors:
    batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v = shape
    sizes = ((seqlen_q, heads, head_dim), (seqlen_k, heads_k, head_dim), (seqlen_k, heads_k, head_dim_v))
    q, k, v = (torch.randn(batch, *size, dtype=dtype).requires_grad_() for size in sizes)
    return q, k, v


def blind_rows(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
    """How many query rows see no key: the first ones."""
    return max(q.shape[1] - k.shape[1], 0) if causal else 0


def by_hand(
    tensors: Tensors, grad_out: torch.Tensor, grad_lse: torch.Tensor, scale: float, causal: bool
) -> list[torch.Tensor]:
    """dq, dk and dv by the formulas that the kernels follow, in fp64: delta = rowsum(dO ∘ O) - dLSE."""
    group = tensors[0].shape[2] // tensors[1].shape[2]
    q, k, v = (x.detach().double().transpose(1, 2) for x in tensors)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    grad_out = grad_out.double().transpose(1, 2)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        visible = visible.tril(seqlen_k - seqlen_q)
    weights = torch.exp(q @ k.transpose(-1, -2) * scale) * visible
    p = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    delta = (grad_out * (p @ v)).sum(-1) - grad_lse.double()
    ds = p * (grad_out @ v.transpose(-1, -2) - delta[..., None]) * scale
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad_out
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return [x.transpose(1, 2) for x in (ds @ k, dk, dv)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_gradcheck(name: str, causal: bool) -> None:
    """Finite differences of out and of LSE, where it is finite."""
    q, k, v = inputs(SHAPES[name])
    seeing = slice(blind_rows(q, k, causal), None)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_attn_func(q, k, v, softmax_scale=0.7, causal=causal, return_lse=True)
        return out, lse[:, :, seeing]

    assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("needed", SUBSETS)
def test_gradcheck_of_subsets(needed: tuple[int, ...], causal: bool) -> None:
    """The others are constants."""
    tensors = inputs(SHAPES["GQA, longer keys, dv > d"])
    for i, x in enumerate(tensors):
        x.requires_grad_(i in needed)
    assert torch.autograd.gradcheck(lambda *qkv: flash_attn_func(*qkv, causal=causal), tensors)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softmax_scale", [None, 0.0, 0.5])
@pytest.mark.parametrize("shape", [*SHAPES.values(), MEDIUM, (1, 50, 33, 6, 1, 8, 8)])
def test_the_formulas_of_the_kernels(shape: tuple[int, ...], softmax_scale: float | None, causal: bool) -> None:
    tensors = inputs(shape)
    out, lse = flash_attn_func(*tensors, softmax_scale=softmax_scale, causal=causal, return_lse=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    actual = torch.autograd.grad((out, lse), tensors, (grad_out, grad_lse))
    scale = shape[5] ** -0.5 if softmax_scale is None else softmax_scale
    for gradient, expected in zip(actual, by_hand(tensors, grad_out, grad_lse, scale, causal), strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-11)
    if softmax_scale == 0.0:
        assert actual[0].count_nonzero() == actual[1].count_nonzero() == 0
    assert actual[0][:, : blind_rows(*tensors[:2], causal)].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_low_precision_gradients_are_rounded_once(causal: bool, dtype: torch.dtype) -> None:
    """Computed in fp32, the sums over heads that share a key too."""
    tensors = inputs(MEDIUM, dtype)
    out, lse = flash_attn_func(*tensors, causal=causal, return_lse=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    actual = torch.autograd.grad((out, lse), tensors, (grad_out, grad_lse))
    half_ulp = torch.finfo(dtype).eps / 2
    for gradient, expected in zip(actual, by_hand(tensors, grad_out, grad_lse, 0.25, causal), strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=half_ulp + 1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_lse_alone(causal: bool) -> None:
    """Its gradient is the weights': nothing for v."""
    tensors = inputs((2, 40, 33, 4, 2, 16, 8))
    out, lse = flash_attn_func(*tensors, causal=causal, return_lse=True)
    grad_lse = torch.randn_like(lse)
    dq, dk, dv = torch.autograd.grad(lse, tensors, grad_lse, materialize_grads=True)
    expected = by_hand(tensors, torch.zeros_like(out), grad_lse, 0.25, causal)
    torch.testing.assert_close(dq, expected[0], atol=1e-12, rtol=1e-11)
    torch.testing.assert_close(dk, expected[1], atol=1e-12, rtol=1e-11)
    assert dv.count_nonzero() == 0


def test_z_loss_on_rows_with_keys_only_is_finite() -> None:
    """The square of -inf is a loss of inf, but the rows that see a key can be chosen."""
    tensors = inputs((1, 7, 4, 2, 1, 8, 8))
    out, lse = flash_attn_func(*tensors, causal=True, return_lse=True)
    seeing = lse[:, :, 3:]
    assert lse[:, :, :3].eq(-math.inf).all()
    (out.sum() + 0.5 * seeing.square().sum()).backward()
    grad_lse = torch.nn.functional.pad(seeing.detach(), (3, 0))
    expected = by_hand(tensors, torch.ones_like(out), grad_lse, 8**-0.5, True)
    for x, gradient in zip(tensors, expected, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(x.grad, gradient, atol=1e-12, rtol=1e-11)


@pytest.mark.parametrize("needed", SUBSETS)
def test_only_the_gradients_asked_for(needed: tuple[int, ...]) -> None:
    tensors = inputs(MEDIUM, torch.bfloat16)
    grad_out = torch.randn(2, 33, 4, 24, dtype=torch.bfloat16)
    expected = torch.autograd.grad(flash_attn_func(*tensors, causal=True), tensors, grad_out)
    some = [x.detach().requires_grad_(i in needed) for i, x in enumerate(tensors)]
    flash_attn_func(*some, causal=True).backward(grad_out)
    for i, (x, gradient) in enumerate(zip(some, expected, strict=True)):
        if i in needed:
            assert x.grad is not None
            assert torch.equal(x.grad, gradient)
        else:
            assert x.grad is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    tensors = inputs(MEDIUM, torch.bfloat16)
    grad_out = torch.randn(2, 33, 4, 24, dtype=torch.bfloat16)
    expected = torch.autograd.grad(flash_attn_func(*tensors, causal=True), tensors, grad_out)
    out = checkpoint(lambda *qkv: flash_attn_func(*qkv, causal=True), *tensors, use_reentrant=use_reentrant)
    out.backward(grad_out)
    for x, gradient in zip(tensors, expected, strict=True):
        assert x.grad is not None
        assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    """Out keeps the dtype of q, as on CUDA, and the arithmetic its precision. The backward runs outside, as PyTorch
    asks for."""
    tensors = inputs(MEDIUM, dtype)
    grad_out = torch.randn(2, 33, 4, 24, dtype=dtype)

    def run(autocast: bool) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out, lse = flash_attn_func(*tensors, causal=True, return_lse=True)
        return out, lse, *torch.autograd.grad(out, tensors, grad_out)

    for x, y in zip(run(True), run(False), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def test_autocast_of_the_layers_around() -> None:
    """fp32 weights get fp32 gradients through a bf16 call."""
    x, weight = torch.randn(2, 33, 32), (torch.randn(3 * 4 * 16, 32) / 32**0.5).requires_grad_()
    grad_out = torch.randn(2, 33, 4, 16)

    def gradient(autocast: bool) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            q, k, v = torch.nn.functional.linear(x, weight).unflatten(-1, (3, 4, 16)).unbind(2)
            out = flash_attn_func(q, k, v, causal=True)
        assert out.dtype == (torch.bfloat16 if autocast else torch.float32)
        (result,) = torch.autograd.grad((out.float() * grad_out).sum(), weight)
        return result

    low, full = gradient(True), gradient(False)
    assert low.dtype == torch.float32
    error = (low - full).square().mean().sqrt() / full.square().mean().sqrt()
    assert 1e-4 < error < 0.02  # bf16, but no worse


@pytest.mark.parametrize("causal", [False, True])
def test_expanded_gradients(causal: bool) -> None:
    """What ``sum()`` hands back has strides of 0; so may inputs."""
    tensors = inputs(MEDIUM)
    out, lse = flash_attn_func(*tensors, causal=causal, return_lse=True)
    ones, ones_lse = torch.ones_like(out), torch.ones_like(lse)
    expected = torch.autograd.grad((out, lse), tensors, (ones, ones_lse), retain_graph=True)
    for x, y in zip(torch.autograd.grad(out.sum() + lse.sum(), tensors), expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-13, rtol=1e-12)
    q, k, v = tensors
    small = [x[:1].detach().requires_grad_() for x in (q, k, v)]
    big = [x.expand(3, -1, -1, -1) for x in small]
    grad_out = torch.randn(3, 33, 4, 24, dtype=torch.float64)
    actual = torch.autograd.grad(flash_attn_func(*big, causal=causal), small, grad_out)
    expected_sum = by_hand(
        (small[0], small[1], small[2]), grad_out.sum(0, keepdim=True), torch.zeros(1, 4, 33), 0.25, causal
    )
    for gradient, x in zip(actual, expected_sum, strict=True):
        torch.testing.assert_close(gradient, x, atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch, seqlen_q, seqlen_k", [(2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 5, 7)])
def test_zero_lengths_have_gradients_of_zero(batch: int, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    tensors = inputs((batch, seqlen_q, seqlen_k, 4, 2, 8, 16), torch.bfloat16)
    out = flash_attn_func(*tensors, causal=causal)
    for gradient, x in zip(torch.autograd.grad(out.sum(), tensors), tensors, strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
        assert gradient.count_nonzero() == 0


def test_a_packed_tensor_gets_one_gradient() -> None:
    packed = torch.randn(2, 20, 4 + 2 + 2, 16, dtype=torch.float64, requires_grad=True)
    q, k, v = packed.split((4, 2, 2), dim=2)
    grad_out = torch.randn(2, 20, 4, 16, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(flash_attn_func(q, k, v, causal=True), packed, grad_out)
    expected = by_hand((q, k, v), grad_out, torch.zeros(2, 4, 20), 0.25, True)
    torch.testing.assert_close(gradient, torch.cat(expected, dim=2), atol=1e-12, rtol=1e-11)
