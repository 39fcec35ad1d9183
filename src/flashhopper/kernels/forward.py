"""The forward kernel: descriptors and launch on the host, roles dispatched on the device."""

from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from flashhopper.config import ELEMENT_BYTES, ROWS_PER_WARPGROUP, KernelSpec
from flashhopper.kernels.cta import Cta
from flashhopper.kernels.epilogue import Output
from flashhopper.kernels.features import FeatureArgs, fake_feature_args
from flashhopper.kernels.load import Producer, TmaOperand
from flashhopper.kernels.mma import Consumer, Operands
from flashhopper.kernels.pipeline import WARPS_PER_WARPGROUP, TmaRing
from flashhopper.kernels.ragged import ragged_view
from flashhopper.kernels.smem import TileLayouts, make_storage, staged_columns
from flashhopper.kernels.softmax import make_softmax
from flashhopper.kernels.tile_scheduler import Mailbox, RaggedGrid, TileGrid, TileScheduler

ELEMENTS = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
}
WORKSPACE_INTS = 4


class ForwardKernel:
    """Attention forward for one :class:`KernelSpec`."""

    value_modes: ClassVar[list[int]] = [3, 1, 2, 0]  # of V's dimensions: head_dim_v, keys, heads, batch
    value_major = OperandMajorMode.MN
    value_operand: ClassVar[type[TmaOperand]] = TmaOperand

    def __init__(self, spec: KernelSpec):
        self.spec, self.element, self.out_element = spec, ELEMENTS[spec.dtype], ELEMENTS[spec.out_dtype or spec.dtype]
        self.probability_element = self.element  # of P as the operand of P V

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        workspace: cute.Tensor,
        softmax_scale_log2: Float32,
        max_ctas: Int32,
        feature_args: Any,
        stream: Any,
    ):
        """Tensors are ``(batch, seqlen, heads, head_dim)``, LSE ``(batch, heads, seqlen_q)``, workspace int32 (4,).
        Of a ragged batch, whose tensors are packed, batch is 1. ``feature_args``: a :class:`FeatureArgs`, or None
        without features."""
        self.launch((mQ, mK, mV), (mO, mLSE, workspace), softmax_scale_log2, max_ctas, feature_args, stream)

    def launch(
        self,
        inputs: tuple,
        memory: tuple,
        softmax_scale_log2: Float32,
        max_ctas: Int32,
        feature_args: Any,
        stream: Any,
        scales: tuple = (),
    ) -> None:
        """Make descriptors, size the grid, launch. ``memory``: O, LSE and workspace; ``scales``: FP8's."""
        (mQ, mK, mV), mO = inputs, memory[0]
        spec, config = self.spec, self.spec.config
        layouts = TileLayouts.create(spec, self.element, self.out_element, self.value_major)
        self.storage = make_storage(spec, layouts, self.element, self.out_element)
        gQ, gK, gV, gO = (self.tma_view(m, mode) for m, mode in ((mQ, 0), (mK, 0), (mV, 1), (mO, 0)))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_tensors = tuple(
            cpasync.make_tiled_tma_atom(op, g, cute.slice_(layout, (None, None, 0)), tile)
            for op, g, layout, tile in (
                (load, gQ, layouts.Q, (config.tile_m, spec.head_dim)),
                (load, gK, layouts.K, (config.tile_n, spec.head_dim)),
                (load, gV, layouts.V, (spec.head_dim_v, config.tile_n)),
                (store, gO, layouts.O, (ROWS_PER_WARPGROUP, staged_columns(spec))),
            )
        )
        (batch, seqlen_q, heads, _), (_, seqlen_k, heads_k, _) = mQ.shape, mK.shape
        grid = TileGrid.create((seqlen_q, heads, batch), (seqlen_k, heads_k, batch), spec, max_ctas)
        num_ctas = grid.num_tiles if config.scheduler == "single" else cutlass.min(grid.num_tiles, max_ctas)
        if const_expr(spec.features.ragged):  # how many tiles there are is known to the device alone
            num_ctas = max_ctas
        self.kernel(
            tma_tensors,
            memory,
            self.make_mmas(),
            layouts,
            softmax_scale_log2,
            tuple(grid[:4]),
            (seqlen_q, seqlen_k, heads, heads_k),
            feature_args,
            scales,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(config.num_threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def tma_view(self, m: cute.Tensor, rows_mode: int) -> cute.Tensor:
        """(rows, head_dim, heads, batch), rows and head_dim exchanged for ``rows_mode`` 1; see :func:`ragged_view`."""
        if self.spec.features.ragged:
            return ragged_view(m, m.element_type.width // 8, rows_mode)
        modes = [1, 3, 2, 0] if rows_mode == 0 else self.value_modes
        return cute.make_tensor(m.iterator, cute.select(m.layout, mode=modes))

    def make_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """S = Q Kᵀ (Q from shared memory or registers) and O += P V (P from registers), 64 rows per warpgroup."""
        config, k_major = self.spec.config, OperandMajorMode.K
        groups = (config.num_consumer_warpgroups, 1, 1)
        source_Q = warpgroup.OperandSource.RMEM if config.q_in_registers else warpgroup.OperandSource.SMEM
        element = self.element
        columns_O = config.two_level_columns or self.spec.head_dim_v
        shape_S, shape_O = (ROWS_PER_WARPGROUP, config.tile_n), (ROWS_PER_WARPGROUP, columns_O)
        return (
            sm90.make_trivial_tiled_mma(element, element, k_major, k_major, Float32, groups, shape_S, source_Q),
            sm90.make_trivial_tiled_mma(
                self.probability_element,
                element,
                k_major,
                self.value_major,
                Float32,
                groups,
                shape_O,
                warpgroup.OperandSource.RMEM,
            ),
        )

    @cute.kernel
    def kernel(
        self,
        tma_tensors: tuple,
        memory: tuple,
        mmas: tuple,
        layouts: TileLayouts,
        softmax_scale_log2: Float32,
        grid: tuple,
        extents: tuple,
        feature_args: Any,
        scales: tuple,
    ):
        spec, config = self.spec, self.spec.config
        mO, mLSE, workspace = memory
        seqlen_q, seqlen_k, heads, heads_k = extents
        features = FeatureArgs() if const_expr(feature_args is None) else FeatureArgs(*feature_args)
        (tma_Q, gQ), (tma_K, gK), (tma_V, gV), (tma_O, gO) = tma_tensors
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sQ, sK, sV = (
            tile.get_tensor(layout.outer, swizzle=layout.inner)
            for tile, layout in ((storage.sQ, layouts.Q), (storage.sK, layouts.K), (storage.sV, layouts.V))
        )
        sO = None
        if cutlass.const_expr(config.tma_store):
            sO = storage.sO.get_tensor(layouts.O.outer, swizzle=layouts.O.inner)

        row_bytes, row_bytes_v = (ELEMENT_BYTES[spec.dtype] * d for d in (spec.head_dim, spec.head_dim_v))
        rings = (
            TmaRing(storage.q_barriers.data_ptr(), config.num_q_stages, config.tile_m * row_bytes),
            TmaRing(storage.k_barriers.data_ptr(), config.num_stages, config.tile_n * row_bytes),
            TmaRing(storage.v_barriers.data_ptr(), config.num_stages, config.tile_n * row_bytes_v),
        )
        mailbox = Mailbox(storage.mailbox.data_ptr(), storage.done_barriers.data_ptr(), config.num_q_stages)
        tile_grid: Any = TileGrid(grid[0], grid[1], grid[2], grid[3], spec.causal)
        table = features.sequence_table()
        if const_expr(table is not None):
            tile_grid = RaggedGrid(table, spec, (heads, heads_k), cute.arch.grid_dim()[0])
        scheduler = TileScheduler(config.scheduler, tile_grid, mailbox, workspace)
        cta = Cta(spec, rings, scheduler, (seqlen_q, seqlen_k, heads // heads_k), features)
        cta.initialise_barriers()
        cute.arch.griddepcontrol_wait()  # nothing in global memory before this: it may be another kernel's still

        warpgroup_index = cute.arch.make_warp_uniform(cute.arch.warp_idx() // WARPS_PER_WARPGROUP)
        registers = config.registers()
        if warpgroup_index == 0:
            if cutlass.const_expr(config.reallocate_registers):
                cute.arch.setmaxregister_decrease(registers.producer)
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                operands = (
                    TmaOperand(tma_Q, gQ, sQ, (config.tile_m, spec.head_dim), along=0),
                    TmaOperand(tma_K, gK, sK, (config.tile_n, spec.head_dim), along=0),
                    self.value_operand(tma_V, gV, sV, (spec.head_dim_v, config.tile_n), along=1),
                )
                Producer(cta, operands).run()
        else:
            if cutlass.const_expr(config.reallocate_registers):
                cute.arch.setmaxregister_increase(registers.consumer)
            output = Output(tma_O, gO, sO, mO, mLSE)
            tiles = Operands(mmas[0], mmas[1], sQ, sK, sV)
            self.make_consumer(cta, tiles, output, warpgroup_index - 1, softmax_scale_log2, scales).run()

    def make_consumer(
        self, cta: Cta, operands: Operands, output: Output, index: Int32, softmax_scale_log2: Float32, scales: tuple
    ) -> Consumer:
        """The consumer warpgroup ``index``."""
        softmax = make_softmax(self.spec.config, self.spec.dtype, softmax_scale_log2)
        return Consumer(cta, operands, softmax, output, index)


def compile_forward(spec: KernelSpec, options: str = "--enable-tvm-ffi") -> Any:
    """Compile the kernel of a spec for the current target; needs neither a tensor nor a GPU.

    The result takes ``(q, k, v, out, lse, workspace, softmax_scale_log2, max_ctas, feature_args)``, on torch's current
    stream; ``feature_args`` is a :class:`FeatureArgs`, or None without features.
    """
    element = ELEMENTS[spec.dtype]
    batch, seqlen_q, seqlen_k, heads, heads_k = (cute.sym_int() for _ in range(5))
    per_16_bytes = 16 // ELEMENT_BYTES[spec.dtype]  # TMA: strides are multiples of 16 bytes
    head_dim, head_dim_v = (cute.sym_int(divisibility=per_16_bytes) for _ in range(2))

    def tensor(seqlen: Any, num_heads: Any, dim: Any) -> Any:
        strides = tuple(cute.sym_int64(divisibility=per_16_bytes) for _ in range(3))
        return make_fake_tensor(element, (batch, seqlen, num_heads, dim), (*strides, 1), assumed_align=16)

    lse = make_fake_compact_tensor(Float32, (batch, heads, seqlen_q), stride_order=(2, 1, 0), assumed_align=4)
    workspace = make_fake_compact_tensor(Int32, (WORKSPACE_INTS,), assumed_align=16)
    return cute.compile(
        ForwardKernel(spec),
        tensor(seqlen_q, heads, head_dim),
        tensor(seqlen_k, heads_k, head_dim),
        tensor(seqlen_k, heads_k, head_dim_v),
        tensor(seqlen_q, heads, head_dim_v),
        lse,
        workspace,
        Float32(1.0),
        Int32(1),
        fake_feature_args(spec.features),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
