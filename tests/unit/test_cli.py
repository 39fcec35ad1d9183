"""The command line: ``doctor``, ``warmup`` and ``cache``, with stand-ins for the machine and the compiler."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashhopper import compiler
from flashhopper.cli import COMMANDS, build_parser, doctor, main, warmup
from flashhopper.cli.doctor import Card, Machine, check_machine, inspect_machine
from flashhopper.cli.warmup import select_specs, warm_specs
from flashhopper.compiler import KernelCache
from flashhopper.config import E5M2, PLAIN, AnySpec, Features, ForwardConfig, KernelSpec
from flashhopper.kernel_list import fp8_specs, quantize_specs
from flashhopper.toolchain import dsl_version

SPECS = [
    KernelSpec("bfloat16", 64, 64, False, ForwardConfig(128, 128)),
    KernelSpec("bfloat16", 128, 128, True, ForwardConfig(128, 128)),
    KernelSpec("float16", 128, 128, True, ForwardConfig(128, 128, softmax="exact")),
]
H200 = Card(0, "NVIDIA H200", (9, 0), 132, 139.8)
A100 = Card(1, "NVIDIA A100", (8, 0), 108, 79.3)


CAPPED = [replace(spec, features=Features(softcap=True)) for spec in SPECS]
TABLES = {PLAIN: SPECS, Features(softcap=True): CAPPED}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "kernels"
    monkeypatch.setenv("FLASHHOPPER_CACHE_DIR", str(directory))
    monkeypatch.setattr(compiler, "source_digest", lambda: "digest")  # the sources may be edited while tests run
    monkeypatch.setattr(compiler, "_sources", lambda: "digest")
    return directory


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile table of SPECS."""
    kernel_list = types.ModuleType("flashhopper.kernel_list")
    vars(kernel_list)["all_specs"] = lambda features, fp8_dtypes: TABLES.get(features, [])
    monkeypatch.setitem(sys.modules, "flashhopper.kernel_list", kernel_list)


@pytest.fixture
def machine() -> Machine:
    """A machine on which everything works."""
    found = inspect_machine()
    return replace(
        found,
        cards=(H200,),
        driver_cuda="13.0",
        torch_cuda="13.0",
        linker="/usr/bin/ld",
        nvdisasm="/usr/bin/nvdisasm",
        cache_problem=None,
    )


def stand_in_warm(spec: KernelSpec) -> bool:
    return KernelCache(lambda spec: None, lambda compiled, name, host: name.encode()).warm(spec)


def test_every_command_is_registered() -> None:
    usage = build_parser().format_help()
    assert all(f"\n    {command} " in usage for command in COMMANDS)
    assert build_parser().parse_args(["warmup", "--jobs", "3", "--dtype", "float16"]).jobs == 3


@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_bad_number_of_jobs_is_refused(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["warmup", "--jobs", jobs])
    assert caught.value.code == 2
    assert "--jobs" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("flashhopper 0.")


def test_interrupted_command_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> Machine:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "inspect_machine", interrupt)
    assert main(["doctor"]) == 130


def test_doctor_without_a_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "inspect_machine", lambda: replace(machine, cards=(), driver_cuda=None))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "no   attention on a GPU: torch finds no GPU (torch for CUDA 13.0; no NVIDIA driver was found)" in lines
    assert any(line.startswith("yes  attention on CPU tensors: ") for line in lines)
    assert any(line.startswith("yes  compile kernels for sm_90a: nvidia-cutlass-dsl 4.") for line in lines)


def test_doctor_on_this_machine_prints_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["works"] else 1)
    assert report["cache_dir"] == str(directory)
    assert report["cached_kernels"] == 0
    assert report["dsl"] == dsl_version()
    assert report["checks"][0]["what"] == "attention on a GPU"
    assert all(check["reason"] for check in report["checks"])


def test_doctor_on_a_hopper(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "inspect_machine", lambda: replace(machine, cards=(H200, A100)))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H200, compute capability 9.0, 132 SMs, 140 GiB" in out
    assert "yes  attention on a GPU: cuda:0 NVIDIA H200\n" in out
    assert "\nno " not in out


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"torch_cuda": None}, "is built without CUDA: install a CUDA build of torch"),
        ({"cards": ()}, "torch finds no GPU (torch for CUDA 13.0; driver CUDA 13.0)"),
        ({"cards": (A100,)}, "found NVIDIA A100, compute capability 8.0, 108 SMs, 79 GiB; needed is a Hopper GPU"),
    ],
)
def test_doctor_says_why_attention_will_not_run(change: dict[str, Any], reason: str, machine: Machine) -> None:
    check = check_machine(replace(machine, **change))[0]
    assert not check.works
    assert reason in check.reason


def test_doctor_without_the_compiler(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("FlashHopper's kernels need nvidia-cutlass-dsl, which is not installed")

    monkeypatch.setattr(doctor, "current_toolchain", missing)
    checks = {check.what: check for check in check_machine(machine)}
    assert "nvidia-cutlass-dsl" in checks["attention on a GPU"].reason
    assert not checks["compile kernels for sm_90a"].works


def test_doctor_reports_a_cache_it_cannot_write_to(directory: Path) -> None:
    directory.write_text("a file")
    checks = {check.what: check for check in check_machine(inspect_machine())}
    assert not checks["keep kernels on disk"].works
    assert str(directory) in checks["keep kernels on disk"].reason


@pytest.mark.parametrize(
    "dtypes, head_dims, expected",
    [
        (None, None, [0, 1, 2]),
        (["float16"], None, [2]),
        (None, [64], [0]),
        (None, [40, 96], [0, 1, 2]),
        (["bfloat16"], [72], [1]),
        (None, [256], []),
    ],
)
def test_warmup_filters(dtypes: list[str] | None, head_dims: list[int] | None, expected: list[int]) -> None:
    assert select_specs(SPECS, dtypes, head_dims) == [SPECS[index] for index in expected]


@pytest.mark.usefixtures("table")
def test_warmup_compiles_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in_warm(SPECS[0])
    monkeypatch.setattr(warmup, "warm_specs", lambda specs, jobs: warm_specs(specs, 1, stand_in_warm))
    assert main(["warmup"]) == 0
    assert capsys.readouterr().out.startswith("2 compiled, 1 already there in ")
    assert main(["warmup"]) == 0
    assert capsys.readouterr().out.startswith("0 compiled, 3 already there in ")
    assert len(list(directory.glob("*.o"))) == 3


def fail_for_float16(spec: KernelSpec) -> None:
    if spec.dtype == "float16":
        raise RuntimeError("ptxas failed")


@pytest.mark.parametrize("jobs", [1, 2])
def test_warmup_lists_failures_and_goes_on(jobs: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert warm_specs(SPECS, jobs, fail_for_float16) == 1
    captured = capsys.readouterr()
    assert captured.err.count("failed: ") == 1
    assert f"failed: {SPECS[2].name}: RuntimeError: ptxas failed" in captured.err
    assert captured.out.startswith("2 compiled, 0 already there, 1 failed in ")


@pytest.mark.usefixtures("table")
def test_warmup_without_a_writable_cache(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory.write_text("a file")
    assert main(["warmup"]) == 1
    assert "cannot write to the kernel cache" in capsys.readouterr().err


@pytest.mark.usefixtures("table")
def test_warmup_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--head-dim", "512"], ["--features", "ragged", "window"]):
        assert main(["warmup", *arguments]) == 1
        assert "no kernel of the tile table matches" in capsys.readouterr().err


@pytest.mark.usefixtures("table")
def test_warmup_of_features(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[KernelSpec] = []
    monkeypatch.setattr(warmup, "warm_specs", lambda specs, jobs: taken.extend(specs) or 0)
    assert main(["warmup", "--features", "softcap"]) == 0
    assert taken == CAPPED
    assert main(["warmup", "--features", "chunk"]) == 1
    assert "chunk without window" in capsys.readouterr().err


def test_warmup_of_e5m2_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[AnySpec] = []
    monkeypatch.setattr(warmup, "warm_specs", lambda specs, jobs: taken.extend(specs) or 0)
    assert main(["warmup", "--dtype", "bfloat16", "float8_e4m3fn"]) == 0
    assert not [spec for spec in taken if E5M2 in (spec.dtype, getattr(spec, "out_dtype", None))]
    usual = set(taken)
    taken.clear()
    assert main(["warmup", "--dtype", "bfloat16", "float8_e4m3fn", "float8_e5m2"]) == 0
    assert len(set(taken)) == len(taken)
    quantise = [spec for spec in quantize_specs(out_dtype=E5M2) if spec.dtype == "bfloat16"]
    assert set(taken) == usual.union(fp8_specs(dtype=E5M2), quantise)


def test_cache_info_and_clear(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "info"]) == 0
    assert capsys.readouterr().out == f"{directory}: 0 kernels, 0.0 MB\n"
    for spec in SPECS:
        stand_in_warm(spec)
    foreign = directory / "lib-of-others.so"
    foreign.write_text("not ours")
    assert main(["cache", "info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == sorted(spec.name for spec in SPECS)
    assert lines[-1] == f"{directory}: 3 kernels, 0.0 MB"
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"deleted 3 kernels, 0.0 MB from {directory}\n"
    assert list(directory.iterdir()) == [foreign]


def test_cache_clear_removes_what_interrupted_writes_left(directory: Path) -> None:
    directory.mkdir()
    (directory / f".fwd-{16 * 'a'}-{16 * '0'}.o.123.0123abcd").write_bytes(b"half")
    assert main(["cache", "clear"]) == 0
    assert list(directory.iterdir()) == []
