"""Every kernel of the tile table, compiled for sm_90a: what ptxas and the disassembler find in it. No GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from flashhopper.compiler import compile_spec
from flashhopper.config import (
    MAX_REGISTERS_PER_THREAD,
    REGISTER_FILE,
    SMEM_BYTES_PER_CTA,
    AnySpec,
    BackwardSpec,
    KernelSpec,
    PostprocessSpec,
    PreprocessSpec,
)
from flashhopper.inspect_kernel import compile_report
from flashhopper.kernel_list import backward_specs, forward_specs


class Compilation:
    """Compiles a spec and keeps what the report does not hold: the host code of the launch, and the storage's size."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, module: str = "forward", function: str = "make_storage"
    ) -> None:
        kernels = importlib.import_module(f"flashhopper.kernels.{module}")
        self.host_code = ""
        self.storage_bytes: set[int] = set()
        make_storage: Callable[..., Any] = getattr(kernels, function)

        def recorded(*arguments: Any) -> Any:
            storage = make_storage(*arguments)
            self.storage_bytes.add(storage.size_in_bytes())
            return storage

        monkeypatch.setattr(kernels, function, recorded)

    def __call__(self, spec: AnySpec, options: str) -> Any:
        compiled = compile_spec(spec, options)
        self.host_code = str(compiled.ir_module)
        return compiled


@pytest.mark.parametrize("spec", forward_specs(), ids=lambda spec: spec.name)
def test_kernel(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = Compilation(monkeypatch)
    report = compile_report(spec, compilation)
    config, budget = spec.config, spec.config.registers()

    in_local_memory = (report.spill_bytes, report.stack_bytes, report.local_loads, report.local_stores)
    assert in_local_memory == (0, 0, 0, 0), "spill bytes, stack bytes, local loads, local stores"
    # C7508 setmaxnreg ignored; C7510, C7514, C7519, C7520 WGMMA serialised; C7512, C7517 a wait injected.
    assert not {code for code in report.remark_codes if code.startswith("C75")}, report.remarks

    assert report.registers == budget.entry <= MAX_REGISTERS_PER_THREAD
    assert report.registers * config.num_threads <= REGISTER_FILE

    # S and O of one step: a WGMMA reads 16 columns of its first operand.
    wgmmas = spec.head_dim // 16 + config.tile_n // 16
    assert report.opcodes.get("HGMMA", 0) >= wgmmas
    assert report.opcodes.get("UTMALDG", 0) >= 3  # Q, K, V
    assert ("UTMASTG" in report.opcodes) == config.tma_store  # O, one per swizzled column block
    assert report.opcodes.get("USETMAXREG", 0) == 2 * int(config.reallocate_registers)  # one per role

    smem = config.smem_bytes(spec.head_dim, spec.head_dim_v)
    assert compilation.storage_bytes == {smem}
    assert smem <= SMEM_BYTES_PER_CTA
    assert f"llvm.mlir.constant({smem} : i64)" in compilation.host_code, "the launch asks for another amount"


@pytest.mark.parametrize("spec", backward_specs(), ids=lambda spec: spec.name)
def test_backward_kernel(spec: AnySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = Compilation(monkeypatch, "backward", "make_backward_storage")
    report = compile_report(spec, compilation)
    in_local_memory = (report.spill_bytes, report.stack_bytes, report.local_loads, report.local_stores)
    assert in_local_memory == (0, 0, 0, 0), "spill bytes, stack bytes, local loads, local stores"
    assert not {code for code in report.remark_codes if code.startswith("C75")}, report.remarks
    # griddepcontrol.wait and .launch_dependents: each kernel waits for the one before and lets the next one in.
    waits, lets_in = report.opcodes.get("ACQBULK", 0), report.opcodes.get("PREEXIT", 0)
    assert (waits > 0) == (not isinstance(spec, PreprocessSpec))
    assert lets_in == (not isinstance(spec, PostprocessSpec))
    if not isinstance(spec, BackwardSpec):  # elementwise kernels: 16 bytes at a time
        assert report.opcodes.get("HGMMA", 0) == 0
        assert report.opcodes.get("LDG", 0) >= 2
        assert report.opcodes.get("STG", 0) >= 2
        return
    config = spec.config
    assert report.registers == config.registers().entry
    assert report.registers * config.num_threads == REGISTER_FILE
    assert report.opcodes.get("USETMAXREG", 0) == 3  # producer, dQ warpgroup, consumers
    # S and dP sum over the head dims, dK and dV over tile_m rows, dQ over tile_n keys, 16 at a time.
    sums = spec.head_dim + spec.head_dim_v + 2 * config.tile_m
    dq_chunks = config.dq_chunks(spec.head_dim) * config.tile_m // 64
    assert report.opcodes.get("HGMMA", 0) >= sums // 16 + dq_chunks * config.keys_per_tile // 16
    assert report.opcodes.get("UTMALDG", 0) >= 4 + int(config.paired)  # Q, K, V, dO; of a pair the other's K
    assert (report.opcodes.get("UCGABAR_WAIT", 0) >= 2) == config.paired  # at the start and at the end
    assert report.opcodes.get("STG", 0) >= 2 * (spec.head_dim + spec.head_dim_v) // 32  # dK, dV: 32 columns a quad
    assert report.opcodes.get("UBLKRED", 0) >= 1  # dQ
    smem = config.smem_bytes(spec.head_dim, spec.head_dim_v)
    assert compilation.storage_bytes == {smem}
    assert f"llvm.mlir.constant({smem} : i64)" in compilation.host_code, "the launch asks for another amount"
