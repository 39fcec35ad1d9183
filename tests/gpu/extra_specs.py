"""Kernels that the GPU tests use beyond the tile table's: one switch of ForwardConfig changed in each.

``extra_specs()`` is what has to be compiled before these tests run somewhere without a compiler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashhopper.config import ForwardConfig, KernelSpec
from flashhopper.heuristics import TILE_TABLE

D64 = ForwardConfig(192, 128, num_stages=4)
D64_SHORT = ForwardConfig(128, 128, num_stages=4, num_q_stages=2, prefetch_scores=True)
D64_FOUR = ForwardConfig(256, 64, num_stages=6)
D128 = ForwardConfig(128, 128, num_stages=2, num_q_stages=2)


def _spec(base: ForwardConfig, head_dim: int, causal: bool, **changes: Any) -> KernelSpec:
    return KernelSpec("bfloat16", head_dim, head_dim, causal, replace(base, **changes))


def _table_config(head_dim: int, causal: bool) -> ForwardConfig:
    """What the tile table has for bfloat16, for the longest sequences."""
    rows = [row for row in TILE_TABLE if row.head_dim == row.head_dim_v == head_dim and row.causal == causal]
    return rows[-1].config


EXTRA_SPECS: dict[str, KernelSpec] = {
    "single": _spec(D128, 128, True, scheduler="single"),
    "static": _spec(D128, 128, True, scheduler="static"),
    "free": _spec(D64, 64, True, warpgroup_order="free"),
    "ping_pong_of_2": _spec(D128, 128, False, warpgroup_order="ping_pong"),
    "ping_pong_of_3": _spec(D64, 64, True, warpgroup_order="ping_pong"),
    "ping_pong_of_4": _spec(D64_FOUR, 64, True, warpgroup_order="ping_pong"),
    "relay_of_2": _spec(D128, 128, True, warpgroup_order="relay"),
    "relay_of_3": _spec(D64, 64, True, warpgroup_order="relay"),
    "relay_of_4": _spec(D64_FOUR, 64, True, warpgroup_order="relay"),
    "prefetch_in_relay": _spec(D64_SHORT, 64, True, warpgroup_order="relay"),
    "no_overlap": _spec(D128, 128, True, overlap_gemm_softmax=False),
    "one_loop": _spec(D128, 128, True, split_masked_loop=False, softmax="exact"),
    "prefetch_in_turns": _spec(D64_SHORT, 64, True, warpgroup_order="ping_pong"),
    "one_warpgroup": _spec(D128, 128, False, tile_m=64, reallocate_registers=False),
    "o_in_4_parts": _spec(D128, 128, True, num_o_parts=4),
    "no_tma_store": _spec(D128, 128, False, tma_store=False),
    "one_stage": _spec(D128, 128, False, num_stages=1),
    "q_in_registers": _spec(D128, 128, True, q_in_registers=True),
    "exact": _spec(_table_config(128, False), 128, False, softmax="exact"),
    "exact_causal": _spec(_table_config(128, True), 128, True, softmax="exact"),
}


def extra_specs() -> list[KernelSpec]:
    return list(EXTRA_SPECS.values())
