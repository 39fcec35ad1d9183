"""Whole benchmark runs with fake peers and a fake clock, and explicit kernel configurations."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable

import pytest
import torch
from bench_fakes import SMALL, FakeClock, FakePeer, quiet, rendered

from flashhopper.bench import BenchError, ablation, check, configs, forward, launch, report
from flashhopper.bench.check import attention
from flashhopper.bench.forward import ForwardOptions, ForwardRun
from flashhopper.bench.peers import OURS
from flashhopper.bench.results import ForwardResults
from flashhopper.config import ForwardConfig


@pytest.fixture(autouse=True)
def small_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CHECK_SEQLEN", 64)


@pytest.fixture
def forward_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[FakePeer]], ForwardResults]:
    monkeypatch.setattr(forward, "matmul_tflops", lambda clock: 700.0)

    def run(peers: list[FakePeer]) -> ForwardResults:
        options = ForwardOptions(SMALL, peers, seed=7, budget_seconds=30.0)
        return ForwardRun(options, peers[0].clock, quiet(), device="cpu").run()

    return run


def test_forward_run_records_rows_and_reasons(forward_run: Callable[[list[FakePeer]], ForwardResults]) -> None:
    clock = FakeClock()
    peers = [FakePeer(OURS, clock, 1.0), FakePeer("fa4", clock, 2.0), FakePeer("fa3", clock, 2.0, reason="not here")]
    peers += [FakePeer("cudnn", clock, 4.0, factor=1.5), FakePeer("fa2", clock, 8.0)]
    peers[4].fails_causal = True
    results = forward_run(peers)
    full, causal = results.rows
    assert full.tflops["ours"] == round(SMALL[0].tflops(1.0), 1)
    assert full.tflops.get("fa3") is None
    assert causal.tflops.get("fa2") is None
    assert causal.tflops["fa4"] is not None
    assert results.errors == []
    assert clock.now() < 30.0
    reasons = {(skip["implementation"], skip["where"]): skip["reason"] for skip in results.skipped}
    assert reasons["fa3", "everywhere"] == "not here"
    assert reasons["fa2", str(SMALL[1])] == "RuntimeError: no causal kernel"
    verdicts = {(entry["name"], entry["ok"]) for entry in results.checks}
    assert verdicts == {(OURS, True), ("fa4", True), ("cudnn", False), ("fa2", True), ("fa2", False)}
    json.dumps(results.to_json(), allow_nan=False)


@pytest.mark.parametrize("spoiled", [{"factor": 1.5}, {"factor": float("nan")}, {"reason": "no CUDA device found"}])
def test_our_own_failure_is_an_error(
    forward_run: Callable[[list[FakePeer]], ForwardResults], spoiled: dict[str, float | str]
) -> None:
    clock = FakeClock()
    ours = FakePeer(OURS, clock, 1.0, **spoiled)  # type: ignore[arg-type]
    results = forward_run([ours, FakePeer("fa4", clock, 2.0)])
    assert results.errors
    assert all(row.tflops["fa4"] is not None for row in results.rows)


def test_launch_run_has_a_row_per_implementation_and_mode() -> None:
    clock = FakeClock()
    peers = [FakePeer(OURS, clock, 0.004), FakePeer("fa4", clock, 0.03), FakePeer("fa3", clock, 1.0, reason="not here")]
    results = launch.run_launch(peers, 0, clock, device="cpu")
    expected = [(name, mode, best) for mode in launch.MODES for name, best in (("ours", 4.0), ("fa4", 30.0))]
    assert [(row["name"], row["mode"], row["best_us"]) for row in results.rows] == expected
    assert all(row["median_us"] == row["best_us"] for row in results.rows)
    assert results.to_json()["skipped"] == [{"implementation": "fa3", "where": "everywhere", "reason": "not here"}]
    assert results.errors == []


def test_variant_run_compares_with_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    base = ForwardConfig(128, 128)

    def fake_forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: object, config: ForwardConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        clock.milliseconds += 1.0 if config == base else 2.0
        if not config.tma_store:
            raise RuntimeError("misaligned")
        return attention(q, k, v, options.causal) if q.shape[1] == check.CHECK_SEQLEN else q, q  # type: ignore[attr-defined]

    monkeypatch.setattr(ablation, "forward", fake_forward)
    monkeypatch.setattr(configs, "select_config", lambda problem: base)
    variants = {"stages=1": ForwardConfig(128, 128, 1), "no tma": ForwardConfig(128, 128, tma_store=False)}
    variants["huge"] = ForwardConfig(192, 256)
    plan = configs.VariantPlan.of(SMALL, configs.explicit_variants(variants))
    assert len(plan.specs) == 6
    options = ablation.VariantOptions(plan, [FakePeer("fa4", clock, 0.5)], seed=1, budget_seconds=20.0)
    results = ablation.VariantRun(options, clock, quiet(), device="cpu").run()
    assert {(row.variant, row.ratio) for row in results.rows} == {("default", 1.0), ("stages=1", 0.5), ("fa4", 2.0)}
    assert len(results.rows) == 6
    assert {entry["variant"] for entry in results.infeasible} == {"huge"}
    assert "registers" in results.infeasible[0]["reason"]
    assert results.errors
    assert all("misaligned" in error for error in results.errors)
    text = "\n".join(rendered(table) for table in report.variant_tables(results))
    assert re.search(r"stages=1 +│ +\d 0\.500 +│ +\d 0\.500", text)
    json.dumps(results.to_json(), allow_nan=False)


def test_configs_are_parsed() -> None:
    text = "128x128:stages=3,softmax=exact,tma_store=off ; 192x96:order=ping_pong,overlap=0"
    parsed = configs.parse_configs(text)
    assert list(parsed.values()) == [
        ForwardConfig(128, 128, num_stages=3, softmax="exact", tma_store=False),
        ForwardConfig(192, 96, warpgroup_order="ping_pong", overlap_gemm_softmax=False),
    ]


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "empty"),
        ("128", "tile '128'"),
        ("128x128:speed=9", "no field 'speed'"),
        ("128x128:softmax", "field=value"),
        ("128x128:softmax=fast", "exact, lazy"),
        ("128x128:stages=two", "whole number"),
        ("128x128:tma_store=maybe", "on and off"),
    ],
)
def test_wrong_configs_say_what_is_accepted(text: str, said: str) -> None:
    with pytest.raises(BenchError, match=re.escape(said)):
        configs.parse_configs(text)


def test_ablations_change_one_technique_each() -> None:
    base = ForwardConfig(128, 128, share_qo_smem=True)
    variants = configs.ablations(base)
    assert variants.pop("default") == base
    for name, config in variants.items():
        changed = {f.name for f in dataclasses.fields(base) if getattr(base, f.name) != getattr(config, f.name)}
        assert changed - {"share_qo_smem"} == {part.partition("=")[0] for part in name.split(", ")}
        assert ("share_qo_smem" in changed) == (name == "tma_store=False")
    assert "split_masked_loop=False" not in variants, "the lazy softmax has no masked loop"
    assert {"num_stages=1", "softmax=exact", "scheduler=single", "warpgroup_order=ping_pong"} <= set(variants)
