"""What is read and written: any strides, alignment, nothing past the ends, offsets past 2**31 elements."""

from __future__ import annotations

import math

import pytest
import torch
from checks import (
    BF16,
    FP16,
    Shape,
    assert_same_bits,
    check,
    compare,
    dense,
    guarded_inputs,
    random_inputs,
    run,
)
from extra_specs import EXTRA_SPECS
from layouts import CUTS, Cut, fitted, normal

from flashhopper.config import ForwardConfig

BASE = Shape(2, 300, 427, 6, 2, 128, 128)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
def test_strides(cut: Cut, head_dim: int, causal: bool) -> None:
    """The result is that of contiguous copies, bit by bit, and the inputs stay as they are."""
    shape = fitted(BASE._replace(head_dim=head_dim, head_dim_v=head_dim), cut)
    tensors = cut(shape)
    copies = dense(tensors)
    assert [tuple(x.shape) for x in tensors] == list(shape.tensors)
    assert any(x.stride() != y.stride() or x.data_ptr() % 16 for x, y in zip(tensors, copies, strict=True))
    assert_same_bits(run(tensors, causal=causal), check(copies, causal=causal))
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("strides", [(1, 64, 1, 1), (7, 64, 3, 1), (0, 64, 0, 1), (2**40 + 1, 64, 2**40 + 3, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_strides_of_extents_of_1_do_not_matter(strides: tuple[int, ...], causal: bool) -> None:
    """PyTorch leaves anything there; no copy is due to them, so the kernel reads through as_strided views."""
    tensors = random_inputs(Shape(1, 130, 260, 1, 1, 64, 64))
    q, k, v = (x.as_strided(x.shape, strides) for x in tensors)
    assert q.stride() == strides
    assert_same_bits(run((q, k, v), causal=causal), check(tensors, causal=causal))


def test_strides_of_one_query_row_do_not_matter() -> None:
    tensors = random_inputs(Shape(1, 1, 1, 4, 4, 64, 64))
    q, k, v = (x.as_strided(x.shape, (5, 3, 64, 1)) for x in tensors)
    assert_same_bits(run((q, k, v)), run(tensors))


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


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", GUARDED)
def test_nothing_past_the_ends_is_read(shape: Shape, causal: bool, dtype: torch.dtype) -> None:
    """NaN lies before and after every batch, row, head and column."""
    tensors = guarded_inputs(shape, dtype)
    result = check(tensors, causal=causal)
    assert_same_bits(run(dense(tensors), causal=causal), result)


@pytest.mark.slow
@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "extents, strides",
    [
        ((2, 300, 2, 64), (2**31 + 8, 128, 64, 1)),
        ((1, 200, 2, 64), (8, 64, 2**31 + 8, 1)),
        ((1, 3, 2, 64), (8, 2**30 + 8, 64, 1)),
        ((2, 2, 2, 64), (2**31 + 2**11, 2**10, 2**31 + 2**12, 1)),
    ],
)
def test_input_offsets_past_2_to_31(extents: tuple[int, ...], strides: tuple[int, ...], causal: bool) -> None:
    """q, k and v lie in one buffer of NaN with their elements far apart; the last offset is past 2**31 elements."""
    last = sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))
    assert last > 2**31
    room = 2**18
    buffer = torch.full((last + 3 * room,), math.nan, dtype=BF16, device="cuda")
    q, k, v = (buffer.as_strided(extents, strides, i * room).copy_(normal(*extents)) for i in range(3))
    expected = run(dense((q, k, v)), causal=causal)
    assert expected[0].isfinite().all()
    assert_same_bits(run((q, k, v), causal=causal), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("config", [None, EXTRA_SPECS["no_tma_store"].config], ids=["tma_store", "registers"])
def test_output_offsets_past_2_to_31(config: ForwardConfig | None) -> None:
    """Long sequences, then many batch entries: the last rows are right, and what is expanded comes out equal."""
    seqlen_q, heads, head_dim = 2**18 + 77, 64, 128
    assert seqlen_q * heads * head_dim > 2**31
    q, k, v = random_inputs(Shape(1, seqlen_q, 100, heads, 8, head_dim, head_dim))
    out, lse = run((q, k, v), config=config)
    for rows in (slice(0, 300), slice(seqlen_q - 300, seqlen_q)):
        compare((q[:, rows], k, v), (out[:, rows].contiguous(), lse[:, :, rows].contiguous()))
    batch = 70
    q, k, v = (x[:, : 2**15].expand(batch, -1, -1, -1)[:, :, :8] for x in (q, k, v))
    assert batch * 2**15 * 8 * head_dim > 2**31
    result = run((q, k, v), config=config)
    first = check((q[:1], k[:1], v[:1]), config=config)
    for entry in (1, batch - 1):
        assert_same_bits((result[0][entry : entry + 1], result[1][entry : entry + 1]), first)


@pytest.mark.slow
@pytest.mark.usefixtures("large_memory")
def test_more_than_2_to_31_rows() -> None:
    """LSE itself has more than 2**31 elements, out 2**34. All batch entries and heads are the same by expansion."""
    batch, seqlen_q, heads = 33, 2**20 + 5, 64
    assert batch * seqlen_q * heads > 2**31
    q, k, v = random_inputs(Shape(1, seqlen_q, 50, 1, 1, 8, 8))
    out, lse = run((q.expand(batch, -1, heads, -1), *(x.expand(batch, -1, heads, -1) for x in (k, v))))
    expected_out, expected_lse = run((q, k, v))
    for entry, head in ((0, 0), (1, 1), (batch // 2, heads - 1), (batch - 1, 0), (batch - 1, heads - 1)):
        assert torch.equal(out[entry, :, head], expected_out[0, :, 0])
        assert torch.equal(lse[entry, head], expected_lse[0, 0])
    tail = slice(seqlen_q - 300, seqlen_q)
    compare((q[:, tail], k, v), (expected_out[:, tail].contiguous(), expected_lse[:, :, tail].contiguous()))
