"""Compile-time facts of the kernels: tile configurations, and the specialisations that kernels are built for.

Everything here is plain Python on plain values, so that a wrong configuration is found on any machine, before ptxas or
the card sees it. All of it is part of a kernel's key in the cache: what does not decide what a spec compiles to belongs
elsewhere.
"""

from flashhopper.config.backward import (
    PREPROCESS_WARPS,
    PREPROCESS_WORDS,
    BackwardConfig,
    BackwardRegisters,
    BackwardSpec,
    BackwardSplit,
    PostprocessSpec,
    PreprocessSpec,
)
from flashhopper.config.common import (
    E4M3,
    E5M2,
    ELEMENT_BYTES,
    FP8_MAX_EXPONENT,
    KEYS_PER_SCALE,
    MAX_REGISTERS_PER_THREAD,
    QUERIES_PER_SCALE,
    REGISTER_FILE,
    ROWS_PER_WARPGROUP,
    SMEM_BYTES_PER_CTA,
    WARP_THREADS,
    WARPGROUP_THREADS,
    ConfigError,
    Dtype,
    WarpgroupOrder,
)
from flashhopper.config.features import FP8_FEATURES, PLAIN, SWITCHES, Features
from flashhopper.config.forward import (
    FLUSHED_BYTES,
    OUTPUT_BYTES,
    WGMMA_K_BYTES,
    ForwardConfig,
    KernelSpec,
    RegisterBudget,
    Scheduler,
    Softmax,
)
from flashhopper.config.quantize import (
    QuantizeRowsSpec,
    QuantizeSpec,
    QuantizeValuesSpec,
    ScaleKind,
    ValueScalesSpec,
    ValueStatisticsSpec,
)
from flashhopper.config.schedule import ScheduleSpec

AnySpec = KernelSpec | BackwardSpec | PreprocessSpec | PostprocessSpec | ScheduleSpec | QuantizeSpec

__all__ = [
    "E4M3",
    "E5M2",
    "ELEMENT_BYTES",
    "FLUSHED_BYTES",
    "FP8_FEATURES",
    "FP8_MAX_EXPONENT",
    "KEYS_PER_SCALE",
    "MAX_REGISTERS_PER_THREAD",
    "OUTPUT_BYTES",
    "PLAIN",
    "PREPROCESS_WARPS",
    "PREPROCESS_WORDS",
    "QUERIES_PER_SCALE",
    "REGISTER_FILE",
    "ROWS_PER_WARPGROUP",
    "SMEM_BYTES_PER_CTA",
    "SWITCHES",
    "WARPGROUP_THREADS",
    "WARP_THREADS",
    "WGMMA_K_BYTES",
    "AnySpec",
    "BackwardConfig",
    "BackwardRegisters",
    "BackwardSpec",
    "BackwardSplit",
    "ConfigError",
    "Dtype",
    "Features",
    "ForwardConfig",
    "KernelSpec",
    "PostprocessSpec",
    "PreprocessSpec",
    "QuantizeRowsSpec",
    "QuantizeSpec",
    "QuantizeValuesSpec",
    "RegisterBudget",
    "ScaleKind",
    "ScheduleSpec",
    "Scheduler",
    "Softmax",
    "ValueScalesSpec",
    "ValueStatisticsSpec",
    "WarpgroupOrder",
]
