"""What the backward reads, writes and keeps: any strides, nothing past the ends, offsets past 2**31, peak memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from backward_checks import (
    CAUSAL,
    FULL,
    Incoming,
    assert_same_gradients,
    attend,
    check_gradients,
    compare_gradients,
    leaves,
    pull,
    random_incoming,
    run_gradients,
    take_gradients,
)
from checks import BF16, FP16, Shape, dense, guarded_inputs, random_inputs
from layouts import CUTS, Cut, fitted, normal

from flashhopper.options import AttentionOptions

BASE = Shape(2, 200, 327, 6, 2, 128, 128)
BOTH = [FULL._replace(deterministic=True), CAUSAL._replace(deterministic=True)]
MASKS = ["full", "causal"]


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
def test_strides_of_inputs(cut: Cut, head_dim: int, options: AttentionOptions) -> None:
    """The gradients are those of contiguous copies, bit by bit, and the inputs stay as they are."""
    shape = fitted(BASE._replace(head_dim=head_dim, head_dim_v=head_dim), cut)
    tensors, incoming = cut(shape), random_incoming(shape)
    copies = dense(tensors)
    gradients = run_gradients(tensors, incoming, options)
    assert_same_gradients(gradients, check_gradients(copies, incoming, options))
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)


def large_row_stride(x: torch.Tensor) -> torch.Tensor:
    b, s, h, d = x.shape
    storage = x.new_full((b, s, 2**16), math.nan)
    return storage[:, :, 64 : 64 + h * d].unflatten(2, (h, d)).copy_(x)


def odd_base(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel() + 3)[3:].view(x.shape).copy_(x)


def odd_row_stride(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 3))[..., :-3]


def heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def columns_first(x: torch.Tensor) -> torch.Tensor:
    """The last dimension is not contiguous, as after ``out.transpose(2, 3)`` or an einsum."""
    return x.transpose(1, 3).contiguous().transpose(1, 3)


def expanded_rows(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1].expand_as(x)


def expanded_everywhere(x: torch.Tensor) -> torch.Tensor:
    """What ``out.sum().backward()`` hands over."""
    return x[:1, :1, :1, :1].expand_as(x)


def expanded_columns(x: torch.Tensor) -> torch.Tensor:
    """What ``out.sum(-1)`` hands over."""
    return x[..., :1].expand_as(x)


GRAD_LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    large_row_stride,
    odd_base,
    odd_row_stride,
    heads_first,
    columns_first,
    expanded_rows,
    expanded_everywhere,
    expanded_columns,
]


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("head_dim_v", [64, 72, 128])
@pytest.mark.parametrize("layout", GRAD_LAYOUTS, ids=lambda layout: layout.__name__)
def test_strides_of_grad_out(
    layout: Callable[[torch.Tensor], torch.Tensor], head_dim_v: int, options: AttentionOptions
) -> None:
    shape = BASE._replace(head_dim_v=head_dim_v)
    tensors, grad_out = random_inputs(shape), random_incoming(shape).grad_out
    assert grad_out is not None
    strided = layout(grad_out)
    copy = strided.clone(memory_format=torch.contiguous_format)
    assert strided.stride() != copy.stride() or strided.data_ptr() % 16
    gradients = run_gradients(tensors, Incoming(strided), options)
    assert_same_gradients(gradients, check_gradients(tensors, Incoming(copy), options))
    assert torch.equal(strided, copy)


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
def test_strides_of_grad_lse(options: AttentionOptions) -> None:
    tensors, incoming = random_inputs(BASE), random_incoming(BASE, lse=True)
    grad_lse = incoming.grad_lse
    assert grad_lse is not None
    last_dim_first = grad_lse.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    spread = torch.stack((grad_lse, grad_lse * math.nan), dim=-1)[..., 0]
    for strided in (
        last_dim_first,
        spread,
        grad_lse[:, :, :1].expand_as(grad_lse),
        grad_lse[:1, :1].expand_as(grad_lse),
    ):
        assert not strided.is_contiguous()
        copy = strided.clone(memory_format=torch.contiguous_format)
        gradients = run_gradients(tensors, incoming._replace(grad_lse=strided), options)
        assert_same_gradients(gradients, check_gradients(tensors, incoming._replace(grad_lse=copy), options))


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
def test_gradients_of_sums(options: AttentionOptions) -> None:
    """``out.sum().backward()`` and ``(out.sum() + lse.sum()).backward()``, whose gradients are expanded scalars."""
    shape = BASE._replace(seqlen_q=200, seqlen_k=200)
    tensors = random_inputs(shape)
    ones, ones_lse = (torch.ones_like(x) for x in attend(tensors, options))
    for incoming in (Incoming(ones), Incoming(ones, ones_lse)):
        q, k, v = leaves(tensors)
        out, lse = attend((q, k, v), options)
        (out.sum() if incoming.grad_lse is None else out.sum() + lse.sum()).backward()
        expected = check_gradients(tensors, incoming, options)
        assert q.grad is not None
        assert k.grad is not None
        assert v.grad is not None
        assert_same_gradients((q.grad, k.grad, v.grad), expected)


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
def test_a_packed_tensor_gets_one_gradient(options: AttentionOptions) -> None:
    """q, k and v are slices of one projection, as models have them; its gradient holds the three beside each other."""
    shape = Shape(2, 300, 300, 6, 2, 64, 64)
    packed = normal(2, 300, 6 + 2 + 2, 64).requires_grad_()
    incoming = random_incoming(shape)
    q, k, v = packed.split((6, 2, 2), dim=2)
    (gradient,) = torch.autograd.grad(attend((q, k, v), options)[0], packed, incoming.grad_out)
    expected = check_gradients((q.detach(), k.detach(), v.detach()), incoming, options)
    assert torch.equal(gradient, torch.cat(expected, dim=2))


@pytest.mark.parametrize("strides", [(1, 64, 1, 1), (7, 64, 3, 1), (0, 64, 0, 1), (2**40 + 1, 64, 2**40 + 3, 1)])
@pytest.mark.parametrize("options", BOTH, ids=MASKS)
def test_strides_of_extents_of_1_do_not_matter(strides: tuple[int, ...], options: AttentionOptions) -> None:
    shape = Shape(1, 130, 260, 1, 1, 64, 64)
    tensors, incoming = random_inputs(shape), random_incoming(shape)
    q, k, v = (x.as_strided(x.shape, strides) for x in tensors)
    assert incoming.grad_out is not None
    strided = Incoming(incoming.grad_out.as_strided(incoming.grad_out.shape, strides))
    gradients = run_gradients((q, k, v), strided, options)
    assert_same_gradients(gradients, check_gradients(tensors, incoming, options))


GUARDED = [
    Shape(2, 1, 1, 2, 1, 64, 64),
    Shape(2, 70, 333, 2, 1, 64, 64),
    Shape(1, 333, 70, 4, 2, 128, 128),
    Shape(2, 129, 129, 2, 2, 40, 24),
    Shape(1, 191, 449, 3, 1, 72, 136),
    Shape(1, 257, 81, 2, 2, 256, 256),
    Shape(1, 100, 500, 6, 2, 192, 128),
    Shape(1, 100, 500, 2, 2, 184, 168),
]


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy cut out of a larger buffer that is NaN everywhere else, in every dimension."""
    b, s, h, d = x.shape
    return x.new_full((b + 2, s + 512, h + 2, d + 16), math.nan)[1:-1, 256:-256, 1:-1, 8:-8].copy_(x)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("shape", GUARDED)
def test_nothing_past_the_ends_is_read(shape: Shape, options: AttentionOptions, dtype: torch.dtype) -> None:
    """NaN lies before and after every batch, row, head and column, and in whatever memory torch hands out next."""
    tensors, incoming = guarded_inputs(shape, dtype), random_incoming(shape, dtype, lse=True)
    assert incoming.grad_out is not None
    assert incoming.grad_lse is not None
    grad_lse = guarded(incoming.grad_lse[:, :, :, None].expand(-1, -1, -1, 8))[..., 0]
    between = Incoming(guarded(incoming.grad_out), grad_lse)
    freed = [torch.full((2**size,), math.nan, device="cuda") for size in range(8, 24) for _ in range(2)]
    del freed
    gradients = take_gradients(tensors, between, options)
    for gradient in gradients:
        assert gradient.isfinite().all()
    compare_gradients(tensors, between, gradients, options)
    assert_same_gradients(run_gradients(dense(tensors), incoming, options), gradients)


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def rounded_up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads_k", [16, 2])
def test_peak_memory(heads_k: int, head_dim: int, deterministic: bool) -> None:
    """The gradients, fp32 sums of dq and, with shared key heads, of dk and dv; vectors of a row's length.

    No scores, no copies of the inputs, and no dk and dv of every query head.
    """
    shape = Shape(2, 2000, 3000, 16, heads_k, head_dim, head_dim)
    tensors, incoming = random_inputs(shape), random_incoming(shape, lse=True)
    options = CAUSAL._replace(deterministic=deterministic)
    expected = take_gradients(tensors, incoming, options)  # loads what there is to load
    inputs = leaves(tensors)
    result = attend(inputs, options)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = pull(result, inputs, incoming)
    peak = torch.cuda.max_memory_allocated() - before
    rows = rounded_up(shape.seqlen_q, 128)
    sums = 4 * shape.batch * shape.heads * rows * rounded_up(head_dim, 64)
    if heads_k != shape.heads:
        sums += 4 * 2 * shape.batch * heads_k * rounded_up(shape.seqlen_k, 128) * rounded_up(head_dim, 64)
    vectors = 3 * 4 * shape.batch * shape.heads * rows
    allowed = (
        bytes_of(*gradients) + sums + vectors + 6 * 2**20
    )  # PyTorch gives out blocks up to 1 MiB larger than asked
    print(f"peak {peak / 2**20:.1f} MiB, allowed {allowed / 2**20:.1f} MiB")
    assert bytes_of(*gradients) <= peak <= allowed
    if deterministic:
        assert_same_gradients(gradients, expected)


def test_nothing_is_kept_after_the_backward() -> None:
    shape = Shape(2, 1000, 1000, 16, 4, 128, 128)
    tensors, incoming = random_inputs(shape), random_incoming(shape)
    take_gradients(tensors, incoming, CAUSAL)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        take_gradients(tensors, incoming, CAUSAL)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.slow
@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize(
    "extents, strides",
    [
        ((2, 300, 2, 64), (2**31 + 8, 128, 64, 1)),
        ((1, 200, 2, 64), (8, 64, 2**31 + 8, 1)),
        ((1, 3, 2, 64), (8, 2**30 + 8, 64, 1)),
        ((2, 2, 2, 64), (2**31 + 2**11, 2**10, 2**31 + 2**12, 1)),
    ],
)
def test_input_offsets_past_2_to_31(
    extents: tuple[int, ...], strides: tuple[int, ...], options: AttentionOptions
) -> None:
    """q, k, v and dout lie in one buffer of NaN with their elements far apart, the last past 2**31 elements."""
    last = sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))
    assert last > 2**31
    room = 2**18
    buffer = torch.full((last + 4 * room,), math.nan, dtype=BF16, device="cuda")
    q, k, v, grad_out = (buffer.as_strided(extents, strides, i * room).copy_(normal(*extents)) for i in range(4))
    expected = run_gradients(dense((q, k, v)), Incoming(grad_out.contiguous()), options)
    assert all(gradient.isfinite().all() for gradient in expected)
    assert_same_gradients(run_gradients((q, k, v), Incoming(grad_out), options), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("long", ["q", "k"])
def test_gradient_offsets_past_2_to_31(long: str) -> None:
    """One long sequence: dq, or dk and dv, have more than 2**31 elements. The first and the last head are right."""
    length, heads, head_dim = 2**18 + 77, 64, 128
    assert length * heads * head_dim > 2**31
    seqlen_q, seqlen_k = (length, 100) if long == "q" else (100, length)
    group = 8 if long == "q" else 1
    q, k, v = random_inputs(Shape(1, seqlen_q, seqlen_k, heads, heads // group, head_dim, head_dim))
    grad_out = torch.empty(q.shape, dtype=BF16, device="cuda").normal_(std=2.0**10)  # or dk would be as small as 1e-5
    gradients = take_gradients((q, k, v), Incoming(grad_out))
    for head_k in (0, heads // group - 1):
        of_q, of_k = (slice(head_k * size, (head_k + 1) * size) for size in (group, 1))
        tensors = q[:, :, of_q], k[:, :, of_k], v[:, :, of_k]
        dq, dk, dv = gradients
        part = dq[:, :, of_q], dk[:, :, of_k], dv[:, :, of_k]
        compare_gradients(tensors, Incoming(grad_out[:, :, of_q]), part)
        torch.cuda.empty_cache()
    tail = gradients[0][:, -300:] if long == "q" else gradients[1][:, -300:]
    assert tail.count_nonzero() > 0.9 * tail.numel()


@pytest.mark.slow
@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("lengths", [(2**15, 64), (64, 2**15)])
def test_batches_past_2_to_31(lengths: tuple[int, int]) -> None:
    """All batch entries are the same by expansion, and so are their gradients, bit by bit."""
    batch, heads, head_dim = 70, 8, 128
    assert batch * max(lengths) * heads * head_dim > 2**31
    shape = Shape(1, *lengths, heads, heads, head_dim, head_dim)
    options = FULL._replace(deterministic=True)
    tensors, incoming = random_inputs(shape), random_incoming(shape)
    first = check_gradients(tensors, incoming, options)
    assert incoming.grad_out is not None
    q, k, v = (x.expand(batch, -1, -1, -1) for x in tensors)
    gradients = take_gradients((q, k, v), Incoming(incoming.grad_out.expand(batch, -1, -1, -1)), options)
    for entry in (0, 1, batch // 2, batch - 1):
        dq, dk, dv = (x[entry : entry + 1] for x in gradients)
        assert_same_gradients((dq, dk, dv), first)
