"""How ``flashhopper tune`` searches: halving, the noise, the budget, and what fails on the way."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from bench_fakes import FakeClock, rendered
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_fakes import BASE, BEST, LONG, SHORT, cost_of, fake_tuning

from flashhopper.bench import report, timing
from flashhopper.bench.configs import DEFAULT, AnyConfig, config_text, main_spec, problem_of
from flashhopper.bench.findings import Standing
from flashhopper.bench.grid import Cell
from flashhopper.bench.hang_guard import hang_guard
from flashhopper.bench.passes import BACKWARD, FORWARD
from flashhopper.bench.tune import TuneResults, rung_plan, rungs
from flashhopper.bench.variants import Ratio
from flashhopper.config import BackwardConfig, ForwardConfig
from flashhopper.heuristics import BACKWARD_TABLE


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TuneResults, FakeClock, dict[str, int]]]:
    return fake_tuning(monkeypatch)


@settings(deadline=None)
@given(st.integers(0, 500))
def test_rungs_halve_until_the_finalists_are_left(count: int) -> None:
    sizes = rungs(count)
    assert sizes[0] == count
    assert sizes[-1] == min(count, 4)
    assert all(one > other >= one // 2 for one, other in itertools.pairwise(sizes))


@settings(deadline=None, max_examples=30)
@given(st.floats(0.05, 10.0), st.integers(1, 60))
def test_a_round_of_halving_keeps_its_time(seconds: float, count: int) -> None:
    """But for what was begun when time was up, and a launch where a sample is shorter: kernels take 1 ms."""
    clock = FakeClock()
    candidates = [clock.candidate(str(index), lambda: 1.0) for index in range(count)]
    samples = timing.measure(candidates, rung_plan(seconds, count), clock, random.Random(0))
    assert clock.now() <= 1.45 * seconds + 0.012 * count
    assert all(3 <= len(times) <= 25 for times in samples.values())


def test_noise_is_that_of_the_rounds_ratios() -> None:
    base = [1.0, 1.1, 1.2, 1.3, 1.4]
    assert Ratio.of(base, [2 * x for x in base]) == (0.5, 0.0), "what slows both is no noise"
    ratio = Ratio.of([1.0] * 5, [1.0, 1 / 1.1, 1 / 0.9, 1 / 1.02, 1 / 0.98])
    assert ratio.value == 1.0
    assert ratio.noise == pytest.approx(2 * 1.253 / 1.349 * 0.04 / 5**0.5)
    assert Ratio.of([1.0], [2.0]).noise == float("inf")


@pytest.mark.parametrize("value, noise, is_faster", [(1.02, 0.0, True), (1.005, 0.0, False), (1.02, 0.03, False)])
def test_a_row_changes_only_beyond_the_noise(value: float, noise: float, is_faster: bool) -> None:
    assert Standing("x", ForwardConfig(128, 128), (), Ratio(value, noise)).is_faster == is_faster


def test_halving_finds_the_fastest_and_spends_little_on_the_slow(tuned: Callable[..., Any]) -> None:
    results, clock, launches = tuned(LONG, cost_of)
    (finding,) = results.findings
    assert finding.best is not None
    assert finding.best.config == BEST
    assert finding.base.gain == (1.0, 0.0)
    gain = cost_of(BASE, LONG[0].s)
    assert gain > 1.2
    assert finding.best.gain.value == pytest.approx(gain)
    assert len(finding.standings) == 5
    assert [one.gain.value for one in finding.standings] == sorted(
        (x.gain.value for x in finding.standings), reverse=True
    )
    slowest = min(count for text, count in launches.items() if text.startswith("64x"))
    assert launches[config_text(BEST)] > 3 * slowest
    assert clock.now() < 13.0
    assert not results.errors
    names = {row.variant for row in results.rows}
    assert len(results.rows) == 2 * len(names) == 2 * len(finding.of.configs), "each once in each shape"
    ratios = {row.variant: row.ratio for row in results.rows}
    assert ratios[config_text(BEST)] == round(gain, 4)
    json.dumps(results.to_json(), allow_nan=False)
    text = rendered(report.finding_table(finding))
    assert f"{gain:.3f} ±0.000" in text
    assert "1.000 ±0.000" in text


def test_a_wrong_or_failing_configuration_is_out_and_an_error(tuned: Callable[..., Any]) -> None:
    def fails_late(config: AnyConfig, length: int) -> float:
        if config == BEST and length == 8192:
            raise RuntimeError("misaligned address")
        if config.tile_m == 128:
            raise RuntimeError("no such tile")
        return cost_of(config, length)

    results, _, _ = tuned(LONG, fails_late)
    (finding,) = results.findings
    assert all(one.config != BEST and one.config.tile_m != 128 for one in finding.standings)
    assert any("misaligned address" in error for error in results.errors)
    assert any("no such tile" in error for error in results.errors)


def test_without_the_rows_own_kernel_nothing_is_found(tuned: Callable[..., Any]) -> None:
    base = main_spec(FORWARD, problem_of(LONG[0])).config

    def fails(config: AnyConfig, length: int) -> float:
        if config == base:
            raise RuntimeError("broken")
        return 1.0

    results, _, _ = tuned(LONG, fails)
    assert results.findings == []
    assert any(error.startswith(DEFAULT) and "broken" in error for error in results.errors)


@pytest.mark.parametrize("budget", [3.0, 5.0, 20.0])
def test_the_budget_is_kept(tuned: Callable[..., Any], budget: float) -> None:
    results, clock, _ = tuned(SHORT + LONG, cost_of, budget=budget)
    assert clock.now() < 1.25 * budget
    assert [finding.of.cells for finding in results.findings] == [tuple(SHORT), tuple(LONG)]


def test_a_budget_too_small_says_what_it_did_not_reach(tuned: Callable[..., Any]) -> None:
    results, _, _ = tuned(SHORT + LONG, lambda config, length: 500.0, budget=60.0)
    assert [finding.of.cells for finding in results.findings] == [tuple(SHORT)]
    reasons = {entry["where"]: entry["reason"] for entry in results.skipped}
    assert reasons["TILE_TABLE d128 causal, keys up to 1k"].startswith("the budget ended after 1 of ")
    assert reasons["TILE_TABLE d128 causal"].startswith("the budget had ended: a larger --budget-seconds")
    assert len(results.errors) == 1


@pytest.mark.parametrize("seconds, said", [(0.05, ["error: 128x112 has not ended after 0 s: it hangs"]), (60.0, [])])
def test_a_kernel_that_hangs_is_named(seconds: float, said: list[str]) -> None:
    heard = threading.Event()
    messages: list[str] = []

    def on_hang(message: str) -> None:
        messages.append(message)
        heard.set()

    with hang_guard("128x112", seconds, on_hang):
        assert heard.wait(10.0 if said else 0.0) == bool(said)
    assert [message[: len(expected)] for message, expected in zip(messages, said, strict=True)] == said


def test_the_backward_is_tuned_for_a_mask_at_a_time(tuned: Callable[..., Any]) -> None:
    cells = [Cell("bfloat16", 192, causal, 512, 1, 1, 128) for causal in (False, True)]
    target = BackwardConfig(64, 64, "operands", num_q_stages=3, dq_columns=32, num_dq_stages=2, paired=True)
    results, _, _ = tuned(cells, lambda config, length: 1.0 if config == target else 2.0, BACKWARD)
    assert not results.errors
    assert [finding.best is not None and finding.best.config for finding in results.findings] == [target, target]
    ((number, rows),) = results.new_rows().items()
    assert BACKWARD_TABLE[number].head_dim_v == 128
    assert [(row.causal, row.config) for row in rows] == [(False, target), (True, target)]
    results.findings.pop(0)
    full, causal = results.new_rows()[number]
    assert (full.causal, full.config, full.reason) == (False, *BACKWARD_TABLE[number][2:4])
    assert (causal.causal, causal.config) == (True, target)
    flop = 2.5 * cells[0].flop
    assert full.head_dim_v == 128
    assert {row.tflops for row in results.rows if row.variant == config_text(target) and not row.cell.causal} == {
        round(flop / 1e9, 1)
    }
