"""What ``bench fp8`` and ``accuracy fp8`` compute around the kernels, and their command lines, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flashhopper.bench import fp8
from flashhopper.bench.fp8 import COLUMNS, Fp8Results, fa3_call, geometric_means, per_head_e4m3
from flashhopper.bench.fp8_accuracy import VARIANTS, AccuracyOptions, run_accuracy
from flashhopper.bench.grid import Cell
from flashhopper.bench.timing import Candidate
from flashhopper.cli import main
from flashhopper.fp8_tensor import Fp8QKV


def test_fa3_gets_one_scale_a_key_head() -> None:
    x = torch.randn(2, 50, 4, 16) * torch.tensor([1.0, 2.0, 3.0, 40.0])[:, None]
    data, scale = per_head_e4m3(x, 2)
    assert scale.shape == (2, 2)
    assert scale[1, 0] == x[1, :, :2].abs().max() / 448
    assert scale[0, 1] == x[0, :, 2:].abs().max() / 448
    restored = data.float() * scale.repeat_interleave(2, 1)[:, None, :, None]
    assert ((restored - x).abs() <= x.abs() / 16 + scale.max() * 2**-10).all()
    assert data.float().abs().amax((1, 3)).amax() == 448


@pytest.mark.skipif(torch.cuda.is_available(), reason="FA3 may be installed where there is a GPU")
def test_fa3_is_missed_by_name() -> None:
    x = torch.randn(1, 8, 2, 16)
    with pytest.raises(ModuleNotFoundError, match="FA3: "):
        fa3_call(x, x, x, False)


def test_geometric_means() -> None:
    cells = [(512, 2.0, 4.0, 1.0, 1.0, 1.0), (8192, 8.0, 4.0, 3.0, 4.0, 2.0), (16384, 1.0, 1.0, 2.0, None, 1.0)]
    rows = [dict(zip(("s", *COLUMNS), cell, strict=True)) for cell in cells]
    means = geometric_means(rows)
    assert means["ours / fa3_fp8"] == pytest.approx(2.0)
    assert means["ours / fa3_fp8, worst"] == 2.0
    assert means["ours_fast / fa3_fp8"] == pytest.approx(2.0)
    assert means["ours_fast / fa3_fp8, worst"] == 1.0
    assert means["ours_end_to_end / bf16, s >= 8k"] == pytest.approx(3**0.5)
    assert geometric_means([]) == {}


def test_results_tell_our_failures_from_missing_peers() -> None:
    results = Fp8Results({"device": "none"})
    results.skipped = [{"name": "fa3_fp8", "where": "a", "reason": "b"}, {"name": "ours", "where": "c", "reason": "d"}]
    assert results.errors == ["ours c: d"]
    assert results.to_json()["unit"] == "TFLOPS"


def test_quantising_is_timed_beside_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tensors of 2-byte elements: 9 bytes of each three to quantise, 12 to copy."""
    run = object.__new__(fp8.Fp8Run)
    run.results, said = Fp8Results({}), []
    run.say, run.generator, run.clock, run.rng = said.append, torch.Generator(), None, None
    inputs = [torch.randn(2, 256, 4, 64).to(torch.bfloat16) for _ in range(3)]
    monkeypatch.setattr(fp8, "random_inputs", lambda cell, generator: inputs)
    timed: list[Candidate] = []
    monkeypatch.setattr(fp8, "measure", lambda candidates, plan, clock, rng: timed.extend(candidates))
    monkeypatch.setattr(fp8, "medians", lambda samples: {"quantize": 0.5, "copy": 0.25})  # ms
    run.time_quantising(Cell("bfloat16", 64, True, 256, 2, 4))
    elements = inputs[0].numel()
    quantize, copy = round(9 * elements / 0.5e6, 1), round(12 * elements / 0.25e6, 1)
    assert run.results.to_json()["quantize_gb_per_s"] == [
        {"d": 64, "s": 256, "b": 2, "h": 4, "quantize": quantize, "copy": copy}
    ]
    assert f"{quantize} GB/s" in said[0]
    results = {candidate.name: candidate.call() for candidate in timed}
    assert isinstance(results["quantize"], Fp8QKV)
    assert all(torch.equal(x, y) for x, y in zip(results["copy"], inputs, strict=True))  # type: ignore[call-overload]


def test_accuracy_by_the_emulator() -> None:
    said: list[str] = []
    options = AccuracyOptions("cpu", 3, seeds=2, head_dim=32, heads=2, keys=512, long_keys=1024)
    results = run_accuracy(options, said.append)
    errors = {(row["distribution"], row["variant"]): row["rmse"] for row in results.rows}
    assert len(results.rows) == len(said) == 5 * len(VARIANTS) - len(results.skipped)
    assert {skipped["variant"] for skipped in results.skipped} <= {"FA3 FP8"}
    assert errors["outliers", "block + Hadamard"] < errors["outliers", "per tensor"]
    assert errors["mean 1", "block + Hadamard"] < errors["mean 1", "block + Hadamard, v not centred"]
    for distribution in ("normal", "outliers", "sinks", "mean 1", "mean 1, long"):
        for variant in set(VARIANTS) - {"FA3 FP8", "bf16"}:
            assert errors[distribution, "bf16"] < errors[distribution, variant] < 0.05


def test_the_command_writes_rows_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, picture = tmp_path / "accuracy.json", tmp_path / "accuracy.png"
    arguments = ["--device", "cpu", "--seeds", "1", "--heads", "1", "--head-dim", "16", "--keys", "128"]
    arguments += ["--long-keys", "256", "--seed", "1", "--output", str(output), "--plot", str(picture)]
    assert main(["accuracy", "fp8", *arguments]) == 0
    data = json.loads(output.read_text())
    assert (data["kind"], data["seed"], data["computed_on"]) == ("fp8_accuracy", 1, "cpu")
    assert {row["variant"] for row in data["rows"]} | {"FA3 FP8"} == set(VARIANTS)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "seed 1, cpu" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_commands_name_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fp8"]) == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err
    assert main(["accuracy", "fp8", "--device", "cuda"]) == 2
    assert "needs a Hopper GPU, or --device cpu" in capsys.readouterr().err
    assert main(["accuracy", "fp8", "--device", "cpu", "--head-dim", "24"]) == 2
    assert "--head-dim 24 is no multiple of 16" in capsys.readouterr().err
