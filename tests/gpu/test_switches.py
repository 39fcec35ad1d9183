"""Every switch of ForwardConfig gives the right result, and sm_margin leaves multiprocessors to others."""

from __future__ import annotations

import time
from dataclasses import fields

import pytest
import torch
from checks import Shape, assert_same_bits, check, random_inputs, run
from extra_specs import EXTRA_SPECS

from flashhopper import flash_attn_func
from flashhopper.config import ForwardConfig, KernelSpec
from flashhopper.heuristics import select_spec
from flashhopper.kernel_list import forward_specs, fp8_specs
from flashhopper.options import AttentionOptions
from flashhopper.problem import AttentionProblem

SWITCHES = {
    "scheduler": {"single", "static", "dynamic"},
    "softmax": {"exact", "lazy"},
    "warpgroup_order": {"free", "stagger", "ping_pong", "relay"},
}

SHAPES = [
    (2, 300, 500, 6, 2, 0, 0),
    (1, 1100, 1100, 3, 3, 0, 0),
    (2, 500, 130, 4, 2, 0, 0),  # causal: rows without keys
    (5, 700, 300, 16, 4, 0, 0),  # more tiles than multiprocessors
    (2, 77, 129, 4, 4, 24, 16),  # head dims far below the tile's
    (3, 1, 1, 12, 2, 0, 0),
]


def test_every_switch_is_covered() -> None:
    """By the tile tables or an extra spec; a new field of ForwardConfig needs one too."""
    specs = [*forward_specs(), *fp8_specs(), *EXTRA_SPECS.values()]
    for field in fields(ForwardConfig):
        found = {getattr(spec.config, field.name) for spec in specs}
        expected = {False, True} if isinstance(field.default, bool) else SWITCHES.get(field.name, set())
        assert expected <= found, field.name
    assert {1, 2} <= {spec.config.num_stages for spec in specs}
    assert {1, 2, 4} <= {spec.config.num_o_parts for spec in specs}
    assert {64, 128, 192, 256} == {spec.config.tile_m for spec in specs}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EXTRA_SPECS)
def test_switch(name: str, shape: tuple[int, ...]) -> None:
    spec: KernelSpec = EXTRA_SPECS[name]
    *extents, less, less_v = shape
    tensors = random_inputs(Shape(*extents, spec.head_dim - less, spec.head_dim_v - less_v))
    problem = AttentionProblem.from_tensors(*tensors, AttentionOptions(causal=spec.causal))
    assert select_spec(problem, spec.config) == spec  # the kernel that this test is about
    check(tensors, causal=spec.causal, config=spec.config)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sm_margin_changes_nothing_in_the_result(head_dim: int, causal: bool) -> None:
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    tensors = random_inputs(Shape(3, 900, 700, 16, 4, head_dim, head_dim))
    expected = check(tensors, causal=causal)
    for margin in (1, 60, multiprocessors - 1):
        assert_same_bits(run(tensors, causal=causal, sm_margin=margin), expected)


def test_sm_margin_leaves_room_for_another_kernel() -> None:
    """A small kernel on another stream finishes while attention is still running: it found a free multiprocessor.

    Without a margin the persistent CTAs hold every register of the card until their work is done.
    """
    q, k, v = random_inputs(Shape(1, 2**17, 2**17, 16, 16, 128, 128))
    small = torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()  # small is zeroed before another stream adds to it
    side = torch.cuda.Stream()
    flash_attn_func(q[:, :128], k[:, :128], v[:, :128])  # load what there is to load
    with torch.cuda.stream(side):
        small.add_(1)
    torch.cuda.synchronize()
    flash_attn_func(q, k, v, sm_margin=60)
    done = torch.cuda.current_stream().record_event()
    time.sleep(0.005)  # attention has started
    with torch.cuda.stream(side):
        small.add_(1)
    side.synchronize()
    assert not done.query()
    assert small.unique().tolist() == [2.0]
    done.synchronize()
