"""Kernels with windows, softcap, ALiBi, sinks and ragged batches, compiled for sm_90a. No GPU.

bf16 of the head dims that differ in how their tiles are cut; the other types and head dims differ in nothing that the
features touch. Left out: the backward of head_dim 256 with softcap, which spills about 40 bytes a thread, and all
features at once, which spill too; both are right, and slower than they might be.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_fp8_kernels import assert_nothing_in_local_memory
from test_tile_table import Compilation

from flashhopper.config import BackwardSpec, Features, KernelSpec, PostprocessSpec, PreprocessSpec, ScheduleSpec
from flashhopper.inspect_kernel import compile_report
from flashhopper.kernel_list import backward_specs, forward_specs

WINDOW, RAGGED, SOFTCAP = Features(window=True), Features(ragged=True), Features(softcap=True)
FORWARD = {
    64: (
        WINDOW,
        RAGGED,
        SOFTCAP,
        Features(softcap=True, alibi=True, window=True),
        Features(window=True, chunk=True, ragged=True),
        Features(sink=True, ragged=True),
    ),
    96: (Features(softcap=True, alibi=True, window=True),),
    128: (WINDOW, Features(window=True, chunk=True), RAGGED, SOFTCAP, Features(sink=True), Features(alibi=True)),
    256: (WINDOW, Features(window=True, ragged=True)),
}
BACKWARD = {
    64: (WINDOW, SOFTCAP, Features(alibi=True)),
    96: (SOFTCAP,),
    128: (WINDOW, RAGGED, SOFTCAP),
    256: (Features(window=True, ragged=True), Features(alibi=True)),
}
OTHERS = [
    PreprocessSpec("bfloat16", 128, 128, True, ragged=True),
    PostprocessSpec("bfloat16", 128, ragged=True),
    ScheduleSpec(False, False),
    ScheduleSpec(True, True),
]


def forward_kernels() -> Iterator[KernelSpec]:
    """The longest sequences' row, causal where the features leave that open."""
    for head_dim, sets in FORWARD.items():
        for features in sets:
            fitting = [s for s in forward_specs(features) if s.head_dim == s.head_dim_v == head_dim]
            yield next(spec for spec in reversed(fitting) if spec.dtype == "bfloat16")


def backward_kernels() -> Iterator[BackwardSpec]:
    for head_dim, sets in BACKWARD.items():
        for features in sets:
            specs = [spec for spec in backward_specs(features) if isinstance(spec, BackwardSpec)]
            fitting = [s for s in specs if s.head_dim == s.head_dim_v == head_dim and s.dtype == "bfloat16"]
            yield next(spec for spec in reversed(fitting) if not spec.deterministic)
        yield next(spec for spec in reversed(fitting) if spec.deterministic)


@pytest.mark.parametrize("spec", forward_kernels(), ids=lambda spec: spec.name)
def test_forward(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = Compilation(monkeypatch)
    report = compile_report(spec, compilation)
    assert_nothing_in_local_memory(report)
    assert report.registers == spec.config.registers().entry
    assert ("MUFU.TANH" in report.sass) == spec.features.softcap
    polynomials = spec.config.exp2_on_fma * (spec.config.tile_n // 2) // 8  # of a thread's scores in the unmasked loop
    assert report.sass.count("12582912") == 2 * polynomials  # 0x1.8p23, added and subtracted
    assert "ATOMG.E.INC" in report.sass  # the ticket of the next tile: an ADD would be waited for where it is issued
    assert compilation.storage_bytes == {spec.config.smem_bytes(spec.head_dim, spec.head_dim_v)}
    loads = "UTMALDG.5D" if spec.features.ragged else "UTMALDG.4D"
    assert (
        report.sass.count(loads) == report.opcodes["UTMALDG"] >= 3
    )  # Q, K, V: a ragged batch has its end in a 5th mode


@pytest.mark.parametrize("spec", backward_kernels(), ids=lambda spec: spec.name)
def test_backward(spec: BackwardSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = Compilation(monkeypatch, "backward", "make_backward_storage")
    report = compile_report(spec, compilation)
    assert_nothing_in_local_memory(report)
    assert report.registers == spec.config.registers().entry
    assert ("MUFU.TANH" in report.sass) == spec.features.softcap
    assert compilation.storage_bytes == {spec.config.smem_bytes(spec.head_dim, spec.head_dim_v)}
    loads = "UTMALDG.5D" if spec.features.ragged else "UTMALDG.4D"
    assert report.sass.count(loads) == report.opcodes["UTMALDG"] >= 4  # Q, K, V, dO


@pytest.mark.parametrize("spec", OTHERS, ids=lambda spec: spec.name)
def test_other_kernels_of_ragged_batches(spec: PreprocessSpec | PostprocessSpec | ScheduleSpec) -> None:
    report = compile_report(spec)
    assert_nothing_in_local_memory(report)
    assert report.opcodes.get("STG", 0) >= 2
