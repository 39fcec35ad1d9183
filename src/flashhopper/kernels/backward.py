"""The main backward kernel: descriptors and launch on the host, roles dispatched on the device."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from flashhopper.config import ELEMENT_BYTES, ROWS_PER_WARPGROUP, WARPGROUP_THREADS, BackwardSpec
from flashhopper.kernels.backward_cta import BackwardCta, BackwardExtents, BackwardRings, TileSlot
from flashhopper.kernels.backward_dq import DqAdder, DqTiles, DqWarpgroup
from flashhopper.kernels.backward_grid import RaggedKeyGrid, key_tile_grid
from flashhopper.kernels.backward_keys import KeysConsumer
from flashhopper.kernels.backward_load import BackwardOperands, BackwardProducer, RowStatistics
from flashhopper.kernels.backward_mma import BackwardMmas, BackwardTiles, GradientOutputs, transposed
from flashhopper.kernels.backward_operands import KeyConsumer, ValueConsumer
from flashhopper.kernels.backward_pair import Pair, PairRing
from flashhopper.kernels.backward_smem import BackwardLayouts, make_backward_storage
from flashhopper.kernels.features import FeatureArgs, fake_feature_args
from flashhopper.kernels.forward import ELEMENTS
from flashhopper.kernels.load import TmaOperand
from flashhopper.kernels.pipeline import WARPS_PER_WARPGROUP, TmaRing
from flashhopper.kernels.ragged import ragged_view
from flashhopper.kernels.tile_scheduler import TileGrid
from flashhopper.kernels.values import minimum


def instruction_columns(head_dim: int) -> int:
    """Columns of one WGMMA: ptxas refuses 256, whose accumulator alone takes the 128 registers at entry."""
    return head_dim if head_dim <= 192 else head_dim // 2


class BackwardKernel:
    """Attention backward for one :class:`BackwardSpec`, between preprocess and postprocess."""

    def __init__(self, spec: BackwardSpec):
        self.spec, self.element = spec, ELEMENTS[spec.dtype]

    @cute.jit
    def __call__(
        self,
        inputs: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
        mLSE: cute.Tensor,
        mDelta: cute.Tensor,
        mdQ: cute.Tensor,
        outputs: tuple[cute.Tensor, cute.Tensor],
        counter: cute.Tensor,
        semaphores: cute.Tensor | None,
        softmax_scale: Float32,
        softmax_scale_log2: Float32,
        max_ctas: Int32,
        feature_args: Any,
        stream: Any,
    ):
        """``inputs``: q, k, v, dout, and ``outputs``: dk, dv, all ``(batch, seqlen, heads, head_dim)``. LSE (base 2)
        and delta: fp32 ``(batch, heads, padded rows)``. ``mdQ`` and ``semaphores``: see :class:`DqAdder`, zero;
        ``counter``: int32, its first element zero. Of a ragged batch, whose tensors are packed, batch is 1 and rows of
        the workspaces are counted as :func:`padded_row` does. ``feature_args``: a :class:`FeatureArgs`, or None without
        features."""
        spec, config = self.spec, self.spec.config
        layouts = BackwardLayouts.create(spec, self.element)
        self.storage = make_backward_storage(spec, layouts, self.element)
        gQ, gK, gV, gdO = (self.tma_view(m) for m in inputs)
        load = cpasync.CopyBulkTensorTileG2SOp()
        d, dv = spec.head_dim, spec.head_dim_v
        tma_tensors = tuple(
            cpasync.make_tiled_tma_atom(load, g, cute.slice_(layout, (None, None, 0)), tile)
            for g, layout, tile in (
                (gQ, layouts.Q, (config.tile_m, d)),
                (gK, layouts.K, (config.tile_n, d)),
                (gV, layouts.V, (config.tile_n, dv)),
                (gdO, layouts.dO, (config.tile_m, dv)),
                *([(gK, layouts.other_K, (config.tile_n, d // 2))] if config.paired else []),
            )
        )
        mQ, mK, _, _ = inputs
        (batch, seqlen_q, heads, _), (_, seqlen_k, heads_k, _) = mQ.shape, mK.shape
        grid = key_tile_grid(spec, (seqlen_q, seqlen_k), (heads, heads_k), batch, max_ctas)
        at_once = max_ctas // config.num_ctas
        if const_expr(not spec.features.ragged):  # else how many tiles there are is known to the device alone
            at_once = minimum(grid.num_tiles, at_once)
        self.kernel(
            tma_tensors,
            (mLSE, mDelta),
            (mdQ, counter, semaphores),
            outputs,
            self.make_mmas(),
            layouts,
            (softmax_scale, softmax_scale_log2),
            tuple(grid[:4]),
            (seqlen_q, seqlen_k, heads, heads_k),
            feature_args,
        ).launch(
            grid=(at_once * config.num_ctas, 1, 1),
            block=(config.num_threads, 1, 1),
            cluster=(config.num_ctas, 1, 1) if config.paired else None,
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def tma_view(self, m: cute.Tensor) -> cute.Tensor:
        """(rows, head_dim, heads, batch); see :func:`ragged_view`."""
        if self.spec.features.ragged:
            return ragged_view(m, ELEMENT_BYTES[self.spec.dtype], 0)
        return cute.make_tensor(m.iterator, cute.select(m.layout, mode=[1, 3, 2, 0]))

    def make_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        """Sᵀ and dPᵀ, dK, dV, and dQ of the dQ warpgroup alone."""
        spec, config, element = self.spec, self.spec.config, self.element
        k_major, mn_major, registers = OperandMajorMode.K, OperandMajorMode.MN, warpgroup.OperandSource.RMEM
        groups, rows = (config.key_groups, 1, 1), ROWS_PER_WARPGROUP

        def mma(b_major: Any, groups: Any, columns: int, *source: Any) -> cute.TiledMma:
            shape = (rows, columns)
            return sm90.make_trivial_tiled_mma(element, element, k_major, b_major, Float32, groups, shape, *source)

        return (
            mma(k_major, groups, config.tile_m),
            mma(mn_major, groups, instruction_columns(spec.head_dim), registers),
            mma(mn_major, groups, instruction_columns(spec.head_dim_v), registers),
            mma(mn_major, (1, 1, 1), config.dq_columns),
        )

    @cute.kernel
    def kernel(
        self,
        tma_tensors: tuple,
        statistics: tuple,
        accumulation: tuple,
        outputs: tuple,
        mmas: tuple,
        layouts: BackwardLayouts,
        scales: tuple,
        grid: tuple,
        sizes: tuple,
        feature_args: Any,
    ):
        spec, config = self.spec, self.spec.config
        (tma_Q, gQ), (tma_K, gK), (tma_V, gV), (tma_dO, gdO) = tma_tensors[:4]
        mdQ, counter, semaphores = accumulation
        seqlen_q, seqlen_k, heads, heads_k = sizes
        features = FeatureArgs() if const_expr(feature_args is None) else FeatureArgs(*feature_args)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sQ, sK, sV, sdO, sdS = (
            tile.get_tensor(layout.outer, swizzle=layout.inner)
            for tile, layout in (
                (storage.sQ, layouts.Q),
                (storage.sK, layouts.K),
                (storage.sV, layouts.V),
                (storage.sdO, layouts.dO),
                (storage.sdS, layouts.dS),
            )
        )
        sLSE = storage.sLSE.get_tensor(cute.make_layout((config.tile_m, config.num_q_stages)))
        sDelta = storage.sDelta.get_tensor(cute.make_layout((config.tile_m, config.num_do_stages)))
        sP = cute.make_tensor(storage.sP.data_ptr(), cute.make_layout((4, WARPGROUP_THREADS, config.tile_m // 16)))
        row_bytes, row_bytes_v = (ELEMENT_BYTES[spec.dtype] * d for d in (spec.head_dim, spec.head_dim_v))
        key_bytes = config.tile_n * (row_bytes + (row_bytes // 2 if config.paired else 0))
        score_ring = PairRing if config.paired else TmaRing
        rings = BackwardRings(
            TmaRing(storage.k_barriers.data_ptr(), config.num_k_stages, key_bytes),
            TmaRing(storage.v_barriers.data_ptr(), 1, config.tile_n * row_bytes_v),
            TmaRing(storage.q_barriers.data_ptr(), config.num_q_stages, config.tile_m * (row_bytes + 4)),
            TmaRing(storage.do_barriers.data_ptr(), config.num_do_stages, config.tile_m * (row_bytes_v + 4)),
            score_ring(storage.ds_barriers.data_ptr(), config.num_ds_stages, 0),
            TmaRing(storage.dq_barriers.data_ptr(), config.num_dq_stages, 0),
        )
        extents = BackwardExtents(seqlen_q, seqlen_k, heads, heads // heads_k)
        slot = TileSlot(storage.tile_slots.data_ptr(), config.num_k_stages)
        pair = other_K = None
        if const_expr(config.paired):
            other_K = storage.other_K.get_tensor(layouts.other_K.outer, swizzle=layouts.other_K.inner)
            other_dS = storage.other_dS.get_tensor(layouts.dS.outer, swizzle=layouts.dS.inner)
            claims = TmaRing(storage.claim_barriers.data_ptr(), 1, Pair.CLAIM_BYTES)
            pair = Pair(sdS, other_dS, storage.other_ds_barriers.data_ptr(), claims, storage.claimed.data_ptr())
        cta = BackwardCta(spec, rings, slot, extents, features, pair)
        cta.initialise_barriers()

        warpgroup_index = cute.arch.make_warp_uniform(cute.arch.warp_idx() // WARPS_PER_WARPGROUP)
        registers = config.registers()
        softmax_scale, scale_log2 = scales
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(registers.producer)
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            if warp == 0:
                operands = BackwardOperands(
                    TmaOperand(tma_K, gK, sK, (config.tile_n, spec.head_dim), along=0),
                    TmaOperand(tma_V, gV, sV, (config.tile_n, spec.head_dim_v), along=0),
                    TmaOperand(tma_Q, gQ, sQ, (config.tile_m, spec.head_dim), along=0),
                    TmaOperand(tma_dO, gdO, sdO, (config.tile_m, spec.head_dim_v), along=0),
                    RowStatistics(statistics[0], sLSE),
                    RowStatistics(statistics[1], sDelta),
                )
                if const_expr(config.paired):
                    tma, view = tma_tensors[4]
                    tile = config.tile_n, spec.head_dim // 2
                    operands.other_K = TmaOperand(tma, view, other_K, tile, along=0)
                tile_grid: Any = TileGrid(grid[0], grid[1], grid[2], grid[3], spec.deterministic)
                table = features.sequence_table()
                if const_expr(table is not None):
                    tile_grid = RaggedKeyGrid(table, spec, (heads, heads_k), cute.arch.grid_dim()[0])
                BackwardProducer(cta, operands, tile_grid, counter.iterator).run()
            for index in cutlass.range_constexpr(cta.num_adders):
                if warp == 1 + index:
                    DqAdder(cta, storage.sdQ.data_ptr(), mdQ, semaphores, index).run()
        elif warpgroup_index == 1:
            cute.arch.setmaxregister_decrease(registers.dq)
            tiles = DqTiles(mmas[3], sdS, transposed(sK), storage.sdQ.data_ptr())
            if const_expr(config.paired):
                tiles.other_Kt = transposed(other_K)
            DqWarpgroup(cta, tiles).run()
        else:
            cute.arch.setmaxregister_increase(registers.consumer)
            common = (
                cta,
                BackwardMmas(*mmas[:3]),
                BackwardTiles(sK, sV, sQ, sdO, sdS, sP, sLSE, sDelta),
                GradientOutputs(outputs[0], outputs[1], softmax_scale),
                scale_log2,
            )
            if const_expr(config.split == "keys"):
                KeysConsumer(*common, warpgroup_index - 2).run()
            elif warpgroup_index == 2:
                ValueConsumer(*common).run()
            else:
                KeyConsumer(*common).run()
        if const_expr(config.paired):
            pair.leave()


def compile_backward(spec: BackwardSpec, options: str = "--enable-tvm-ffi") -> Any:
    """Compile the kernel of a spec for the current target; needs neither a tensor nor a GPU.

    The result takes ``((q, k, v, dout), lse, delta, dq_acc, (dk, dv), counter, semaphores or None, softmax_scale,
    softmax_scale_log2, max_ctas, feature_args)``, on torch's current stream.
    """
    element, config = ELEMENTS[spec.dtype], spec.config
    batch, seqlen_q, seqlen_k, heads, heads_k, rows, batch_heads, row_blocks, m_blocks = (
        cute.sym_int() for _ in range(9)
    )
    per_16_bytes = 16 // ELEMENT_BYTES[spec.dtype]  # TMA: strides are multiples of 16 bytes
    head_dim, head_dim_v = (cute.sym_int(divisibility=per_16_bytes) for _ in range(2))

    def tensor(seqlen: Any, num_heads: Any, dim: Any) -> Any:
        strides = tuple(cute.sym_int64(divisibility=per_16_bytes) for _ in range(3))
        return make_fake_tensor(element, (batch, seqlen, num_heads, dim), (*strides, 1), assumed_align=16)

    def compact(kind: Any, *shape: Any, align: int = 16) -> Any:
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(kind, shape, stride_order=order, assumed_align=align)

    chunks, chunk = spec.head_dim // config.dq_columns, ROWS_PER_WARPGROUP * config.dq_columns
    return cute.compile(
        BackwardKernel(spec),
        (
            tensor(seqlen_q, heads, head_dim),
            tensor(seqlen_k, heads_k, head_dim),
            tensor(seqlen_k, heads_k, head_dim_v),
            tensor(seqlen_q, heads, head_dim_v),
        ),
        compact(Float32, batch, heads, rows),
        compact(Float32, batch, heads, rows),
        compact(Float32, batch_heads, row_blocks, chunks, chunk),
        (tensor(seqlen_k, heads_k, head_dim), tensor(seqlen_k, heads_k, head_dim_v)),
        compact(Int32, cute.sym_int(), align=4),
        compact(Int32, batch_heads, m_blocks, align=4) if spec.deterministic else None,
        Float32(1.0),
        Float32(1.0),
        Int32(1),
        fake_feature_args(spec.features),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
