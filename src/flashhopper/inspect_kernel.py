"""What the compiler made of a kernel: registers, spills, ptxas remarks and SASS, without a GPU."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from flashhopper.compiler import KernelCache, compile_lock, compile_spec, find_note, is_cached, keep_note
from flashhopper.config import AnySpec
from flashhopper.toolchain import COMPILE_OPTIONS

# A SASS line of `nvdisasm -c`: `/*0a10*/  @!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;`
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
_REMARK = re.compile(r"\((C\d{4})\)\s*([^\n]*)")
_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class PtxasReport(NamedTuple):
    """What ptxas says of a kernel: the largest of each number, should it speak of more than one function."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    remarks: tuple[str, ...]

    @classmethod
    def parse(cls, log: str) -> PtxasReport:
        """Read the output of ptxas. Raises ValueError if it does not speak of registers and spills."""
        log = _ANSI_COLOUR.sub("", log)
        registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
        stack = [int(count) for count in re.findall(r"(\d+) bytes stack frame", log)]
        spills = [int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
        if not (registers and stack and spills):
            raise ValueError(f"ptxas reported neither registers nor spills; its output was: {log!r}")
        remarks = tuple(f"{code} {text}".strip() for code, text in _REMARK.findall(log))
        return cls(max(registers), max(spills), max(stack), remarks)

    @classmethod
    def from_json(cls, text: str) -> PtxasReport:
        fields = json.loads(text)
        return cls(**{**fields, "remarks": tuple(fields["remarks"])})

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @property
    def problem(self) -> str | None:
        """Why no row of the tables may have this kernel, or None: it uses local memory, or its WGMMAs wait."""
        if self.spill_bytes or self.stack_bytes:
            return f"{self.spill_bytes} bytes spill, {self.stack_bytes} bytes of stack"
        return next((remark for remark in self.remarks if remark.startswith("C75")), None)


@dataclass(frozen=True)
class CompileReport:
    """A compiled kernel, seen from outside."""

    name: str
    registers: int
    """Per thread, at entry: what setmaxnreg then moves between the roles."""
    spill_bytes: int
    stack_bytes: int
    local_loads: int
    """Instructions that read local memory, a thread's stack in DRAM: spills, or an array indexed at run time."""
    local_stores: int
    remarks: tuple[str, ...]
    """What ptxas remarked, code first: ``C7514 Potential Performance Loss: wgmma.mma_async instructions are …``."""
    opcodes: Mapping[str, int] = field(repr=False)
    """How often each instruction stands in the code, by its name without modifiers: ``HGMMA``, ``UTMALDG``."""
    sass: str = field(repr=False)

    @property
    def remark_codes(self) -> frozenset[str]:
        """``C7508`` setmaxnreg ignored; ``C7510``, ``C7514`` WGMMA serialised; ``C7512``, ``C7517`` a wait injected…"""
        return frozenset(remark.split(" ", 1)[0] for remark in self.remarks)


def find_nvdisasm() -> str | None:
    """NVIDIA's disassembler: the one from ``pip install nvidia-cuda-nvdisasm``, else the one on PATH.

    The package goes first: a toolkit older than the DSL's ptxas does not understand its code.
    """
    try:
        files = metadata.distribution("nvidia-cuda-nvdisasm").files or []
    except metadata.PackageNotFoundError:
        files = []
    for entry in files:
        if entry.name == "nvdisasm" and (path := Path(str(entry.locate()))).is_file():
            return str(path)
    return shutil.which("nvdisasm")


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin. Raises FileNotFoundError if nvdisasm is not installed."""
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        raise FileNotFoundError("nvdisasm was not found: run `pip install nvidia-cuda-nvdisasm`")
    with tempfile.TemporaryDirectory(prefix="flashhopper-") as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        finished = subprocess.run([nvdisasm, "-c", str(path)], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"{nvdisasm} failed: {finished.stderr.strip()}")
    return finished.stdout


def count_opcodes(sass: str) -> dict[str, int]:
    """Instructions of a disassembly by name without modifiers, the most frequent first."""
    return dict(Counter(_INSTRUCTION.findall(sass)).most_common())


def compile_report(spec: AnySpec, compile_function: Callable[[AnySpec, str], Any] = compile_spec) -> CompileReport:
    """Compile ``spec`` for sm_90a, past all caches, and report on the result. Needs nvdisasm, but no GPU."""
    with tempfile.TemporaryDirectory(prefix="flashhopper-") as directory:
        compiled, report = _compile_with_remarks(spec, compile_function, f"--keep-cubin --dump-dir {directory}")
        sass = disassemble(compiled.__cubin__)
    opcodes = count_opcodes(sass)
    return CompileReport(
        name=spec.name,
        **report._asdict(),
        local_loads=opcodes.get("LDL", 0),
        local_stores=opcodes.get("STL", 0),
        opcodes=opcodes,
        sass=sass,
    )


def _compile_with_remarks(
    spec: AnySpec, compile_function: Callable[[AnySpec, str], Any], options: str = ""
) -> tuple[Any, PtxasReport]:
    log = io.StringIO()
    with compile_lock, contextlib.redirect_stderr(log):  # where the DSL prints what ptxas says
        compiled = compile_function(spec, f"{COMPILE_OPTIONS} {options} remarks{{ptx}}")
    return compiled, PtxasReport.parse(log.getvalue())


def warm_with_report(spec: AnySpec) -> None:
    """Put the kernel of ``spec`` into the disk cache, and beside it what ptxas says of it: one compilation for both.
    Needs neither nvdisasm nor a GPU. OSError if they cannot be stored."""
    compiled, report = _compile_with_remarks(spec, compile_spec)
    KernelCache(lambda _: compiled).warm(spec)
    keep_note(spec, report.to_json())


def cached_report(spec: AnySpec) -> PtxasReport | None:
    """What :func:`warm_with_report` has kept, if its kernel is still there."""
    note = find_note(spec) if is_cached(spec) else None
    return None if note is None else PtxasReport.from_json(note)
