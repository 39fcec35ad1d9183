"""``deterministic=True``: the same bits in every run, alone and beside other work; else, a difference of rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from backward_checks import (
    CAUSAL,
    FULL,
    Gradients,
    Incoming,
    attend,
    check_gradients,
    count_differing_gradients,
    leaves,
    pull,
    random_incoming,
    run_gradients,
    take_gradients,
)
from checks import BF16, FP16, Shape, Tensors, random_inputs
from tolerance import root_mean_square

from flashhopper.options import AttentionOptions

SMALL = Shape(2, 300, 300, 6, 2, 64, 64)

LARGER = [
    (Shape(2, 1024, 1024, 8, 8, 64, 64), BF16),
    (Shape(2, 1000, 1111, 8, 4, 128, 128), FP16),
    (Shape(1, 1023, 2045, 6, 1, 128, 128), BF16),
    (Shape(1, 64, 4096, 8, 2, 128, 128), BF16),  # few blocks of dq, each added to by many CTAs
    (Shape(1, 4096, 64, 8, 2, 128, 128), BF16),
    (Shape(8, 1, 2000, 8, 1, 64, 64), BF16),
    (Shape(1, 700, 900, 16, 2, 96, 96), BF16),
    (Shape(2, 700, 700, 12, 2, 256, 256), BF16),
    (Shape(2, 700, 500, 12, 2, 192, 128), FP16),
    (Shape(2, 500, 700, 4, 4, 40, 248), BF16),
    (Shape(6, 777, 777, 32, 4, 64, 64), BF16),  # more tiles than multiprocessors
]


def repeat(tensors: Tensors, incoming: Incoming, options: AttentionOptions, runs: int) -> list[int]:
    """Differing elements of dq, dk and dv over backward passes of one forward, without a look at them in between."""
    inputs = leaves(tensors)
    result = attend(inputs, options)
    expected = pull(result, inputs, incoming, retain_graph=True)
    differing = torch.zeros(3, dtype=torch.int64, device="cuda")
    for _ in range(runs):
        gradients = pull(result, inputs, incoming, retain_graph=True)
        differing += count_differing_gradients(gradients, expected)
    counts: list[int] = differing.tolist()
    return counts


@contextmanager
def other_work() -> Iterator[None]:
    """Kernels of another stream come and go on some of the multiprocessors, so that CTAs start in other orders."""
    side = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=BF16)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(1000):  # about 25 ms of the card, queued in 5
            torch.mm(a, a)
    yield
    side.synchronize()


@pytest.mark.parametrize("options", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_thousand_repeats_are_bitwise_equal(head_dim: int, options: AttentionOptions) -> None:
    shape = SMALL._replace(head_dim=head_dim, head_dim_v=head_dim)
    tensors, incoming = random_inputs(shape), random_incoming(shape, lse=True)
    repeatable = options._replace(deterministic=True)
    check_gradients(tensors, incoming, repeatable)
    assert repeat(tensors, incoming, repeatable, 1000) == [0, 0, 0]


@pytest.mark.parametrize("options", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("shape, dtype", LARGER)
def test_twenty_repeats_of_larger_problems(shape: Shape, dtype: torch.dtype, options: AttentionOptions) -> None:
    tensors, incoming = random_inputs(shape, dtype), random_incoming(shape, dtype)
    assert repeat(tensors, incoming, options._replace(deterministic=True), 20) == [0, 0, 0]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repeats_beside_other_work(head_dim: int) -> None:
    """Also a test that CTAs do not wait for others that have no multiprocessor yet."""
    shape = Shape(4, 700, 900, 12, 4, head_dim, head_dim)
    tensors, incoming = random_inputs(shape), random_incoming(shape)
    options = CAUSAL._replace(deterministic=True)
    alone = run_gradients(tensors, incoming, options)
    with other_work():
        crowded = [take_gradients(tensors, incoming, options) for _ in range(20)]
    assert sum(count_differing_gradients(gradients, alone) for gradients in crowded).tolist() == [0, 0, 0]


def test_repeats_of_the_whole_call_with_poisoned_memory() -> None:
    """Forward and backward, every allocation NaN before: nothing depends on what lay there."""
    tensors, incoming = random_inputs(SMALL), random_incoming(SMALL, lse=True)
    options = CAUSAL._replace(deterministic=True)
    expected = check_gradients(tensors, incoming, options)
    differing = [count_differing_gradients(run_gradients(tensors, incoming, options), expected) for _ in range(50)]
    assert sum(differing).tolist() == [0, 0, 0]


@pytest.mark.parametrize("options", [FULL, CAUSAL], ids=["full", "causal"])
def test_the_other_mode_differs_by_rounding_only(options: AttentionOptions) -> None:
    shape = Shape(2, 1000, 1500, 6, 2, 128, 128)
    tensors, incoming = random_inputs(shape), random_incoming(shape)
    ordered: Gradients = check_gradients(tensors, incoming, options._replace(deterministic=True))
    for x, y in zip(check_gradients(tensors, incoming, options), ordered, strict=True):
        difference = root_mean_square(x.double() - y.double())
        assert difference <= torch.finfo(BF16).eps * root_mean_square(y.double())
