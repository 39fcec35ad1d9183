"""O and LSE out of one consumer warpgroup."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.tensor_utils import LayoutEnum

from flashhopper.config import ROWS_PER_WARPGROUP, WARPGROUP_THREADS
from flashhopper.kernels import ptx
from flashhopper.kernels.cta import Cta
from flashhopper.kernels.mask import ROWS_PER_THREAD, rows_view
from flashhopper.kernels.ragged import Rows, head_rows
from flashhopper.kernels.smem import NamedBarrier, output_tiles, staged_columns


class Place(NamedTuple):
    """Where a tile's results go: batch entry and head, and the rows of its sequence."""

    batch: Int32  # 0 in a ragged batch
    head: Int32
    rows: Rows


class Output:
    """Where the results go: O as TMA and as plain tensor ``(b, sq, h, dv)``, its staging tile, LSE ``(b, h, sq)``."""

    def __init__(
        self, tma_O: cute.CopyAtom, gO: cute.Tensor, sO: cute.Tensor | None, mO: cute.Tensor, mLSE: cute.Tensor
    ):
        self.tma_O, self.gO, self.sO, self.mO, self.mLSE = tma_O, gO, sO, mO, mLSE


class Epilogue:
    """Writes the normalised rows of one warpgroup: 64 rows of the tile."""

    def __init__(self, cta: Cta, output: Output, warpgroup: Int32, is_storing_warp: Boolean, lane: Int32):
        """``warpgroup`` counts consumer warpgroups; the storing warp, one of each, issues the TMA stores."""
        self.cta, self.output, self.warpgroup = cta, output, warpgroup
        self.is_storing_warp, self.lane = is_storing_warp, lane
        self.barrier = NamedBarrier.EPILOGUE + warpgroup
        self.staging = warpgroup * output_tiles(cta.spec)

    @cute.jit
    def write_lse(self, rows_lse: cute.Tensor, row: Int32, place: Place):
        """LSE of rows ``row`` and ``row + 8`` of the sequence, by one thread of each row's four."""
        mLSE = self.output.mLSE
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            if row + 8 * r < place.rows.length and self.lane % 4 == 0:
                mLSE[place.batch, place.head, place.rows.start + row + 8 * r] = rows_lse[r]

    @cute.jit
    def write_by_tma(self, acc_O: cute.Tensor, m_block: Int32, place: Place):
        """Registers -> shared memory -> TMA, which drops the rows and columns past the tensor."""
        for part in cutlass.range_constexpr(self.cta.spec.config.num_o_parts):
            self.write_part(acc_O, m_block, place, part)

    @cute.jit
    def write_part(self, acc_O: cute.Tensor, m_block: Int32, place: Place, part: Constexpr[int]):
        """The columns that are staged at a time, when those before have left."""
        columns = staged_columns(self.cta.spec)
        element, shape = self.output.sO.element_type, (ROWS_PER_WARPGROUP, columns)
        major = OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(element, element, major, major, Float32, (1, 1, 1), shape)
        stmatrix = sm90.sm90_get_smem_store_op(LayoutEnum.ROW_MAJOR, element, Float32)
        copy_O = cute.make_tiled_copy_C(stmatrix, mma).get_slice(ptx.reread_thread_index() % WARPGROUP_THREADS)
        frag_O = cute.make_rmem_tensor(mma.partition_shape_C(shape), element)
        count = cute.size(frag_O)
        part_O = cute.make_tensor(acc_O.iterator + part * count, cute.make_layout(count))
        for i in cutlass.range_constexpr(count):
            frag_O[i] = part_O[i].to(element)
        if self.is_storing_warp:
            if const_expr(part == 0):
                # The item before must be stored, not only have been read: a redone tile writes the same addresses.
                ptx.bulk_store_wait()
            else:
                ptx.bulk_store_wait_read()
        ptx.named_barrier_wait(self.barrier, WARPGROUP_THREADS)
        cute.copy(copy_O, copy_O.retile(frag_O), copy_O.partition_D(self.output.sO)[None, None, None, self.staging])
        ptx.fence_async_shared()
        ptx.named_barrier_wait(self.barrier, WARPGROUP_THREADS)
        if self.is_storing_warp:
            rows = place.rows if self.cta.spec.features.ragged else None
            gO = head_rows(self.output.gO, place.head, place.batch, rows)
            gO_tiles = cute.local_tile(gO, (ROWS_PER_WARPGROUP, columns), (None, part))
            tOsO, tOgO = cpasync.tma_partition(
                self.output.tma_O,
                0,
                cute.make_layout(1),
                cute.group_modes(self.output.sO, 0, 2),
                cute.group_modes(gO_tiles, 0, 2),
            )
            tile = self.cta.spec.config.num_consumer_warpgroups * m_block + self.warpgroup
            cute.copy(self.output.tma_O, tOsO[None, self.staging], tOgO[None, tile])
            ptx.bulk_store_commit()

    @cute.jit
    def write_from_registers(self, acc_O: cute.Tensor, row: Int32, place: Place):
        """Predicated stores of the elements this thread holds."""
        mO, rows_O = self.output.mO, rows_view(acc_O)
        head_dim_v = cute.size(self.output.mO, mode=[3])
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            if row + 8 * r < place.rows.length:
                for c in cutlass.range_constexpr(self.cta.spec.head_dim_v // 4):
                    column = 8 * (c // 2) + 2 * (self.lane % 4) + c % 2
                    if column < head_dim_v:
                        target_row = place.rows.start + row + 8 * r
                        mO[place.batch, target_row, place.head, column] = rows_O[r, c].to(mO.element_type)

    @cute.jit
    def free_staging(self):
        """The whole warpgroup: its part of the shared O is its own again."""
        self.wait_staging_read()
        ptx.named_barrier_wait(self.barrier, WARPGROUP_THREADS)

    @cute.jit
    def wait_staging_read(self):
        """The storing warp: until TMA has read the staging tile."""
        if self.is_storing_warp:
            ptx.bulk_store_wait_read()
