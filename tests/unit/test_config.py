"""Configurations: sizes as computed on paper, and what does not fit is refused with the limit and the number."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashhopper.config import (
    MAX_REGISTERS_PER_THREAD,
    REGISTER_FILE,
    SMEM_BYTES_PER_CTA,
    BackwardConfig,
    BackwardSpec,
    ConfigError,
    Features,
    ForwardConfig,
    KernelSpec,
    PostprocessSpec,
    PreprocessSpec,
)
from flashhopper.heuristics import BACKWARD_TABLE, BackwardRow
from flashhopper.programs import trace_mask, trace_score

D128 = ForwardConfig(tile_m=128, tile_n=128)


@pytest.mark.parametrize(
    "config, head_dim, head_dim_v, expected",
    [
        # barriers + Q + O + stages · (K + V)
        (D128, 128, 128, 1024 + 32768 + 32768 + 2 * 2 * 32768),
        (replace(D128, tma_store=False), 128, 128, 1024 + 32768 + 2 * 2 * 32768),
        (replace(D128, num_stages=1), 128, 128, 1024 + 32768 + 32768 + 2 * 32768),
        (replace(D128, num_q_stages=2), 128, 128, 1024 + 2 * 32768 + 32768 + 2 * 2 * 32768),
        (ForwardConfig(192, 128), 64, 64, 1024 + 24576 + 24576 + 2 * 2 * 16384),
        (ForwardConfig(128, 144, num_o_parts=2), 128, 128, 1024 + 32768 + 16384 + 2 * 2 * 36864),
        (ForwardConfig(128, 64, num_o_parts=2), 256, 256, 1024 + 65536 + 32768 + 2 * 2 * 32768),
        (ForwardConfig(128, 112, num_o_parts=4), 192, 128, 1024 + 49152 + 8192 + 2 * (43008 + 28672)),
    ],
)
def test_smem_bytes(config: ForwardConfig, head_dim: int, head_dim_v: int, expected: int) -> None:
    assert config.smem_bytes(head_dim, head_dim_v) == expected


def test_smem_bytes_of_one_byte_elements_is_half_beside_the_barriers_and_the_16_bit_output() -> None:
    two, one = D128.smem_bytes(128, 128), D128.smem_bytes(128, 128, element_bytes=1)
    other = 1024 + 128 * 128 * 2
    assert two - other == 2 * (one - other)


@pytest.mark.parametrize(
    "tile_m, groups, threads, entry, producer, consumer",
    [(64, 1, 256, 248, 56, 248), (128, 2, 384, 168, 40, 232), (192, 3, 512, 128, 32, 160), (256, 4, 640, 96, 32, 112)],
)
def test_registers(tile_m: int, groups: int, threads: int, entry: int, producer: int, consumer: int) -> None:
    config = ForwardConfig(tile_m, 64)
    assert (config.num_consumer_warpgroups, config.num_threads) == (groups, threads)
    assert config.registers() == (entry, producer, consumer)
    assert replace(config, reallocate_registers=False).registers() == (entry, entry, entry)
    for count in config.registers():  # what setmaxnreg accepts
        assert count % 8 == 0
        assert 24 <= count <= MAX_REGISTERS_PER_THREAD
    assert 128 * (producer + groups * consumer) <= entry * threads <= REGISTER_FILE


@pytest.mark.parametrize(
    "config, head_dim, head_dim_v, expected",
    [
        (D128, 128, 128, 64 + 32 + 64),  # S, P as pairs, O
        (replace(D128, q_in_registers=True), 128, 128, 64 + 32 + 64 + 32),
        (ForwardConfig(128, 80), 256, 256, 40 + 20 + 128),
        (ForwardConfig(192, 128), 64, 64, 64 + 32 + 32),
        (ForwardConfig(192, 128, q_in_registers=True), 64, 128, 64 + 32 + 64 + 16),
    ],
)
def test_accumulator_registers(config: ForwardConfig, head_dim: int, head_dim_v: int, expected: int) -> None:
    assert config.accumulator_registers(head_dim, head_dim_v) == expected


FEASIBLE = [
    (ForwardConfig(192, 128), 64, 64),
    (D128, 128, 128),
    (ForwardConfig(128, 144, num_o_parts=2), 128, 128),
    (ForwardConfig(128, 96, num_o_parts=2), 192, 192),
    (ForwardConfig(128, 64, num_o_parts=2), 256, 256),
    (ForwardConfig(64, 64), 128, 128),
    (ForwardConfig(192, 128, num_q_stages=2, prefetch_scores=True), 64, 64),
]


@pytest.mark.parametrize("config, head_dim, head_dim_v", FEASIBLE)
def test_feasible(config: ForwardConfig, head_dim: int, head_dim_v: int) -> None:
    config.check_feasible(head_dim, head_dim_v)
    assert config.smem_bytes(head_dim, head_dim_v) <= SMEM_BYTES_PER_CTA
    free = config.registers().consumer - config.accumulator_registers(head_dim, head_dim_v)
    assert free >= 16


INFEASIBLE = [
    (ForwardConfig(0, 128), 64, "tile_m=0 must be 64, 128, 192 or 256"),
    (ForwardConfig(100, 128), 64, "tile_m=100 must be 64, 128, 192 or 256"),
    (ForwardConfig(320, 64), 64, "tile_m=320 must be 64, 128, 192 or 256"),
    (ForwardConfig(256, 96), 64, "S, P, O and Q take 104 of 112 registers"),
    (ForwardConfig(128, 8), 64, "tile_n=8 must be a multiple of 16 from 16 to 256"),
    (ForwardConfig(128, 100), 64, "tile_n=100 must be a multiple of 16 from 16 to 256"),
    (ForwardConfig(128, 272), 64, "tile_n=272 must be a multiple of 16 from 16 to 256"),
    (ForwardConfig(128, 128, num_stages=0), 64, "num_stages=0 must be at least 1"),
    (ForwardConfig(128, 128, num_q_stages=0), 64, "num_q_stages=0 must be at least 1"),
    (ForwardConfig(128, 128, num_stages=3), 128, "needs 263168 bytes of shared memory, the card has 232448"),
    (ForwardConfig(128, 80), 256, "needs 295936 bytes of shared memory, the card has 232448"),
    (ForwardConfig(192, 128), 128, "S, P, O and Q take 160 of 160 registers, at least 16 must be left"),
    (
        ForwardConfig(128, 128, reallocate_registers=False),
        128,
        "S, P, O and Q take 160 of 168 registers, at least 16 must be left",
    ),
    (ForwardConfig(128, 64, num_o_parts=0), 64, "num_o_parts=0 must be at least 1"),
    (ForwardConfig(128, 64, num_o_parts=3), 64, "num_o_parts=3 must leave multiples of 32 columns of head_dim_v=64"),
    (ForwardConfig(64, 64, num_q_stages=3), 64, "num_q_stages=3 must be 1 or 2"),
    (ForwardConfig(128, 64, num_o_parts=2, tma_store=False), 64, "num_o_parts=2 without tma_store"),
    (ForwardConfig(128, 64, exp2_on_fma=9), 64, "exp2_on_fma=9 must be 0 to 8"),
    (ForwardConfig(128, 64, exp2_on_fma=2, softmax="exact"), 64, "and 0 with softmax='exact'"),
    (ForwardConfig(128, 64, softmax="lazy", split_masked_loop=False), 64, "split_masked_loop=False leaves none"),
    (ForwardConfig(128, 64, prefetch_scores=True), 64, "prefetch_scores reads the next Q beside this one"),
    (ForwardConfig(128, 64, num_q_stages=2, prefetch_scores=True, q_in_registers=True), 64, "q_in_registers=False"),
]


@pytest.mark.parametrize("config, head_dim, reason", INFEASIBLE)
def test_infeasible(config: ForwardConfig, head_dim: int, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config.check_feasible(head_dim, head_dim)
    assert reason in str(raised.value)
    assert repr(config) in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_all_broken_limits_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        ForwardConfig(32, 8, num_stages=0).check_feasible(64, 64)
    assert str(raised.value).count(";") == 2
    with pytest.raises(ConfigError) as raised:
        ForwardConfig(192, 256).check_feasible(256, 256)
    assert "bytes of shared memory" in str(raised.value)
    assert "registers, at least 16" in str(raised.value)


def test_a_register_sum_above_the_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles and hangs the card; no built-in row has it, so one is made."""
    monkeypatch.setattr("flashhopper.config.forward._ROLE_REGISTERS", {2: (48, 240)})
    with pytest.raises(ConfigError, match="setmaxnreg hands out 67584 of 64512 registers"):
        D128.check_feasible(128, 128)


@given(
    tile_m=st.integers(0, 320).map(lambda n: n // 8 * 8),
    tile_n=st.integers(0, 40).map(lambda n: 8 * n),
    num_stages=st.integers(0, 4),
    head_dim=st.sampled_from([64, 96, 128, 192, 256]),
    head_dim_v=st.sampled_from([64, 96, 128, 192, 256]),
    flags=st.tuples(*[st.booleans()] * 4),
)
def test_whatever_passes_fits_the_card(
    tile_m: int, tile_n: int, num_stages: int, head_dim: int, head_dim_v: int, flags: tuple[bool, ...]
) -> None:
    names = ("q_in_registers", "reallocate_registers", "tma_store")
    parts = 2 if flags[0] else 1
    config = ForwardConfig(tile_m, tile_n, num_stages, num_o_parts=parts, **dict(zip(names, flags[1:], strict=True)))
    try:
        config.check_feasible(head_dim, head_dim_v)
    except ConfigError:
        return
    entry, producer, consumer = config.registers()
    ring = 2 * num_stages * tile_n * (head_dim + head_dim_v)
    assert ring + 2 * tile_m * head_dim < SMEM_BYTES_PER_CTA
    assert 128 * producer + 2 * tile_m * consumer <= entry * (128 + 2 * tile_m) <= REGISTER_FILE
    assert tile_m in (64, 128, 192, 256)
    assert tile_n in range(16, 257, 16)


SPEC: dict[str, Any] = {"dtype": "bfloat16", "head_dim": 128, "head_dim_v": 128, "causal": True, "config": D128}


def test_spec_is_a_key() -> None:
    spec = KernelSpec(**SPEC)
    same = KernelSpec(**(SPEC | {"config": ForwardConfig(tile_m=128, tile_n=128)}))
    assert spec == same
    assert hash(spec) == hash(same)
    assert {spec: 1}[same] == 1
    with pytest.raises(FrozenInstanceError):
        spec.causal = False  # type: ignore[misc]


def another(value: Any, type_hint: Any) -> Any:
    """A different value of the same type."""
    if isinstance(value, str):
        return next(choice for choice in get_args(type_hint) if choice != value)
    return not value if isinstance(value, bool) else value + 64


def test_every_field_is_part_of_the_key() -> None:
    hints = get_type_hints(ForwardConfig)
    changed = [replace(D128, **{f.name: another(getattr(D128, f.name), hints[f.name])}) for f in fields(ForwardConfig)]
    assert len({D128, *changed}) == 1 + len(hints)
    exact = replace(D128, softmax="exact")
    spec = KernelSpec(**(SPEC | {"head_dim": 64, "head_dim_v": 64, "config": exact}))
    others = [replace(spec, head_dim=96), replace(spec, head_dim_v=96), replace(spec, causal=False)]
    others += [replace(spec, dtype="float16"), replace(spec, config=D128)]
    fp8 = replace(spec, dtype="float8_e4m3fn", out_dtype="bfloat16")
    others += [fp8, replace(fp8, out_dtype="float16"), replace(spec, features=Features(softcap=True))]
    assert len({spec, *others}) == 2 + len(fields(KernelSpec))


def test_every_feature_is_part_of_the_key_and_of_the_name() -> None:
    names = [field.name for field in fields(Features)]
    score, mask = trace_score(lambda score, *_: score * 2, ()), trace_mask(lambda *_: False, ())
    values = dict.fromkeys(names, True) | {"score_mod": score, "mask_mod": mask}
    sets = [Features(**({"window": True} if name == "chunk" else {}) | {name: values[name]}) for name in names]
    assert len({Features(), *sets}) == 1 + len(names)
    full = KernelSpec(**(SPEC | {"causal": False, "config": replace(D128, softmax="exact")}))
    specs = [replace(full, features=features) for features in sets]
    assert [spec.name for spec in specs] == [
        "fwd_bfloat16_d128x128_window_128x128",
        "fwd_bfloat16_d128x128_window_chunk_128x128",
        *(f"fwd_bfloat16_d128x128_full_{name}_128x128" for name in names[2:]),
    ]


def test_features_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="chunk without window"):
        Features(chunk=True)
    with pytest.raises(ConfigError, match="causal with a window"):
        KernelSpec(**(SPEC | {"causal": True, "features": Features(window=True)}))
    with pytest.raises(ConfigError, match="softmax='lazy' with score_mod or mask_mod"):
        KernelSpec(**(SPEC | {"features": Features(mask_mod=trace_mask(lambda *_: False, ()))}))
    ahead = replace(D128, num_q_stages=2, prefetch_scores=True)
    with pytest.raises(ConfigError, match="prefetch_scores with a window"):
        KernelSpec(**(SPEC | {"causal": False, "config": ahead, "features": Features(window=True)}))
    with pytest.raises(ConfigError, match="scheduler='single' takes the number of tiles on the host"):
        KernelSpec(**(SPEC | {"config": replace(D128, scheduler="single"), "features": Features(ragged=True)}))
    backward = BackwardConfig(64, 128)
    with pytest.raises(ConfigError, match="the backward has no sink of its own"):
        BackwardSpec("bfloat16", 64, 64, False, False, backward, Features(sink=True))


def test_spec_refuses_what_cannot_run() -> None:
    with pytest.raises(ConfigError, match=r"dtype='float32': accepted are bfloat16, float16"):
        KernelSpec(**(SPEC | {"dtype": "float32"}))
    with pytest.raises(ConfigError, match=r"softmax='lazy' lets P grow to 2\*\*30, float16 ends at 65504"):
        KernelSpec(**(SPEC | {"dtype": "float16"}))
    with pytest.raises(ConfigError, match="needs 345088 bytes of shared memory"):
        KernelSpec(**(SPEC | {"head_dim": 256, "head_dim_v": 192}))
    exact = KernelSpec(**(SPEC | {"dtype": "float16", "config": replace(D128, softmax="exact")}))
    assert exact.config.softmax == "exact"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"features": Features(softcap=True)}, "softcap: not in FP8 kernels yet"),
        ({"out_dtype": None}, "out_dtype=None with dtype='float8_e4m3fn': 16-bit with FP8, else None"),
        ({"dtype": "float8_e5m2", "out_dtype": None}, "out_dtype=None with dtype='float8_e5m2': 16-bit with FP8"),
        ({"out_dtype": "float8_e5m2"}, "out_dtype='float8_e5m2' with dtype='float8_e4m3fn': 16-bit with FP8"),
        ({"dtype": "bfloat16"}, "out_dtype='float16' with dtype='bfloat16': 16-bit with FP8, else None"),
        ({"config": ForwardConfig(128, 112)}, "tile_n=112 must be a multiple of 32 from 32 to 256"),
        ({"config": ForwardConfig(128, 96)}, "tile_n=96 must divide the 128 keys of a scale"),
        ({"config": replace(D128, two_level_columns=96)}, "two_level_columns=96 must be a multiple of 8 that divides"),
        ({"config": replace(D128, flush_blocks=12)}, "flush_blocks=12 must be a power of two or 0"),
        ({"config": replace(D128, flush_blocks=8, two_level_columns=64)}, "flush_blocks=8 goes with tma_store, not"),
        ({"config": replace(D128, overlap_gemm_softmax=False)}, "FP8 kernels overlap: no separate GEMMs"),
        (
            {"head_dim": 256, "head_dim_v": 256, "config": ForwardConfig(128, 64, two_level_columns=128)},
            "S, P, O and Q take 232 of 232 registers, at least 16 must be left",
        ),
    ],
)
def test_fp8_spec_refuses_what_cannot_run(changes: dict[str, Any], message: str) -> None:
    fields_of_spec = SPEC | {"dtype": "float8_e4m3fn", "out_dtype": "float16"}
    assert KernelSpec(**fields_of_spec).name == "fwd_float8_e4m3fn_d128x128_causal_128x128_fast_float16"
    with pytest.raises(ConfigError) as raised:
        KernelSpec(**(fields_of_spec | changes))
    assert message in str(raised.value)


def test_two_levels_are_for_fp8() -> None:
    with pytest.raises(
        ConfigError, match="two_level_columns and flush_blocks are for FP8: a 16-bit WGMMA accumulates in fp32"
    ):
        KernelSpec(**(SPEC | {"config": replace(D128, two_level_columns=128)}))
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        with pytest.raises(ConfigError, match=f"dtype='{dtype}': the backward is computed in 16 bits"):
            BackwardSpec(dtype, 128, 128, False, False, BackwardConfig(64, 128))


def test_spec_name() -> None:
    assert KernelSpec(**SPEC).name == "fwd_bfloat16_d128x128_causal_128x128"
    full = KernelSpec(**(SPEC | {"causal": False, "head_dim_v": 64, "config": ForwardConfig(128, 112)}))
    assert full.name == "fwd_bfloat16_d128x64_full_128x112"


BACKWARD = BackwardConfig(64, 128, num_q_stages=3, num_do_stages=3)
PAIR = BackwardConfig(64, 64, "operands", num_do_stages=1, num_ds_stages=1, paired=True)


@pytest.mark.parametrize(
    "config, head_dim, head_dim_v, expected",
    [
        # barriers, LSE and delta + K, V + stages · (Q + dO) + stages · dS + P + staging of dQ
        (BACKWARD, 128, 128, 2048 + 65536 + 6 * 16384 + 2 * 16384 + 16384),
        (replace(BACKWARD, num_k_stages=2), 64, 64, 2048 + 49152 + 6 * 8192 + 2 * 16384 + 16384),
        (replace(BACKWARD, num_dq_stages=2), 128, 128, 2048 + 65536 + 6 * 16384 + 2 * 16384 + 2 * 16384),
        (replace(BACKWARD, tile_m=128), 64, 64, 4096 + 32768 + 6 * 16384 + 2 * 32768 + 16384),
        (BackwardConfig(64, 64, "operands"), 192, 128, 2048 + 40960 + 2 * 24576 + 2 * 16384 + 2 * 8192 + 8192 + 16384),
        (
            BackwardConfig(64, 64, "operands", num_do_stages=1, dq_columns=128),
            256,
            256,
            1024 + 65536 + 2 * 32768 + 32768 + 2 * 8192 + 8192 + 32768,
        ),
        # of a pair also half of the other's K, and its dS
        (PAIR, 256, 256, 1024 + 65536 + 16384 + 2 * 32768 + 32768 + 2 * 8192 + 8192 + 16384),
        (
            replace(PAIR, num_ds_stages=2, dq_columns=32),
            192,
            128,
            1024 + 40960 + 12288 + 2 * 24576 + 16384 + 4 * 8192 + 8192 + 8192,
        ),
    ],
)
def test_backward_smem_bytes(config: BackwardConfig, head_dim: int, head_dim_v: int, expected: int) -> None:
    assert config.smem_bytes(head_dim, head_dim_v) == expected


def test_a_pair_works_on_two_key_blocks_and_each_on_half_of_dq() -> None:
    alone = replace(PAIR, paired=False)
    assert (PAIR.num_ctas, PAIR.keys_per_tile, PAIR.dq_chunks(256)) == (2, 128, 2)
    assert (alone.num_ctas, alone.keys_per_tile, alone.dq_chunks(256)) == (1, 64, 4)
    alone.check_feasible(256, 256)  # for cards that leave us a single multiprocessor


@pytest.mark.parametrize("row", BACKWARD_TABLE, ids=lambda row: f"d{row.head_dim}x{row.head_dim_v}")
def test_backward_registers(row: BackwardRow) -> None:
    budget = row.config.registers()
    assert budget.producer + budget.dq + 2 * budget.consumer <= 4 * budget.entry  # a wrong sum hangs the card
    assert budget.entry * row.config.num_threads == REGISTER_FILE
    for count in budget:
        assert count % 8 == 0
        assert 24 <= count <= MAX_REGISTERS_PER_THREAD


@pytest.mark.parametrize(
    "config, head_dim, message",
    [
        (replace(BACKWARD, tile_m=80), 128, "tile_m=80 must be 64 or 128"),
        (replace(BACKWARD, tile_n=64), 128, "tile_n=64 must be 128 with split='keys'"),
        (BackwardConfig(64, 128, "operands"), 128, "tile_n=128 must be 64 with split='operands'"),
        (replace(BACKWARD, dq_columns=96), 128, "dq_columns=96 must be 32, 64, 96 or 128 and divide head_dim=128"),
        (
            BackwardConfig(64, 64, "operands", dq_columns=192),
            192,
            "dq_columns=192 must be 32, 64, 96 or 128",
        ),
        (replace(BACKWARD, num_q_stages=5), 128, "num_q_stages=5 must be from 1 to 4"),
        (replace(BACKWARD, num_k_stages=3), 128, "num_k_stages=3 must be 1 or 2"),
        (replace(BACKWARD, num_dq_stages=0), 128, "num_dq_stages=0 must be from 1 to 4"),
        (
            replace(BACKWARD, num_q_stages=4, num_do_stages=4),
            128,
            "needs 248832 bytes of shared memory, the card has 232448",
        ),
        (replace(BACKWARD, tile_m=128), 128, "accumulators, P and dS take 224 of 208 registers"),
        (
            BackwardConfig(64, 64, "operands", warpgroup_order="stagger"),
            256,
            "only 'free', and with split='keys' 'stagger'",
        ),
        (replace(BACKWARD, warpgroup_order="ping_pong"), 128, "warpgroup_order='ping_pong': only 'free'"),
        (replace(BACKWARD, group_waves=0), 128, "group_waves=0 must be at least 1"),
        (BackwardConfig(64, 64, "operands", dq_columns=96), 192, "dq_columns=96 would cut the 64-column blocks"),
        (replace(BACKWARD, dq_columns=8), 128, "dq_columns=8 must be 32, 64, 96 or 128 and divide head_dim=128"),
        (replace(PAIR, dq_columns=64), 192, "must be 32, 64, 96 or 128 and divide head_dim=192, halved for a pair"),
        (replace(PAIR, dq_columns=96), 192, "dq_columns=96 would cut the 64-column blocks"),
        (replace(BACKWARD, paired=True), 128, "paired with split='keys'"),
    ],
)
def test_backward_that_cannot_run(config: BackwardConfig, head_dim: int, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.check_feasible(head_dim, head_dim)


def test_backward_names() -> None:
    spec = BackwardSpec("bfloat16", 128, 128, True, True, BACKWARD)
    assert spec.name == "bwd_bfloat16_d128x128_causal_deterministic_64x128"
    assert PreprocessSpec("float16", 64, 96, True).name == "bwd_pre_float16_d64x96_lse"
    assert PostprocessSpec("float16", 192).name == "bwd_post_float16_d192"
    with pytest.raises(ConfigError, match="head_dim=72 must be a multiple of 32"):
        BackwardSpec("bfloat16", 72, 128, False, False, BACKWARD)
