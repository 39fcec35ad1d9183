"""Order of the backward's tiles, and where a sequence's rows lie in its padded workspaces."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from flashhopper.config import ELEMENT_BYTES, BackwardSpec
from flashhopper.kernels.ragged import SequenceTable
from flashhopper.kernels.tile_scheduler import TileCoord, TileGrid
from flashhopper.kernels.values import ceil_div, maximum, minimum

L2_BYTES = 32 << 20  # Q, dO and the dQ accumulator of the heads worked on at a time: half of the H200's L2
ROW_PADDING = 128  # a multiple of every tile_m


def padded_row(start: Any, batch: Any) -> Any:
    """The first row of sequence ``batch`` of a ragged batch, whose queries begin at ``start``, in workspaces in which
    every sequence has whole blocks of ROW_PADDING rows."""
    return (start + batch * ROW_PADDING) // ROW_PADDING * ROW_PADDING


def key_tile_grid(
    spec: BackwardSpec, seqlens: tuple[Any, Any], heads: tuple[Any, Any], batch: Any, num_ctas: Any
) -> TileGrid:
    """One tile per key block, or per two of them for a pair of CTAs; key block 0, which a causal mask leaves the most
    queries, first. If deterministic, the last one first: each waits for the one after it at every query block; causal
    ones begin where that one has been.

    ``seqlens`` and ``heads``: of Q and of K, at least 1; ``num_ctas``: that run at once."""
    (seqlen_q, seqlen_k), (num_heads, heads_k) = seqlens, heads
    num_n_blocks, total = ceil_div(seqlen_k, spec.config.keys_per_tile), heads_k * batch
    row_bytes = ELEMENT_BYTES[spec.dtype] * (spec.head_dim + spec.head_dim_v) + 4 * spec.head_dim
    in_l2 = maximum(L2_BYTES // row_bytes // seqlen_q // (num_heads // heads_k), 1)
    in_waves = ceil_div(spec.config.group_waves * num_ctas // spec.config.num_ctas, num_n_blocks)
    return TileGrid(num_n_blocks, heads_k, total, minimum(minimum(in_l2, in_waves), total), spec.deterministic)


class RaggedKeyGrid:
    """Order of the tiles of a ragged batch: sequence after sequence, within each as :func:`key_tile_grid` has it."""

    def __init__(self, table: SequenceTable, spec: BackwardSpec, heads: tuple[Int32, Int32], num_ctas: Int32):
        self.table, self.spec, self.heads, self.num_ctas = table, spec, heads, num_ctas
        self.num_tiles, self.sample = table.num_tiles(), table.sample(cute.arch.lane_idx())

    @cute.jit
    def locate(self, tile: Int32, lane: Int32):
        """Coordinates of a tile, with the batch index of its sequence, and that sequence's queries and keys."""
        sequence = self.table.find(tile, lane, self.sample)
        seqlens = (maximum(sequence.others.length, 1), sequence.rows.length)
        grid = key_tile_grid(self.spec, seqlens, self.heads, 1, self.num_ctas)
        n_block, head, _ = grid.coord(tile - sequence.first_tile)
        return TileCoord(n_block, head, sequence.batch), sequence.others, sequence.rows
