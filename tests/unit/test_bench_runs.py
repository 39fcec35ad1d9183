"""Whole benchmark runs with fake peers and a fake clock, and explicit kernel configurations."""

from __future__ import annotations

import dataclasses
import json
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_fakes import SMALL, FakeClock, FakePeer, quiet, rendered
from torch.nn.attention import SDPBackend

from flashhopper.bench import BenchError, ablation, check, configs, launch, report, run, sampler, work
from flashhopper.bench.check import attention
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import BACKWARD, FORWARD, OURS, OURS_DETERMINISTIC, TRAIN, Pass
from flashhopper.bench.peers import PackagePeer, Peer, SdpaPeer
from flashhopper.bench.results import GridResults
from flashhopper.bench.run import GridOptions, GridRun
from flashhopper.config import ForwardConfig

GridRunner = Callable[..., GridResults]


@pytest.fixture(autouse=True)
def small_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CHECK_SEQLEN", 64)


@pytest.fixture
def grid_run(monkeypatch: pytest.MonkeyPatch) -> GridRunner:
    monkeypatch.setattr(run, "matmul_tflops", lambda clock: 700.0)

    def run_grid(peers: list[FakePeer], kind: Pass = FORWARD) -> GridResults:
        options = GridOptions(SMALL, peers, seed=7, budget_seconds=30.0, kind=kind)
        return GridRun(options, peers[0].clock, quiet(), device="cpu").run()

    return run_grid


def test_forward_run_records_rows_and_reasons(grid_run: GridRunner) -> None:
    clock = FakeClock()
    peers = [FakePeer(OURS, clock, 1.0), FakePeer("fa4", clock, 2.0), FakePeer("fa3", clock, 2.0, reason="not here")]
    peers += [FakePeer("cudnn", clock, 4.0, factor=1.5), FakePeer("fa2", clock, 8.0)]
    peers[4].fails_causal = True
    results = grid_run(peers)
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
def test_our_own_failure_is_an_error(grid_run: GridRunner, spoiled: dict[str, float | str]) -> None:
    clock = FakeClock()
    ours = FakePeer(OURS, clock, 1.0, **spoiled)  # type: ignore[arg-type]
    results = grid_run([ours, FakePeer("fa4", clock, 2.0)])
    assert results.errors
    assert all(row.tflops["fa4"] is not None for row in results.rows)


@pytest.mark.parametrize("kind, milliseconds", [(BACKWARD, 2.0), (TRAIN, 3.0)])
def test_gradient_run_times_its_pass_alone(
    grid_run: GridRunner, monkeypatch: pytest.MonkeyPatch, kind: Pass, milliseconds: float
) -> None:
    monkeypatch.setattr(work, "peak_extra_bytes", lambda call: call() and 3 * 2**20)
    clock = FakeClock()
    costs = {OURS: 1.0, OURS_DETERMINISTIC: 1.25, "fa4": 2.0, "cudnn": 4.0, "fa2": 8.0}
    peers = [FakePeer(name, clock, cost) for name, cost in costs.items()]
    peers[3].factor = 1.5
    peers[4].fails_causal = True
    results = grid_run(peers, kind)
    full, causal = results.rows
    for name, cost in costs.items():  # the fake's backward takes twice the time of its forward
        assert full.tflops[name] == round(kind.flop_factor * SMALL[0].tflops(milliseconds * cost), 1), name
    assert full.best_peer() == ("fa4", full.tflops["fa4"]), "our deterministic kernel, which is faster, is no peer"
    assert "fa2" not in causal.tflops
    # q, k, v of 256 KiB each and the LSE's 32 KiB; cuDNN and FA2 are not asked
    memory = {"saved_mib": 0.78, "backward_peak_mib": 3.0}
    assert full.memory == causal.memory == {OURS: memory, OURS_DETERMINISTIC: memory, "fa4": memory}
    assert results.errors == []
    assert [entry["tensor"] for entry in results.checks[:3]] == ["dq", "dk", "dv"]
    verdicts = [(entry["name"], entry["ok"]) for entry in results.checks]
    counts = {pair: verdicts.count(pair) for pair in verdicts}
    good = dict.fromkeys([(OURS, True), (OURS_DETERMINISTIC, True), ("fa4", True), ("cudnn", False)], 6)
    assert counts == {**good, ("fa2", True): 3, ("fa2", False): 3}
    reasons = {(skip["implementation"], skip["where"]): skip["reason"] for skip in results.skipped}
    assert reasons["fa2", str(SMALL[1])] == "RuntimeError: no causal kernel"
    assert "over the tolerance" in reasons["cudnn", f"check dk {check.check_cell(SMALL[0])}"]
    json.dumps(results.to_json(), allow_nan=False)


@pytest.mark.parametrize("name", [OURS, OURS_DETERMINISTIC])
@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_our_own_wrong_gradient_is_an_error(
    grid_run: GridRunner, monkeypatch: pytest.MonkeyPatch, name: str, factor: float
) -> None:
    monkeypatch.setattr(work, "peak_extra_bytes", lambda call: 0)
    clock = FakeClock()
    results = grid_run([FakePeer(name, clock, 50.0, factor), FakePeer("fa4", clock, 50.0)], BACKWARD)
    assert len(results.errors) == 6, "dq, dk and dv, full and causal"
    assert all(re.search("over the tolerance|d[qkv] is not finite", error) for error in results.errors)
    assert all(row.tflops["fa4"] is not None for row in results.rows)


def test_memory_that_cannot_be_measured_leaves_the_figure(
    grid_run: GridRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(call: Callable[[], object]) -> int:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(work, "peak_extra_bytes", fails)
    results = grid_run([FakePeer("fa4", FakeClock(), 50.0)], BACKWARD)
    assert [row.tflops["fa4"] for row in results.rows] == [round(2.5 * cell.tflops(100.0), 1) for cell in SMALL]
    assert [row.memory for row in results.rows] == [{}, {}]
    wheres = {skip["where"]: skip["reason"] for skip in results.skipped}
    assert wheres == {f"memory {cell}": "RuntimeError: out of memory" for cell in SMALL}


@pytest.mark.parametrize("kind", [BACKWARD, TRAIN])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "peer",
    [
        PackagePeer(OURS, ["flashhopper"], ["flashhopper"]),
        PackagePeer(OURS_DETERMINISTIC, ["flashhopper"], ["flashhopper"], deterministic=True),
        SdpaPeer("fa2", SDPBackend.MATH),
    ],
    ids=lambda peer: peer.name,
)
def test_gradients_of_real_implementations_are_right(peer: Peer, causal: bool, kind: Pass) -> None:
    """On the CPU: layouts there and back, the graph that is used again, nothing accumulated."""
    cell = check.check_cell(Cell("bfloat16", 32, causal, 4096, 4, 3))
    task = work.work_of(kind, cell, torch.Generator().manual_seed(5))
    checks = task.check([peer])
    assert [(result.tensor, result.ok) for result in checks] == [("dq", True), ("dk", True), ("dv", True)]
    assert all(result.error is not None and result.error > 0 for result in checks)
    call = task.candidate(peer).call
    first, again = call(), call()
    assert isinstance(first, tuple)
    assert isinstance(again, tuple)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert all(x.grad is None for x in task.inputs)


def test_saved_bytes_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "peak_extra_bytes", lambda call: len(call()) * 2**20)

    class Product(FakePeer):
        def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], object]:
            return lambda: q * k * v  # keeps q, k, q·k and v

    cell = Cell("bfloat16", 128, False, 1024, 2, 4)
    task = work.work_of(TRAIN, cell, torch.Generator().manual_seed(5))
    memory = task.memory(Product("fa4", FakeClock(), 1.0))
    assert memory == {"saved_mib": 4 * 2.0, "backward_peak_mib": 3.0}
    assert work.work_of(FORWARD, cell, torch.Generator()).memory(Product("fa4", FakeClock(), 1.0)) == {}


def test_measuring_memory_frees_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "peak_extra_bytes", lambda call: len(call()))
    alive: list[weakref.ref[Marker]] = []

    class Marker:
        pass

    class KeepsItsOutput(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            ctx.marker = Marker()
            alive.append(weakref.ref(ctx.marker))
            out = q + k + v
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (*ctx.saved_tensors,) * 3

    class Saving(FakePeer):
        def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], object]:
            return lambda: KeepsItsOutput.apply(q, k, v)

    task = work.work_of(BACKWARD, Cell("bfloat16", 128, False, 1024, 2, 4), torch.Generator().manual_seed(5))
    assert task.memory(Saving("fa4", FakeClock(), 1.0))["saved_mib"] == 2.0
    assert [reference() for reference in alive] == [None]


def test_launch_run_has_a_row_per_implementation_and_mode() -> None:
    clock = FakeClock()
    peers = [FakePeer(OURS, clock, 0.004), FakePeer("fa4", clock, 0.03), FakePeer("fa3", clock, 1.0, reason="not here")]
    results = launch.run_launch(peers, 0, clock, device="cpu")
    factors = dict.fromkeys(launch.MODES, 1.0) | {"backward": 2.0, "varlen_backward": 2.0}
    expected = [
        (name, mode, factor * best) for mode, factor in factors.items() for name, best in (("ours", 4.0), ("fa4", 30.0))
    ]
    assert [(row["name"], row["mode"], row["best_us"]) for row in results.rows] == expected
    assert all(row["median_us"] == row["best_us"] for row in results.rows)
    assert results.to_json()["skipped"] == [{"implementation": "fa3", "where": "everywhere", "reason": "not here"}]
    assert results.errors == []


class WithoutRagged(FakePeer):
    ragged_call = Peer.ragged_call


def test_launch_run_leaves_out_what_an_implementation_lacks() -> None:
    clock = FakeClock()
    results = launch.run_launch([FakePeer(OURS, clock, 0.004), WithoutRagged("fa2", clock, 0.01)], 0, clock, "cpu")
    assert {row["mode"] for row in results.rows if row["name"] == "fa2"} == {"no_grad", "requires_grad", "backward"}
    assert {skip["where"] for skip in results.skipped} == {"varlen", "varlen_requires_grad", "varlen_backward"}
    assert "fa2 has no function for ragged batches" in results.skipped[0]["reason"]
    assert results.errors == []


def test_launch_run_of_ours_takes_every_ragged_batch_and_plans_each_mode_once() -> None:
    """On CPU tensors: what is measured on a card runs, with gradients of its own."""
    inputs = [torch.randn(1, 512, 2, 16).requires_grad_() for _ in range(3)]
    ours = PackagePeer(OURS, ["flashhopper"], ["flashhopper"])
    for lengths, (call, packed) in zip(launch.RAGGED_LENGTHS, launch._ragged_calls(ours, inputs), strict=True):
        out = ours.output(call())
        assert out.shape == packed[0].shape == (sum(lengths), 2, 16)
        assert all(x.is_leaf and x.requires_grad for x in packed)
    backward = launch.MODES["varlen_backward"].prepare(ours, inputs)
    for lengths in (*launch.RAGGED_LENGTHS, *launch.RAGGED_LENGTHS):
        gradients = backward()
        assert isinstance(gradients, tuple)
        assert [x.shape for x in gradients] == [(sum(lengths), 2, 16)] * 3


def test_variant_run_compares_with_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    bases = [configs.main_spec(FORWARD, configs.problem_of(cell)).config for cell in SMALL]

    def fake_forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: object, config: ForwardConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        clock.milliseconds += 1.0 if config in bases else 2.0
        if not config.tma_store:
            raise RuntimeError("misaligned")
        return attention(q, k, v, options.causal) if q.shape[1] == check.CHECK_SEQLEN else q, q  # type: ignore[attr-defined]

    monkeypatch.setattr(sampler, "forward", fake_forward)
    variants = {"stages=1": ForwardConfig(128, 128, 1), "no tma": ForwardConfig(128, 128, tma_store=False)}
    variants["huge"] = ForwardConfig(192, 256)
    plan = configs.VariantPlan.of(SMALL, configs.explicit_variants(variants))
    assert len(plan.specs) == 6
    options = ablation.VariantOptions(plan, [FakePeer("fa4", clock, 0.5)], seed=1, budget_seconds=20.0)
    results = ablation.VariantRun(options, clock, quiet(), device="cpu").run()
    assert {(row.variant, row.ratio) for row in results.rows} == {("default", 1.0), ("stages=1", 0.5), ("fa4", 2.0)}
    assert {row.noise for row in results.rows} == {0.0}
    assert len(results.rows) == 6
    assert {entry["variant"] for entry in results.infeasible} == {"huge"}
    assert "registers" in results.infeasible[0]["reason"]
    assert results.errors
    assert all("misaligned" in error for error in results.errors)
    text = "\n".join(rendered(table) for table in report.variant_tables(results))
    assert re.search(r"stages=1 +│ +\d 0\.500 ±0\.000 +│ +\d 0\.500 ±0\.000", text)
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
    base = ForwardConfig(128, 128, num_o_parts=2)
    variants = configs.ablations(base)
    assert variants.pop("default") == base
    for name, config in variants.items():
        changed = {f.name for f in dataclasses.fields(base) if getattr(base, f.name) != getattr(config, f.name)}
        assert changed - {"num_o_parts"} == {part.partition("=")[0] for part in name.split(", ")}
        assert ("num_o_parts" in changed) == (name == "tma_store=False")
    assert "split_masked_loop=False" not in variants, "the lazy softmax has no masked loop"
    assert {"num_stages=1", "softmax=exact", "scheduler=single", "warpgroup_order=ping_pong"} <= set(variants)
