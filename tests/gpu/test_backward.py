"""dq, dk and dv against fp32 autograd by the numerics contract: shapes, head dims, masks, dtypes, scales, LSE."""

from __future__ import annotations

import itertools
import math
import random

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
from checks import BF16, FP16, TORCH_DTYPES, Shape, Tensors, random_inputs
from tolerance import root_mean_square

from flashhopper import flash_attn_func, launch, launch_backward
from flashhopper.config import BackwardSpec
from flashhopper.heuristics import select_backward_spec
from flashhopper.kernel_list import backward_specs
from flashhopper.options import AttentionOptions
from flashhopper.problem import AttentionProblem
from flashhopper.reference import attention

BOTH = [FULL, CAUSAL]
MASKS = ["full", "causal"]
DTYPES = [BF16, FP16]
MAIN_KERNELS = [spec for spec in backward_specs() if isinstance(spec, BackwardSpec)]
HEAD_DIMS = range(8, 257, 8)
PAIRS = [(d, d) for d in (8, 32, 40, 64, 72, 96, 120, 128, 160, 192, 248, 256)]
PAIRS += [(192, 128), (128, 192), (128, 64), (64, 128), (64, 256), (256, 64), (40, 248), (248, 40), (8, 256), (96, 72)]
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 193, 320)
UNEQUAL = [(113, 203), (203, 113), (1000, 777), (777, 1000), (1023, 2045), (2048, 2048), (1, 2048), (2048, 1)]
UNEQUAL += [(5, 1500), (1500, 5), (64, 2048), (2048, 64)]
OF_EACH_ROW = [(777, 900), (900, 333), (1, 640), (513, 1), (333, 512), (512, 77), (1025, 129), (1100, 200), (1300, 77)]


@pytest.mark.parametrize("spec", MAIN_KERNELS, ids=lambda spec: spec.name)
def test_every_kernel_of_the_table(spec: BackwardSpec) -> None:
    options = AttentionOptions(causal=spec.causal, deterministic=spec.deterministic)
    dtype = TORCH_DTYPES[spec.dtype]
    checked = 0
    for seqlen_q, seqlen_k in OF_EACH_ROW:
        shape = Shape(2, seqlen_q, seqlen_k, 6, 2, spec.head_dim, spec.head_dim_v)
        tensors = random_inputs(shape, dtype)
        if select_backward_spec(AttentionProblem.from_tensors(*tensors, options)) == spec:  # rows may end at a length
            check_gradients(tensors, random_incoming(shape, dtype, lse=seqlen_q > seqlen_k), options)
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("head_dim, head_dim_v", PAIRS)
def test_head_dims(head_dim: int, head_dim_v: int, options: AttentionOptions) -> None:
    for dtype, (seqlen_q, seqlen_k) in itertools.product(DTYPES, ((257, 391), (300, 130))):
        shape = Shape(2, seqlen_q, seqlen_k, 4, 2, head_dim, head_dim_v)
        check_gradients(random_inputs(shape, dtype), random_incoming(shape, dtype), options)


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_lengths_around_tiles(seqlen_q: int, head_dim: int, options: AttentionOptions) -> None:
    for seqlen_k in LENGTHS:
        shape = Shape(2, seqlen_q, seqlen_k, 4, 2, head_dim, head_dim)
        check_gradients(random_inputs(shape), random_incoming(shape, lse=seqlen_k % 2 == 0), options)


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q, seqlen_k", UNEQUAL)
def test_unequal_and_long_sequences(seqlen_q: int, seqlen_k: int, head_dim: int, options: AttentionOptions) -> None:
    shape = Shape(1, seqlen_q, seqlen_k, 6, 2, head_dim, head_dim)
    check_gradients(random_inputs(shape), random_incoming(shape), options)


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads, heads_k", [(3, 3), (4, 2), (6, 1), (12, 2), (6, 3), (5, 1), (16, 1)])
def test_grouped_heads(heads: int, heads_k: int, head_dim: int, options: AttentionOptions) -> None:
    """Also dk and dv are the sums over the heads that share a key head, as repeated key heads give them."""
    shape = Shape(2, 260, 390, heads, heads_k, head_dim, head_dim)
    tensors, incoming = random_inputs(shape), random_incoming(shape)
    dq, dk, dv = check_gradients(tensors, incoming, options)
    q, k, v = tensors
    group = heads // heads_k
    repeated = (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
    each_dq, *each = run_gradients(repeated, incoming, options)
    eps = torch.finfo(BF16).eps
    assert root_mean_square((dq - each_dq).double()) <= eps * root_mean_square(dq.double())
    for x, parts in zip((dk, dv), each, strict=True):
        total = parts.double().unflatten(2, (heads_k, group)).sum(3)
        assert root_mean_square(x.double() - total) <= eps * root_mean_square(total)


def random_length() -> int:
    """Up to 900: anything, or within 1 of a multiple of 16."""
    return max(random.choice((random.randint(1, 900), 16 * random.randint(1, 50) + random.randint(-1, 1))), 1)


def random_shape() -> Shape:
    """With at least 2000 numbers in each tensor: fewer would leave the tolerance to luck."""
    while True:
        heads_k = random.randint(1, 4)
        heads = heads_k * random.choice((1, 2, 3, 4, 6, 8))
        dims = random.choice(HEAD_DIMS), random.choice(HEAD_DIMS)
        lengths = (random_length() for _ in range(2))
        shape = Shape(random.randint(1, 3), *lengths, heads, heads_k, *dims)
        if min(math.prod(size) for size in shape.tensors) >= 2000:
            return shape


@pytest.mark.parametrize("index", range(48))
def test_random_shapes(index: int) -> None:
    dtype, options, lse = DTYPES[index % 2], BOTH[index % 4 // 2], index % 8 >= 4
    for _ in range(3):
        shape = random_shape()
        check_gradients(random_inputs(shape, dtype), random_incoming(shape, dtype, lse), options)


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
def test_more_tiles_than_multiprocessors(options: AttentionOptions) -> None:
    for shape in (Shape(5, 520, 1000, 12, 4, 128, 128), Shape(150, 70, 70, 3, 1, 64, 64)):
        check_gradients(random_inputs(shape), random_incoming(shape), options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(300, 100), (1000, 1), (129, 128), (640, 383)])
def test_rows_without_keys(seqlen_q: int, seqlen_k: int, head_dim: int, dtype: torch.dtype) -> None:
    """They have zero gradients and add nothing to dk and dv, whatever arrives there."""
    shape = Shape(2, seqlen_q, seqlen_k, 4, 2, head_dim, head_dim)
    tensors, incoming = random_inputs(shape, dtype), random_incoming(shape, dtype, lse=True)
    options = CAUSAL._replace(deterministic=True)
    gradients = check_gradients(tensors, incoming, options)
    hidden = seqlen_q - seqlen_k
    assert gradients[0][:, :hidden].count_nonzero() == 0
    q, k, v = (x.clone() for x in tensors)
    grad_out, grad_lse = (x.clone() for x in incoming)
    q[:, :hidden], grad_out[:, :hidden] = 7.0, -5.0
    for sent in (1e4, math.inf, math.nan):  # NaN is what logaddexp(-inf, -inf) sends back
        grad_lse[:, :, :hidden] = sent
        assert_same_gradients(run_gradients((q, k, v), Incoming(grad_out, grad_lse), options), gradients)


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("batch, seqlen_q, seqlen_k", [(2, 5, 0), (2, 0, 5), (2, 0, 0), (0, 5, 7)])
def test_empty(batch: int, seqlen_q: int, seqlen_k: int, options: AttentionOptions) -> None:
    shape = Shape(batch, seqlen_q, seqlen_k, 6, 2, 64, 32)
    tensors = random_inputs(shape)
    for deterministic, lse in itertools.product((False, True), (False, True)):
        incoming = random_incoming(shape, lse=lse)
        gradients = run_gradients(tensors, incoming, options._replace(deterministic=deterministic))
        for gradient, x in zip(gradients, tensors, strict=True):
            assert (gradient.shape, gradient.dtype, gradient.device) == (x.shape, x.dtype, x.device)
            assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradient_of_lse(head_dim: int, options: AttentionOptions, dtype: torch.dtype) -> None:
    """Alone, where it gives v exactly nothing, and with out's; the two add up."""
    for lengths in ((300, 411), (411, 300)):
        shape = Shape(2, *lengths, 6, 2, head_dim, head_dim)
        tensors = random_inputs(shape, dtype)
        together = random_incoming(shape, dtype, lse=True)
        alone = Incoming(None, together.grad_lse)
        from_lse = check_gradients(tensors, alone, options)
        assert from_lse[2].count_nonzero() == 0
        total = check_gradients(tensors, together, options)
        from_out = check_gradients(tensors, Incoming(together.grad_out), options)
        for x, parts in zip(total, zip(from_out, from_lse, strict=True), strict=True):
            added = sum(part.double() for part in parts)
            assert root_mean_square(x.double() - added) <= torch.finfo(dtype).eps * root_mean_square(added)


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
def test_no_gradient_of_lse_is_one_of_zero(options: AttentionOptions) -> None:
    shape = Shape(2, 300, 300, 4, 2, 64, 64)
    tensors, incoming = random_inputs(shape), random_incoming(shape)
    repeatable = options._replace(deterministic=True)
    zero = torch.zeros(shape.batch, shape.heads, shape.seqlen_q, device="cuda")
    expected = run_gradients(tensors, incoming, repeatable)
    assert_same_gradients(run_gradients(tensors, incoming._replace(grad_lse=zero), repeatable), expected)


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
def test_z_loss(options: AttentionOptions) -> None:
    """A loss of out and of LSE squared, by ``backward()``, on rows that all see a key."""
    shape = Shape(2, 256, 300, 4, 2, 128, 128)
    tensors = random_inputs(shape)
    weight = random_incoming(shape).grad_out
    q, k, v = leaves(tensors)
    out, lse = attend((q, k, v), options)
    ((out * weight).sum() + 0.5 * lse.square().sum()).backward()
    assert weight is not None
    compare_gradients(tensors, Incoming(weight, lse.detach()), (q.grad, k.grad, v.grad), options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("softmax_scale", [1e-20, 1e-3, 0.2, 1.0])
def test_softmax_scale(softmax_scale: float, options: AttentionOptions, dtype: torch.dtype) -> None:
    shape = Shape(2, 300, 555, 4, 2, 64, 64)
    scaled = options._replace(softmax_scale=softmax_scale)
    check_gradients(random_inputs(shape, dtype), random_incoming(shape, dtype, lse=True), scaled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(300, 555), (555, 300)])
def test_scale_zero(seqlen_q: int, seqlen_k: int, dtype: torch.dtype) -> None:
    """Uniform weights: dv is a sum of dout over counts, and q and k have no influence."""
    shape = Shape(2, seqlen_q, seqlen_k, 4, 4, 64, 64)
    q, k, v = random_inputs(shape, dtype)
    incoming = random_incoming(shape, dtype, lse=True)
    assert incoming.grad_out is not None
    tensors = (q * 100, k * 100, v)
    dq, dk, dv = check_gradients(tensors, incoming, AttentionOptions(softmax_scale=0.0, causal=True))
    assert dq.float().abs().max() < 1e-20
    assert dk.float().abs().max() < 1e-20
    counts = torch.arange(seqlen_q, device="cuda") + 1 + seqlen_k - seqlen_q
    weights = torch.where(counts > 0, 1 / counts.clamp_min(1).double(), 0.0)
    sees = torch.arange(seqlen_k, device="cuda") < counts[:, None]
    expected = torch.einsum("qk,bqhd->bkhd", sees * weights[:, None], incoming.grad_out.double())
    eps = torch.finfo(dtype).eps  # of each weight, which is rounded to the dtype, and of dv itself
    torch.testing.assert_close(dv.double(), expected, atol=4 * eps, rtol=eps)


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float16_with_scores_nine_times_as_large(head_dim: int, options: AttentionOptions) -> None:
    """Neither P nor dS may leave float16's range."""
    for seqlen_q, seqlen_k in ((512, 512), (777, 1500), (500, 300)):
        shape = Shape(2, seqlen_q, seqlen_k, 4, 2, head_dim, head_dim)
        tensors = random_inputs(shape, FP16, size=3.0)
        for gradient in check_gradients(tensors, random_incoming(shape, FP16), options):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_large_logits(head_dim: int, options: AttentionOptions) -> None:
    """Logits to several thousand, as one key takes all. dv is then dout's rows, added up at the keys that won."""
    shape = Shape(2, 300, 420, 4, 2, head_dim, head_dim)
    tensors, incoming = random_inputs(shape, size=20.0), random_incoming(shape)
    gradients = check_gradients(tensors, incoming, options, on_average=False)
    assert all(gradient.isfinite().all() for gradient in gradients)
    q, k, v = (x.double().requires_grad_() for x in tensors)
    result = attention(q, k, v, softmax_scale=head_dim**-0.5, causal=options.causal)
    assert incoming.grad_out is not None
    (expected,) = torch.autograd.grad(result[0], v, incoming.grad_out.double())
    eps = torch.finfo(BF16).eps
    assert root_mean_square(gradients[2].double() - expected) <= eps * root_mean_square(expected)


@pytest.mark.parametrize("power", [2.0**-40, 2.0**40])
def test_gradients_of_any_size(power: float) -> None:
    """The backward is linear in what arrives, and bf16 has fp32's exponents: powers of two come through exactly."""
    shape = Shape(2, 300, 500, 4, 2, 128, 128)
    tensors, incoming = random_inputs(shape), random_incoming(shape, lse=True)
    options = CAUSAL._replace(deterministic=True)
    expected = run_gradients(tensors, incoming, options)
    assert incoming.grad_out is not None
    assert incoming.grad_lse is not None
    scaled = Incoming(incoming.grad_out * power, incoming.grad_lse * power)
    dq, dk, dv = (x / power for x in run_gradients(tensors, scaled, options))
    assert_same_gradients((dq, dk, dv), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_row_that_is_not_finite_spoils_only_what_it_reaches(which: str, head_dim: int, value: float) -> None:
    """The call returns, and another batch entry's gradients keep their bits."""
    shape = Shape(2, 300, 500, 4, 2, head_dim, head_dim)
    options = CAUSAL._replace(deterministic=True)
    q, k, v = random_inputs(shape)
    incoming = random_incoming(shape)
    expected = run_gradients((q, k, v), incoming, options)
    spoiled = {"q": q, "k": k, "v": v, "dout": incoming.grad_out}[which]
    assert spoiled is not None
    spoiled[0, 137, 1] = value
    gradients = run_gradients((q, k, v), incoming, options)
    for x, clean in zip(gradients, expected, strict=True):
        assert torch.equal(x[1], clean[1])
    assert not all(x[0].isfinite().all() for x in gradients)
    if which in ("q", "dout"):  # a query row reaches its key head, not the other
        for x, clean in zip(gradients[1:], expected[1:], strict=True):
            assert torch.equal(x[0, :, 1], clean[0, :, 1])
            assert not x[0, :, 0].isfinite().all()


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
def test_the_lower_level_gives_the_same(options: AttentionOptions) -> None:
    """``launch_backward.backward`` from what ``launch.forward`` returned."""
    shape = Shape(2, 300, 411, 6, 2, 128, 64)
    tensors = random_inputs(shape)
    repeatable = options._replace(deterministic=True)
    for lse in (False, True):
        incoming = random_incoming(shape, lse=lse)
        expected = take_gradients(tensors, incoming, repeatable)
        result = launch.forward(*tensors, repeatable)
        dq, dk, dv, dsink = launch_backward.backward(
            incoming.grad_out, *tensors, *result, repeatable, grad_lse=incoming.grad_lse
        )
        assert dsink is None
        direct = dq, dk, dv
        assert_same_gradients(direct, expected)
        compare_gradients(tensors, incoming, direct, options)


@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_mode_is_right(head_dim: int, options: AttentionOptions) -> None:
    for lengths in ((300, 411), (411, 300), (64, 1500), (1500, 64)):
        shape = Shape(2, *lengths, 6, 2, head_dim, head_dim)
        repeatable = options._replace(deterministic=True)
        check_gradients(random_inputs(shape), random_incoming(shape, lse=True), repeatable)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", BOTH, ids=MASKS)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_sm_margin(head_dim: int, options: AttentionOptions, deterministic: bool) -> None:
    """Down to one multiprocessor, on which CTAs that wait for each other would wait forever, and which has no room for
    the pairs of head_dim 256."""
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    shape = Shape(2, 300, 700, 8, 2, head_dim, head_dim)
    tensors, incoming = random_inputs(shape), random_incoming(shape)
    for margin in (1, 60, multiprocessors - 3, multiprocessors - 2, multiprocessors - 1):
        check_gradients(tensors, incoming, options._replace(deterministic=deterministic, sm_margin=margin))


@pytest.mark.parametrize("needed", [n for size in (1, 2, 3) for n in itertools.combinations(range(3), size)])
@pytest.mark.parametrize("options", BOTH, ids=MASKS)
def test_only_the_gradients_asked_for(options: AttentionOptions, needed: tuple[int, ...]) -> None:
    """They have the bits of the full run's; the others stay None."""
    shape = Shape(2, 300, 411, 6, 2, 128, 64)
    tensors, incoming = random_inputs(shape), random_incoming(shape, lse=True)
    repeatable = options._replace(deterministic=True)
    expected = check_gradients(tensors, incoming, repeatable)
    q, k, v = (x.detach().requires_grad_(i in needed) for i, x in enumerate(tensors))
    inputs: Tensors = (q, k, v)
    result = attend(inputs, repeatable)
    torch.autograd.backward(result, incoming)
    for i, x in enumerate(inputs):
        if i in needed:
            assert x.grad is not None
            assert torch.equal(x.grad, expected[i])
        else:
            assert x.grad is None


def test_one_tensor_as_q_k_and_v() -> None:
    """Its gradient is the sum of the three."""
    shape = Shape(2, 200, 200, 4, 4, 64, 64)
    (x, _, _), incoming = random_inputs(shape), random_incoming(shape)
    options = CAUSAL._replace(deterministic=True)
    # Each row's own key takes most of it: the case of few keys, in which plain PyTorch's roundings of P and dP cancel.
    three = check_gradients((x, x, x), incoming, options, few_keys=True)
    expected = sum(gradient.double() for gradient in three)
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(attend((leaf, leaf, leaf), options)[0], leaf, incoming.grad_out)
    eps = torch.finfo(BF16).eps
    torch.testing.assert_close(gradient.double(), expected, atol=2 * eps * expected.abs().max().item(), rtol=2 * eps)


def test_gradients_accumulate_over_two_losses() -> None:
    shape = Shape(2, 200, 300, 4, 2, 64, 64)
    tensors = random_inputs(shape)
    options = CAUSAL._replace(deterministic=True)
    losses = [random_incoming(shape), random_incoming(shape, lse=True)]
    inputs = leaves(tensors)
    result = attend(inputs, options)
    first, second = (pull(result, inputs, loss, retain_graph=True) for loss in losses)
    for gradients, loss in ((first, losses[0]), (second, losses[1])):
        assert_same_gradients(gradients, run_gradients(tensors, loss, options))
    for loss in losses:
        pairs = [(x, g) for x, g in zip(result, loss, strict=True) if g is not None]
        torch.autograd.backward(*zip(*pairs, strict=True), retain_graph=True)
    for x, *parts in zip(inputs, first, second, strict=True):
        assert x.grad is not None
        assert torch.equal(x.grad, parts[0] + parts[1])


def test_out_alone_is_returned_and_differentiable() -> None:
    shape = Shape(1, 200, 300, 4, 2, 64, 64)
    tensors, incoming = random_inputs(shape), random_incoming(shape)
    inputs = leaves(tensors)
    out = flash_attn_func(*inputs, causal=True)
    dq, dk, dv = torch.autograd.grad(out, inputs, incoming.grad_out)
    compare_gradients(tensors, incoming, (dq, dk, dv), CAUSAL)
