"""The forward kernel's emulator against the fp64 oracle, on random inputs and on inputs made to break lazy softmax."""

from __future__ import annotations

import math

import pytest
import torch
from tolerance import assert_close_to_reference, assert_lse_close, assert_within_own_roundings

from flashhopper import reference
from flashhopper.config import ForwardConfig
from flashhopper.reference import attention, emulate_forward

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

EXACT = ForwardConfig(tile_m=64, tile_n=32, softmax="exact")
LAZY = ForwardConfig(tile_m=64, tile_n=32, softmax="lazy")
BLOCKS, SEQLEN, HEADS, HEAD_DIM = 6, 192, 2, 64  # of the adversarial inputs, cut by 64 x 32 tiles
SCALE = HEAD_DIM**-0.5


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensors:
    batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v = shape
    sizes = ((seqlen_q, heads, head_dim), (seqlen_k, heads_k, head_dim), (seqlen_k, heads_k, head_dim_v))
    q, k, v = (torch.randn(batch, *size).to(dtype) for size in sizes)
    return q, k, v


def check(tensors: Tensors, scale: float, causal: bool, config: ForwardConfig) -> int:
    """Compare with the oracle; return the number of tiles redone."""
    out, lse, redone = emulate_forward(*tensors, softmax_scale=scale, causal=causal, config=config)
    q, k, v = (x.double() for x in tensors)
    ref_out, ref_lse = attention(q, k, v, softmax_scale=scale, causal=causal)
    assert out.dtype == tensors[0].dtype
    assert_within_own_roundings(out, ref_out, ref_lse, tensors[2])
    assert_lse_close(lse, ref_lse)
    return redone


def check_by_the_rule(tensors: Tensors, scale: float, causal: bool, config: ForwardConfig) -> int:
    """As ``check``, and by the tolerance rule, which is the stricter one where logits are small."""
    out, _, _ = emulate_forward(*tensors, softmax_scale=scale, causal=causal, config=config)
    ref, _ = attention(*(x.double() for x in tensors), softmax_scale=scale, causal=causal)
    low, _ = attention(*tensors, softmax_scale=scale, causal=causal, compute_dtype=tensors[0].dtype)
    assert_close_to_reference(out, ref, low)
    return check(tensors, scale, causal, config)


SHAPES = [
    (2, 128, 128, 2, 2, 64, 64),
    (1, 100, 333, 6, 1, 64, 64),  # GQA 6:1, ragged ends
    (1, 333, 100, 4, 2, 32, 96),  # causal rows without keys, whole query tiles without keys, dv > d
    (3, 1, 200, 2, 1, 128, 64),
    (1, 257, 257, 1, 1, 256, 256),
    (2, 70, 1, 2, 2, 64, 64),
]
CONFIGS = [
    EXACT,
    LAZY,
    ForwardConfig(tile_m=128, tile_n=128, softmax="exact"),
    ForwardConfig(tile_m=128, tile_n=176, softmax="lazy"),
    ForwardConfig(tile_m=192, tile_n=128, softmax="lazy"),
    ForwardConfig(tile_m=128, tile_n=80, softmax="lazy"),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.softmax}-{c.tile_m}x{c.tile_n}")
@pytest.mark.parametrize("shape", SHAPES)
def test_random_inputs(shape: tuple[int, ...], config: ForwardConfig, causal: bool) -> None:
    assert check_by_the_rule(inputs(shape), shape[5] ** -0.5, causal, config) == 0


@pytest.mark.parametrize("causal", [False, True])
def test_float16(causal: bool) -> None:
    assert check_by_the_rule(inputs((1, 150, 300, 4, 2, 64, 64), torch.float16), SCALE, causal, EXACT) == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("config", [EXACT, LAZY], ids=lambda c: c.softmax)
def test_fp32_inputs_show_the_arithmetic_without_rounding_of_p(config: ForwardConfig, causal: bool) -> None:
    q, k, v = inputs((2, 200, 333, 4, 2, 32, 48), torch.float32)
    out, lse, redone = emulate_forward(q, k, v, softmax_scale=0.5, causal=causal, config=config)
    ref_out, ref_lse = attention(q.double(), k.double(), v.double(), softmax_scale=0.5, causal=causal)
    torch.testing.assert_close(out.double(), ref_out, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(lse.double(), ref_lse, atol=5e-6, rtol=1e-6)
    assert redone == 0


def test_p_is_rounded_and_its_sum_is_not() -> None:
    """Values that cancel against the rounded P leave exactly 0; the LSE sees the unrounded P."""
    q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)
    q[..., 0], k[:, 1, :, 0] = 1.0, -1.25
    p = math.exp(-1.25)
    rounded = torch.tensor(p).bfloat16().item()
    assert abs(rounded - p) > 1e-4
    v[:, 0], v[:, 1] = -rounded, 1.0
    out, lse, _ = emulate_forward(*(x.bfloat16() for x in (q, k, v)), softmax_scale=1.0, causal=False, config=EXACT)
    assert out.count_nonzero() == 0
    assert lse.item() == pytest.approx(math.log1p(p), abs=1e-6)


@pytest.mark.parametrize("config", [EXACT, LAZY], ids=lambda c: c.softmax)
def test_large_logits_keep_their_differences(config: ForwardConfig) -> None:
    """Scores of 1e5 are exact in steps of 1/128; an exponent rounded before the subtraction would be off by 4e-3."""
    q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
    q[..., 0] = 1.0
    k[:, 0, :, 0], k[:, 40, :, 0] = 1e5, 1e5 - 0.515625
    v[:, 40] = 1.0
    out, _, _ = emulate_forward(q, k, v, softmax_scale=1.0, causal=False, config=config)
    assert out[0, 0, 0].tolist() == pytest.approx([1 / (1 + math.exp(0.515625))] * 8, abs=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("config", [EXACT, LAZY], ids=lambda c: c.softmax)
@pytest.mark.parametrize("batch, seqlen_q, seqlen_k", [(2, 5, 0), (2, 0, 5), (0, 70, 70), (1, 0, 0)])
def test_zero_lengths(batch: int, seqlen_q: int, seqlen_k: int, config: ForwardConfig, causal: bool) -> None:
    q, k, v = inputs((batch, seqlen_q, seqlen_k, 2, 1, 8, 16))
    out, lse, redone = emulate_forward(q, k, v, softmax_scale=1.0, causal=causal, config=config)
    assert (out.shape, lse.shape, redone) == ((batch, seqlen_q, 2, 16), (batch, 2, seqlen_q), 0)
    assert out.count_nonzero() == 0
    assert lse.eq(-math.inf).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("config", [EXACT, LAZY], ids=lambda c: c.softmax)
def test_scale_zero(config: ForwardConfig, causal: bool) -> None:
    assert check_by_the_rule(inputs((1, 70, 100, 2, 1, 64, 64)), 0.0, causal, config) == 0


def steered(extra: torch.Tensor) -> Tensors:
    """Random q, k, v, with ``extra (batch, SEQLEN)`` added to the logits of each key."""
    q, k, v = inputs((len(extra), SEQLEN, SEQLEN, HEADS, HEADS, HEAD_DIM, HEAD_DIM))
    q[..., 5] = 32.0
    k[..., 5] = (extra / (32.0 * SCALE)).bfloat16()[:, :, None]
    return q, k, v


def spikes(size: float, column: int) -> torch.Tensor:
    """Batch entry i: key ``column`` of block i gets ``size``."""
    extra = torch.zeros(BLOCKS, SEQLEN)
    extra[torch.arange(BLOCKS), 32 * torch.arange(BLOCKS) + column] = size
    return extra


KEYS = torch.arange(SEQLEN)
BLOCK_OF_KEY = KEYS // 32
ADVERSARIAL = {
    "equal keys": torch.zeros(1, SEQLEN),
    **{f"ramp to {x:g}": torch.stack((KEYS, SEQLEN - KEYS)) / SEQLEN * x for x in (50.0, 500.0, 1e4, 1e5)},
    **{
        f"a key {x:g} larger in each next block": ((KEYS % 32 == 9) * (BLOCKS - BLOCK_OF_KEY) * x)[None]
        for x in (20.0, 60.0, 100.0, 1e4)
    },
    **{f"first block visited {x:g}": ((BLOCK_OF_KEY == BLOCKS - 1) * x)[None] for x in (-1e5, -1e4, -60.0, -40.0)},
    **{f"all logits {x:g}": torch.full((1, SEQLEN), x) for x in (-1e5, 1e5)},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("config", [EXACT, LAZY], ids=lambda c: c.softmax)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_inputs(name: str, config: ForwardConfig, causal: bool) -> None:
    q, k, v = steered(ADVERSARIAL[name])
    if name == "equal keys":
        k = k[:, :1].expand_as(k)
    redone = check((q, k, v), SCALE, causal, config)
    if config is EXACT or name == "equal keys" or name.startswith("all"):
        assert redone == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e5, 1e4, 300.0, 100.0, 75.0, 45.0, 30.0, 21.0, -1e4, -1e5])
def test_spike_in_any_block(size: float, causal: bool) -> None:
    """A spike past 2**100 in a lazy block redoes the tiles that see it there, and no other; smaller ones none.

    75 is 2**108: the sum is finite, yet not trusted.
    """
    column = int(torch.randint(1, 32, ()))  # column 0 may be the only key of a row's masked block: the next test
    tensors = steered(spikes(size, column))
    assert check(tensors, SCALE, causal, EXACT) == 0
    redone = check(tensors, SCALE, causal, LAZY)
    lazy_blocks = (0 + 2 + 4) if causal else 3 * 5  # of the 3 query tiles: those below the diagonal; all but the last
    assert redone == (lazy_blocks * HEADS if size >= 75 else 0)


def test_reference_from_a_single_low_key_redoes() -> None:
    """The first rows of query tiles 1 and 2 see one key in their masked block; at -1e4 it is a bad reference."""
    tensors = steered(spikes(-1e4, 0))
    assert check(tensors, SCALE, True, LAZY) == 2 * HEADS
    assert check(tensors, SCALE, False, LAZY) == 0


def test_moved_reference_avoids_the_redo() -> None:
    """Logits climb 40 (2**58) per block, to 2**290 above the first reference: only moves keep the sums in range."""
    climb = ((BLOCKS - 1 - BLOCK_OF_KEY) * 40.0)[None]
    assert check(steered(climb), SCALE, False, LAZY) == 0
    assert check(steered(climb * 2.5), SCALE, False, LAZY) == 3 * HEADS  # 2**144 in one step


def test_overflow_of_o_alone_redoes() -> None:
    """Row sums of 2**86 are trusted, but P times values of 1e20 is not finite: O's own check must see it."""
    extra = ((BLOCK_OF_KEY == BLOCKS - 1) * -60.0)[None]
    q, k, v = steered(extra)
    assert check((q, k, v), SCALE, False, LAZY) == 0
    assert check((q, k, v * 1e20), SCALE, False, LAZY) == 3 * HEADS


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_non_finite_input_gives_the_pattern_of_the_exact_softmax(poison: float) -> None:
    q, k, v = inputs((1, 130, 130, 1, 1, 64, 64))
    k[:, 17, :, 0] = poison
    lazy_out, lazy_lse, redone = emulate_forward(q, k, v, softmax_scale=SCALE, causal=True, config=LAZY)
    exact_out, exact_lse, _ = emulate_forward(q, k, v, softmax_scale=SCALE, causal=True, config=EXACT)
    assert redone == 3
    assert torch.equal(lazy_out.isnan(), exact_out.isnan())
    assert torch.equal(lazy_lse.isnan(), exact_lse.isnan())
    assert 0 < int(exact_lse.isnan().sum()) <= 130 - 17


def test_constants_are_the_kernels() -> None:
    from flashhopper.kernels import softmax

    assert reference.LOG2_E == softmax.LOG2_E
    assert reference.NO_KEY_YET == softmax.NO_REFERENCE
    assert reference.MOVE_ABOVE == softmax.MOVE_ABOVE
    assert reference.SAFE_SUMS == softmax.TRUSTED_SUM


def test_a_move_whose_factor_underflows_redoes_the_tile() -> None:
    """Near 2**30 the new reference is rounded by up to 64, the factor to 0: without a mark the sum would be lost."""
    q, k, v = (torch.zeros(1, 512, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    q[..., 0], q[..., 1] = 1.5 * 2**14, 8.0
    k[..., 0] = 2.0**14
    for key, value in ((256 + 5, 1.0), (5, 3.0)):  # 64 more than the rest, in two lazy blocks
        k[0, key, 0, 1], v[0, key] = 8.0, value
    scale = 1.5 * math.log(2)
    config = ForwardConfig(128, 128)
    out, _, redone = emulate_forward(q, k, v, softmax_scale=scale, causal=False, config=config)
    assert redone == 4
    assert torch.equal(out, torch.full_like(out, 2.0))


@pytest.mark.parametrize("softmax", ["exact", "lazy"])
def test_references_too_large_for_their_exponents_are_nan(softmax: str) -> None:
    q, k, v = (torch.ones(1, 70, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    config = ForwardConfig(128, 128, softmax=softmax)
    limit = 2.0**31 / 64 * math.log(2)
    for scale, holds in ((0.99 * limit, True), (1.01 * limit, False)):
        out, lse, _ = emulate_forward(q, k, v, softmax_scale=scale, causal=False, config=config)
        assert bool(out.isnan().all() and lse.isnan().all()) is not holds
        assert not holds or torch.equal(out, torch.ones_like(out))
