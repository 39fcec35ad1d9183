"""After the main backward kernel: dQ = softmax_scale · accumulator, from fragment order to rows of 16-bit elements."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from flashhopper.config import ELEMENT_BYTES, ROWS_PER_WARPGROUP, WARPGROUP_THREADS, PostprocessSpec
from flashhopper.kernels.backward_rows import (
    BLOCKS_PER_TILE,
    RowBlock,
    dense_block,
    fake_sequences,
    ragged_block,
    ragged_ctas,
)
from flashhopper.kernels.forward import ELEMENTS
from flashhopper.kernels.ragged import SequenceTable
from flashhopper.kernels.values import divide, minimum

VECTOR = 8  # 16-bit elements in 16 bytes: the columns of one column group of the accumulator


class PostprocessKernel:
    """One CTA of 128 threads per 64 query rows of a head; a thread gathers 8 columns of a row at a time."""

    def __init__(self, spec: PostprocessSpec):
        self.spec = spec

    @cute.jit
    def __call__(self, mAcc: cute.Tensor, mdQ: cute.Tensor, softmax_scale: Float32, sequences: Any, stream: Any):
        """``mAcc``: as :class:`DqWarpgroup` leaves it, ``(batch · heads, padded rows / 64, 64 · head_dim)``; ``mdQ``
        ``(batch, seqlen, heads, head_dim)``; ``sequences`` as :class:`PreprocessKernel` has them."""
        if const_expr(sequences is None):  # one dimension: the others end at 65535
            num_ctas = cute.size(mAcc, mode=[0]) * cute.size(mAcc, mode=[1])
        else:
            num_ctas = ragged_ctas(sequences[1], mdQ.shape[1], mdQ.shape[2])
        self.kernel(mAcc, mdQ, softmax_scale, sequences).launch(
            grid=(num_ctas, 1, 1), block=(WARPGROUP_THREADS, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(self, mAcc: cute.Tensor, mdQ: cute.Tensor, softmax_scale: Float32, sequences: Any):
        cute.arch.griddepcontrol_wait()
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if const_expr(sequences is None):
            block = dense_block(cta, cute.size(mAcc, mode=[1]), mdQ.shape[2], mdQ.shape[1])
            self.process(block, mAcc, mdQ, softmax_scale, tidx)
        else:
            table = SequenceTable(*sequences)
            if cta < table.num_tiles() * BLOCKS_PER_TILE:
                block, is_sequence = ragged_block(table, cta, tidx % 32)
                if is_sequence:
                    self.process(block, mAcc, mdQ, softmax_scale, tidx)
                else:
                    self.clear(block, mdQ, tidx)

    @cute.jit
    def clear(self, block: RowBlock, mdQ: cute.Tensor, tidx: Int32):
        """Rows that are no sequence's: dQ is 0."""
        vectors = mdQ.shape[3] // VECTOR
        values = cute.make_rmem_tensor((VECTOR,), mdQ.element_type)
        values.fill(0.0)
        num_rows = minimum(block.seqlen - block.row, ROWS_PER_WARPGROUP)
        for i in cutlass.range(tidx, num_rows * vectors, WARPGROUP_THREADS, unroll=1):
            row, vector = divide(i, vectors)
            gdQ = mdQ[block.batch, block.start + block.row + row, block.head, None]
            target = cute.domain_offset((vector * VECTOR,), gdQ).iterator.align(16)
            cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(VECTOR)))

    @cute.jit
    def process(self, block: RowBlock, mAcc: cute.Tensor, mdQ: cute.Tensor, softmax_scale: Float32, tidx: Int32):
        """One block of rows."""
        warp, lane = tidx // 32, tidx % 32
        row = block.row + 16 * warp + lane % 16
        groups = self.spec.head_dim // VECTOR
        accumulated = mAcc[block.work_head, block.work_block, None]
        # A fragment is (2 neighbouring columns, rows r and r + 8, lanes of a quad, rows, warps); groups of 8 columns
        # follow each other, and chunks of columns do so too.
        shape = (2, 2, 4, 8, 4, groups)
        strides = (1, 2, 4, 16, 128, 4 * WARPGROUP_THREADS)
        fragments = cute.make_tensor(accumulated.iterator.align(8), cute.make_layout(shape, stride=strides))
        pairs = cute.make_rmem_tensor((2, 4, groups // 2), Float32)
        for i in cutlass.range_constexpr(groups // 2):  # every load is issued before the first is used
            for quad in cutlass.range_constexpr(4):
                source = fragments[None, lane % 16 // 8, quad, lane % 8, warp, 2 * i + lane // 16]
                cute.autovec_copy(source, pairs[None, quad, i])
        if row < block.seqlen:
            gdQ = mdQ[block.batch, block.start + row, block.head, None]
            for i in cutlass.range_constexpr(groups // 2):
                column = (2 * i + lane // 16) * VECTOR
                if column < mdQ.shape[3]:
                    values = cute.make_rmem_tensor((VECTOR,), mdQ.element_type)
                    eight = cute.make_tensor(pairs[None, None, i].iterator, cute.make_layout(VECTOR))
                    values.store((eight.load() * softmax_scale).to(mdQ.element_type))
                    target = cute.domain_offset((column,), gdQ).iterator.align(16)
                    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(VECTOR)))


def compile_postprocess(spec: PostprocessSpec, options: str = "--enable-tvm-ffi") -> Any:
    """The result takes ``(dq_acc, dq, softmax_scale, sequences or None)``, on torch's current stream."""
    element = ELEMENTS[spec.dtype]
    batch, seqlen, heads, row_blocks, batch_heads = (cute.sym_int() for _ in range(5))
    per_16_bytes = 16 // ELEMENT_BYTES[spec.dtype]
    head_dim = cute.sym_int(divisibility=per_16_bytes)
    strides = tuple(cute.sym_int64(divisibility=per_16_bytes) for _ in range(3))
    accumulator = (batch_heads, row_blocks, ROWS_PER_WARPGROUP * spec.head_dim)
    return cute.compile(
        PostprocessKernel(spec),
        make_fake_compact_tensor(Float32, accumulator, stride_order=(2, 1, 0), assumed_align=16),
        make_fake_tensor(element, (batch, seqlen, heads, head_dim), (*strides, 1), assumed_align=16),
        Float32(1.0),
        fake_sequences(spec.ragged),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
