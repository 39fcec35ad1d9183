"""Which kernels and which run-time values calls with windows, softcap, ALiBi, sinks and ragged batches get."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given as draw
from hypothesis import strategies as st
from row_by_row import sees

from flashhopper.config import (
    FP8_FEATURES,
    FP8_MAX_EXPONENT,
    BackwardSpec,
    ConfigError,
    Features,
    ForwardConfig,
    KernelSpec,
    WarpgroupOrder,
)
from flashhopper.heuristics import (
    BACKWARD_TABLE,
    CAUSAL_WAVES,
    TILE_TABLE,
    TileRow,
    features_of,
    forward_config,
    select_backward_row,
    select_backward_spec,
    select_row,
    select_spec,
)
from flashhopper.heuristics_fp8 import FP8_TABLE, Fp8Row, select_fp8_spec
from flashhopper.kernel_list import all_specs, backward_specs, forward_specs, fp8_specs, quantize_specs
from flashhopper.launch import LOG2_E, SMALLEST_SCALE, UNBOUNDED, Given, KernelScales, given, kernel_window
from flashhopper.launch_backward import Saved, _gradients_without_pairs
from flashhopper.options import AttentionOptions
from flashhopper.problem import DTYPES, AttentionProblem, RaggedFacts, RaggedTensors, SoftmaxTensors, TensorFacts
from flashhopper.reference import attention

CARD = torch.device("cuda:0")
ASKED: dict[str, tuple[dict[str, Any], Features]] = {
    "plain": ({}, Features()),
    "causal": ({"causal": True}, Features()),
    "window": ({"window_size": (64, 0)}, Features(window=True)),
    "causal window": ({"window_size": (64, -1), "causal": True}, Features(window=True)),
    "chunks": ({"attention_chunk": 64}, Features(window=True, chunk=True)),
    "softcap": ({"softcap": 20.0, "causal": True}, Features(softcap=True)),
    "both": ({"softcap": 20.0, "window_size": (64, 64)}, Features(window=True, softcap=True)),
}


def problem(head_dim: int = 128, seqlen: int = 2048, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    one = TensorFacts.of(torch.empty(1, 1, 1, head_dim, dtype=dtype).expand(2, seqlen, 6, head_dim))
    facts = one._replace(device=CARD)
    return AttentionProblem(facts, facts, facts, AttentionOptions(**options)).validate()


@pytest.mark.parametrize("options, features", ASKED.values(), ids=list(ASKED))
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_specs_have_the_features_that_are_asked_for(head_dim: int, options: dict[str, Any], features: Features) -> None:
    asked = problem(head_dim, **options)
    assert features_of(asked) == features
    forward, backward = select_spec(asked), select_backward_spec(asked)
    assert (forward.features, backward.features) == (features, features)
    causal = options.get("causal", False) and not features.window
    assert (forward.causal, backward.causal) == (causal, causal)
    assert not (features.window and forward.config.prefetch_scores)


@pytest.mark.parametrize("features", [features for _, features in ASKED.values()], ids=list(ASKED))
def test_all_kernels_with_features_are_those_that_calls_choose(features: Features) -> None:
    forward, backward = set(forward_specs(features)), set(backward_specs(features))
    has_fp8 = set(features.names) <= set(FP8_FEATURES)
    fp8 = set(fp8_specs(features)) if has_fp8 else set()
    others = set(quantize_specs(features.ragged)) if has_fp8 else set()
    assert set(all_specs(features)) == forward | backward | fp8 | others
    found_forward, found_backward, found_fp8 = set(), set(), set()
    in_e5m2 = set(fp8_specs(features, "float8_e5m2")) if has_fp8 else set()
    asked = [options for options, found in ASKED.values() if found == features]
    asked += [options | {"causal": False} for options in asked]
    asked += [options | {"causal": True} for options in asked]
    for options, deterministic in itertools.product(asked, (False, True)):
        for head_dims in itertools.product((64, 96, 128, 192, 256), repeat=2):
            for seqlen, dtype in itertools.product((512, 1024, 2048, 4096, 8192), DTYPES):
                one = problem(head_dims[0], seqlen, dtype, deterministic=deterministic, **options)
                v = one.v._replace(shape=(*one.v.shape[:3], head_dims[1]))
                found_forward.add(select_spec(one._replace(v=v)))
                found_backward.add(select_backward_spec(one._replace(v=v)))
                if has_fp8:
                    found_fp8 |= {
                        select_fp8_spec(one._replace(v=v), fast, is_centered, dtype=dtype)
                        for fast, is_centered in itertools.product((False, True), repeat=2)
                        for dtype in FP8_MAX_EXPONENT
                    }
    assert found_forward == forward
    assert found_backward == {spec for spec in backward if isinstance(spec, BackwardSpec)}
    assert found_fp8 == fp8 | in_e5m2
    assert len(in_e5m2) == len(fp8)


@pytest.mark.parametrize("row", FP8_TABLE, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}")
def test_fp8_kernels_have_masks_and_nothing_else(row: Any) -> None:
    window = row.spec("bfloat16", False, False, features=Features(window=True))
    assert (window.causal, window.features) == (False, Features(window=True))
    assert window.config.group_waves == row.spec("bfloat16", True, False).config.group_waves
    assert window.config.two_level
    assert not window.config.prefetch_scores
    for name in ("softcap", "alibi", "sink"):
        with pytest.raises(ConfigError, match=f"{name}: not in FP8 kernels yet"):
            row.spec("bfloat16", False, False, features=Features(window=True, **{name: True}))


def test_a_sink_is_none_of_the_backward_s_business() -> None:
    asked = problem()
    features = features_of(asked, has_sink=True, has_alibi=True)
    assert features == Features(sink=True, alibi=True)
    assert select_spec(asked, None, features).features == features
    assert select_backward_spec(asked, None, features).features == Features(alibi=True)


def test_what_would_spill_gets_smaller_tiles() -> None:
    plain, capped = (select_backward_spec(problem(d, softcap=cap)) for d, cap in ((128, 0.0), (128, 30.0)))
    assert (plain.config.split, capped.config.split) == ("keys", "operands")
    alibi = Features(alibi=True)
    assert select_backward_spec(problem(64), None, alibi).config.tile_m == 64
    assert select_backward_spec(problem(64)).config.tile_m == 128


def test_windows_and_ragged_batches_take_the_rows_of_causal_masks() -> None:
    for head_dim in (64, 128, 256):
        causal, window = (
            select_spec(problem(head_dim, **o)).config for o in ({"causal": True}, {"window_size": (9, 9)})
        )
        assert window.group_waves == causal.group_waves
    assert {row.causal for row in TILE_TABLE} == {False, True}
    assert any(row.causal for row in BACKWARD_TABLE)


@pytest.mark.parametrize(
    "window_size, chunk, expected",
    [
        ((-1, -1), 0, None),
        ((64, 0), 0, (64, 0, 1)),
        ((-1, 5), 0, (UNBOUNDED, 5, 1)),
        ((5, -1), 7, (5, UNBOUNDED, 7)),
        ((-1, -1), 2**40, (UNBOUNDED, UNBOUNDED, UNBOUNDED)),
    ],
)
def test_sides_of_windows_fit_32_bits(window_size: tuple[int, int], chunk: int, expected: Any) -> None:
    assert kernel_window(problem(window_size=window_size, attention_chunk=chunk)) == expected


SIDE = st.one_of(st.just(-1), st.integers(0, 9), st.just(2**40))


@draw(
    lengths=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    causal=st.booleans(),
    sides=st.tuples(SIDE, SIDE),
    chunk=st.one_of(st.just(0), st.integers(1, 9), st.just(2**40)),
)
def test_what_kernels_get_hides_what_the_options_hide(
    lengths: tuple[int, int], causal: bool, sides: tuple[int, int], chunk: int
) -> None:
    """Pair by pair, from the definition: the spec's causal flag with the window that the launcher hands over."""
    one = TensorFacts.of(torch.empty(1, 1, 1, 64, dtype=torch.bfloat16))._replace(device=CARD)
    q, k = (one._replace(shape=(1, seqlen, 1, 64)) for seqlen in lengths)
    options = AttentionOptions(causal=causal, window_size=sides, attention_chunk=chunk)
    asked = AttentionProblem(q, k, k, options).validate()
    forward, backward, window = select_spec(asked), select_backward_spec(asked), kernel_window(asked)
    assert forward.causal == backward.causal
    assert forward.features == backward.features == Features(window=window is not None, chunk=chunk > 0)
    left, right, found_chunk = window or (UNBOUNDED, UNBOUNDED, 1)
    found_chunk = found_chunk if forward.features.chunk else 0
    for i, j in itertools.product(*map(range, lengths)):
        found = sees(i, j, *lengths, forward.causal, (left, right), found_chunk)
        assert found == sees(i, j, *lengths, causal, sides, chunk)


def test_scales() -> None:
    assert KernelScales.of(problem(softmax_scale=0.5)) == (0.5 * LOG2_E, None, None)
    assert KernelScales.of(problem(softmax_scale=0.0)) == (SMALLEST_SCALE, None, None)
    assert KernelScales.of(problem(softmax_scale=0.5, softcap=20.0)) == (20.0 * LOG2_E, 0.5 / 20.0, None)
    assert KernelScales.of(problem(softmax_scale=0.5), True) == (LOG2_E, None, 0.5)
    assert KernelScales.of(problem(softmax_scale=0.5, softcap=20.0), True) == (LOG2_E, 0.5 / 20.0, 20.0)


@pytest.mark.parametrize("options", [{"softmax_scale": 0.5}, {"softmax_scale": 0.5, "softcap": 3.0}])
def test_slopes_are_in_units_of_scores(options: dict[str, Any]) -> None:
    """What is added to a score, times the factor in front of exp2, is the bias in base 2."""
    slopes = torch.tensor([0.25, 1.0])
    for has_score_mod, given_slopes in itertools.product((False, True), (slopes, slopes.expand(3, 2))):
        scales = KernelScales.of(problem(**options), has_score_mod)
        scaled = scales.slopes(given_slopes, 3)
        assert scaled.shape == (3, 2)
        assert scaled.stride(1) == 1
        unit = scales.unit if scales.unit is not None else 1.0
        torch.testing.assert_close(scaled[1] * unit * scales.scale_log2, -slopes * LOG2_E)


def test_what_a_call_has_of_the_softmax_s_tensors() -> None:
    asked = problem()
    assert given(asked, SoftmaxTensors()) is None
    q = torch.zeros(1, 2, 6, 8)
    on_cpu = AttentionProblem.from_tensors(q, q, q, AttentionOptions())
    assert given(on_cpu, SoftmaxTensors(learnable_sink=torch.zeros(6))) == Given(sink=True, alibi=False)
    assert given(on_cpu, SoftmaxTensors(alibi_slopes=torch.zeros(6))) == Given(sink=False, alibi=True)
    with pytest.raises(ValueError, match="learnable_sink has shape"):
        given(on_cpu, SoftmaxTensors(learnable_sink=torch.zeros(5)))


def test_without_keys_the_sink_s_gradient_is_that_of_the_lse() -> None:
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 0, 3, 8)
    sink = torch.randn(3, requires_grad=True)
    out, lse = attention(q, k, k, softmax_scale=1.0, causal=False, learnable_sink=sink)
    grad_lse = torch.randn_like(lse)
    (expected,) = torch.autograd.grad(lse, sink, grad_lse)
    found = _gradients_without_pairs(Saved(q, k, k, out, lse.detach()), grad_lse, sink)
    assert found.dsink is not None
    torch.testing.assert_close(found.dsink, expected)
    assert not any(x.any() for x in found[:3])
    rows_of_no_sequence = lse.detach().clone()
    rows_of_no_sequence[..., 2:] = -math.inf
    found = _gradients_without_pairs(Saved(q, k, k, out, rows_of_no_sequence), grad_lse, sink)
    torch.testing.assert_close(found.dsink, grad_lse[..., :2].sum(dim=(0, 2)))
    assert _gradients_without_pairs(Saved(q, k, k, out, lse.detach()), None, None).dsink is None


def test_specs_are_of_both_kinds() -> None:
    assert {type(spec) for spec in forward_specs()} == {KernelSpec}


def ragged_problem(head_dim: int, longest: int, **options: Any) -> AttentionProblem:
    facts = TensorFacts.of(torch.empty(1, 1, head_dim, dtype=torch.bfloat16).expand(9000, 6, head_dim))
    facts = facts._replace(device=CARD)
    lengths = torch.tensor([0, 9000], dtype=torch.int32)
    ragged = RaggedFacts.of(RaggedTensors(longest, longest, lengths, lengths))
    return AttentionProblem(facts, facts, facts, AttentionOptions(**options), ragged)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 9)}])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_ragged_batches_take_the_rows_of_masks_by_their_longest_sequence(
    head_dim: int, options: dict[str, Any]
) -> None:
    rows = [row for row in TILE_TABLE if row[:3] == (head_dim, head_dim, True)]
    limits = [row.max_seqlen_k for row in rows if row.max_seqlen_k is not None]
    assert len(limits) == len(rows) - 1
    for longest in (100, *limits, *(limit + 1 for limit in limits), 5000):
        asked = ragged_problem(head_dim, longest, **options)
        assert select_row(asked) is rows[sum(longest > limit for limit in limits)]
        spec = select_spec(asked)
        assert spec.features.ragged
        assert spec in forward_specs(spec.features)


@pytest.mark.parametrize("seqlen, causal", [(2048, False), (2048, True), (16384, True)])
def test_four_warpgroups_prefetch_scores_but_with_a_window(seqlen: int, causal: bool) -> None:
    """With which they are in no order."""
    plain = select_spec(problem(64, seqlen, causal=causal)).config
    assert (plain.num_consumer_warpgroups, plain.prefetch_scores) == (4, True)
    masked = replace(plain, group_waves=CAUSAL_WAVES, items_by_shuffle=True)
    free = replace(masked, num_stages=7, warpgroup_order="free")
    assert select_spec(ragged_problem(64, seqlen, causal=causal)).config == (free if causal else masked)
    for one in (problem, ragged_problem):
        for options in ({"window_size": (9, 9)}, {"attention_chunk": 64}):
            config = select_spec(one(64, seqlen, causal=causal, **options)).config
            assert config == replace(masked, prefetch_scores=False, warpgroup_order="free")


@pytest.mark.parametrize("causal", [False, True])
def test_three_warpgroups_have_an_order_of_their_own_for_ragged_batches(causal: bool) -> None:
    plain = select_spec(problem(128, 4096, causal=True)).config
    assert (plain.num_consumer_warpgroups, plain.items_by_shuffle) == (3, True)
    ragged = select_spec(ragged_problem(128, 4096, causal=causal)).config
    order: WarpgroupOrder = "free" if causal else "relay"
    assert ragged == replace(plain, warpgroup_order=order, items_by_shuffle=False)
    assert select_spec(ragged_problem(128, 4096, causal=causal, window_size=(9, 9))).config == plain


@pytest.mark.parametrize("causal", [False, True])
def test_two_warpgroups_prefetch_scores_of_ragged_batches_too(causal: bool) -> None:
    row = select_row(problem(128, 512, causal=True))
    assert (row.config.num_consumer_warpgroups, row.config.prefetch_scores) == (2, True)
    assert select_spec(ragged_problem(128, 512, causal=causal)).config == row.config
    window = select_spec(problem(128, 512, causal=causal, window_size=(9, 9))).config
    assert window == replace(row.config, prefetch_scores=False)


@pytest.mark.parametrize("row", TILE_TABLE, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}-{row.max_seqlen_k}")
def test_float16_takes_what_a_row_has_for_exact_softmax(row: TileRow) -> None:
    exact = replace(row.config if row.exact is None else row.exact, softmax="exact")
    assert row.config.softmax == "lazy"
    assert forward_config(row, "float16") == exact
    assert forward_config(row, "bfloat16") == row.config
    assert exact.group_waves == row.config.group_waves


def fp8_config(one: AttentionProblem, is_centered: bool = False, fast: bool = False) -> ForwardConfig:
    return select_fp8_spec(one, fast, is_centered).config


MASKED: list[dict[str, Any]] = [{"causal": True}, {"window_size": (64, 0)}, {"attention_chunk": 64}]


@pytest.mark.parametrize("seqlen", [512, 2048, 2049, 8192])
def test_fp8_at_head_dim_128_goes_by_the_mean_alone(seqlen: int) -> None:
    """Raw values may have one, of which only columns of a block at a time lose nothing."""
    for options in ({}, *MASKED):
        for one in (problem(128, seqlen, **options), ragged_problem(128, seqlen, **options)):
            raw, centered, fast = fp8_config(one), fp8_config(one, True), fp8_config(one, fast=True)
            assert (raw.tile_m, raw.two_level_columns, raw.flush_blocks) == (128, 128, 0)
            tile = (128, 128, False, False) if seqlen <= 512 else (192, 64, True, False)
            assert (fast.tile_m, fast.tile_n, fast.q_in_registers, fast.two_level) == tile
            assert replace(centered, flush_blocks=0, num_stages=fast.num_stages) == fast
            assert centered.flush_blocks == (32 if seqlen > 2048 else 0)
            is_masked = bool(options) or one.ragged is not None
            waves = CAUSAL_WAVES if is_masked else ForwardConfig(192, 64).group_waves
            assert {config.group_waves for config in (raw, centered, fast)} == {waves}


@pytest.mark.parametrize("row", FP8_TABLE, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}-{row.max_seqlen_k}")
def test_fp8_of_a_raw_v_is_by_columns_or_flushed_more_often(row: Fp8Row) -> None:
    assert row.centered.flush_blocks > 0
    assert not row.fast.two_level
    if row.two_level.flush_blocks > 0:
        assert row.two_level.flush_blocks < row.centered.flush_blocks
        assert replace(row.two_level, flush_blocks=row.centered.flush_blocks) == row.centered
    else:
        assert row.two_level.two_level_columns == row.head_dim_v
    for is_centered, config in ((False, row.two_level), (True, row.centered)):
        assert row.spec("bfloat16", False, False, is_centered).config == config
        assert row.spec("bfloat16", True, False, is_centered).config == replace(config, group_waves=CAUSAL_WAVES)


@pytest.mark.parametrize("row", FP8_TABLE, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}-{row.max_seqlen_k}")
def test_fp8_without_a_flush_is_fast(row: Fp8Row) -> None:
    """Where keys end before O would be flushed, the same sums are done without room for the flushed ones."""
    for is_centered, two_level in ((False, row.two_level), (True, row.centered)):
        last = two_level.flush_blocks * two_level.tile_n
        assert last <= 2048
        assert row.config(False, is_centered, last + 1) == two_level
        assert row.config(False, is_centered) == two_level
        assert row.config(True, is_centered, last + 1) == row.fast
        if last > 0:
            assert row.config(False, is_centered, last) == row.fast


CAPPED = {64: (192, 128), 128: (192, 64)}


@pytest.mark.parametrize("head_dim", list(CAPPED))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [512, 8192])
def test_capped_scores_have_tiles_of_their_own(head_dim: int, causal: bool, seqlen: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        row = select_row(problem(head_dim, seqlen, causal=causal))
        config = select_spec(problem(head_dim, seqlen, dtype, softcap=20.0, causal=causal)).config
        assert (config.tile_m, config.tile_n) == CAPPED[head_dim]
        assert config.softmax == ("exact" if dtype is torch.float16 else "lazy")
        assert config.group_waves == row.config.group_waves
        assert not config.prefetch_scores
        assert head_dim == 64 or config.warpgroup_order == "free"


def test_some_exponentials_of_capped_scores_run_on_the_fma_units() -> None:
    for causal in (False, True):
        found = {d: select_spec(problem(d, softcap=20.0, causal=causal)).config.exp2_on_fma for d in (64, 96, 128)}
        assert found == {64: 4, 96: 0, 128: 1}
    for head_dim in (64, 128):
        assert select_spec(problem(head_dim, dtype=torch.float16, softcap=20.0)).config.exp2_on_fma == 0
        assert select_spec(problem(head_dim, causal=True)).config.exp2_on_fma == 0


def test_capped_scores_with_slopes_have_tiles_of_128_rows_at_head_dim_64() -> None:
    asked = problem(64, 8192, softcap=20.0, causal=True)
    for dtype in (torch.bfloat16, torch.float16):
        facts = asked.q._replace(dtype=dtype)
        one = asked._replace(q=facts, k=facts, v=facts)
        config = select_spec(one, features=features_of(one, has_alibi=True)).config
        assert (config.tile_m, config.exp2_on_fma) == (128, 0)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 9)}])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_backward_of_a_ragged_batch_takes_the_row_of_its_mask(head_dim: int, options: dict[str, Any]) -> None:
    asked = ragged_problem(head_dim, 4096, **options)
    row, dense = select_backward_row(asked), select_backward_row(problem(head_dim, 4096, **options))
    assert row is dense
    spec = select_backward_spec(asked)
    assert spec in backward_specs(spec.features)
    free = replace(row.config, warpgroup_order="free", group_waves=CAUSAL_WAVES)
    assert spec.config == (free if head_dim == 64 and not options else row.config)
