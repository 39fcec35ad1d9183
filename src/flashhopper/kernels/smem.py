"""Shared memory of the forward kernel: one struct, the tiles' swizzled layouts, and the named barriers' numbers."""

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from flashhopper.config import (
    FLUSHED_BYTES,
    OUTPUT_BYTES,
    ROWS_PER_WARPGROUP,
    SMEM_BYTES_PER_CTA,
    KernelSpec,
)
from flashhopper.kernels.tile_scheduler import Mailbox

TILE_ALIGNMENT = 1024  # a 128-byte swizzle pattern repeats every 1024 bytes


class NamedBarrier(IntEnum):
    """Named barriers by number (0 is ``sync_threads``). One per consumer warpgroup follows each base."""

    TURN = 1
    EPILOGUE = 5
    TURN_SLOT_1 = 9


def output_tiles(spec: KernelSpec) -> int:
    """Tiles of 16-bit O that a warpgroup's part of the shared O takes: the first is staged, and there is no other
    unless fp32 sums lie there while the tile is worked on."""
    return FLUSHED_BYTES // OUTPUT_BYTES if spec.config.flush_blocks else 1


def staged_columns(spec: KernelSpec) -> int:
    """Columns of O that are staged at a time."""
    return spec.head_dim_v // spec.config.num_o_parts


class TileLayouts(NamedTuple):
    """Swizzled shared-memory layouts. Q and K are K-major operands of S = Q Kᵀ, V is the operand of O = P V: N-major
    for 16-bit types, K-major (keys contiguous), as 8-bit WGMMAs want it, for FP8."""

    Q: cute.ComposedLayout  # (tile_m, head_dim, num_q_stages)
    K: cute.ComposedLayout  # (tile_n, head_dim, num_stages)
    V: cute.ComposedLayout  # (head_dim_v, tile_n, num_stages)
    O: cute.ComposedLayout  # (64, staged_columns, num_consumer_warpgroups · output_tiles)  # noqa: E741 - the operand's name

    @classmethod
    def create(cls, spec: KernelSpec, element: Any, out_element: Any, value_major: OperandMajorMode) -> "TileLayouts":
        config, row = spec.config, LayoutEnum.ROW_MAJOR
        order_V = row if value_major == OperandMajorMode.K else LayoutEnum.COL_MAJOR
        tile_m, tile_n, stages = config.tile_m, config.tile_n, config.num_stages
        kind = sm90.get_smem_layout_atom(row, out_element, staged_columns(spec))
        atom = warpgroup.make_smem_layout_atom(kind, out_element)
        return cls(
            sm90.make_smem_layout_a(row, (tile_m, tile_n, spec.head_dim), element, config.num_q_stages),
            sm90.make_smem_layout_b(row, (tile_m, tile_n, spec.head_dim), element, stages),
            sm90.make_smem_layout_b(order_V, (tile_m, spec.head_dim_v, tile_n), element, stages),
            cute.tile_to_shape(
                atom,
                (ROWS_PER_WARPGROUP, staged_columns(spec), config.num_consumer_warpgroups * output_tiles(spec)),
                order=(0, 1, 2) if config.flush_blocks else (0, 2, 1),
            ),
        )


def make_storage(spec: KernelSpec, layouts: TileLayouts, element: Any, out_element: Any) -> Any:
    """The struct of one CTA. O has no bytes if it leaves from registers."""
    config = spec.config
    elements_Q, elements_O = cute.cosize(layouts.Q), cute.cosize(layouts.O) if config.tma_store else 0

    def tile(elements: int, element: Any = element) -> Any:
        return cute.struct.Align[cute.struct.MemRange[element, elements], TILE_ALIGNMENT]

    @cute.struct
    class ForwardStorage:
        q_barriers: cute.struct.MemRange[Int64, 2 * config.num_q_stages]
        k_barriers: cute.struct.MemRange[Int64, 2 * config.num_stages]
        v_barriers: cute.struct.MemRange[Int64, 2 * config.num_stages]
        done_barriers: cute.struct.MemRange[Int64, Mailbox.VERDICTS]
        mailbox: cute.struct.MemRange[Int32, Mailbox.ITEM_WORDS * config.num_q_stages + Mailbox.VERDICTS]
        sQ: tile(elements_Q)
        sK: tile(cute.cosize(layouts.K))
        sV: tile(cute.cosize(layouts.V))
        sO: tile(elements_O, out_element)

    if ForwardStorage.size_in_bytes() > SMEM_BYTES_PER_CTA:
        raise ValueError(f"{spec.name} takes {ForwardStorage.size_in_bytes()} bytes of shared memory")
    return ForwardStorage
