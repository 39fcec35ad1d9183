"""``flashhopper tune``, the command: what it lists, compiles, prints and writes."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import FakeClock
from tune_fakes import BASE, BEST, CLEAN, LONG, SHORT, cost_of, fake_tuning

from flashhopper import heuristics, inspect_kernel
from flashhopper.bench import environment, grid, timing, tune
from flashhopper.bench.configs import config_text, main_spec, problem_of
from flashhopper.bench.findings import length_classes
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import FORWARD
from flashhopper.bench.search import neighbours
from flashhopper.bench.table_rows import row_source
from flashhopper.bench.tune import TuneResults, TuneRun
from flashhopper.cli import main, warmup
from flashhopper.cli import tune as cli
from flashhopper.cli.arguments import CANNOT_RUN
from flashhopper.heuristics import BACKWARD_TABLE, TILE_TABLE, select_row
from flashhopper.inspect_kernel import PtxasReport

SOURCE = inspect.getsource(heuristics)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TuneResults, FakeClock, dict[str, int]]]:
    return fake_tuning(monkeypatch)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "no CUDA device found; --compile-only fills the kernel cache without one"),
        (("--head-dim", "72"), "TILE_TABLE has no row of its own for d72; head dims of rows: 64 64, 96 96"),
        (("--head-dim", "128", "64", "--pass", "backward"), "BACKWARD_TABLE has no row of its own for d128x64"),
        (("--head-dim", "64", "64", "64"), "got 3 numbers"),
        (("--dtype", "float16", "--write"), "rows and their figures are of bfloat16"),
    ],
)
def test_what_cannot_run_is_one_line(
    no_gpu: None, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(["tune", *arguments]) == CANNOT_RUN
    captured = capsys.readouterr()
    assert captured.err.startswith("flashhopper tune: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("wrong", [["--pass", "train"], ["--budget-seconds", "0"], ["--mask", "none"]])
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tune", *wrong])
    assert caught.value.code == 2


def test_dry_run_lists_what_would_be_compiled(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--pass", "backward", "--head-dim", "256", "--mask", "causal", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = BACKWARD_TABLE[-1]
    count = len(neighbours(row.config, 256, 256))
    assert lines[0] == f"BACKWARD_TABLE d256 causal: {count} configurations at 512, 1024, 2048, 4096, 16384"
    assert lines[1] == "  default  217 KiB"
    assert row.config.smem_bytes(256, 256) // 1024 == 217
    assert lines[-1] == f"{count} kernels"
    assert len(lines) == count + 2


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """A compiler that finds spills in tiles of 112 keys; the specs it was given."""
    monkeypatch.setenv("FLASHHOPPER_CACHE_DIR", str(tmp_path / "kernels"))
    specs: list[Any] = []

    def report_of(spec: Any) -> PtxasReport | None:
        if spec not in specs:
            return None
        return CLEAN._replace(spill_bytes=4) if getattr(spec.config, "tile_n", 0) == 112 else CLEAN

    def compile_in_process(todo: Any, jobs: int, worker: Any, on_done: Any) -> None:
        for spec in todo:
            specs.append(spec)
            on_done(spec, None)

    monkeypatch.setattr(inspect_kernel, "cached_report", report_of)
    monkeypatch.setattr(warmup, "compile_all", compile_in_process)
    return specs


ARGUMENTS = ["tune", "--mask", "causal", "--seqlen", "4k", "8k", "--seed", "5"]


def test_compile_only_compiles_each_kernel_once(
    no_gpu: None, compiled: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = length_classes(LONG, FORWARD)
    specs = list(one.specs.values())
    assert main([*ARGUMENTS, "--compile-only"]) == 0
    assert compiled == specs
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{len(specs)} compiled, 0 already there in ")
    spilled = [config_text(spec.config) for spec in specs if spec.config.tile_n == 112]
    assert spilled
    assert lines[1:] == [
        f"left out: {name}: TILE_TABLE d128 causal: 4 bytes spill, 0 bytes of stack" for name in spilled
    ]
    assert main([*ARGUMENTS, "--compile-only"]) == 0
    assert capsys.readouterr().out.startswith("0 compiled, ")


def test_the_backwards_companions_are_compiled_too(no_gpu: None, compiled: list[Any]) -> None:
    assert main(["tune", "--pass", "backward", "--mask", "full", "--seqlen", "4k", "--compile-only"]) == 0
    forward = main_spec(FORWARD, problem_of(Cell.of("bfloat16", 128, False, 4096)))
    names = [spec.name for spec in compiled[-3:]]
    assert names == [forward.name, "bwd_pre_bfloat16_d128x128", "bwd_post_bfloat16_d128"]


def test_a_cache_that_cannot_be_written_to_is_said(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHHOPPER_CACHE_DIR", str(tmp_path / "file"))
    assert main([*ARGUMENTS, "--compile-only"]) == CANNOT_RUN
    assert "cannot write to the kernel cache" in capsys.readouterr().err


@pytest.mark.parametrize("write", [False, True])
def test_the_whole_command(
    tuned: Callable[..., Any],
    compiled: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: bool,
) -> None:
    _, clock, _ = tuned(SHORT[:1], cost_of, budget=1.0)  # installs the fakes
    monkeypatch.setattr(grid, "TOKENS", 1)
    monkeypatch.setattr(grid, "WIDTH", 1)
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "heuristics.py"
    copy.write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(heuristics, "__file__", str(copy))
    monkeypatch.setattr(environment, "require_hopper", lambda: None)
    monkeypatch.setattr(timing, "CudaClock", lambda: clock)
    monkeypatch.setattr(tune, "describe_machine", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(tune, "TuneRun", functools.partial(TuneRun, device="cpu"))
    assert main([*ARGUMENTS, "--budget-seconds", "10", *(["--write"] if write else [])]) == 0
    base, tflops = select_row(problem_of(LONG[0])), LONG[0].flop / 1e9
    assert (base.head_dim, base.causal, base.max_seqlen_k, base.config) == (128, True, None, BASE)
    captured = capsys.readouterr()
    out = captured.out
    printed = out[out.index("TileRow(") : out.index("wrote ")].rstrip().removesuffix(",")
    row = eval(printed, vars(heuristics))
    assert printed == row_source(row)
    assert row.reason.startswith(
        f"{tflops:.0f} and {4 * tflops:.0f} TFLOPS at 4k and 8k keys; {BASE.tile_m}×{BASE.tile_n}: "
    )
    assert row == base._replace(config=BEST, reason=row.reason)
    assert "left out: 128x112:" in out
    data = json.loads((tmp_path / cli.RESULTS / "tune_forward_d128.json").read_text())
    assert data["findings"][0]["best"] == config_text(BEST)
    assert data["findings"][0]["new_row"] == row_source(row)
    assert data["device"] == "NVIDIA H200"
    if not write:
        assert copy.read_text() == SOURCE
        return
    assert "heuristics.py: 1 row of TILE_TABLE replaced" in out
    names: dict[str, Any] = {"__name__": "copy"}
    exec(compile(copy.read_text(), "copy", "exec"), names)
    changes = [(old, new) for old, new in zip(TILE_TABLE, names["TILE_TABLE"], strict=True) if tuple(old) != tuple(new)]
    assert [(tuple(old), tuple(new)) for old, new in changes] == [(tuple(base), tuple(row))]
