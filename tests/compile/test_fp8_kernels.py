"""The FP8 kernels, compiled for sm_90a: what ptxas and the disassembler find in them. No GPU."""

from __future__ import annotations

import re

import pytest
from test_tile_table import Compilation

from flashhopper.config import (
    E4M3,
    E5M2,
    PLAIN,
    Dtype,
    Features,
    KernelSpec,
    QuantizeRowsSpec,
    QuantizeSpec,
    QuantizeValuesSpec,
    ValueScalesSpec,
)
from flashhopper.inspect_kernel import CompileReport, compile_report
from flashhopper.kernel_list import fp8_specs, quantize_specs


def differing(features: Features = PLAIN, dtype: Dtype = E4M3) -> list[KernelSpec]:
    """Those for a bfloat16 O, once where only the number of keys between two flushes differs."""
    specs = [spec for spec in fp8_specs(features, dtype) if spec.out_dtype == "bfloat16"]
    return [spec for spec in specs if spec.config.flush_blocks * spec.config.tile_n in (0, 2048)]


# O's type changes the epilogue alone: one head dim with both.
FORWARD = differing()
FORWARD += [spec for spec in fp8_specs() if spec.out_dtype == "float16" and spec.head_dim == 128 and spec.causal]
# Chunks take more registers than windows alone.
MASKED = differing(Features(window=True, chunk=True))
# Ragged batches have more to find and to keep; head_dim 256 has least room for it.
MASKED += [spec for spec in differing(Features(ragged=True)) if spec.causal or spec.head_dim == 256]
MASKED += [spec for spec in differing(Features(window=True, chunk=True, ragged=True)) if spec.head_dim in (64, 256)]
# e5m2 has another instruction in the place of e4m3's.
IN_E5M2 = [spec for spec in differing(dtype=E5M2) if spec.config.two_level and spec.causal]
IN_E5M2 += [spec for spec in differing(Features(window=True, chunk=True, ragged=True), E5M2) if spec.head_dim == 256]
QUANTIZE = [spec for spec in quantize_specs() if spec.dtype != "float16"]
QUANTIZE += [spec for spec in quantize_specs(out_dtype=E5M2) if spec.dtype == "bfloat16" and spec.head_dim == 128]
QUANTIZE += [spec for spec in quantize_specs(ragged=True) if spec.dtype != "float16" and spec.head_dim in (128, 256)]
SASS_NAMES = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
OTHERS = [
    QuantizeRowsSpec("float16", 80, 64, "amax", False),
    QuantizeRowsSpec("bfloat16", 16, 128, "power_of_two", True),
    QuantizeValuesSpec("float16", 80),
]


def assert_nothing_in_local_memory(report: CompileReport) -> None:
    in_local_memory = (report.spill_bytes, report.stack_bytes, report.local_loads, report.local_stores)
    assert in_local_memory == (0, 0, 0, 0), "spill bytes, stack bytes, local loads, local stores"
    assert not {code for code in report.remark_codes if code.startswith("C75")}, report.remarks


@pytest.mark.parametrize("spec", [*FORWARD, *MASKED, *IN_E5M2], ids=lambda spec: spec.name)
def test_forward(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = Compilation(monkeypatch)
    report = compile_report(spec, compilation)
    config = spec.config
    assert_nothing_in_local_memory(report)
    assert report.registers == config.registers().entry
    assert report.opcodes.get("HGMMA", 0) == 0
    chunks = spec.head_dim_v // (config.two_level_columns or spec.head_dim_v)
    assert report.opcodes.get("QGMMA", 0) >= spec.head_dim // 32 + chunks * config.tile_n // 32
    element = SASS_NAMES[spec.dtype]
    operands = re.findall(r"QGMMA\.\w+\.F32\.(\w+)\.(\w+)", report.sass)
    assert len(operands) == report.opcodes["QGMMA"]
    assert set(operands) == {(element, element), ("E4M3", element)}  # Q and K; P, always e4m3, and V
    assert report.opcodes.get("UTMALDG", 0) >= 3  # Q, K, V
    assert report.opcodes.get("UTMASTG", 0) >= 1  # O
    assert report.opcodes.get("USETMAXREG", 0) == 2
    # P: two values an instruction, in the first block, the masked loop, and the unmasked loop with its guard.
    assert report.sass.count("F2FP.SATFINITE.E4M3") >= 4 * config.tile_n // 4
    smem = config.smem_bytes(spec.head_dim, spec.head_dim_v, element_bytes=1)
    assert compilation.storage_bytes == {smem}
    assert f"llvm.mlir.constant({smem} : i64)" in compilation.host_code, "the launch asks for another amount"


@pytest.mark.parametrize("spec", [*QUANTIZE, *OTHERS], ids=lambda spec: spec.name)
def test_quantising(spec: QuantizeSpec) -> None:
    report = compile_report(spec)
    assert_nothing_in_local_memory(report)
    assert report.opcodes.get("LDG", 0) >= 1
    assert report.opcodes.get("STG", 0) >= 1
    if isinstance(spec, QuantizeRowsSpec):  # 16 bytes a load, 8 a store
        lengths = 3 if spec.ragged else 0  # cu_seqlens, in the search and after it, and a length
        assert report.sass.count("LDG.E.128") == report.opcodes["LDG"] - lengths >= 2
        assert report.sass.count("STG.E.64") == report.opcodes["STG"] - 1  # and a scale
    if isinstance(spec, ValueScalesSpec) and spec.scales == "power_of_two":
        assert "FFMA" not in report.opcodes  # the mean is rounded before it is rounded to V's spacing
    if isinstance(spec, QuantizeRowsSpec | QuantizeValuesSpec):
        conversions = re.findall(r"F2FP\.SATFINITE\.(\w+)", report.sass)
        assert len(conversions) >= 8
        assert set(conversions) == {SASS_NAMES[spec.out_dtype]}
    if isinstance(spec, QuantizeValuesSpec):
        assert report.sass.count("STG.E.128") == report.opcodes["STG"]
