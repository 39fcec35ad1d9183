"""``flashhopper doctor --explain``: it says what the launchers would do."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashhopper import launch, launch_backward
from flashhopper.cli import build_parser, doctor, main
from flashhopper.cli.explain import SMS, explain, problem_of
from flashhopper.config import BackwardSpec, ForwardConfig
from flashhopper.device import hopper_multiprocessors
from flashhopper.heuristics import BACKWARD_TABLE, TILE_TABLE, select_row
from flashhopper.problem import TensorFacts


def problem(*arguments: str) -> Any:
    return problem_of(build_parser().parse_args(["doctor", "--explain", *arguments]))


CALLS = [
    (),
    ("--seqlen", "4096", "--head-dim", "64"),
    ("--causal", "--seqlen", "1024"),
    ("--causal", "--seqlen", "1025", "--deterministic"),
    (
        "--dtype",
        "float16",
        "--batch",
        "3",
        "--heads",
        "12",
        "--heads-k",
        "4",
        "--head-dim",
        "192",
        "--head-dim-v",
        "128",
    ),
    ("--window", "127", "0", "--softcap", "30", "--sink", "--seqlen-k", "9000"),
    ("--attention-chunk", "512", "--head-dim", "72", "--sm-margin", "16"),
    ("--head-dim", "256", "--sm-margin", "77"),
    ("--head-dim", "256", "--sm-margin", "76"),
]


@pytest.mark.parametrize("arguments", CALLS, ids=" ".join)
@pytest.mark.parametrize("sms", SMS.values())
def test_the_choice_is_the_launchers(arguments: tuple[str, ...], sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA H20", major=9, minor=0, multi_processor_count=sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for module in (launch, launch_backward):
        monkeypatch.setattr(module, "get_kernel", lambda spec: spec)
    hopper_multiprocessors.cache_clear()
    asked = problem(*arguments)
    has = launch.Given("--sink" in arguments, False)
    forward, backward = explain(asked, sms, has_sink=has.sink)
    plan = launch.make_plan(asked.validate(), has)
    assert isinstance(plan, launch._DensePlan)
    shape = asked.out_shape
    out = TensorFacts(shape, launch.compact(shape)[1], asked.dtype, asked.device)
    backward_plan = launch_backward.make_plan(asked, (out, out), has)
    hopper_multiprocessors.cache_clear()
    assert backward_plan is not None
    assert (forward.spec, forward.num_ctas) == (plan.spec, plan.max_ctas)
    assert (backward.spec, backward.num_ctas) == (backward_plan.spec, backward_plan.max_ctas)
    for choice, table in ((forward, TILE_TABLE), (backward, BACKWARD_TABLE)):
        assert choice.reason in {row.reason for row in table}
        assert all(getattr(choice.config, name) == value for name, value in choice.changed.items())
        assert choice.smem_bytes <= 227 * 1024


def test_tiles_against_the_number_of_multiprocessors() -> None:
    """2 x 16 heads of 2048 queries, 192 rows a tile, and 12 heads of 1000, 128 rows."""
    found = {sms: explain(problem("--batch", "2", "--seqlen", "2048"), sms)[0] for sms in SMS.values()}
    assert {sms: (x.num_tiles, round(x.waves, 2)) for sms, x in found.items()} == {
        132: (352, 2.67),
        114: (352, 3.09),
        78: (352, 4.51),
    }
    assert "tiles alike would keep them 77 % busy" in found[114].balance  # 352 of 4 x 114
    few = explain(problem("--heads", "12", "--heads-k", "3", "--seqlen", "1000", "--sm-margin", "2"), 132)
    assert [x.num_tiles for x in few] == [8 * 12, 8 * 3]
    assert "34 of 130 SMs are idle" in few[0].balance
    assert "106 of 130 SMs are idle" in few[1].balance


def test_a_pair_of_ctas_shares_a_tile() -> None:
    """17 tiles of 128 keys for each of 4 heads; then one."""
    backward = explain(problem("--head-dim", "256", "--seqlen", "2112", "--heads", "4"), 132)[1]
    assert backward.balance.startswith("68 tiles of 128 keys on 66 pairs of SMs: 1.03 a pair; ")
    one = explain(problem("--head-dim", "256", "--seqlen", "64", "--heads", "1"), 132)[1]
    assert one.balance == "1 tile of 128 keys, fewer than pairs of SMs or as many: 130 of 132 SMs are idle"


@pytest.mark.parametrize(
    "arguments, forward, backward",
    [
        (("--seqlen", "512"), "no mask, keys up to 1024", "no mask, queries up to 1024"),
        (("--seqlen", "1025"), "no mask, keys over 1024", "no mask, queries over 1024"),
        (("--seqlen", "513", "--causal"), "masked, keys up to 1024", "masked, queries over 512"),
        (("--seqlen", "2048", "--causal", "--head-dim", "96"), "masked, keys over 1024 up to 2048", "any number of"),
        (("--seqlen", "2049", "--causal", "--head-dim", "96"), "masked, keys over 2048", "any number of queries"),
        (("--seqlen", "99", "--head-dim", "256"), "no mask, any number of keys", "no mask, any number of queries"),
    ],
)
def test_the_lengths_that_a_row_serves(arguments: tuple[str, ...], forward: str, backward: str) -> None:
    rows = [choice.row for choice in explain(problem(*arguments), 132)]
    assert forward in rows[0]
    assert backward in rows[1]


def test_what_dtype_and_features_change_is_said() -> None:
    forward, backward = explain(problem("--dtype", "float16", "--softcap", "30"), 132)
    assert forward.changed == {"softmax": "exact", "warpgroup_order": "free"}
    assert isinstance(backward.spec, BackwardSpec)
    assert backward.changed["split"] == "operands"
    forward, backward = explain(problem(), 132)
    assert (forward.changed, backward.changed) == ({}, {})


def test_what_a_row_has_for_exact_softmax_is_said() -> None:
    asked = problem("--dtype", "float16")
    row, forward = select_row(asked), explain(asked, 132)[0]
    assert row.exact is not None
    assert forward.config == row.exact
    assert forward.changed["softmax"] == "exact"
    assert forward.changed["tile_n"] == row.exact.tile_n


def test_the_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "find_cards", lambda: (doctor.Card(0, "NVIDIA H20", (9, 0), 78, 95.0),))
    assert main(["doctor", "--explain", "--causal", "--seqlen", "1024", "--dtype", "float16"]) == 0
    out = capsys.readouterr().out
    for line in (
        "  kernel         fwd_float16_d128x128_causal_128x128",
        "  row            TILE_TABLE, head dims up to 128 and 128, masked, keys up to 1024",
        "  not as the row tile_n=128, num_stages=2, softmax=exact, warpgroup_order=stagger, prefetch_scores=False: "
        "for this dtype or these features",
        "  tiles          128 tiles of 128 queries on 78 SMs: 1.64 each; tiles alike would keep them 82 % busy",
    ):
        assert f"{line}\n" in out
    assert main(["doctor", "--explain", "--json", "--sms", "114"]) == 0
    forward, backward = json.loads(capsys.readouterr().out)
    assert (forward["what"], forward["num_ctas"], backward["what"]) == ("forward", 114, "backward")
    assert ForwardConfig(**forward["config"]) == explain(problem(), 114)[0].config


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--head-dim", "60"), "q has head_dim 60"),
        (("--heads-k", "3"), "q's must be a multiple of k's"),
        (("--window", "-2", "0"), "each side is -1"),
        (("--sm-margin", "78", "--sms", "78"), "sm_margin is 78; of 78 SMs at least 1 must be left"),
    ],
)
def test_a_call_that_is_refused_is_not_explained(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--explain", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
