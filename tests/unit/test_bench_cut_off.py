"""Runs that are interrupted keep what they have measured."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from flashhopper.bench.case_run import CaseResults, CaseRow
from flashhopper.bench.cases import CASES
from flashhopper.bench.fp8 import Fp8Results
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import BACKWARD
from flashhopper.bench.results import GridResults, Row, read_results
from flashhopper.cli.bench_output import kept_if_cut_off

MACHINE = {"device": "NVIDIA H200", "date": "2026-01-01", "torch": "2.13", "driver": "580"}


def test_rows_are_kept_when_timeout_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "backward.json"
    results = GridResults(MACHINE, {"ours": "0.1"}, kind=BACKWARD)
    results.rows.append(Row(Cell.of("bfloat16", 64, True, 512), {"ours": 300.0, "fa4": 250.0}))
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), kept_if_cut_off(results, path):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is handler
    kept = tmp_path / "backward.cut_off.json"
    assert read_results(kept).rows[0].tflops["ours"] == 300.0
    assert not path.exists()
    assert f"cut off after 1 rows, which are in {kept}" in capsys.readouterr().err


def test_other_results_are_kept_too(tmp_path: Path) -> None:
    case = CASES["masks"]("bfloat16", (64,))[0]
    cases = CaseResults("masks", MACHINE, {"ours": "0.1"})
    cases.rows.append(CaseRow(case, BACKWARD, {"ours": 300.0, "fa4": 250.0}))
    fp8 = Fp8Results(dict(MACHINE), rows=[{"d": 64, "ours": 300.0}])
    for name, results in (("cases", cases), ("fp8", fp8)):
        path = tmp_path / f"{name}.json"
        with pytest.raises(KeyboardInterrupt), kept_if_cut_off(results, path):
            raise KeyboardInterrupt
        assert json.loads(path.with_suffix(".cut_off.json").read_text())["rows"][0]["ours"] == 300.0


def test_nothing_is_written_without_a_row(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), kept_if_cut_off(Fp8Results(dict(MACHINE)), tmp_path / "fp8.json"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_run_that_ends_writes_nothing_here(tmp_path: Path) -> None:
    path = tmp_path / "fp8.json"
    with kept_if_cut_off(Fp8Results(dict(MACHINE), rows=[{"d": 64}]), path):
        pass
    assert not list(tmp_path.iterdir())
