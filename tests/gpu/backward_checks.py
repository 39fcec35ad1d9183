"""Gradients: what flows in, how they are taken, and how they are compared; shared by the GPU tests of the backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from checks import BF16, FENCE, Result, Shape, Tensors, scale_of
from tolerance import assert_close_on_average, assert_close_to_reference, largest_error, tolerance

from flashhopper import current, flash_attn_func
from flashhopper.options import AttentionOptions
from flashhopper.reference import attention, visible_keys

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

NAMES = ("dq", "dk", "dv")
MANY_KEYS = (
    32  # with 1 to 3, rounding out for delta costs as much as rounding every score; else a quarter of it was seen
)
FULL, CAUSAL = AttentionOptions(), AttentionOptions(causal=True)
REPEATABLE = AttentionOptions(causal=True, deterministic=True)


class Incoming(NamedTuple):
    """What a loss hands to the backward; None where it does not depend on that output."""

    grad_out: torch.Tensor | None
    grad_lse: torch.Tensor | None = None


def random_incoming(shape: Shape, dtype: torch.dtype = BF16, lse: bool = False) -> Incoming:
    """Normal values for out, with ``lse`` for LSE too."""
    b, sq, _, h, _, _, dv = shape
    grad_out = torch.randn(b, sq, h, dv, device="cuda").to(dtype)
    return Incoming(grad_out, torch.randn(b, h, sq, device="cuda") if lse else None)


def leaves(tensors: Tensors) -> Tensors:
    """The same memory, as tensors that need a gradient."""
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    return q, k, v


def attend(tensors: Tensors, options: AttentionOptions = FULL) -> Result:
    """The public call as it is, without any checks."""
    result: Result = flash_attn_func(
        *tensors,
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        deterministic=options.deterministic,
        sm_margin=options.sm_margin,
        return_lse=True,
    )
    return result


def pull(result: Result, inputs: Tensors, incoming: Incoming, *, retain_graph: bool = False) -> Gradients:
    """Gradients of a result that autograd has recorded."""
    pairs = [(x, grad) for x, grad in zip(result, incoming, strict=True) if grad is not None]
    outputs, grads = zip(*pairs, strict=True)
    dq, dk, dv = torch.autograd.grad(outputs, inputs, grads, retain_graph=retain_graph)
    return dq, dk, dv


def take_gradients(tensors: Tensors, incoming: Incoming, options: AttentionOptions = FULL) -> Gradients:
    """Through the public function and autograd, without any checks."""
    inputs = leaves(tensors)
    return pull(attend(inputs, options), inputs, incoming)


@contextmanager
def fenced_allocations() -> Iterator[set[int]]:
    """What is taken from ``torch.empty``, ``torch.empty_like`` or ``current.empty_strided`` inside is NaN (integers:
    their largest value) until a kernel writes it, and lies between fences that nobody may touch. Yields the addresses
    of these allocations.
    """
    buffers: list[torch.Tensor] = []
    addresses: set[int] = set()

    def fenced_empty(*size: Any, dtype: torch.dtype, device: torch.device, **_: Any) -> torch.Tensor:
        shape = size if not size or isinstance(size[0], int) else tuple(size[0])
        buffer = torch.full((math.prod(shape) + 2 * FENCE,), poison(dtype), dtype=dtype, device=device)
        buffers.append(buffer)
        addresses.add(buffer.untyped_storage().data_ptr())
        return buffer[FENCE:-FENCE].view(shape)

    def fenced_empty_like(x: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return fenced_empty(x.shape, dtype=dtype or x.dtype, device=x.device)

    def fenced_empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        inside = fenced_empty(shape, dtype=dtype, device=torch.device("cuda"))
        assert inside.stride() == strides
        return inside

    with (
        mock.patch.multiple(torch, empty=fenced_empty, empty_like=fenced_empty_like),
        mock.patch.object(current, "empty_strided", fenced_empty_strided),
    ):
        yield addresses
    for buffer in buffers:
        untouched = torch.full((FENCE,), poison(buffer.dtype), dtype=buffer.dtype, device=buffer.device)
        # In bytes: adding to the NaN of torch.full gives another NaN.
        fences = torch.stack((buffer[:FENCE], buffer[-FENCE:])).view(torch.uint8)
        written = int((fences != untouched.view(torch.uint8)).sum())
        assert written == 0, f"{written} bytes next to {buffer.numel() - 2 * FENCE} of {buffer.dtype} were written"


def poison(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def run_gradients(tensors: Tensors, incoming: Incoming, options: AttentionOptions = FULL) -> Gradients:
    """As :func:`take_gradients`, with every allocation poisoned; the gradients must be among them."""
    with fenced_allocations() as addresses:
        gradients = take_gradients(tensors, incoming, options)
    if tensors[0].numel() and tensors[1].numel():
        for name, gradient in zip(NAMES, gradients, strict=True):
            where = gradient.untyped_storage().data_ptr()
            assert where in addresses, f"{name} was taken from elsewhere than torch.empty…: it was not poisoned"
    return gradients


def check_gradients(
    tensors: Tensors,
    incoming: Incoming | None = None,
    options: AttentionOptions = FULL,
    *,
    on_average: bool = True,
    few_keys: bool = False,
) -> Gradients:
    """Run, and compare with fp32 by the numerics contract. ``incoming``: by default normal values for out."""
    if incoming is None:
        q, _, v = tensors
        incoming = Incoming(torch.randn(*q.shape[:3], v.shape[3], device="cuda").to(q.dtype))
    gradients = run_gradients(tensors, incoming, options)
    compare_gradients(tensors, incoming, gradients, options, on_average=on_average, few_keys=few_keys)
    return gradients


def compare_gradients(
    tensors: Tensors,
    incoming: Incoming,
    gradients: Gradients,
    options: AttentionOptions = FULL,
    *,
    on_average: bool = True,
    few_keys: bool = False,
) -> None:
    """Gradients against fp32, by the numerics contract; rows that see no key have exactly 0.

    ``on_average``: also in the mean square, which finds small terms missing that one large error allows. ``few_keys``
    says that few keys have all the weight although there are many.
    """
    q, k, v = tensors
    print(f"q {tuple(q.shape)} k {tuple(k.shape)} v {tuple(v.shape)} {q.dtype} {options}")
    scale = scale_of(q, options.softmax_scale)
    refs = _gradients_by_autograd(attention, tensors, incoming, scale, options.causal, torch.float32)
    lows = _gradients_by_autograd(plain_attention, tensors, incoming, scale, options.causal, q.dtype)
    for name, x, ref, low in zip(NAMES, gradients, refs, lows, strict=True):
        assert x.dtype == q.dtype, (name, x.dtype)
        assert x.device == q.device, (name, x.device)
        print(f"{name}: largest error {largest_error(x, ref):.3e}, allowed {tolerance(ref, low):.3e}")
        assert_close_to_reference(x, ref, low)
        if on_average:
            assert_close_on_average(x, ref, low, factor=2 if few_keys or k.shape[1] < MANY_KEYS else 1)
    if options.causal:
        assert gradients[0][:, : max(q.shape[1] - k.shape[1], 0)].count_nonzero() == 0


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    learnable_sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    **masks: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as anyone writes it in PyTorch, every step rounded to the dtype of the inputs.

    ``masks``: those of :func:`flashhopper.reference.visible_keys`.
    """
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = (q * softmax_scale) @ k.transpose(-1, -2)  # in this order float16 does not overflow
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        rows, keys = (torch.arange(length, device=q.device) for length in (seqlen_q, seqlen_k))
        distance = (rows[:, None] + seqlen_k - seqlen_q - keys).abs().to(scores)
        scores = scores - alibi_slopes.to(scores).expand(q.shape[0], -1)[:, :, None, None] * distance
    hidden = hidden_pairs(seqlen_q, seqlen_k, q.device, **masks)
    blind = hidden.all(dim=1)
    if learnable_sink is not None:  # a key more, of value 0
        scores = scores.masked_fill(hidden, -math.inf)
        sink = learnable_sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores, v = torch.cat((scores, sink), dim=-1), torch.nn.functional.pad(v, (0, 0, 0, 1))
        return (scores.softmax(dim=-1) @ v).transpose(1, 2), scores.logsumexp(dim=-1)
    scores = scores.masked_fill(hidden & ~blind[:, None], -math.inf)  # all of a row hidden: softmax would be NaN
    out = (scores.softmax(dim=-1) @ v).masked_fill(blind[:, None], 0.0)
    return out.transpose(1, 2), scores.logsumexp(dim=-1).masked_fill(blind, -math.inf)


def hidden_pairs(seqlen_q: int, seqlen_k: int, device: torch.device, **masks: Any) -> torch.Tensor:
    """Which keys each query does not see, ``(seqlen_q, seqlen_k)``."""
    visible = visible_keys(seqlen_q, seqlen_k, device=device, **masks)
    columns = torch.arange(seqlen_k, device=device)
    return (columns < visible.starts[:, None]) | (columns >= visible.ends[:, None])


def _gradients_by_autograd(
    function: Any, tensors: Tensors, incoming: Incoming, softmax_scale: float, causal: bool, dtype: torch.dtype
) -> Gradients:
    """Gradients of ``function`` computed in ``dtype``."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors)
    result = function(q, k, v, softmax_scale=softmax_scale, causal=causal)
    grads = [
        torch.zeros_like(x) if grad is None else grad.to(x.dtype) for x, grad in zip(result, incoming, strict=True)
    ]
    dq, dk, dv = torch.autograd.grad(result, (q, k, v), grads)
    return dq, dk, dv


def count_differing_gradients(gradients: Gradients, expected: Gradients) -> torch.Tensor:
    """How many elements of dq, dk and dv differ in any bit, without a host synchronisation."""
    counts = []
    for x, y in zip(gradients, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        counts.append((x.contiguous().view(torch.int16) != y.contiguous().view(torch.int16)).sum())
    return torch.stack(counts)


def assert_same_gradients(gradients: Gradients, expected: Gradients) -> None:
    """Bitwise equal; the same NaN counts as equal."""
    assert count_differing_gradients(gradients, expected).tolist() == [0, 0, 0]
