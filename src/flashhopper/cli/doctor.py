"""``flashhopper doctor``: what this machine has, and what of FlashHopper will run on it and what will not, and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from dataclasses import dataclass
from typing import Any

import torch

from flashhopper._version import __version__
from flashhopper.bench.environment import driver_version
from flashhopper.cli import explain
from flashhopper.cli.cache import count_kernels, summary
from flashhopper.disk_cache import DiskCache, cache_dir
from flashhopper.inspect_kernel import find_nvdisasm
from flashhopper.kernel_binary import find_linker
from flashhopper.toolchain import current_toolchain, driver_cuda_version, dsl_version, tvm_ffi_version

HOPPER = (9, 0)


@dataclass(frozen=True)
class Card:
    """One GPU as torch sees it."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_gib: float

    def __str__(self) -> str:
        capability = ".".join(map(str, self.compute_capability))
        return f"{self.name}, compute capability {capability}, {self.multiprocessors} SMs, {self.memory_gib:.0f} GiB"


@dataclass(frozen=True)
class Machine:
    """Hardware and software, as found."""

    flashhopper: str
    python: str
    platform: str
    cards: tuple[Card, ...]
    driver: str | None
    driver_cuda: str | None
    torch: str
    torch_cuda: str | None
    dsl: str | None
    tvm_ffi: str | None
    cache_dir: str
    cache_problem: str | None
    cached_kernels: int
    cached_bytes: int
    nvdisasm: str | None
    linker: str | None


@dataclass(frozen=True)
class Check:
    """One thing a user may want to do here. ``reason`` says why it works, or what is missing."""

    what: str
    works: bool
    reason: str


def add_parser(subparsers: Any) -> None:
    """Add ``doctor``."""
    text = "say what will run on this machine, what will not, and why; exit code 1 if attention will not run on a GPU"
    parser = subparsers.add_parser("doctor", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    explain.add_arguments(parser)
    parser.set_defaults(run=run)


def find_cards() -> tuple[Card, ...]:
    if not torch.cuda.is_available():
        return ()
    cards = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        capability = (facts.major, facts.minor)
        cards.append(Card(index, facts.name, capability, facts.multi_processor_count, facts.total_memory / 2**30))
    return tuple(cards)


def inspect_machine() -> Machine:
    """Look at this machine. Creates the cache directory if it is missing, to see whether it can be written to."""
    cache = DiskCache(cache_dir())
    driver_cuda = driver_cuda_version()
    kernels, size = count_kernels(cache.entries())
    return Machine(
        flashhopper=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cards=find_cards(),
        driver=driver_version(),
        driver_cuda=".".join(map(str, driver_cuda)) if driver_cuda else None,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        dsl=dsl_version(),
        tvm_ffi=tvm_ffi_version(),
        cache_dir=str(cache.directory),
        cache_problem=cache.problem(),
        cached_kernels=kernels,
        cached_bytes=size,
        nvdisasm=find_nvdisasm(),
        linker=find_linker(),
    )


def _check_compile() -> Check:
    what = "compile kernels for sm_90a"
    try:
        toolchain = current_toolchain()
    except ImportError as error:
        return Check(what, False, str(error))
    return Check(what, True, f"nvidia-cutlass-dsl {toolchain.dsl} ({toolchain.cuda}), no GPU needed")


def _check_gpu(machine: Machine, compile_check: Check) -> Check:
    what = "attention on a GPU"
    hopper = [card for card in machine.cards if card.compute_capability == HOPPER]
    if machine.torch_cuda is None:
        return Check(what, False, f"torch {machine.torch} is built without CUDA: install a CUDA build of torch")
    if not machine.cards:
        driver = "no NVIDIA driver was found" if machine.driver_cuda is None else f"driver CUDA {machine.driver_cuda}"
        return Check(what, False, f"torch finds no GPU (torch for CUDA {machine.torch_cuda}; {driver})")
    if not hopper:
        found = "; ".join(map(str, machine.cards))
        return Check(
            what, False, f"found {found}; needed is a Hopper GPU, compute capability 9.0 (H100, H200, H800, H20)"
        )
    if not compile_check.works:
        return Check(what, False, compile_check.reason)
    return Check(what, True, ", ".join(f"cuda:{card.index} {card.name}" for card in hopper))


def check_machine(machine: Machine) -> list[Check]:
    """What will run and what will not. The first line decides the exit code."""
    compiling = _check_compile()
    missing = "found no {}: {}"
    return [
        _check_gpu(machine, compiling),
        Check("attention on CPU tensors", True, "through the reference implementation: exact, for tests, not fast"),
        compiling,
        Check(
            "keep kernels on disk",
            machine.cache_problem is None,
            machine.cache_problem or f"{machine.cache_dir}: {summary(machine.cached_kernels, machine.cached_bytes)}",
        ),
        Check(
            "load them without importing cutlass",
            machine.linker is not None,
            machine.linker or missing.format("linker (ld)", "the first call of each process takes a second longer"),
        ),
        Check(
            "look at the machine code",
            machine.nvdisasm is not None,
            machine.nvdisasm or missing.format("nvdisasm", "pip install nvidia-cuda-nvdisasm"),
        ),
    ]


def _print_report(machine: Machine, checks: list[Check]) -> None:
    from rich.console import Console
    from rich.text import Text

    driver = f"{machine.driver or 'version unknown'}, CUDA {machine.driver_cuda}" if machine.driver_cuda else "none"
    rows = [(f"GPU {card.index}", str(card)) for card in machine.cards] or [("GPU", "none")]
    rows += [
        ("driver", driver),
        ("torch", f"{machine.torch}, {f'CUDA {machine.torch_cuda}' if machine.torch_cuda else 'without CUDA'}"),
        ("nvidia-cutlass-dsl", machine.dsl or "not installed"),
        ("apache-tvm-ffi", machine.tvm_ffi or "not installed"),
        ("flashhopper", f"{machine.flashhopper}, Python {machine.python}, {machine.platform}"),
    ]
    for name, value in rows:
        print(f"{name:20}{value}")
    print()
    console = Console()
    for check in checks:
        mark = Text("yes  ", style="green") if check.works else Text("no   ", style="bold red")
        console.print(mark + Text(f"{check.what}: {check.reason}"), soft_wrap=True)


def run(args: argparse.Namespace) -> int:
    if args.explain:
        hopper = (card.multiprocessors for card in find_cards() if card.compute_capability == HOPPER)
        return explain.run(args, next(hopper, None))
    machine = inspect_machine()
    checks = check_machine(machine)
    works = checks[0].works
    if args.json:
        report = {"works": works, **dataclasses.asdict(machine), "checks": [dataclasses.asdict(c) for c in checks]}
        print(json.dumps(report, indent=2))
    else:
        _print_report(machine, checks)
    return 0 if works else 1
