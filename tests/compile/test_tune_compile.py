"""``flashhopper tune --compile-only`` with real kernels: one that is fine, one whose registers spill."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashhopper import compiler
from flashhopper.bench import findings
from flashhopper.bench.configs import DEFAULT, main_spec, problem_of
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import FORWARD
from flashhopper.cli import main
from flashhopper.config import ForwardConfig
from flashhopper.inspect_kernel import cached_report

CONFIGS = {DEFAULT: ForwardConfig(64, 32), "spills": ForwardConfig(192, 144)}


def test_kernels_are_compiled_once_and_those_that_spill_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHHOPPER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "source_digest", lambda: "digest")  # the sources may be edited while tests run
    monkeypatch.setattr(compiler, "_sources", lambda: "digest")
    monkeypatch.setattr(findings, "search_variants", lambda *dims: lambda base: CONFIGS)
    command = ["tune", "--head-dim", "64", "--mask", "full", "--seqlen", "8k", "--compile-only", "--jobs", "1"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 compiled, 0 already there in ")
    problem = problem_of(Cell.of("bfloat16", 64, False, 8192))
    fine, spilling = (cached_report(main_spec(FORWARD, problem, config)) for config in CONFIGS.values())
    assert fine is not None
    assert spilling is not None
    assert (fine.spill_bytes, fine.registers, fine.problem) == (0, CONFIGS[DEFAULT].registers().entry, None)
    assert spilling.spill_bytes > 0
    assert lines[1:] == [f"left out: spills: TILE_TABLE d64 full: {spilling.problem}"]
    assert len(list(tmp_path.glob("*.o"))) == len(list(tmp_path.glob("*.json"))) == 2
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[1:] == lines[1:]
    assert main(["cache", "clear"]) == 0
    assert list(tmp_path.iterdir()) == []
