"""Out and LSE against fp32 PyTorch by the numerics contract: shapes, head dims, masks, dtypes, scales."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from checks import BF16, FP16, TORCH_DTYPES, Shape, assert_same_bits, check, compare, random_inputs, redone_tiles, run
from tolerance import assert_lse_close, assert_within_own_roundings

from flashhopper.config import KernelSpec
from flashhopper.heuristics import TILE_TABLE
from flashhopper.kernel_list import forward_specs
from flashhopper.reference import attention

HEAD_DIMS = range(8, 257, 8)
TILE_SIZES = sorted({64} | {size for row in TILE_TABLE for size in (row.config.tile_m, row.config.tile_n)})
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 320, 385)
GROUPS = (1, 2, 3, 4, 6, 8)  # query heads per key head


def test_the_reference_is_fp32_and_not_tf32() -> None:
    q, k, v = (x.float() for x in random_inputs(Shape(2, 200, 300, 4, 2, 128, 64)))
    out, lse = attention(q, k, v, softmax_scale=0.1, causal=True)
    ref, ref_lse = attention(q.double(), k.double(), v.double(), softmax_scale=0.1, causal=True)
    torch.testing.assert_close(out.double(), ref, atol=1e-5, rtol=1e-5)  # TF32 is off by 1e-3
    torch.testing.assert_close(lse.double(), ref_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", forward_specs(), ids=lambda spec: spec.name)
def test_every_kernel_of_the_table(spec: KernelSpec) -> None:
    shape = Shape(2, 777, 900, 6, 2, spec.head_dim, spec.head_dim_v)
    for seqlen_q, seqlen_k in ((777, 900), (900, 333), (1, 640), (513, 1)):
        sized = shape._replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        check(random_inputs(sized, TORCH_DTYPES[spec.dtype]), causal=spec.causal, config=spec.config)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim(head_dim: int, causal: bool) -> None:
    other = random.choice([d for d in HEAD_DIMS if d != head_dim])
    print(f"head_dim_v={other}")
    for dtype, head_dim_v, seqlen_k in itertools.product((BF16, FP16), (head_dim, other), (391, 1100)):
        check(random_inputs(Shape(1, 333, seqlen_k, 4, 2, head_dim, head_dim_v), dtype), causal=causal)


@pytest.mark.parametrize("head_dim, head_dim_v", [(192, 40), (192, 136), (256, 16), (256, 128), (256, 136), (256, 200)])
def test_columns_of_o_that_are_stored_in_parts(head_dim: int, head_dim_v: int) -> None:
    """Some parts hold few columns of the tensor, some none."""
    for dtype, seqlen_q in itertools.product((BF16, FP16), (1, 333, 3000)):
        check(random_inputs(Shape(2, seqlen_q, 777, 8, 2, head_dim, head_dim_v), dtype), causal=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_lengths_around_tiles(seqlen_q: int, head_dim: int, causal: bool) -> None:
    for seqlen_k in LENGTHS:
        check(random_inputs(Shape(3, seqlen_q, seqlen_k, 8, 4, head_dim, head_dim)), causal=causal)


def random_length() -> int:
    """Up to 1500: anything, or within 1 of a multiple of a tile's extent."""
    if random.random() < 0.4:
        return random.randint(1, 1500)
    size = random.choice(TILE_SIZES)
    return max(size * random.randint(1, 1400 // size) + random.randint(-1, 1), 1)


def random_shape() -> Shape:
    """With at least 2000 numbers in the output: fewer would leave the tolerance to luck."""
    while True:
        heads_k = random.randint(1, 4)
        heads = heads_k * random.choice(GROUPS)
        dims = random.choice(HEAD_DIMS), random.choice(HEAD_DIMS)
        shape = Shape(random.randint(1, 4), random_length(), random_length(), heads, heads_k, *dims)
        if shape.batch * shape.seqlen_q * heads * shape.head_dim_v >= 2000:
            return shape


@pytest.mark.parametrize("index", range(96))
def test_random_shapes(index: int) -> None:
    dtype, causal = (BF16, FP16)[index % 2], index % 4 >= 2
    for _ in range(3):
        check(random_inputs(random_shape(), dtype), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, heads_k", [(6, 1), (12, 2), (6, 3), (8, 8), (5, 1), (32, 4), (16, 1), (7, 7)])
def test_grouped_heads(heads: int, heads_k: int, causal: bool) -> None:
    tensors = random_inputs(Shape(2, 260, 390, heads, heads_k, 128, 128))
    result = check(tensors, causal=causal)
    q, k, v = tensors
    repeated = (q, *(x.repeat_interleave(heads // heads_k, dim=2) for x in (k, v)))
    assert_same_bits(run(repeated, causal=causal), result)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [2048, 4099])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences(head_dim: int, seqlen: int, causal: bool) -> None:
    check(random_inputs(Shape(1, seqlen, seqlen + 77, 4, 2, head_dim, head_dim)), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_more_tiles_than_multiprocessors(causal: bool) -> None:
    check(random_inputs(Shape(5, 1000, 520, 12, 4, 128, 128)), causal=causal)
    check(random_inputs(Shape(300, 70, 70, 3, 1, 64, 64)), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_float16_with_scores_nine_times_as_large(head_dim: int, causal: bool) -> None:
    for seqlen_q, seqlen_k in ((512, 512), (777, 1500)):
        tensors = random_inputs(Shape(2, seqlen_q, seqlen_k, 4, 2, head_dim, head_dim), FP16, size=3.0)
        result = run(tensors, causal=causal)
        q, k, v = (x.double() for x in tensors)
        ref, ref_lse = attention(q, k, v, softmax_scale=head_dim**-0.5, causal=causal)
        assert_within_own_roundings(result[0], ref, ref_lse, tensors[2])
        compare(tensors, result, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("softmax_scale", [1e-20, 1e-3, 0.2, 1.0])
def test_softmax_scale(softmax_scale: float, dtype: torch.dtype, causal: bool) -> None:
    tensors = random_inputs(Shape(2, 300, 555, 4, 2, 64, 64), dtype)
    check(tensors, softmax_scale=softmax_scale, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("softmax_scale", [10.0, 1000.0])
def test_large_softmax_scale(softmax_scale: float, dtype: torch.dtype, causal: bool) -> None:
    """Logits to 4e4: one key takes all, and bf16 arithmetic says nothing of what is allowed."""
    tensors = random_inputs(Shape(2, 300, 1555, 4, 2, 64, 64), dtype)
    out, lse = run(tensors, softmax_scale=softmax_scale, causal=causal)
    q, k, v = (x.double() for x in tensors)
    ref, ref_lse = attention(q, k, v, softmax_scale=softmax_scale, causal=causal)
    assert_within_own_roundings(out, ref, ref_lse, tensors[2])
    assert_lse_close(lse, ref_lse)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(300, 555), (555, 300)])
def test_scale_zero_averages_the_visible_values(seqlen_q: int, seqlen_k: int, dtype: torch.dtype) -> None:
    q, k, v = random_inputs(Shape(2, seqlen_q, seqlen_k, 4, 2, 64, 64), dtype)
    out, lse = check((q * 100, k * 100, v), softmax_scale=0.0, causal=True)
    counts = (torch.arange(seqlen_q, device="cuda") + 1 + seqlen_k - seqlen_q).clamp_min(0)
    assert_lse_close(lse, counts.double().log().expand_as(lse), atol=1e-5)
    means = v.double().cumsum(1) / torch.arange(1, seqlen_k + 1, device="cuda")[:, None, None]
    seeing = counts > 0
    expected = means[:, counts[seeing] - 1].repeat_interleave(2, dim=2)
    half_ulp = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out[:, seeing].double(), expected, atol=1e-4, rtol=half_ulp)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(300, 100), (1000, 1), (129, 128), (640, 383)])
def test_rows_without_keys(seqlen_q: int, seqlen_k: int, head_dim: int, dtype: torch.dtype) -> None:
    out, lse = check(random_inputs(Shape(2, seqlen_q, seqlen_k, 4, 2, head_dim, head_dim), dtype), causal=True)
    hidden = seqlen_q - seqlen_k
    assert out[:, :hidden].count_nonzero() == 0
    assert lse[:, :, :hidden].eq(-math.inf).all()
    assert lse[:, :, hidden:].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch, seqlen_q, seqlen_k", [(2, 5, 0), (2, 0, 5), (2, 0, 0), (0, 5, 7)])
def test_empty(batch: int, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    q, k, v = random_inputs(Shape(batch, seqlen_q, seqlen_k, 6, 2, 64, 32))
    out, lse = run((q, k, v), causal=causal)
    assert out.shape == (batch, seqlen_q, 6, 32)
    assert (out.dtype, lse.dtype) == (BF16, torch.float32)
    assert out.device == lse.device == q.device
    assert lse.shape == (batch, 6, seqlen_q)
    assert out.count_nonzero() == 0
    assert lse.eq(-math.inf).all()


def test_one_key_is_copied() -> None:
    q, k, v = random_inputs(Shape(3, 200, 1, 4, 4, 64, 64))
    out, lse = run((q, k, v))
    assert torch.equal(out, v.expand_as(out))
    assert_lse_close(lse, torch.einsum("bqhd,bkhd->bhq", q.double(), k.double()) / 8)


@pytest.mark.parametrize("power", [2.0**-60, 2.0**60])
def test_values_of_any_size(power: float) -> None:
    """P·V is linear in V, whose exponents bf16 shares with fp32: powers of two come through exactly."""
    q, k, v = random_inputs(Shape(2, 400, 700, 4, 2, 128, 128))
    before = redone_tiles()
    out, lse = run((q, k, v), causal=True)
    scaled_out, scaled_lse = run((q, k, v * power), causal=True)
    assert_same_bits((scaled_out / power, scaled_lse), (out, lse))
    assert redone_tiles() == before
