"""A real kernel through the cache: compiled here without a GPU, loaded in a process that never compiles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scale_kernel import compile_scale

from flashhopper import compiler, kernel_binary
from flashhopper.compiler import KernelCache
from flashhopper.config import ForwardConfig, KernelSpec
from flashhopper.inspect_kernel import compile_report
from flashhopper.kernel_binary import export_object, find_linker
from flashhopper.toolchain import COMPILE_OPTIONS, HOST_CPU, current_toolchain

SPEC = KernelSpec("bfloat16", 128, 128, True, ForwardConfig(128, 128))

LOAD = """
import sys, torch
from flashhopper import compiler
from flashhopper.compiler import KernelCache
from flashhopper.config import Features, ForwardConfig, KernelSpec
compiler._sources = compiler.source_digest = lambda: "digest"

def compile_function(spec):
    raise AssertionError("compiled instead of loaded")

kernel = KernelCache(compile_function).get({spec!r})
try:
    kernel(torch.zeros(4), torch.zeros(4), 2.0)
except ValueError as error:
    print(error)
print("cutlass" in sys.modules)
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHHOPPER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "source_digest", lambda: "digest")  # the sources may be edited while tests run
    monkeypatch.setattr(compiler, "_sources", lambda: "digest")
    return tmp_path


def load_in_a_fresh_process() -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOAD.format(spec=SPEC)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_kernel_compiled_here_is_loaded_there(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")  # of no effect: kernels are for sm_90a whatever the environment says
    kernel = KernelCache(lambda spec: compile_scale(COMPILE_OPTIONS)).get(SPEC)
    with pytest.raises(ValueError, match="expected device_type=cuda"):  # loaded, called, and its arguments checked
        kernel(torch.zeros(4), torch.zeros(4), 2.0)
    message, imports_cutlass = load_in_a_fresh_process()
    assert "expected device_type=cuda" in message
    assert imports_cutlass == str(find_linker() is None)
    assert len(list(directory.glob("*.o"))) == 1


def test_object_file_alone_is_loaded_through_cutlass(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_binary, "_LINKERS", ())
    KernelCache(lambda spec: compile_scale(COMPILE_OPTIONS)).get(SPEC)
    assert [path.suffix for path in directory.iterdir()] == [".o"]
    monkeypatch.setenv("PATH", "")  # no linker in the other process either
    message, imports_cutlass = load_in_a_fresh_process()
    assert "expected device_type=cuda" in message
    assert imports_cutlass == "True"


def test_export_is_reproducible() -> None:
    host = current_toolchain().host
    first, second = (export_object(compile_scale(COMPILE_OPTIONS), SPEC.name, host) for _ in range(2))
    assert first == second


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.skipif(current_toolchain().host != HOST_CPU, reason="launch code is made portable on x86-64 only")
def test_launch_code_runs_on_any_x86_64_machine(tmp_path: Path) -> None:
    path = tmp_path / "kernel.o"
    path.write_bytes(export_object(compile_scale(COMPILE_OPTIONS), SPEC.name, HOST_CPU))
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(path)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    mnemonics = {line.split("\t")[1].split()[0] for line in code.splitlines() if "\t" in line}
    assert "call" in mnemonics
    assert not {mnemonic for mnemonic in mnemonics if mnemonic.startswith("v")}  # AVX and later


def test_compile_report_of_a_small_kernel() -> None:
    report = compile_report(SPEC, lambda spec, options: compile_scale(options))
    assert 8 <= report.registers <= 32
    assert (report.spill_bytes, report.stack_bytes, report.local_loads, report.local_stores) == (0, 0, 0, 0)
    assert report.remarks == ()
    assert report.opcodes["LDG"] == report.opcodes["STG"] == report.opcodes["FMUL"] == 1
    assert "FMUL" in report.sass
