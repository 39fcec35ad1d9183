"""Kernels whose time is made up, and configurations to draw, for the tests of ``flashhopper tune``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from bench_fakes import FakeClock, quiet
from hypothesis import strategies as st

from flashhopper.bench import check, sampler
from flashhopper.bench.check import attention
from flashhopper.bench.configs import AnyConfig, config_text, problem_of
from flashhopper.bench.findings import length_classes
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import FORWARD, Pass
from flashhopper.bench.search import FORWARD_ROWS
from flashhopper.bench.tune import TuneOptions, TuneResults, TuneRun
from flashhopper.config import BackwardConfig, ForwardConfig, WarpgroupOrder
from flashhopper.heuristics import BACKWARD_TABLE, TILE_TABLE, select_row
from flashhopper.inspect_kernel import PtxasReport

ROWS = [*TILE_TABLE, *BACKWARD_TABLE]
CLEAN = PtxasReport(168, 0, 0, ())


forward_configs = st.builds(
    ForwardConfig,
    st.sampled_from(FORWARD_ROWS),
    st.integers(1, 16).map(lambda n: 16 * n),
    num_stages=st.integers(1, 5),
    num_q_stages=st.integers(1, 2),
    q_in_registers=st.booleans(),
    num_o_parts=st.sampled_from([1, 2, 4]),
    group_waves=st.integers(1, 9),
    softmax=st.sampled_from(["exact", "lazy"]),
    warpgroup_order=st.sampled_from(get_args(WarpgroupOrder)),
    prefetch_scores=st.booleans(),
    split_masked_loop=st.booleans(),
    items_by_shuffle=st.booleans(),
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
    paired=st.booleans(),
    wide_consumers=st.booleans(),
)


def fake_tuning(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TuneResults, FakeClock, dict[str, int]]]:
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
BASE = select_row(problem_of(LONG[0])).config
BEST = dataclasses.replace(BASE, tile_n=BASE.tile_n - 16)


def cost_of(config: AnyConfig, length: int) -> float:
    """BEST takes 1, others up to 2: the more keys a tile has, or the fewer rows, the longer."""
    if config == BEST:
        return 1.0
    return 1.2 + 0.001 * config.tile_n + 0.1 * (config.tile_m == 64)
