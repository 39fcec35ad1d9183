"""The benchmarks' arithmetic, order, files and gate, with made-up figures and a fake clock."""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from bench_fakes import FakeClock, made_up_results, rendered, with_rates

from flashhopper.bench import BenchError, environment, report, timing
from flashhopper.bench.check import reason_of
from flashhopper.bench.grid import HEAD_DIMS, SEQLENS, Cell, grid, short_seqlen
from flashhopper.bench.passes import BACKWARD, FORWARD, NAMES, OURS, PEERS, TRAIN
from flashhopper.bench.peers import all_peers
from flashhopper.bench.results import Row, compare, read_results, summarise, write_json
from flashhopper.bench.timing import Candidate, Plan, balanced_orders
from flashhopper.cli import bench as cli
from flashhopper.cli.arguments import CANNOT_RUN

# ---------------------------------------------------------------- arithmetic


def test_tflops_of_a_cell() -> None:
    cell = Cell.of("bfloat16", 128, False, 4096)
    assert (cell.b, cell.h) == (4, 16)
    assert cell.flop == 4 * 4 * 16 * 4096 * 4096 * 128
    assert cell.tflops(1.0) == pytest.approx(549.755813888)
    assert dataclasses.replace(cell, causal=True).tflops(1.0) == pytest.approx(549.755813888 / 2)
    assert Row.of(cell, {"ours": 1.0}).tflops == {"ours": 549.8}


def test_tflops_of_each_pass() -> None:
    cell = Cell.of("bfloat16", 128, False, 4096)
    assert Row.of(cell, {"ours": 1.0}, BACKWARD).tflops == {"ours": 1374.4}
    assert Row.of(cell, {"ours": 1.0}, TRAIN).tflops == {"ours": 1924.1}
    assert BACKWARD.peers == TRAIN.peers == ("fa4", "cudnn", "fa2")
    assert FORWARD.peers == PEERS
    row = Row(cell, {"ours": 600.0, "ours_deterministic": 700.0, "fa4": 500.0})
    assert row.best_peer() == ("fa4", 500.0)
    assert row.ratio() == 1.2


def test_the_grid_keeps_tokens_and_width() -> None:
    cells = grid("bfloat16", HEAD_DIMS, (False, True), SEQLENS)
    assert len(cells) == len(set(cells)) == 42
    assert all(cell.b * cell.s == 16384 for cell in cells if cell.s <= 16384)
    assert all(cell.b == 1 for cell in cells if cell.s == 32768)
    assert all(cell.h * cell.d == 2048 for cell in cells)
    assert [short_seqlen(s) for s in (512, 1000, 1024, 32768)] == ["512", "1000", "1k", "32k"]


def test_summary_by_hand() -> None:
    cell = Cell.of("bfloat16", 128, False, 8192)
    other = Cell.of("bfloat16", 64, True, 512)
    rows = [
        Row(cell, {"ours": 600.0, "fa4": 500.0, "fa3": 480.0, "fa2": 300.0}),
        Row(other, {"ours": 90.0, "fa4": 100.0, "cudnn": 50.0}),
        Row(Cell.of("bfloat16", 64, True, 1024), {"ours": None, "fa4": 100.0}),
    ]
    summary = summarise(rows)
    assert (summary["cells"], summary["wins"]) == (2, 1)
    assert summary["geomean_vs_best_peer"] == round((1.2 * 0.9) ** 0.5, 3)
    assert summary["min_ratio"] == 0.9
    assert summary["min_ratio_cell"] == str(other)
    assert summary["geomean_vs"] == {"fa4": 1.039, "fa3": 1.25, "cudnn": 1.8, "fa2": 2.0}
    assert summary["headline"]["sustained"] == {"peak_fraction": [0.607, 0.607], "speedup_over_fa2": [2.0, 2.0]}
    assert summary["headline"]["burst"] == {"peak_fraction": None, "speedup_over_fa2": None}
    assert summarise([])["geomean_vs_best_peer"] is None


# ---------------------------------------------------------------- timing


def test_rounds_are_interleaved_and_medians_right() -> None:
    clock = FakeClock()
    costs = {"a": 1.0, "b": 2.0, "c": 40.0}
    candidates = [clock.candidate(name, lambda cost=cost: cost) for name, cost in costs.items()]
    plan = Plan(warm_up_seconds=0.1, seconds=1e9, min_rounds=2, max_rounds=9)
    samples = timing.measure(candidates, plan, clock, random.Random(3))
    assert timing.medians(samples) == pytest.approx(costs)
    assert {name: len(values) for name, values in samples.items()} == {"a": 9, "b": 9, "c": 9}
    # A sample is 15 ms of launches and a quarter of them before it, not counted: 15 + 3, 8 + 2 and 1 + 1 launches.
    blocks = {"a": 18, "b": 10, "c": 2}
    at, orders = len(clock.launched), []
    for _ in range(9):
        order: list[str] = []
        for _ in costs:
            name = clock.launched[at - 1]
            assert clock.launched[at - blocks[name] : at] == [name] * blocks[name]
            at -= blocks[name]
            order.insert(0, name)
        assert sorted(order) == ["a", "b", "c"]
        orders.append(tuple(order))
    assert len(set(orders)) > 1, "no implementation always follows the same neighbour"


@pytest.mark.parametrize("count", range(1, 9))
def test_each_implementation_follows_each_other_one_equally_often(count: int) -> None:
    cycle = count if count % 2 == 0 else 2 * count
    orders = balanced_orders(count, random.Random(count))
    for _ in range(3):
        taken = list(itertools.islice(orders, cycle))
        assert all(sorted(order) == list(range(count)) for order in taken)
        pairs = Counter(pair for order in taken for pair in itertools.pairwise(order))
        assert pairs == dict.fromkeys(itertools.permutations(range(count), 2), 1 + count % 2)
        places = [Counter(order[place] for order in taken) for place in range(count)]
        assert all(set(found.values()) == {cycle // count} for found in places)


def test_orders_of_nothing_end() -> None:
    assert list(balanced_orders(0, random.Random(0))) == []


def test_a_throttling_card_does_not_favour_whoever_is_first() -> None:
    clock = FakeClock()

    def slower() -> float:
        return 1.0 + min(clock.now(), 2.0)  # clocks fall during the first two seconds

    candidates = [clock.candidate("a", lambda: 3 * slower()), clock.candidate("b", lambda: 2 * slower())]
    samples = timing.measure(candidates, Plan(), clock, random.Random(0))
    medians = timing.medians(samples)
    assert medians["a"] / medians["b"] == pytest.approx(1.5, rel=0.01)


def test_a_plan_stays_within_its_seconds() -> None:
    clock = FakeClock()
    plan = Plan.within(2.0)
    assert (plan.warm_up_seconds, plan.seconds) == pytest.approx((0.7, 1.3))
    timing.measure([clock.candidate("a", lambda: 50.0)], plan, clock, random.Random(0))
    assert 1.9 < clock.now() < 2.6
    assert Plan.within(-1.0).seconds == 0.0


def test_cold_burst_sleeps_before_each_implementation() -> None:
    clock = FakeClock()
    candidates = [clock.candidate("a", lambda: 1.0), clock.candidate("b", lambda: 3.0)]
    assert timing.cold_burst(candidates, clock, 2.5) == pytest.approx({"a": 1.0, "b": 3.0})
    assert clock.launched == ["sleep", *"a" * 10, "sleep", *"b" * 10]


def test_host_time_enters_the_session_once() -> None:
    clock = FakeClock()
    base = clock.candidate("a", lambda: 0.005)
    entered = []
    candidate = Candidate("a", base.call, lambda: entered.append(1) or io.StringIO())
    assert timing.host_microseconds(candidate, 300, clock) == pytest.approx(5.0)
    assert (len(clock.launched), len(entered)) == (300, 1)


# ---------------------------------------------------------------- files, tables, gate


def test_json_has_the_agreed_keys_and_reads_back(tmp_path: Path) -> None:
    results = made_up_results()
    path = tmp_path / "deep" / "forward.json"
    write_json(path, results.to_json())
    data = json.loads(path.read_text())
    head = ["device", "date", "torch", "driver", "versions", "matmul_tflops", "rows", "burst", "summary"]
    assert list(data)[: len(head)] == head
    assert list(data["rows"][0]) == ["dtype", "d", "causal", "s", "b", "h", *NAMES]
    assert data["rows"][0]["cudnn"] is None
    assert data["summary"]["wins"] == 41
    assert read_results(path).to_json() == results.to_json()
    path.write_text('{"rows": [{"d": 1}]}')
    with pytest.raises(BenchError, match="is not a result file"):
        read_results(path)


def test_json_of_a_pass_with_gradients(tmp_path: Path) -> None:
    results = made_up_results(BACKWARD)
    path = tmp_path / "backward.json"
    write_json(path, results.to_json())
    data = json.loads(path.read_text())
    assert list(data)[4:7] == ["pass", "versions", "matmul_tflops"]
    assert data["pass"] == "backward"
    keys = ["dtype", "d", "causal", "s", "b", "h", "ours", "ours_deterministic", "fa4", "cudnn", "fa2", "memory"]
    assert list(data["rows"][0]) == keys
    assert data["rows"][0]["memory"]["ours"] == {"saved_mib": 258.0, "backward_peak_mib": 321.5}
    assert list(data["summary"]["geomean_vs"]) == ["fa4", "cudnn", "fa2"]
    assert data["summary"]["geomean_deterministic"] == 0.8
    assert data["summary"]["wins"] == 41
    back = read_results(path)
    assert back.kind == BACKWARD
    assert back.to_json() == results.to_json()
    path.write_text('{"rows": [], "pass": "sideways"}')
    with pytest.raises(BenchError, match="sideways"):
        read_results(path)


def test_the_published_forward_file_keeps_its_form(tmp_path: Path) -> None:
    published = Path(__file__).parents[2] / "benchmarks" / "results" / "forward.json"
    copy = tmp_path / "forward.json"
    write_json(copy, read_results(published).to_json())
    assert copy.read_text() == published.read_text()


def test_gate_passes_on_the_same_ratios_and_on_a_slower_card() -> None:
    rows = made_up_results().rows
    throttled = [Row(row.cell, {n: r and r * 0.8 for n, r in row.tflops.items()}) for row in rows]
    verdict = compare(throttled, rows)
    assert verdict.passed
    assert verdict.compared == 42
    assert compare([with_rates(row, ours=row.tflops["ours"] * 0.97) for row in rows], rows).passed  # type: ignore[operator]


def test_gate_fails_on_a_drop_a_lost_figure_and_on_nothing_to_compare() -> None:
    rows = made_up_results().rows
    slower = [with_rates(rows[0], ours=rows[0].tflops["ours"] * 0.95), *rows[1:]]  # type: ignore[operator]
    assert compare(slower, rows).drops == [f"{rows[0].cell}: 1.045 of the best peer, was 1.100"]
    assert not compare(slower, rows).passed
    lost = compare([with_rates(rows[0], ours=None), *rows[1:]], rows)
    assert lost.problems
    assert not lost.passed
    assert not compare(rows[:1], rows[1:]).passed
    # fa4 is gone today: ours against fa3 alone must not hide that ours became slower
    today = with_rates(rows[0], fa4=None, ours=rows[0].tflops["ours"] * 0.9)  # type: ignore[operator]
    assert not compare([today], rows).passed


def test_terminal_tables_and_summary() -> None:
    results = made_up_results()
    text = rendered(report.grid_table(results.rows, "title", FORWARD))
    assert re.search(r"64 │ full +│ +16k │ +274 │ +305 │ +200 │ +– │ +152 │ +0\.900 FA4", text)
    lines = "\n".join(report.summary_lines(results))
    assert "over 42 cells, ahead in 41; worst 0.900 at bfloat16 d64 full s=16384" in lines
    assert "700 TFLOPS before, 690 after" in lines
    assert "burst" in lines
    assert "deterministic" not in lines
    assert report.memory_table(results.rows, "memory") is None


def test_terminal_tables_of_a_pass_with_gradients() -> None:
    results = made_up_results(BACKWARD)
    text = rendered(report.grid_table(results.rows, "title", BACKWARD))
    assert re.search(r"64 │ full +│ +512 │ +330 │ +264 │ +300 │ +– │ +150 │ +1\.100 FA4", text)
    memory = rendered(report.memory_table(results.rows, "memory"))
    assert re.search(r"64 │ full +│ +512 │ +258 │ +259 │ +322 │ +– │", memory)
    lines = report.summary_lines(results)
    assert "ours with deterministic=True: 0.800 of the default, geometric mean" in lines


def test_markdown_table_and_markers(tmp_path: Path) -> None:
    results = made_up_results()
    text = report.markdown_table(results)
    lines = text.splitlines()
    assert lines[0] == "| head_dim | mask | 512 | 1k | 2k | 4k | 8k | 16k | 32k |"
    assert lines[2].startswith("| 64 | full | 330 (1.10×) | 331 (1.10×) |")
    assert "274 (0.90×)" in lines[2]
    assert lines[-1].startswith("In parentheses: times the fastest of FA4, FA3, FA2 in that cell. ")
    assert (
        lines[-1]
        .partition("cell. ")[2]
        .startswith("TFLOPS on Made-up GPU, 2001-02-03, torch 9.9 (FlashHopper 0.1, FA4 4); cuBLAS")
    )
    assert "| 64 | full | 512 | **330** | 300 | 200 | – | 150 | 1.10× |" in report.markdown_table(results, True)
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{FORWARD.start_marker}\nold\n{FORWARD.end_marker}\nbelow\n")
    assert report.update_markers(readme, FORWARD, text)
    assert not report.update_markers(readme, FORWARD, text)
    assert readme.read_text() == f"above\n{FORWARD.start_marker}\n{text}\n{FORWARD.end_marker}\nbelow\n"
    readme.write_text("no markers")
    with pytest.raises(BenchError, match="forward-table:start"):
        report.update_markers(readme, FORWARD, text)


def test_markdown_table_of_a_pass_with_gradients() -> None:
    text = report.markdown_table(made_up_results(BACKWARD))
    last = text.splitlines()[-1]
    assert last.startswith("In parentheses: times the fastest of FA4, FA2 in that cell. TFLOPS on Made-up GPU")
    assert "(FlashHopper 0.1, FA4 4)" in last
    assert last.endswith(" Ours with deterministic=True: 0.800 of the default, geometric mean.")
    every = report.markdown_table(made_up_results(BACKWARD), True)
    assert "| 64 | full | 512 | **330** | 264 | 300 | – | 150 | 1.10× |" in every


# ---------------------------------------------------------------- command line


def run_cli(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args(["bench", *arguments])
    code: int = args.run(args)
    return code


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_reason_has_no_folders() -> None:
    error = RuntimeError("run, /build/a-b/flash.cpp:231, no local attention (see /x/y.md) and 1/2\nmore")
    assert reason_of(error) == "RuntimeError: run, flash.cpp:231, no local attention (see y.md) and 1/2"
    assert reason_of(KeyError()) == "KeyError"


def test_peers_give_reasons_without_a_gpu(no_gpu: None) -> None:
    peers = all_peers()
    assert tuple(peers) == NAMES == (OURS, *PEERS)
    assert tuple(all_peers(BACKWARD)) == ("ours", "ours_deterministic", "fa4", "cudnn", "fa2")
    for peer in peers.values():
        assert re.search("not installed|no CUDA device found", peer.available() or "")
    assert peers[OURS].available() == peers["fa2"].available() == "no CUDA device found"


@pytest.mark.parametrize(
    "command",
    [
        ["forward"],
        ["backward"],
        ["train"],
        ["launch"],
        ["ablation"],
        ["tiles", "--pass", "backward", "--configs", "64x128:q_stages=3"],
    ],
)
def test_measuring_needs_a_hopper_gpu(no_gpu: None, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert run_cli(*command) == CANNOT_RUN
    error = capsys.readouterr().err
    assert error.startswith(f"flashhopper bench {command[0]}: needs a Hopper GPU")
    assert "no CUDA device found" in error


def test_plot_and_table_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    source, picture = tmp_path / "forward.json", tmp_path / "images" / "forward.png"
    write_json(source, made_up_results().to_json())
    assert run_cli("plot", "--input", str(source), "--output", str(picture)) == 0
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 20_000
    assert run_cli("table", "--input", str(source), "--markdown") == 0
    assert report.markdown_table(made_up_results()) in capsys.readouterr().out
    assert run_cli("table", "--input", str(tmp_path / "none.json")) == CANNOT_RUN
    assert "none.json" in capsys.readouterr().err


def test_every_result_file_gets_its_table_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    readme = Path("README.md")
    kinds = (FORWARD, BACKWARD, TRAIN)
    readme.write_text("".join(f"{kind.start_marker}\nold\n{kind.end_marker}\n" for kind in kinds[:2]))
    assert run_cli("table", "--update", "README.md") == run_cli("plot") == CANNOT_RUN
    assert "no result file in benchmarks/results" in capsys.readouterr().err

    for kind in (BACKWARD, TRAIN):
        write_json(cli.RESULTS / f"{kind.name}.json", made_up_results(kind).to_json())
    assert run_cli("table", "--update", "README.md") == 0
    assert capsys.readouterr().out == "README.md: backward table updated\n"
    forward, backward = FORWARD, BACKWARD
    table = report.markdown_table(made_up_results(BACKWARD))
    untouched = f"{forward.start_marker}\nold\n{forward.end_marker}\n"
    assert readme.read_text() == f"{untouched}{backward.start_marker}\n{table}\n{backward.end_marker}\n"
    assert run_cli("table", "--markdown") == 0
    printed = [report.markdown_table(made_up_results(kind)) for kind in (BACKWARD, TRAIN)]
    assert capsys.readouterr().out == "\n\n".join(printed) + "\n"

    assert run_cli("table", "--update", "README.md", "--input", "benchmarks/results/train.json") == CANNOT_RUN
    assert "<!-- train-table:start -->" in capsys.readouterr().err
    assert run_cli("plot") == 0
    assert sorted(path.name for path in Path("docs/images").iterdir()) == ["backward.png", "train.png"]
    assert run_cli("plot", "--output", "x.png") == CANNOT_RUN


def test_gate_refuses_a_file_of_another_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "require_hopper", lambda: None)
    write_json(tmp_path / "forward.json", made_up_results().to_json())
    assert run_cli("train", "--against", str(tmp_path / "forward.json")) == CANNOT_RUN
    assert "a result of bench forward, not train" in capsys.readouterr().err


def test_peers_of_a_pass_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    def names(chosen: list[str] | None) -> list[str]:
        return [peer.name for peer in cli._peers(chosen, BACKWARD)]

    assert names(None) == ["ours", "ours_deterministic", "fa4", "cudnn", "fa2"]
    assert names(["fa4"]) == ["ours", "fa4"]
    assert names(["fa2", "ours_deterministic"]) == ["ours", "ours_deterministic", "fa2"]
    with pytest.raises(BenchError, match="fa3; there are ours_deterministic, fa4, cudnn, fa2"):
        names(["fa3"])


def test_wrong_arguments_are_one_line(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("tiles", "--configs", "128") == CANNOT_RUN
    assert "tile '128'" in capsys.readouterr().err
    assert run_cli("ablation", "--peers", "fa9") == CANNOT_RUN
    assert "there are fa4, fa3, cudnn, fa2" in capsys.readouterr().err
    assert run_cli("tiles", "--pass", "backward", "--configs", "64x128:q_regs=on") == CANNOT_RUN
    assert "no field 'q_in_registers'; there are split, num_q_stages" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_cli("forward", "--seqlen", "0k")
