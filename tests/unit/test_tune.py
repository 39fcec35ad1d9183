"""``flashhopper tune``: what is searched, how it is halved, the rows that come out, and the command."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import FakeClock, quiet, rendered
from hypothesis import given, settings
from hypothesis import strategies as st

from flashhopper import heuristics, inspect_kernel
from flashhopper.bench import BenchError, check, environment, findings, grid, report, sampler, timing, tune
from flashhopper.bench.check import attention
from flashhopper.bench.configs import DEFAULT, AnyConfig, config_text, main_spec, parse_config, problem_of
from flashhopper.bench.findings import Finding, LengthClass, Standing, length_classes
from flashhopper.bench.grid import Cell
from flashhopper.bench.hang_guard import hang_guard
from flashhopper.bench.passes import BACKWARD, FORWARD, Pass
from flashhopper.bench.search import is_feasible, neighbours
from flashhopper.bench.table_rows import AnyRow, replace_rows, row_source, unused_names
from flashhopper.bench.tune import TuneOptions, TuneResults, TuneRun, rung_plan, rungs, without_unfit
from flashhopper.bench.variants import Ratio, rows_of
from flashhopper.cli import main, warmup
from flashhopper.cli import tune as cli
from flashhopper.cli.arguments import CANNOT_RUN
from flashhopper.config import BackwardConfig, ForwardConfig
from flashhopper.heuristics import BACKWARD_TABLE, TILE_TABLE
from flashhopper.inspect_kernel import PtxasReport

ROWS = [*TILE_TABLE, *BACKWARD_TABLE]
DIMS = list(dict.fromkeys((row.head_dim, row.head_dim_v) for row in ROWS))
SOURCE = inspect.getsource(heuristics)
CLEAN = PtxasReport(168, 0, 0, ())

forward_configs = st.builds(
    ForwardConfig,
    st.sampled_from([64, 128, 192]),
    st.integers(1, 16).map(lambda n: 16 * n),
    num_stages=st.integers(1, 4),
    num_q_stages=st.integers(1, 2),
    q_in_registers=st.booleans(),
    share_qo_smem=st.booleans(),
    group_waves=st.integers(1, 9),
    softmax=st.sampled_from(["exact", "lazy"]),
    warpgroup_order=st.sampled_from(["free", "stagger", "ping_pong"]),
    prefetch_scores=st.booleans(),
    split_masked_loop=st.booleans(),
)
backward_configs = st.builds(
    BackwardConfig,
    st.sampled_from([64, 128]),
    st.sampled_from([64, 128]),
    split=st.sampled_from(["keys", "operands"]),
    num_q_stages=st.integers(1, 4),
    num_ds_stages=st.integers(1, 4),
    dq_columns=st.sampled_from([32, 64, 128]),
    num_k_stages=st.integers(1, 2),
    warpgroup_order=st.sampled_from(["free", "stagger"]),
    wide_consumers=st.booleans(),
)


def kind_of(config: AnyConfig) -> Pass:
    return BACKWARD if isinstance(config, BackwardConfig) else FORWARD


def changed(base: AnyConfig, config: AnyConfig) -> set[str]:
    return {f.name for f in dataclasses.fields(base) if getattr(base, f.name) != getattr(config, f.name)}


# ---------------------------------------------------------------- what is searched


@settings(deadline=None)
@given(st.one_of(forward_configs, backward_configs))
def test_a_configuration_is_read_back_from_its_text(config: AnyConfig) -> None:
    assert parse_config(config_text(config), kind_of(config)) == config


@settings(deadline=None)
@given(st.one_of(forward_configs, backward_configs), st.sampled_from(DIMS))
def test_neighbours_fit_the_card_and_come_once(base: AnyConfig, dims: tuple[int, int]) -> None:
    found = neighbours(base, *dims)
    assert found[0] == base
    assert len(set(found)) == len(found)
    assert len({config_text(config) for config in found}) == len(found)
    for config in found[1:]:
        config.check_feasible(*dims)


Q_FIELDS = {"num_q_stages", "prefetch_scores", "q_in_registers", "share_qo_smem"}
CHOICES = [{"tile_m", "tile_n", "split", "warpgroup_order"}, Q_FIELDS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{type(row).__name__}-{row.head_dim}-{row.causal}")
def test_neighbours_of_a_row_change_one_choice_or_make_room_with_a_second(row: AnyRow) -> None:
    base, dims = row.config, (row.head_dim, row.head_dim_v)
    found = neighbours(base, *dims)
    assert len(found) > 10
    for config in found[1:]:
        fields = changed(base, config)
        choices = [choice for choice in CHOICES if fields & choice]
        apart = len(choices) + len(fields.difference(*choices))
        assert 1 <= apart <= 2, config_text(config)
        if apart == 2:
            alone = [
                dataclasses.replace(base, **{n: getattr(config, n) for n in choice & fields}) for choice in choices
            ]
            alone += [dataclasses.replace(base, **{n: getattr(config, n)}) for n in fields.difference(*choices)]
            assert not all(is_feasible(one, *dims) for one in alone), config_text(config)
    stages = "num_stages" if isinstance(base, ForwardConfig) else "num_q_stages"
    for name, values in {"group_waves": (1, 2, 4, 8), stages: (2, 3, 4)}.items():
        for value in values:
            config = dataclasses.replace(base, **{name: value})
            assert (config in found) == is_feasible(config, *dims)


def test_lengths_fall_into_the_classes_of_the_table() -> None:
    cells = [Cell.of("bfloat16", 64, causal, s) for causal in (False, True) for s in (512, 1024, 2048, 16384)]
    classes = length_classes(cells, FORWARD)
    found = [(str(one), [cell.s for cell in one.cells]) for one in classes]
    assert found == [
        ("TILE_TABLE d64 full, keys up to 1k", [512, 1024]),
        ("TILE_TABLE d64 causal, keys up to 1k", [512, 1024]),
        ("TILE_TABLE d64 full", [2048, 16384]),
        ("TILE_TABLE d64 causal", [2048, 16384]),
    ]
    assert all(one.base == one.row.config for one in classes)
    both = length_classes([Cell.of("bfloat16", 192, causal, 512, 128) for causal in (False, True)], BACKWARD)
    assert [(one.row.causal, one.causal) for one in both] == [(None, False), (None, True)]
    with pytest.raises(
        BenchError, match="no row of its own for d72; head dims of rows: 64 64, 96 96, 128 128, 192 128"
    ):
        length_classes([Cell.of("bfloat16", 72, False, 512)], FORWARD)


def test_configurations_are_left_out_by_name() -> None:
    (every,) = length_classes([Cell.of("bfloat16", 128, False, 4096)], FORWARD)
    names = list(every.configs)
    (some,) = length_classes(every.cells, FORWARD, skip=[names[3], names[7]])
    assert list(some.configs) == [*names[:3], *names[4:7], *names[8:]]
    for wrong in ("128x999", DEFAULT):
        with pytest.raises(BenchError, match=f"--skip names {wrong}; --dry-run lists"):
            length_classes(every.cells, FORWARD, skip=[names[3], wrong])


def test_float16_is_searched_with_the_exact_softmax() -> None:
    (one,) = length_classes([Cell.of("float16", 128, False, 4096)], FORWARD)
    assert {spec.dtype for spec in one.specs.values()} == {"float16"}
    assert {getattr(config, "softmax", None) for config in one.configs.values()} == {"exact"}
    finding = made_up_finding(one, {DEFAULT: [1.0], "128x112:q_stages=2,softmax=exact,prefetch=on": [0.5]})
    row = finding.row(findings.TABLE_CARD)
    assert row is not None
    assert row.config == dataclasses.replace(one.row.config, tile_n=112)
    assert row.reason.endswith(" (float16)")


def test_kernels_that_no_row_may_have_are_left_out() -> None:
    (one,) = length_classes([Cell.of("bfloat16", 256, True, 512)], FORWARD)
    specs = list(one.specs.values())
    reports: dict[Any, PtxasReport | None] = dict.fromkeys(specs, CLEAN)
    reports[specs[0]] = reports[specs[1]] = CLEAN._replace(spill_bytes=8, stack_bytes=16)
    reports[specs[2]] = CLEAN._replace(remarks=("C7510 wgmma serialized",))
    reports[specs[3]] = None
    (kept,), dropped = without_unfit([one], reports.get)
    names = list(one.configs)
    assert [(entry["variant"], entry["reason"]) for entry in dropped] == [
        (names[1], "8 bytes spill, 16 bytes of stack"),
        (names[2], "C7510 wgmma serialized"),
        (names[3], "did not compile"),
    ]
    assert list(kept.configs) == [DEFAULT, *names[4:]]


# ---------------------------------------------------------------- halving and budget


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


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TuneResults, FakeClock, dict[str, int]]]:
    """Tune with kernels whose time is a function of configuration and length; counts launches by configuration."""
    monkeypatch.setattr(check, "CHECK_SEQLEN", 64)

    def run(
        cells: list[Cell], cost: Callable[[AnyConfig, int], float], kind: Pass = FORWARD, budget: float = 12.0
    ) -> tuple[TuneResults, FakeClock, dict[str, int]]:
        clock, launches = FakeClock(), dict[str, int]()

        def fake_forward(q: Any, k: Any, v: Any, options: Any, config: ForwardConfig | None = None) -> tuple[Any, Any]:
            if kind is FORWARD:
                spend(config, q.shape[1])
            is_check = q.shape[1] == check.CHECK_SEQLEN
            return attention(q, k, v, options.causal) if is_check else v, q

        def fake_backward(dout: Any, q: Any, k: Any, v: Any, *rest: Any, config: BackwardConfig) -> Any:
            spend(config, q.shape[1])
            if q.shape[1] != check.CHECK_SEQLEN:
                return q, k, v
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(attention(*inputs, rest[-1].causal), inputs, dout)

        def spend(config: AnyConfig | None, length: int) -> None:
            assert config is not None
            launches[config_text(config)] = launches.get(config_text(config), 0) + 1
            clock.milliseconds += cost(config, length)

        monkeypatch.setattr(sampler, "forward", fake_forward)
        monkeypatch.setattr(sampler, "backward", fake_backward)
        classes = length_classes(cells, kind)
        results = TuneRun(TuneOptions(classes, 3, budget), clock, quiet(), device="cpu").run()
        return results, clock, launches

    return run


LONG = [Cell("bfloat16", 128, True, s, 1, 1) for s in (4096, 8192)]
SHORT = [Cell("bfloat16", 128, True, s, 1, 1) for s in (512, 1024)]
BEST = ForwardConfig(128, 112, num_stages=2, q_in_registers=True, group_waves=8)


def cost_of(config: AnyConfig, length: int) -> float:
    """BEST takes 1, others up to 2: the more keys a tile has, or the fewer rows, the longer."""
    if config == BEST:
        return 1.0
    return 1.2 + 0.001 * config.tile_n + 0.1 * (config.tile_m == 64)


def test_halving_finds_the_fastest_and_spends_little_on_the_slow(tuned: Callable[..., Any]) -> None:
    results, clock, launches = tuned(LONG, cost_of)
    (finding,) = results.findings
    assert finding.best is not None
    assert finding.best.config == BEST
    assert finding.base.gain == (1.0, 0.0)
    assert finding.best.gain.value == pytest.approx(1.2 + 0.128)
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
    assert ratios[config_text(BEST)] == 1.328
    json.dumps(results.to_json(), allow_nan=False)
    text = rendered(report.finding_table(finding))
    assert "1.328 ±0.000" in text
    assert "1.000 ±0.000" in text


def test_a_wrong_or_failing_configuration_is_out_and_an_error(tuned: Callable[..., Any]) -> None:
    def fails_late(config: AnyConfig, length: int) -> float:
        if config == BEST and length == 8192:
            raise RuntimeError("misaligned address")
        if config.tile_m == 192:
            raise RuntimeError("no such tile")
        return cost_of(config, length)

    results, _, _ = tuned(LONG, fails_late)
    (finding,) = results.findings
    assert all(one.config not in (BEST,) and one.config.tile_m < 192 for one in finding.standings)
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


@pytest.mark.parametrize("budget", [2.0, 5.0, 20.0])
def test_the_budget_is_kept(tuned: Callable[..., Any], budget: float) -> None:
    results, clock, _ = tuned(SHORT + LONG, cost_of, budget=budget)
    assert clock.now() < 1.25 * budget
    assert [finding.of.cells for finding in results.findings] == [tuple(SHORT), tuple(LONG)]


def test_a_budget_too_small_says_what_it_did_not_reach(tuned: Callable[..., Any]) -> None:
    results, _, _ = tuned(SHORT + LONG, lambda config, length: 500.0, budget=60.0)
    assert [finding.of.cells for finding in results.findings] == [tuple(SHORT)]
    reasons = {entry["where"]: entry["reason"] for entry in results.skipped}
    assert reasons["TILE_TABLE d128 causal, keys up to 2k"].startswith("the budget ended after 1 of ")
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
    target = BackwardConfig(64, 64, "operands", num_q_stages=3, num_dq_stages=2)
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


# ---------------------------------------------------------------- rows


def made_up_finding(one: LengthClass, milliseconds: dict[str, list[float]]) -> Finding:
    """Standings of a class with these times, one a shape, each of two equal rounds."""
    configs = {name: one.configs[name] for name in milliseconds}
    rows: dict[str, list[Any]] = {name: [] for name in configs}
    for index, cell in enumerate(one.cells):
        samples = {name: [times[index]] * 2 for name, times in milliseconds.items()}
        for row in rows_of(cell, samples, configs, one.kind):
            rows[row.variant].append(row)
    ratios = {
        name: [Ratio(base / time, 0.0) for base, time in zip(milliseconds[DEFAULT], times, strict=True)]
        for name, times in milliseconds.items()
    }
    standings = [Standing.of(name, rows[name], ratios[name]) for name in configs]
    return Finding(one, tuple(sorted(standings, key=lambda standing: -standing.gain.value)))


def test_the_reason_has_the_figures_of_the_new_row_the_old_and_the_next_best() -> None:
    cells = [Cell.of("bfloat16", 128, True, s) for s in (512, 1024, 2048)]
    (one,) = length_classes(cells, FORWARD)
    times = {
        DEFAULT: [0.1, 0.2, 0.4],
        "128x112:q_stages=2,waves=8": [0.081, 0.162, 0.36],
        "128x128:q_stages=2": [0.09, 0.18, 0.26],
    }
    finding = made_up_finding(one, times)
    assert finding.best is not None
    rates = {name: [f"{c.tflops(t):.0f}" for c, t in zip(cells, ms, strict=True)] for name, ms in times.items()}
    first, second, third = rates["128x128:q_stages=2"]
    row = finding.row("NVIDIA H200")
    assert row is not None
    old, other = rates[DEFAULT], rates["128x112:q_stages=2,waves=8"]
    assert row.reason == (
        f"{first}, {second} and {third} TFLOPS at 512, 1k and 2k keys; group_waves=8: {old[0]}, {old[1]} and {old[2]}; "
        f"128×112, group_waves=8: {other[0]}, {other[1]} and {other[2]}"
    )
    assert row._replace(reason="", config=one.row.config) == one.row._replace(reason="")
    assert row.config == dataclasses.replace(one.row.config, group_waves=2)
    assert (finding.row("NVIDIA H20") or row).reason.endswith(f"{other[2]} (NVIDIA H20)")
    assert finding.hints() == [
        f"at {s} keys 128x112:q_stages=2,waves=8 is faster: {new} to {now} TFLOPS"
        for s, new, now in (("512", other[0], first), ("1k", other[1], second))
    ]
    assert finding.to_json("NVIDIA H200")["new_row"] == row_source(row)


def test_a_row_that_nothing_beats_stays() -> None:
    (one,) = length_classes([Cell.of("bfloat16", 128, True, 512)], FORWARD)
    finding = made_up_finding(one, {DEFAULT: [1.0], "128x112:q_stages=2,waves=8": [0.995]})
    assert finding.standings[0].name != DEFAULT
    assert finding.row("NVIDIA H200") is None
    assert finding.hints() == []


@settings(deadline=None)
@given(st.sampled_from(ROWS), st.one_of(forward_configs, backward_configs), st.text(max_size=300))
def test_the_source_of_a_row_is_the_row(row: AnyRow, config: AnyConfig, reason: str) -> None:
    row = row._replace(config=config, reason=reason)  # type: ignore[arg-type]
    assert eval(row_source(row), vars(heuristics)) == row


def test_rows_are_formatted_as_the_formatter_would() -> None:
    pytest.importorskip("ruff")
    lines = [f"    {row_source(row)},\n" for row in ROWS]
    text = f"ROWS = (\n{''.join(lines)})\n"
    settings = ["--line-length", "120", "--isolated", "-"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", *settings], input=text, capture_output=True, text=True, check=True
    )
    assert done.stdout == text


@pytest.mark.parametrize("table", ["TILE_TABLE", "BACKWARD_TABLE"])
def test_each_row_can_be_replaced_in_the_real_source(table: str) -> None:
    rows: tuple[AnyRow, ...] = getattr(heuristics, table)
    assert replace_rows(SOURCE, table, rows, {}) == SOURCE
    for number, row in enumerate(rows):
        new = [row._replace(reason="neu × “1”"), row._replace(head_dim=248)]
        names: dict[str, Any] = {"__name__": "copy"}
        source = replace_rows(SOURCE, table, rows, {number: new})
        exec(compile(source, "copy", "exec"), names)
        assert list(map(tuple, names[table])) == list(map(tuple, [*rows[:number], *new, *rows[number + 1 :]]))
        kept = [line for line in SOURCE.splitlines() if line.strip().startswith("#")]
        assert [line for line in source.splitlines() if line.strip().startswith("#")] == kept


def test_all_rows_are_replaced_at_once_and_what_they_leave_is_named() -> None:
    new = {number: [row._replace(reason="measured")] for number, row in enumerate(TILE_TABLE)}
    source = replace_rows(SOURCE, "TILE_TABLE", TILE_TABLE, new)
    assert unused_names(SOURCE) == []
    assert unused_names(source) == ["_D64_SHORT_REASON", "_D96_SHORT_REASON"]


def test_a_source_of_another_form_is_refused() -> None:
    row = TILE_TABLE[0]
    with pytest.raises(BenchError, match="not the one that is running"):
        replace_rows(SOURCE, "TILE_TABLE", TILE_TABLE[1:], {0: [row]})
    with pytest.raises(BenchError, match="not the one that is running"):
        replace_rows(
            SOURCE.replace("TileRow(128, 128, False, 512", "TileRow(128, 128, False, 513"), "TILE_TABLE", TILE_TABLE, {}
        )
    with pytest.raises(BenchError, match="not a tuple of rows"):
        replace_rows("TILE_TABLE = tuple([])\n", "TILE_TABLE", TILE_TABLE, {})


# ---------------------------------------------------------------- the command


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
        (("--dtype", "float16", "--write"), "no rows by dtype"),
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
    """A compiler that finds spills in tiles of 144 keys; the specs it was given."""
    monkeypatch.setenv("FLASHHOPPER_CACHE_DIR", str(tmp_path / "kernels"))
    specs: list[Any] = []

    def report_of(spec: Any) -> PtxasReport | None:
        if spec not in specs:
            return None
        return CLEAN._replace(spill_bytes=4) if getattr(spec.config, "tile_n", 0) == 144 else CLEAN

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
    spilled = [config_text(spec.config) for spec in specs if spec.config.tile_n == 144]
    assert lines[1:] == [
        f"left out: {name}: TILE_TABLE d128 causal: 4 bytes spill, 0 bytes of stack" for name in spilled
    ]
    assert main([*ARGUMENTS, "--compile-only"]) == 0
    assert capsys.readouterr().out.startswith("0 compiled, ")


def test_the_backwards_companions_are_compiled_too(no_gpu: None, compiled: list[Any]) -> None:
    assert main(["tune", "--pass", "backward", "--mask", "full", "--seqlen", "4k", "--compile-only"]) == 0
    names = [spec.name for spec in compiled[-3:]]
    assert names == ["fwd_bfloat16_d128x128_full_128x128", "bwd_pre_bfloat16_d128x128", "bwd_post_bfloat16_d128"]


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
    base, tflops = TILE_TABLE[-7], LONG[0].flop / 1e9
    assert (base.head_dim, base.causal, base.max_seqlen_k) == (128, True, None)
    captured = capsys.readouterr()
    out = captured.out
    printed = out[out.index("TileRow(") : out.index("wrote ")].rstrip().removesuffix(",")
    row = eval(printed, vars(heuristics))
    assert printed == row_source(row)
    assert row.reason.startswith(f"{tflops:.0f} and {4 * tflops:.0f} TFLOPS at 4k and 8k keys; 128×128: ")
    assert row == base._replace(config=BEST, reason=row.reason)
    assert "left out: 128x144:" in out
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
