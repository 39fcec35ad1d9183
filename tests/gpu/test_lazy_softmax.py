"""The lazy row maximum on inputs made to break it: the result is right, and the tiles redone are those that must be.

``reference.emulate_forward`` says which: the same blocks, the same policy, in plain PyTorch. Its own tests
(tests/unit/test_emulator.py) hold it against fp64.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from checks import (
    BF16,
    Result,
    Shape,
    Tensors,
    assert_same_bits,
    check,
    compare,
    random_inputs,
    redone_tiles,
    run,
)
from extra_specs import EXTRA_SPECS
from tolerance import assert_lse_close, assert_within_own_roundings

from flashhopper.config import KernelSpec
from flashhopper.kernel_list import forward_specs
from flashhopper.reference import attention, emulate_forward

BLOCKS = 6
# The column of q and k that carries the extra logits, and q's value there. The last one: the other products are summed
# before it, not rounded one by one to the last place of a large sum (seen in column 5: LSE off by 17 ulps of 1e4).
STEERED, PUSH = -1, 32.0

LAZY_SPECS = [spec for spec in forward_specs() if spec.config.softmax == "lazy"]
EXTRA_LAZY = {name: spec for name, spec in EXTRA_SPECS.items() if spec.config.softmax == "lazy"}
LAZY_NAMES = [spec.name for spec in LAZY_SPECS] + list(EXTRA_LAZY)


class Case(NamedTuple):
    """Logits added to each key (batch, keys), and what is known of the redo without the emulator."""

    extra: torch.Tensor
    never_redone: bool = False


def keys_of(spec: KernelSpec) -> torch.Tensor:
    return torch.arange(BLOCKS * spec.config.tile_n, device="cuda")


def spikes(spec: KernelSpec, size: float) -> torch.Tensor:
    """Batch entry i: one key in block i gets ``size``."""
    tile_n = spec.config.tile_n
    extra = torch.zeros(BLOCKS, BLOCKS * tile_n, device="cuda")
    for block in range(BLOCKS):
        extra[block, tile_n * block + int(torch.randint(tile_n, ()))] = size
    return extra


def adversarial(name: str, spec: KernelSpec) -> Case:
    """The cases by name."""
    keys, tile_n = keys_of(spec), spec.config.tile_n
    block, last = keys // tile_n, BLOCKS - 1
    kind, _, number = name.partition(" ")
    size = float(number or 0)
    match kind:
        case "ramp":
            return Case(torch.stack((keys, keys.flip(0))) / len(keys) * size)
        case "staircase":  # a key ``size`` larger in each block visited
            return Case(((keys % tile_n == 9) * (last - block) * size)[None])
        case "first":  # all of the block visited first
            return Case(((block == last) * size)[None])
        case "all":
            return Case(torch.full((1, len(keys)), size, device="cuda"), never_redone=True)
        case "spikes":
            return Case(spikes(spec, size), never_redone=0 <= size < 60)
        case "climb":  # every key of the next block visited, ``size`` more than of the block before
            return Case(((last - block) * size)[None])
        case "alternate":
            return Case(((block % 2) * size)[None])
    raise AssertionError(name)


NAMES = [
    *(f"ramp {size:g}" for size in (50.0, 500.0, 1e4, 1e5)),
    *(f"staircase {size:g}" for size in (20.0, 60.0, 100.0, 1e4)),
    *(f"first {size:g}" for size in (-1e5, -1e4, -60.0, -40.0, 60.0, 1e4)),
    *(f"all {size:g}" for size in (-1e5, 0.0, 1e5)),
    *(f"spikes {size:g}" for size in (1e5, 1e4, 300.0, 100.0, 45.0, 21.0, -1e4, -1e5)),
    *(f"climb {size:g}" for size in (30.0, 40.0, 100.0, -40.0)),
    *(f"alternate {size:g}" for size in (1e4, 50.0)),
]


def steered(extra: torch.Tensor, spec: KernelSpec) -> Tensors:
    """Random inputs, 2 heads, as many rows as keys, with ``extra`` (batch, keys) added to the logits of each key."""
    batch, length = extra.shape
    q, k, v = random_inputs(Shape(batch, length, length, 2, 2, spec.head_dim, spec.head_dim_v))
    q[..., STEERED] = PUSH
    k[..., STEERED] = (extra * spec.head_dim**0.5 / PUSH).to(BF16)[:, :, None]
    return q, k, v


def check_adversarial(tensors: Tensors, spec: KernelSpec) -> int:
    """Compare with fp64, and the number of tiles redone with the emulator's; return that number."""
    scale = spec.head_dim**-0.5
    before = redone_tiles()
    out, lse = run(tensors, causal=spec.causal, config=spec.config)
    redone = redone_tiles() - before
    q, k, v = (x.double() for x in tensors)
    ref, ref_lse = attention(q, k, v, softmax_scale=scale, causal=spec.causal)
    assert_within_own_roundings(out, ref, ref_lse, tensors[2])
    assert_lse_close(lse, ref_lse)
    _, _, expected = emulate_forward(*tensors, softmax_scale=scale, causal=spec.causal, config=spec.config)
    assert redone == expected
    return redone


@pytest.mark.parametrize("spec", [s for s in LAZY_SPECS if s.head_dim in (64, 128, 256)], ids=lambda spec: spec.name)
@pytest.mark.parametrize("name", NAMES)
def test_adversarial_inputs(name: str, spec: KernelSpec) -> None:
    case = adversarial(name, spec)
    redone = check_adversarial(steered(case.extra, spec), spec)
    if case.never_redone:
        assert redone == 0


@pytest.mark.parametrize("spec", [spec for spec in LAZY_SPECS if not spec.causal], ids=lambda spec: spec.name)
def test_a_spike_redoes_the_tiles_that_meet_it_in_a_lazy_block(spec: KernelSpec) -> None:
    """Batch entry i has the spike in block i; only the last block, visited first, is exact."""
    tensors = steered(spikes(spec, 1e4), spec)
    tiles = -(-tensors[0].shape[1] // spec.config.tile_m)
    assert check_adversarial(tensors, spec) == (BLOCKS - 1) * 2 * tiles


@pytest.mark.parametrize("spec", LAZY_SPECS, ids=lambda spec: spec.name)
def test_equal_keys(spec: KernelSpec) -> None:
    q, k, v = random_inputs(Shape(2, 500, BLOCKS * spec.config.tile_n, 2, 2, spec.head_dim, spec.head_dim_v))
    assert check_adversarial((q, 30 * k[:, :1].expand_as(k), v), spec) == 0


@pytest.mark.parametrize("spec", LAZY_SPECS, ids=lambda spec: spec.name)
def test_overflow_of_o_alone_redoes(spec: KernelSpec) -> None:
    """Row sums near 2**86 are trusted, but P times values of 1e20 is not finite: O's own check must see it."""
    block = keys_of(spec) // spec.config.tile_n
    q, k, v = steered(((block == BLOCKS - 1) * -60.0)[None], spec)
    assert check_adversarial((q, k, v), spec) == 0
    assert check_adversarial((q, k, v * 1e20), spec) > 0


def many_tiles(spec: KernelSpec, share: float) -> tuple[Tensors, torch.Tensor]:
    """More tiles than multiprocessors, and per row ``(b, sq, h)`` whether its tile meets a spike in a lazy block."""
    tile_m, tile_n = spec.config.tile_m, spec.config.tile_n
    shape = Shape(3, 7 * tile_m + 37, BLOCKS * tile_n, 8, 4, spec.head_dim, spec.head_dim_v)
    q, k, v = random_inputs(shape)
    chosen = torch.rand(shape.batch, 8, shape.heads, device="cuda") < share
    chosen[0, -1, 0] = True  # at least one, and one that sees all keys under a causal mask
    rows = chosen.repeat_interleave(tile_m, dim=1)[:, : shape.seqlen_q]
    q[..., STEERED] = PUSH * rows
    k[..., STEERED] = 0.0
    k[:, tile_n + 3, :, STEERED] = 1e4 * spec.head_dim**0.5 / PUSH
    return (q, k, v), rows


@pytest.mark.parametrize("share", [0.02, 0.4, 1.0])
@pytest.mark.parametrize("spec", [*LAZY_SPECS, *EXTRA_LAZY.values()], ids=LAZY_NAMES)
def test_random_tiles_are_redone(spec: KernelSpec, share: float) -> None:
    """Whatever the schedule and the pattern of failures, exactly the failed tiles are redone; the others come out as if
    nothing had happened."""
    (q, k, v), rows = many_tiles(spec, share)
    redone = check_adversarial((q, k, v), spec)
    if not spec.causal:
        tiles = rows[:, :: spec.config.tile_m]
        assert redone == int(tiles.sum())
    assert redone > 0
    out, lse = run((q, k, v), causal=spec.causal, config=spec.config)
    q[..., STEERED] = 0.0
    calm = check((q, k, v), causal=spec.causal, config=spec.config)
    assert torch.equal(out[~rows], calm[0][~rows])
    assert torch.equal(lse.transpose(1, 2)[~rows], calm[1].transpose(1, 2)[~rows])


def patterns(result: Result) -> list[torch.Tensor]:
    return [mask for x in result for mask in (x.isnan(), x == math.inf, x == -math.inf)]


POISON_SHAPE = Shape(1, 300, 700, 2, 1, 128, 128)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("row", [7, 640])  # of k and v: in a lazy block, and in the block visited first
def test_non_finite_inputs_give_the_exact_pattern(operand: str, row: int, poison: float, causal: bool) -> None:
    """NaN and Inf come out where the exact kernel has them; of q and k, where fp32 PyTorch has them too.

    Of v, PyTorch agrees without a mask only: a hidden key's P is 0, and 0 times NaN is NaN.
    """
    tensors = random_inputs(POISON_SHAPE)
    poisoned = tensors["qkv".index(operand)]
    poisoned[:, row % poisoned.shape[1], 0, 3] = poison
    exact = EXTRA_SPECS["exact_causal" if causal else "exact"].config
    lazy_result = run(tensors, causal=causal, config=replace(exact, softmax="lazy"))
    exact_result = run(tensors, causal=causal, config=exact)
    for mask, expected in zip(patterns(lazy_result), patterns(exact_result), strict=True):
        assert torch.equal(mask, expected)
    if operand != "v" or not causal:
        q, k, v = (x.float() for x in tensors)
        reference = attention(q, k, v, softmax_scale=128**-0.5, causal=causal)
        for mask, expected in zip(patterns(exact_result), patterns(reference), strict=True):
            assert torch.equal(mask, expected)
    assert any(mask.any() for mask in patterns(exact_result))


def test_random_inputs_redo_nothing() -> None:
    """The price of the lazy softmax is paid by adversaries only: 12 heads × 4k × 4k scores without one redo."""
    before = redone_tiles()
    for spec in LAZY_SPECS:
        tensors = random_inputs(Shape(1, 4096, 4096, 12, 12, spec.head_dim, spec.head_dim_v))
        result = run(tensors, causal=spec.causal, config=spec.config)
        head = (x[:, :, :1].contiguous() for x in tensors)
        compare((*head,), (result[0][:, :, :1].contiguous(), result[1][:, :1].contiguous()), causal=spec.causal)
    assert redone_tiles() == before


@pytest.mark.parametrize("spec", [*LAZY_SPECS, *EXTRA_LAZY.values()], ids=LAZY_NAMES)
def test_a_redo_leaves_nothing_behind(spec: KernelSpec) -> None:
    """The call after one with redone tiles has the bits of the call before it."""
    tensors, _ = many_tiles(spec, share=0.3)
    calm = random_inputs(Shape(2, 900, 900, 8, 4, spec.head_dim, spec.head_dim_v))
    expected = run(calm, causal=spec.causal, config=spec.config)
    for _ in range(3):
        before = redone_tiles()
        run(tensors, causal=spec.causal, config=spec.config)
        assert redone_tiles() > before
        assert_same_bits(run(calm, causal=spec.causal, config=spec.config), expected)
