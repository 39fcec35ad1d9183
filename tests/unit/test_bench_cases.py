"""bench varlen and bench masks: the cases' work, real implementations on the CPU, and runs with fake peers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench_fakes import FakeClock, FakePeer, quiet, rendered
from torch.nn.attention import SDPBackend

from flashhopper.bench import case_peers, case_run, cases, report
from flashhopper.bench.case_peers import (
    CasePeer,
    CaseTensors,
    CudnnCasePeer,
    FlexPeer,
    PackageCasePeer,
    Prepared,
    block_mask,
)
from flashhopper.bench.case_run import CaseOptions, CaseResults, CaseRow, CaseRun
from flashhopper.bench.cases import CASES, Case, mask_cases, mixes, varlen_cases
from flashhopper.bench.check import compare_with
from flashhopper.bench.passes import BACKWARD, FORWARD, OURS
from flashhopper.bench.peers import PackagePeer, SdpaPeer
from flashhopper.bench.results import write_json
from flashhopper.cli import main
from flashhopper.reference import attention

BF16 = "bfloat16"
FEATURES = {
    "causal": Case("causal", BF16, 32, (96,) * 2, causal=True),
    "window": Case("window", BF16, 32, (96,) * 2, window_size=(20, 5)),
    "causal window": Case("causal window", BF16, 32, (96,) * 2, window_size=(20, 5), causal=True),
    "left window": Case("left window", BF16, 32, (96,) * 2, window_size=(20, -1)),
    "softcap": Case("softcap", BF16, 32, (96,) * 2, softcap=2.0),
    "sink": Case("sink", BF16, 32, (96,) * 2, window_size=(20, 0), sink=True),
    "ragged": Case("ragged", BF16, 32, (50, 1, 30), ragged=True),
    "ragged causal": Case("ragged causal", BF16, 32, (50, 1, 30), ragged=True, causal=True),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "WIDTH", 64)  # two heads of 32
    monkeypatch.setattr(cases, "CHECK_SEQLEN", 64)
    monkeypatch.setattr(cases, "CHECK_LENGTHS", (30, 1, 17))


# ---------------------------------------------------------------- work


@pytest.mark.parametrize("case", FEATURES.values(), ids=list(FEATURES))
def test_pairs_are_those_that_the_mask_leaves(case: Case) -> None:
    left, right = case.window_size
    count = 0
    for n in case.lengths:
        for i in range(n):
            for j in range(n):
                hidden = (case.causal and j > i) or (0 <= left < i - j) or (0 <= right < j - i)
                count += not hidden
    assert case.pairs == count
    assert case.flop == 4 * count * 2 * 32
    assert case.tflops(2.0) == pytest.approx(case.flop / 2e9)


def test_mixes_fill_the_batch_and_repeat() -> None:
    for name, lengths in mixes().items():
        assert sum(lengths) == cases.TOKENS, name
        assert min(lengths) >= 1
        assert max(lengths) <= cases.TOKENS // 2
    assert mixes() == mixes()
    assert mixes()["uniform"] != mixes(seed=1)["uniform"]
    zipf = sorted(mixes()["zipf"], reverse=True)
    assert zipf[:4] == [8192, 4096, 2730, 2048]


@pytest.mark.parametrize("case", varlen_cases(BF16), ids=str)
def test_the_dense_batch_has_about_the_same_work(case: Case) -> None:
    dense = case.dense()
    assert not dense.ragged
    assert len(set(dense.lengths)) == 1
    assert sum(dense.lengths) == pytest.approx(sum(case.lengths), rel=0.2)
    assert dense.pairs == pytest.approx(case.pairs, rel=0.25)
    assert dense.causal == case.causal


def test_the_commands_cases() -> None:
    assert [len(CASES[command](BF16, (64, 128))) for command in ("varlen", "masks")] == [16, 18]
    assert len({str(case) for case in mask_cases(BF16)}) == 18
    by_name = {case.name: case for case in mask_cases(BF16, (64,))}
    s = cases.MASKED_SEQLEN
    assert by_name["causal"].pairs == s * (s + 1) // 2
    assert by_name["window 128"].pairs == 129 * s - 128 * 129 // 2
    small = by_name["window 4k"].small()
    assert (small.lengths, small.window_size) == ((64, 64), (cases.CHECK_WINDOW, 0))


# ---------------------------------------------------------------- implementations


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, CasePeer]:
    """Those that run here: ours by the reference, FlexAttention uncompiled, SDPA by its math backend."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    ours = PackageCasePeer(PackagePeer(OURS, ["flashhopper"], ["flashhopper"]))
    return {OURS: ours, "flex": FlexPeer(), "cudnn": CudnnCasePeer(SdpaPeer("cudnn", SDPBackend.MATH))}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", FEATURES.values(), ids=list(FEATURES))
def test_real_implementations_are_right(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients, and what an implementation does not have is said."""
    generator = torch.Generator().manual_seed(5)
    tensors = CaseTensors.random(case, generator)
    for x in tensors.inputs:
        x.requires_grad_()
    dout = torch.randn(tensors.inputs[0].shape, generator=generator, dtype=torch.bfloat16)
    expected = case_run.expected_of(tensors, dout)
    peers = on_cpu(monkeypatch)
    if case.softcap or case.sink:
        with pytest.raises(NotImplementedError, match=r"no softcap|no sinks"):
            peers.pop("cudnn").prepare(tensors)
    del peers["flex"]  # PyTorch has no backward of it on the CPU
    if case.ragged and case.causal:
        del peers["cudnn"]  # nor nested tensors with a causal mask
    checks = compare_with(case, expected, {name: case_run._all_results(p, tensors, dout) for name, p in peers.items()})
    assert len(checks) == 4 * len(peers)
    for check in checks:
        assert check.ok, check
        assert check.error is not None
        assert check.error > 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", FEATURES.values(), ids=list(FEATURES))
def test_flex_attention_is_right(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward, uncompiled; PyTorch has no backward of it on the CPU."""
    tensors = CaseTensors.random(case, torch.Generator().manual_seed(5))
    flex = on_cpu(monkeypatch)["flex"]
    expected = case_run.expected_of(tensors, torch.zeros_like(tensors.inputs[0]))
    checks = compare_with(case, expected[:1], {"flex": case_run._output(flex, tensors)})
    assert [check.ok for check in checks] == [True], checks
    assert checks[0].error is not None
    assert checks[0].error > 0


def test_the_block_mask_of_a_plain_case_is_none() -> None:
    tensors = CaseTensors.random(Case("full", BF16, 32, (96,) * 2), torch.Generator())
    assert block_mask(tensors, 96) is None


def test_windows_are_named_as_each_package_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []

    def fake(name: str) -> Callable[..., object]:
        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> object:
            seen.append({"function": name, **options})
            return q, None

        def with_bounds(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_seqlen_q: int = 0, **options: object
        ) -> object:
            seen.append({"function": name, "max_seqlen_q": max_seqlen_q, **options})
            return q

        return with_bounds if "varlen" in name else function

    package = PackagePeer("fa4", ["flash_attn.cute"], ["flash-attn-4"])
    monkeypatch.setattr(package, "function", fake)
    window = CaseTensors.random(FEATURES["left window"], torch.Generator())
    for unbounded in (None, -1):
        PackageCasePeer(package, unbounded=unbounded).prepare(window).forward()
    assert [call["window_size"] for call in seen] == [(20, None), (20, -1)]
    ragged = CaseTensors.random(FEATURES["ragged causal"], torch.Generator())
    PackageCasePeer(package).prepare(ragged).forward()
    assert (seen[2]["function"], seen[2]["max_seqlen_q"], seen[2]["causal"]) == ("flash_attn_varlen_func", 50, True)
    assert torch.equal(seen[2]["cu_seqlens_q"], torch.tensor([0, 50, 51, 81], dtype=torch.int32))  # type: ignore[arg-type]
    sink = CaseTensors.random(FEATURES["sink"], torch.Generator())
    with pytest.raises(NotImplementedError, match="no sinks"):
        PackageCasePeer(package, has_sinks=False).prepare(sink)


# ---------------------------------------------------------------- runs


class FakeCasePeer(CasePeer):
    """Ours on small shapes, nothing on others; the clock moves by ``cost`` for a forward, twice that for a backward."""

    def __init__(
        self, name: str, clock: FakeClock, cost: float, reason: str | None = None, factor: float = 1.0
    ) -> None:
        super().__init__(FakePeer(name, clock, cost, reason=reason), has_backward=name != "fa3")
        self.clock, self.cost, self.factor = clock, cost, factor
        self.ours = PackageCasePeer(PackagePeer(OURS, ["flashhopper"], ["flashhopper"]))

    def prepare(self, tensors: CaseTensors) -> Prepared:
        if self.name == "cudnn" and tensors.case.softcap:
            raise NotImplementedError("no softcap")
        prepared = self.ours.prepare(tensors)

        def forward() -> torch.Tensor:
            self.clock.milliseconds += self.cost
            small = sum(tensors.case.lengths) < 1000
            out = (prepared.forward() if small else prepared.leaves[0] + 0 * sum(prepared.leaves[1:])) * self.factor
            if out.requires_grad:
                out.register_hook(self.spend)
            return out

        return Prepared(forward, prepared.leaves)

    def spend(self, gradient: torch.Tensor) -> None:
        self.clock.milliseconds += 2 * self.cost


@pytest.fixture
def run_cases(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CaseResults]:
    monkeypatch.setattr(case_run, "matmul_tflops", lambda clock: 700.0)

    def run(chosen: list[Case], peers: list[FakeCasePeer]) -> CaseResults:
        options = CaseOptions("varlen", chosen, peers, seed=7, budget_seconds=20.0)
        return CaseRun(options, peers[0].clock, quiet(), device="cpu").run()

    return run


def test_a_run_has_rows_ratios_and_reasons(run_cases: Callable[..., CaseResults], tmp_path: Path) -> None:
    clock = FakeClock()
    peers = [FakeCasePeer(OURS, clock, 10.0), FakeCasePeer("fa4", clock, 20.0), FakeCasePeer("fa3", clock, 25.0)]
    peers += [FakeCasePeer("flex", clock, 1.0, reason="not here"), FakeCasePeer("cudnn", clock, 40.0)]
    ragged = Case("ragged causal", BF16, 32, (20000, 1, 5000), ragged=True, causal=True)
    softcap = Case("softcap", BF16, 32, (20000,), softcap=2.0)
    results = run_cases([ragged, softcap], peers)
    assert results.errors == []
    assert [(row.case, row.kind) for row in results.rows] == [
        (ragged, FORWARD),
        (ragged, BACKWARD),
        (softcap, FORWARD),
        (softcap, BACKWARD),
    ]
    forward, backward = results.rows[:2]
    assert forward.tflops["ours_dense"] == round(ragged.dense().tflops(10.0), 1)
    assert forward.tflops["ours"] == round(ragged.tflops(10.0), 1)
    assert backward.tflops["ours"] == round(2.5 * ragged.tflops(20.0), 1)
    assert "fa3" in forward.tflops
    assert "fa3" not in backward.tflops
    assert "cudnn" not in results.rows[2].tflops
    reasons = {(skip["implementation"], skip["where"]): skip["reason"] for skip in results.skipped}
    assert reasons["flex", "everywhere"] == "not here"
    assert reasons["cudnn", f"{softcap} forward"] == "NotImplementedError: no softcap"
    verdicts = {(check["name"], check.get("tensor"), check["ok"]) for check in results.checks}
    assert {(OURS, name, True) for name in (None, "dq", "dk", "dv")} <= verdicts
    assert ("fa3", "dq", True) not in verdicts
    path = tmp_path / "varlen.json"
    write_json(path, results.to_json())
    data = json.loads(path.read_text())
    assert list(data)[:6] == ["device", "date", "torch", "driver", "command", "versions"]
    assert data["rows"][0]["case"] == "ragged causal"
    assert (data["rows"][0]["sequences"], data["rows"][0]["tokens"], data["rows"][0]["longest"]) == (3, 25001, 20000)
    assert "ours_dense" in data["rows"][0]
    assert "ours_dense" not in data["rows"][2]
    text = rendered(report.case_table(results))
    assert re.search(r"softcap +│ +32 +│ backward", text)


def test_ratios_by_hand() -> None:
    ragged, dense = FEATURES["ragged"], FEATURES["causal"]
    rows = [
        CaseRow(ragged, FORWARD, {"ours": 570.0, "ours_dense": 600.0, "fa4": 500.0, "fa3": 475.0}),
        CaseRow(dense, FORWARD, {"ours": 450.0, "fa4": 500.0}),
        CaseRow(dense, BACKWARD, {"fa4": 500.0}),
    ]
    assert [(row.ratio, row.to_dense) for row in rows] == [(1.14, 0.95), (0.9, None), (None, None)]
    summary = CaseResults("varlen", {}, {}, rows=rows).summary()
    assert summary["forward"] == {
        "geomean_vs_best_peer": round((1.14 * 0.9) ** 0.5, 3),
        "min_vs_best_peer": 0.9,
        "geomean_vs_dense": 0.95,
        "min_vs_dense": 0.95,
    }
    assert summary["backward"]["geomean_vs_best_peer"] is None
    assert case_run.describe(rows[0]).endswith("ratio 1.140  to dense 0.950")


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_our_own_wrong_result_is_an_error(run_cases: Callable[..., CaseResults], factor: float) -> None:
    clock = FakeClock()
    results = run_cases([FEATURES["window"]], [FakeCasePeer(OURS, clock, 5.0, factor=factor)])
    assert len(results.errors) == 4, "out, dq, dk and dv"
    assert all(re.search("over the tolerance|is not finite", error) for error in results.errors)


def test_the_checks_reference_is_attention() -> None:
    """On a dense case without features: what plain attention in fp32 gives."""
    tensors = CaseTensors.random(Case("full", BF16, 32, (40,) * 2), torch.Generator().manual_seed(3))
    q, k, v = (x.float() for x in tensors.inputs)
    wanted, _ = attention(q, k, v, softmax_scale=32**-0.5, causal=False)
    out = case_run.expected_of(tensors, torch.ones_like(tensors.inputs[0]))[0]
    torch.testing.assert_close(out.reference, wanted)
    assert 0 < out.tolerance < 0.05


def test_the_commands_need_a_gpu_and_known_peers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("varlen", "masks"):
        assert main(["bench", command]) == 2
        assert f"flashhopper bench {command}: needs a Hopper GPU" in capsys.readouterr().err
    assert main(["bench", "varlen", "--peers", "fa9"]) == 2
    assert "--peers names fa9; there are fa4, fa3, flex, cudnn" in capsys.readouterr().err
    assert isinstance(case_peers.case_peers()["flex"], FlexPeer)
