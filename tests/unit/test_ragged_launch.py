"""What a ragged batch asks for: kernels, their schedule and workspaces, on a machine without a GPU."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from posed_card import EMPTY_ON_CPU
from ragged import I32, cu

from flashhopper import current, launch, launch_schedule
from flashhopper import launch_backward as backward_module
from flashhopper.config import (
    AnySpec,
    BackwardSpec,
    Features,
    KernelSpec,
    PostprocessSpec,
    PreprocessSpec,
    ScheduleSpec,
)
from flashhopper.device import hopper_multiprocessors
from flashhopper.kernels import block_range
from flashhopper.kernels import ragged as ragged_kernels
from flashhopper.kernels.backward_grid import ROW_PADDING, padded_row
from flashhopper.launch_schedule import MAX_TILES, Schedule
from flashhopper.options import AttentionOptions
from flashhopper.problem import AttentionProblem, RaggedFacts, RaggedTensors, SoftmaxTensors, TensorFacts


def ragged_on_card() -> tuple[AttentionProblem, RaggedTensors]:
    """The facts of a ragged problem on a card that this machine need not have."""

    def on_card(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> TensorFacts:
        return TensorFacts.of(torch.empty(shape, dtype=dtype))._replace(device=torch.device("cuda:0"))

    lengths = RaggedFacts(4, 5, on_card((3,), I32), on_card((3,), I32), None, on_card((2,), I32))
    shapes = (7, 6, 64), (9, 3, 64), (9, 3, 32)
    problem = AttentionProblem(*(on_card(shape) for shape in shapes), AttentionOptions(), lengths)
    return problem, RaggedTensors(4, 5, cu(0, 4, 7), cu(0, 4, 9), None, cu(4, 5))


def test_a_ragged_problem_reports_its_facts() -> None:
    problem, _ = ragged_on_card()
    assert problem.validate() is problem
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (2, 4, 5)
    assert (problem.num_heads, problem.num_heads_k, problem.head_dim, problem.head_dim_v) == (6, 3, 64, 32)
    assert (problem.out_shape, problem.lse_shape) == ((7, 6, 32), (6, 7))
    assert len({problem, problem._replace(ragged=None), ragged_on_card()[0]}) == 2


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[AnySpec]:
    """A Hopper card that does nothing, and the kernels that plans ask for."""
    specs: list[AnySpec] = []
    card = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for module in (launch, launch_schedule, backward_module):
        monkeypatch.setattr(module, "get_kernel", specs.append)
    hopper_multiprocessors.cache_clear()
    return specs


def test_the_kernels_of_a_ragged_batch(asked: list[AnySpec]) -> None:
    problem, ragged = ragged_on_card()
    launch.make_plan(problem)
    schedule, forward = asked
    used_q, used_k = ragged.seqused_q is not None, ragged.seqused_k is not None
    assert schedule == ScheduleSpec(used_q, used_k)
    assert isinstance(forward, KernelSpec)
    assert forward.features == Features(ragged=True)
    asked.clear()
    out = problem.q._replace(shape=problem.out_shape, stride=(problem.num_heads * 32, 32, 1))
    backward_module.make_plan(problem, (out, out))
    by_keys, by_queries, before, main, after = asked
    assert (by_keys, by_queries) == (ScheduleSpec(used_k, used_q), ScheduleSpec(used_q, used_k))
    assert before == PreprocessSpec("bfloat16", 64, 64, False, ragged=True)
    assert isinstance(main, BackwardSpec)
    assert main.features == Features(ragged=True)
    assert after == PostprocessSpec("bfloat16", 64, ragged=True)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_workspaces_of_a_ragged_backward(asked: list[AnySpec], deterministic: bool) -> None:
    """One batch entry of padded rows: 7 rows in 2 sequences take a block of 128 each, and there is one to spare."""
    problem, _ = ragged_on_card()
    problem = problem._replace(options=AttentionOptions(deterministic=deterministic))
    out = problem.q._replace(shape=problem.out_shape, stride=(problem.num_heads * 32, 32, 1))
    made = backward_module.make_plan(problem, (out, out))
    assert made is not None
    main = asked[3]
    assert isinstance(main, BackwardSpec)
    found = made.workspaces_for(2, 7, 9)
    assert found == made.workspaces
    assert found.statistics == ((1, 6, 384), (6 * 384, 384, 1))
    assert found.accumulator == ((6, 6, 64 * 64), (6 * 64 * 64, 64 * 64, 1))
    assert found.chunked == (6, 6, 64 // main.config.dq_columns, 64 * main.config.dq_columns)
    semaphores = (6, 384 // main.config.tile_m)
    assert found.semaphores == (semaphores if deterministic else None)
    assert found.words == 1 + math.prod(semaphores) * deterministic
    assert made.schedules is not None
    assert [(x.tile_rows, x.heads) for x in made.schedules] == [(main.config.tile_n, 3), (128, 6)]


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_without_keys_only_a_ragged_batch_with_a_sink_needs_a_kernel(
    asked: list[AnySpec], is_ragged: bool, has_sink: bool
) -> None:
    """Which rows are a sequence's, and so have the sink in their LSE, is known to the device alone."""
    problem, _ = ragged_on_card()
    without = [x._replace(shape=(0, *x.shape[1:])) for x in (problem.k, problem.v)]
    problem = problem._replace(k=without[0], v=without[1])
    if not is_ragged:
        problem = AttentionProblem(*map(launch.with_batch, problem[:3]), AttentionOptions())
    made = launch.make_plan(problem, launch.Given(True, False) if has_sink else None)
    if is_ragged and has_sink:
        assert isinstance(made, launch._KernelPlan)
        assert [type(spec) for spec in asked] == [ScheduleSpec, KernelSpec]
        return
    assert asked == []
    (q, k, v), sink = (torch.ones(x.shape) for x in problem[:3]), torch.randn(6)
    out, lse = made(q, k, v, SoftmaxTensors(learnable_sink=sink if has_sink else None))
    assert torch.equal(out, torch.zeros(problem.out_shape))
    per_head = sink if has_sink else torch.full((6,), -math.inf)
    assert torch.equal(lse, per_head[:, None].expand(problem.lse_shape))


def test_a_schedule_has_room_for_every_batch(asked: list[AnySpec]) -> None:
    problem, _ = ragged_on_card()
    assert problem.ragged is not None
    # 2 sequences and what they leave unused: each may have a tile that is not full.
    schedule = Schedule(problem.ragged, by_keys=False, tile_rows=128, heads=3)
    assert schedule.max_tiles(1000, 2) == (1000 // 128 + 4) * 3
    assert schedule.max_tiles(1300, 5) == (1300 // 128 + 10) * 3
    schedule = Schedule(problem.ragged, by_keys=True, tile_rows=1, heads=2**22)
    with pytest.raises(ValueError, match="1000 rows in 2 sequences are more than 2147418112 tiles"):
        schedule.max_tiles(1000, 2)


def test_a_schedule_is_refused_from_one_tile_over_the_limit(asked: list[AnySpec]) -> None:
    problem, ragged = ragged_on_card()
    assert problem.ragged is not None
    rows = MAX_TILES - 4  # 2 sequences and what they leave unused have 4 more
    schedule = Schedule(problem.ragged, by_keys=False, tile_rows=1, heads=1)
    assert schedule.max_tiles(rows, 2) == MAX_TILES < 2**31
    with pytest.raises(ValueError, match=f"{rows + 1} rows in 2 sequences are more than {MAX_TILES} tiles"):
        schedule(ragged, rows + 1)


@pytest.mark.parametrize("by_keys", [False, True])
def test_what_the_schedule_kernel_is_given(monkeypatch: pytest.MonkeyPatch, by_keys: bool) -> None:
    """The side that is cut into tiles first, and room for 2 records a sequence."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch_schedule, "get_kernel", lambda spec: lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(current, "empty_strided", EMPTY_ON_CPU)
    problem, ragged = ragged_on_card()
    assert problem.ragged is not None
    schedule = Schedule(problem.ragged, by_keys=by_keys, tile_rows=64, heads=3)
    records, first_tiles = schedule(ragged, 9)
    q, k = (ragged.cu_seqlens_q, ragged.seqused_q), (ragged.cu_seqlens_k, ragged.seqused_k)
    (cu_rows, used_rows), (cu_others, used_others) = (k, q) if by_keys else (q, k)
    ((*lengths, given_records, given_first_tiles, total_rows, tile_rows, heads),) = calls
    for found, sent in zip(lengths, (cu_rows, cu_others, used_rows, used_others), strict=True):
        assert found is sent
    assert (total_rows, tile_rows, heads) == (9, 64, 3)
    assert (given_records.data_ptr(), given_first_tiles.data_ptr()) == (records.data_ptr(), first_tiles.data_ptr())
    assert (records.shape, first_tiles.shape) == ((2 * 2 * ragged_kernels.RECORD_WORDS,), (2 * 2 + 1,))
    assert records.dtype == first_tiles.dtype == I32


@given(
    sequences=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 300)), min_size=1, max_size=30),
    outside=st.integers(0, 300),
)
def test_workspaces_give_each_sequence_whole_blocks(sequences: list[tuple[int, int]], outside: int) -> None:
    """``sequences``: used and unused rows."""
    start, taken = 0, 0
    for batch, (used, unused) in enumerate(sequences):
        first = padded_row(start, batch)
        assert first % backward_module.ROW_PADDING == 0
        assert first >= taken
        taken = first + -(-used // backward_module.ROW_PADDING) * backward_module.ROW_PADDING
        start += used + unused
    assert taken <= backward_module.ragged_rows(start + outside, len(sequences))


def test_launchers_and_kernels_have_the_same_constants() -> None:
    assert launch.UNBOUNDED == block_range.UNBOUNDED
    assert launch_schedule.RECORD_WORDS == ragged_kernels.RECORD_WORDS
    assert backward_module.ROW_PADDING == ROW_PADDING
