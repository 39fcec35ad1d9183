"""What the backward's launcher decides on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from posed_card import pose

from flashhopper import device, launch_backward
from flashhopper.config import PREPROCESS_WORDS, AnySpec, BackwardSpec, PostprocessSpec, PreprocessSpec
from flashhopper.heuristics import BACKWARD_TABLE, select_backward_row
from flashhopper.options import AttentionOptions
from flashhopper.problem import AttentionProblem, TensorFacts

CARD = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[AnySpec]:
    """A Hopper card of 132 multiprocessors that does nothing, and the kernels a plan asks for."""
    specs: list[AnySpec] = []
    card = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(launch_backward, "get_kernel", specs.append)
    device.hopper_multiprocessors.cache_clear()
    return specs


def facts(*shape: int, dtype: torch.dtype = torch.bfloat16) -> TensorFacts:
    return TensorFacts.of(torch.empty(1, dtype=dtype).expand((*shape[:-1], 1)))._replace(
        shape=shape, stride=(0, 0, 0, 1), device=CARD
    )


def plan(
    q: tuple[int, ...], k: tuple[int, ...], dv: int, grad: tuple[int, ...] | None = None, **options: Any
) -> launch_backward._BackwardPlan | None:
    problem = AttentionProblem(facts(*q), facts(*k), facts(*k[:3], dv), AttentionOptions(**options))
    out = facts(*q[:3], dv)
    dout = out if grad is None else facts(*grad)
    return launch_backward.make_plan(problem, (out, dout))


def test_the_three_kernels_of_a_problem(asked: list[AnySpec]) -> None:
    made = plan((2, 1000, 6, 72), (2, 77, 1, 72), 40, causal=True, deterministic=True, sm_margin=32)
    assert made is not None
    before, main, after = asked
    assert before == PreprocessSpec("bfloat16", 96, 96, False)
    assert isinstance(main, BackwardSpec)
    assert (main.head_dim, main.head_dim_v, main.causal, main.deterministic) == (96, 96, True, True)
    assert after == PostprocessSpec("bfloat16", 96)
    assert made.max_ctas == 100
    m_blocks = -(-1000 // main.config.tile_m)
    assert made.workspaces.accumulator[0] == (12, 16, 64 * 96)  # 1000 rows padded to 1024, 64 at a time
    assert made.workspaces.semaphores == (12, m_blocks)
    assert made.workspaces.words == 1 + 12 * m_blocks


def test_semaphores_only_if_deterministic() -> None:
    made = plan((1, 64, 1, 64), (1, 64, 1, 64), 64)
    assert made is not None
    assert made.workspaces.semaphores is None
    assert made.workspaces.words == 1


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("rows", [1, 64, 128, 1000])
def test_the_preprocess_kernel_zeroes_the_whole_workspace(rows: int, head_dim: int) -> None:
    """A semaphore that begins with anything else is waited for without end."""
    made = plan((1, rows, 1, head_dim), (1, 77, 1, head_dim), head_dim, deterministic=True)
    assert made is not None
    heads, row_blocks, _ = made.workspaces.accumulator[0]
    assert made.workspaces.words <= PREPROCESS_WORDS * heads * row_blocks


def test_ctas_of_a_pair_have_semaphores_of_their_own() -> None:
    made = plan((2, 1000, 3, 256), (2, 77, 3, 256), 256, deterministic=True)
    assert made is not None
    assert made.spec.config.paired
    assert made.workspaces.semaphores == (6, 2 * 16)


@pytest.mark.parametrize("multiprocessors", [1, 2, 3])
@pytest.mark.parametrize("head_dim", [192, 256])
def test_a_single_multiprocessor_has_no_pairs(head_dim: int, multiprocessors: int) -> None:
    made = plan((1, 64, 1, head_dim), (1, 64, 1, head_dim), head_dim, sm_margin=132 - multiprocessors)
    assert made is not None
    assert made.max_ctas == multiprocessors
    assert made.spec.config.paired == (multiprocessors > 1)


def test_semaphores_lie_in_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the counter, wherever in its storage the workspace lies."""
    card = pose(monkeypatch)
    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda words, **where: allocate(words + 16, **where)[8:-8])
    q = torch.zeros(2, 200, 3, 64, dtype=torch.bfloat16)
    options = AttentionOptions(deterministic=True)
    launch_backward.backward(q, q, q, q, q, torch.zeros(2, 3, 200), options)
    _, (spec, arguments), _ = card.launches
    assert isinstance(spec, BackwardSpec)
    workspace, semaphores = arguments[5:7]
    assert semaphores.shape == (6, 2)
    assert semaphores.is_contiguous()
    assert semaphores.data_ptr() == workspace.data_ptr() + 4
    assert workspace.numel() == 1 + 12


@pytest.mark.parametrize(
    "q, k", [((0, 5, 2, 64), (0, 5, 2, 64)), ((1, 0, 2, 64), (1, 5, 2, 64)), ((1, 5, 2, 64), (1, 0, 2, 64))]
)
def test_an_empty_side_launches_nothing(q: tuple[int, ...], k: tuple[int, ...], asked: list[AnySpec]) -> None:
    assert plan(q, k, 64) is None
    assert asked == []


def test_a_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dout is .*; expected shape \(1, 5, 2, 96\), torch.bfloat16 on cuda:0"):
        plan((1, 5, 2, 64), (1, 7, 2, 64), 96, grad=(1, 5, 2, 64))


def test_tiles_are_counted_in_32_bits() -> None:
    with pytest.raises(ValueError, match="more than 2147418112 tiles"):
        plan((2**15, 64, 2**16, 64), (2**15, 64, 1, 64), 64)


def test_every_pair_of_head_dims_has_a_row() -> None:
    for causal in (False, True):
        for seqlen in (1, 4096):
            for head_dim in range(8, 257, 8):
                for head_dim_v in range(8, 257, 8):
                    q, k, v = (facts(1, seqlen, 1, d) for d in (head_dim, head_dim, head_dim_v))
                    row = select_backward_row(AttentionProblem(q, k, v, AttentionOptions(causal=causal)))
                    assert row.head_dim >= head_dim
                    assert row.head_dim_v >= head_dim_v


def test_rows_of_the_table_are_feasible() -> None:
    for row in BACKWARD_TABLE:
        row.config.check_feasible(row.head_dim, row.head_dim_v)
