"""Every kernel that calls can choose, for whoever compiles or tests them all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from flashhopper.config import (
    E4M3,
    FP8_FEATURES,
    KEYS_PER_SCALE,
    PLAIN,
    QUERIES_PER_SCALE,
    AnySpec,
    BackwardSpec,
    Dtype,
    Features,
    KernelSpec,
    PostprocessSpec,
    PreprocessSpec,
    QuantizeRowsSpec,
    QuantizeSpec,
    QuantizeValuesSpec,
    ScheduleSpec,
    ValueScalesSpec,
    ValueStatisticsSpec,
)
from flashhopper.heuristics import BACKWARD_TABLE, backward_config, forward_config, rows_of
from flashhopper.heuristics_fp8 import FP8_TABLE
from flashhopper.problem import DTYPES


def all_specs(features: Features = PLAIN, fp8_dtypes: Sequence[Dtype] = (E4M3,)) -> list[AnySpec]:
    """Every kernel that a call with exactly these features can choose, FP8 calls on ``fp8_dtypes``."""
    flags = (False, True)
    schedules = [ScheduleSpec(*used) for used in itertools.product(flags, flags)] if features.ragged else []
    has_fp8 = set(features.names) <= set(FP8_FEATURES)
    fp8: list[AnySpec] = []
    for dtype in fp8_dtypes if has_fp8 else ():
        fp8 += [*fp8_specs(features, dtype), *quantize_specs(features.ragged, dtype)]
    return [*forward_specs(features), *backward_specs(features), *schedules, *dict.fromkeys(fp8)]


def _causal_flags(features: Features) -> tuple[bool, ...]:
    """Of specs: a window is never causal beside."""
    return (False,) if features.window else (False, True)


def forward_specs(features: Features = PLAIN) -> list[KernelSpec]:
    """Every kernel that ``heuristics.select_spec`` can choose for calls with exactly these features."""
    specs = (
        KernelSpec(
            dtype,
            row.head_dim,
            row.head_dim_v,
            causal,
            forward_config(row, dtype, features, causal),
            features,
        )
        for causal in _causal_flags(features)
        for row in rows_of(causal or features.window or features.ragged)
        for dtype in DTYPES.values()
    )
    return list(dict.fromkeys(specs))  # features may make two rows one


def backward_specs(features: Features = PLAIN) -> list[AnySpec]:
    """Every kernel of the backward: before, main and after."""
    flags, has_sink, features = (False, True), features.sink, replace(features, sink=False)
    dims = list(dict.fromkeys((row.head_dim, row.head_dim_v) for row in BACKWARD_TABLE))
    main = [
        BackwardSpec(
            dtype, row.head_dim, row.head_dim_v, causal, deterministic, backward_config(row, features), features
        )
        for row in BACKWARD_TABLE
        for dtype in DTYPES.values()
        for causal in _causal_flags(features)
        if row.causal in (None, causal or features.window)
        for deterministic in flags
    ]
    return [
        *dict.fromkeys(main),  # smaller tiles may make two rows one
        *(
            PreprocessSpec(dtype, *pair, flag, features.ragged, has_sink)
            for pair in dims
            for dtype in DTYPES.values()
            for flag in flags
        ),
        *(
            PostprocessSpec(dtype, d, features.ragged)
            for d in sorted({d for d, _ in dims})
            for dtype in DTYPES.values()
        ),
    ]


def fp8_specs(features: Features = PLAIN, dtype: Dtype = E4M3) -> list[KernelSpec]:
    """Every kernel that ``heuristics_fp8.select_fp8_spec`` can choose for exactly these features and this type."""
    specs = (
        row.spec(out_dtype, causal, fast, is_centered, features=features, dtype=dtype)
        for row in FP8_TABLE
        for out_dtype in DTYPES.values()
        for causal in _causal_flags(features)
        for fast in (False, True)
        for is_centered in ((True,) if fast else (False, True))
    )
    return list(dict.fromkeys(specs))  # rows share configurations


def quantize_specs(ragged: bool = False, out_dtype: Dtype = E4M3) -> list[QuantizeSpec]:
    """The kernels that quantise to ``out_dtype`` with the default options, for the head dims of the table."""
    specs: list[QuantizeSpec] = []
    for head_dim in sorted({row.head_dim for row in FP8_TABLE}):
        specs.append(QuantizeValuesSpec(E4M3, head_dim, ragged))  # transposes 8-bit values of either type
        for dtype in DTYPES.values():
            for rows in (QUERIES_PER_SCALE, KEYS_PER_SCALE):
                specs.append(QuantizeRowsSpec(dtype, head_dim, rows, "power_of_two", True, ragged, out_dtype))
            specs.append(ValueStatisticsSpec(dtype, head_dim, ragged))
            specs.append(ValueScalesSpec(dtype, head_dim, "power_of_two", True, ragged, out_dtype))
            specs.append(QuantizeValuesSpec(dtype, head_dim, ragged, out_dtype))
    return specs
