"""Before the main backward kernel: delta = rowsum(dO ∘ O) - dLSE, LSE in base 2, the sink's gradient, and a zeroed dQ
accumulator."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from flashhopper.config import (
    ELEMENT_BYTES,
    PREPROCESS_WARPS,
    PREPROCESS_WORDS,
    ROWS_PER_WARPGROUP,
    WARP_THREADS,
    PreprocessSpec,
)
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
from flashhopper.kernels.softmax import LOG2_E

THREADS = PREPROCESS_WARPS * WARP_THREADS
VECTOR = 8  # 16-bit elements in 16 bytes


class PreprocessKernel:
    """One CTA per 64 query rows of a head. Padding rows get LSE +inf and delta 0, so that their P and dS are 0, and so
    do rows without keys, whose LSE is -inf."""

    def __init__(self, spec: PreprocessSpec):
        self.spec = spec
        self.threads_per_row = 8 if spec.head_dim_v <= 64 else 16 if spec.head_dim_v <= 128 else 32

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: Any,
        mLSE_log2: cute.Tensor,
        mDelta: cute.Tensor,
        mdQ: cute.Tensor,
        workspace: cute.Tensor,
        sink: Any,
        sequences: Any,
        stream: Any,
    ):
        """O and dO ``(batch, seqlen, heads, head_dim_v)``, LSE and dLSE or None ``(batch, heads, seqlen)``.

        Out: LSE in base 2 and delta ``(batch, heads, padded rows)``. Zeroed: ``mdQ`` ``(batch · heads, rows / 64,
        64 · head_dim)`` and the int32 ``workspace``, of at most PREPROCESS_WORDS words per 64 rows of a head.

        ``sink``: logits fp32 ``(heads,)`` and, to be filled, parts of their gradients, fp32 ``(batch · heads, rows /
        64, PREPROCESS_WARPS)``, or None. A sink is a key whose value is 0: its dP is 0, so that its dS is -P · delta.

        ``sequences`` of a ragged batch: records and first tiles, see :class:`SequenceTable`, of tiles of ROW_PADDING
        rows; ``workspace`` is then left alone. None if dense.
        """
        if const_expr(sequences is None):  # one dimension: the others end at 65535
            num_ctas = cute.size(mdQ, mode=[0]) * cute.size(mdQ, mode=[1])
        else:
            num_ctas = ragged_ctas(sequences[1], mO.shape[1], mO.shape[2])
        self.kernel((mO, mdO), (mLSE, mdLSE), (mLSE_log2, mDelta, mdQ, workspace), sink, sequences).launch(
            grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, inputs: tuple, lse: tuple, work: tuple, sink: Any, sequences: Any):
        cute.arch.griddepcontrol_launch_dependents()  # the main kernel waits for this one to end before it needs it
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        mO, _ = inputs
        _, _, mdQ, workspace = work
        if const_expr(sequences is None):
            block = dense_block(cta, cute.size(mdQ, mode=[1]), mO.shape[2], mO.shape[1])
            self.process(block, inputs, lse, work, sink, tidx)
            word = PREPROCESS_WORDS * cta + tidx
            if tidx < PREPROCESS_WORDS and word < cute.size(workspace):
                workspace[word] = Int32(0)
        else:
            table = SequenceTable(*sequences)
            if cta < table.num_tiles() * BLOCKS_PER_TILE:
                block, is_sequence = ragged_block(table, cta, tidx % 32)
                if is_sequence:
                    self.process(block, inputs, lse, work, sink, tidx)

    @cute.jit
    def process(self, block: RowBlock, inputs: tuple, lse: tuple, work: tuple, sink: Any, tidx: Int32):
        """One block of rows."""
        (mO, mdO), (mLSE, mdLSE), (mLSE_log2, mDelta, mdQ, _) = inputs, lse, work
        batch, head, seqlen = block.batch, block.head, block.seqlen
        head_dim_v = cute.size(mO, mode=[3])
        per_pass = THREADS // self.threads_per_row
        column = tidx % self.threads_per_row * VECTOR
        passes = ROWS_PER_WARPGROUP // per_pass
        rO, rdO = (cute.make_rmem_tensor((VECTOR, passes), mO.element_type) for _ in range(2))
        rO.fill(0.0)
        rdO.fill(0.0)
        for i in cutlass.range_constexpr(passes):  # every load is issued before the first is used
            row = block.row + i * per_pass + tidx // self.threads_per_row
            if row < seqlen and column < head_dim_v:
                for source, target in ((mO, rO), (mdO, rdO)):
                    gX = cute.domain_offset((column,), source[batch, block.start + row, head, None])
                    vector = cute.make_tensor(gX.iterator.align(16), cute.make_layout(VECTOR))
                    cute.autovec_copy(vector, target[None, i])
        self.clear(mdQ[block.work_head, block.work_block, None], tidx)
        sink_grad = Float32(0.0)
        for i in cutlass.range_constexpr(passes):
            row_in_block = i * per_pass + tidx // self.threads_per_row
            row, work_row = block.row + row_in_block, block.work_row + row_in_block
            product = rO[None, i].load().to(Float32) * rdO[None, i].load().to(Float32)
            delta = product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            delta = cute.arch.warp_reduction_sum(delta, threads_in_group=self.threads_per_row)
            lse_log2 = Float32.inf
            if row < seqlen:
                natural = mLSE[batch, head, block.start + row]
                if const_expr(self.spec.has_lse_grad):
                    delta = delta - mdLSE[batch, head, block.start + row]
                if natural != -Float32.inf:
                    lse_log2 = natural * LOG2_E
                else:
                    delta = Float32(0.0)  # whatever came in: what merges partial results sends NaN for such rows
            if tidx % self.threads_per_row == 0:
                mLSE_log2[batch, head, work_row] = lse_log2
                mDelta[batch, head, work_row] = delta
                if const_expr(self.spec.has_sink):
                    sink_grad = sink_grad - cute.arch.exp2(sink[0][head] * LOG2_E - lse_log2) * delta
        if const_expr(self.spec.has_sink):
            sink_grad = cute.arch.warp_reduction_sum(sink_grad)
            if tidx % WARP_THREADS == 0:
                sink[1][block.work_head, block.work_block, tidx // WARP_THREADS] = sink_grad

    @cute.jit
    def clear(self, gX: cute.Tensor, tidx: Int32):
        """Zero a row block of the accumulator, 16 bytes a thread at a time."""
        zero = cute.make_rmem_tensor((4,), Float32)
        zero.fill(0.0)
        count = cute.size(gX) // 4
        vectors = cute.make_tensor(gX.iterator.align(16), cute.make_layout((4, count)))
        for i in cutlass.range_constexpr(count // THREADS):
            cute.autovec_copy(zero, vectors[None, i * THREADS + tidx])


def compile_preprocess(spec: PreprocessSpec, options: str = "--enable-tvm-ffi") -> Any:
    """The result takes ``(out, dout, lse, dlse or None, lse_log2, delta, dq_acc, workspace, (sink, parts of its
    gradient) or None, sequences or None)``, on torch's current stream."""
    element = ELEMENTS[spec.dtype]
    batch, seqlen, heads, rows, row_blocks, batch_heads = (cute.sym_int() for _ in range(6))
    per_16_bytes = 16 // ELEMENT_BYTES[spec.dtype]
    head_dim_v = cute.sym_int(divisibility=per_16_bytes)

    def tensor() -> Any:
        strides = tuple(cute.sym_int64(divisibility=per_16_bytes) for _ in range(3))
        return make_fake_tensor(element, (batch, seqlen, heads, head_dim_v), (*strides, 1), assumed_align=16)

    def rows_of(extent: Any) -> Any:
        return make_fake_compact_tensor(Float32, (batch, heads, extent), stride_order=(2, 1, 0), assumed_align=4)

    accumulator = (batch_heads, row_blocks, ROWS_PER_WARPGROUP * spec.head_dim)
    sink_parts = make_fake_compact_tensor(
        Float32, (batch_heads, row_blocks, PREPROCESS_WARPS), stride_order=(2, 1, 0), assumed_align=4
    )
    return cute.compile(
        PreprocessKernel(spec),
        tensor(),
        tensor(),
        rows_of(seqlen),
        rows_of(seqlen) if spec.has_lse_grad else None,
        rows_of(rows),
        rows_of(rows),
        make_fake_compact_tensor(Float32, accumulator, stride_order=(2, 1, 0), assumed_align=16),
        make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4),
        (make_fake_compact_tensor(Float32, (heads,), assumed_align=4), sink_parts) if spec.has_sink else None,
        fake_sequences(spec.ragged),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
