"""Shared memory of the backward kernel: one struct, the tiles' swizzled layouts, and the named barriers' numbers."""

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64
from cutlass.tensor_utils import LayoutEnum

from flashhopper.config import ROWS_PER_WARPGROUP, SMEM_BYTES_PER_CTA, BackwardSpec
from flashhopper.kernels.backward_cta import TileSlot
from flashhopper.kernels.smem import TILE_ALIGNMENT


class BackwardBarrier(IntEnum):
    """Named barriers by number (0 is ``sync_threads``)."""

    TURN = 1  # and 2, one per consumer: its turn to issue GEMMs, in tiles with K's first stage
    P_FULL = 3  # split="operands": P is in the exchange tile …
    P_EMPTY = 4  # … and has been read
    ADD = 5  # and 6, one per warp that adds, if deterministic: its turn at the staging ring
    EXCHANGE = 7  # of a pair: all of dS is written and may go to the other CTA
    TURN_SLOT_1 = 9  # and 10, in tiles with K's second stage: see turns.turn_barrier


class BackwardLayouts(NamedTuple):
    """Swizzled shared-memory layouts. Q, K, V and dO are K-major where head_dim is summed over, and MN-major operands
    of the products that sum over rows, from the same bytes."""

    K: cute.ComposedLayout  # (tile_n, head_dim, num_k_stages)
    V: cute.ComposedLayout  # (tile_n, head_dim_v, 1)
    Q: cute.ComposedLayout  # (tile_m, head_dim, num_q_stages)
    dO: cute.ComposedLayout  # (tile_m, head_dim_v, num_do_stages)
    dS: cute.ComposedLayout  # (tile_m, tile_n, num_ds_stages)
    other_K: cute.ComposedLayout | None  # of a pair: (tile_n, head_dim / 2, num_k_stages)

    @classmethod
    def create(cls, spec: BackwardSpec, element: Any) -> "BackwardLayouts":
        config, row = spec.config, LayoutEnum.ROW_MAJOR
        tile_m, tile_n = config.tile_m, config.tile_n

        def keys(head_dim: int, stages: int) -> cute.ComposedLayout:
            return sm90.make_smem_layout_a(row, (tile_n, tile_m, head_dim), element, stages)

        def queries(head_dim: int, stages: int) -> cute.ComposedLayout:
            return sm90.make_smem_layout_b(row, (tile_n, tile_m, head_dim), element, stages)

        return cls(
            keys(spec.head_dim, config.num_k_stages),
            keys(spec.head_dim_v, 1),
            queries(spec.head_dim, config.num_q_stages),
            queries(spec.head_dim_v, config.num_do_stages),
            sm90.make_smem_layout_a(row, (tile_m, spec.head_dim, tile_n), element, config.num_ds_stages),
            keys(spec.head_dim // 2, config.num_k_stages) if config.paired else None,
        )


def make_backward_storage(spec: BackwardSpec, layouts: BackwardLayouts, element: Any) -> Any:
    """The struct of one CTA."""
    config = spec.config
    exchanged_words = config.tile_m * config.tile_n // 2 if config.split == "operands" else 0
    num_pairs = int(config.paired)
    elements_other_K = cute.cosize(layouts.other_K) if config.paired else 0

    def tile(kind: Any, elements: int) -> Any:
        return cute.struct.Align[cute.struct.MemRange[kind, elements], TILE_ALIGNMENT]

    @cute.struct
    class BackwardStorage:
        k_barriers: cute.struct.MemRange[Int64, 2 * config.num_k_stages]
        v_barriers: cute.struct.MemRange[Int64, 2]
        q_barriers: cute.struct.MemRange[Int64, 2 * config.num_q_stages]
        do_barriers: cute.struct.MemRange[Int64, 2 * config.num_do_stages]
        ds_barriers: cute.struct.MemRange[Int64, 2 * config.num_ds_stages]
        dq_barriers: cute.struct.MemRange[Int64, 2 * config.num_dq_stages]
        other_ds_barriers: cute.struct.MemRange[Int64, num_pairs * config.num_ds_stages]
        claim_barriers: cute.struct.MemRange[Int64, num_pairs * 2]
        tile_slots: cute.struct.MemRange[Int32, TileSlot.WORDS * config.num_k_stages]
        claimed: cute.struct.MemRange[Int32, num_pairs]
        sLSE: cute.struct.Align[cute.struct.MemRange[Float32, config.tile_m * config.num_q_stages], 128]
        sDelta: cute.struct.Align[cute.struct.MemRange[Float32, config.tile_m * config.num_do_stages], 128]
        sK: tile(element, cute.cosize(layouts.K))
        sV: tile(element, cute.cosize(layouts.V))
        sQ: tile(element, cute.cosize(layouts.Q))
        sdO: tile(element, cute.cosize(layouts.dO))
        sdS: tile(element, cute.cosize(layouts.dS))
        sP: tile(Int32, exchanged_words)
        other_K: tile(element, elements_other_K)
        other_dS: tile(element, num_pairs * cute.cosize(layouts.dS))
        sdQ: tile(Float32, config.num_dq_stages * ROWS_PER_WARPGROUP * config.dq_columns)

    if BackwardStorage.size_in_bytes() > SMEM_BYTES_PER_CTA:
        raise ValueError(f"{spec.name} takes {BackwardStorage.size_in_bytes()} bytes of shared memory")
    return BackwardStorage
