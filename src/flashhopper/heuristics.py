"""Which tiles a problem gets. One row per case, with the measured reason; adding a head dim is adding a row."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from flashhopper.config import Dtype, ForwardConfig, KernelSpec
from flashhopper.problem import DTYPES, AttentionProblem


class TileRow(NamedTuple):
    """Serves head dims up to ``head_dim`` and ``head_dim_v``; TMA pads smaller ones with zeros."""

    head_dim: int
    head_dim_v: int
    causal: bool
    config: ForwardConfig
    reason: str


def _rows(head_dim: int, head_dim_v: int, config: ForwardConfig, reason: str) -> tuple[TileRow, TileRow]:
    row = TileRow(head_dim, head_dim_v, False, config, reason)
    return row, row._replace(causal=True)


# Searched in order; the first row whose head dims cover the problem's is taken.
TILE_TABLE: tuple[TileRow, ...] = (
    *_rows(64, 64, ForwardConfig(192, 128, num_stages=4), "192 rows best of 128/192; 144 keys spill"),
    *_rows(96, 96, ForwardConfig(192, 96, num_stages=2, num_q_stages=2), "128 keys do not fit 160 registers"),
    *_rows(128, 128, ForwardConfig(128, 128, num_stages=2, num_q_stages=2), "Q in registers spills when not causal"),
    *_rows(192, 128, ForwardConfig(128, 128, num_stages=2, share_qo_smem=True), "fills shared memory"),
    *_rows(192, 192, ForwardConfig(128, 112, num_stages=2, share_qo_smem=True), "fills shared memory"),
    *_rows(256, 256, ForwardConfig(128, 80, num_stages=2, share_qo_smem=True), "fills shared memory"),
)


def select_row(problem: AttentionProblem) -> TileRow:
    """The row of the table that serves a validated problem."""
    for row in TILE_TABLE:
        covers = problem.head_dim <= row.head_dim and problem.head_dim_v <= row.head_dim_v
        if covers and row.causal == problem.options.causal:
            return row
    raise AssertionError(f"no row of TILE_TABLE covers {problem}")  # validate() admits only what the last rows cover


def select_config(problem: AttentionProblem, num_sms: int) -> ForwardConfig:
    """The configuration for a validated problem on a card with ``num_sms`` multiprocessors."""
    return _for_dtype(select_row(problem).config, DTYPES[problem.dtype])


def select_spec(problem: AttentionProblem, num_sms: int, config: ForwardConfig | None = None) -> KernelSpec:
    """The kernel for a validated problem; ``config`` overrides the table's."""
    row = select_row(problem)
    dtype = DTYPES[problem.dtype]
    chosen = _for_dtype(row.config, dtype) if config is None else config
    return KernelSpec(dtype, row.head_dim, row.head_dim_v, row.causal, chosen)


def all_specs() -> list[KernelSpec]:
    """Every kernel that :func:`select_spec` can choose."""
    return [
        KernelSpec(dtype, row.head_dim, row.head_dim_v, row.causal, _for_dtype(row.config, dtype))
        for row in TILE_TABLE
        for dtype in DTYPES.values()
    ]


def _for_dtype(config: ForwardConfig, dtype: Dtype) -> ForwardConfig:
    """float16 ends at 65504, so that its P needs the true row maximum."""
    return replace(config, softmax="exact") if dtype == "float16" else config
