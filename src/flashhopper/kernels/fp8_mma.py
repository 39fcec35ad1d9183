"""The consumers of the FP8 forward: scales, P as e4m3, and P·V in two levels of accumulation."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float8E4M3FN, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flashhopper.config import ROWS_PER_WARPGROUP, WARPGROUP_THREADS
from flashhopper.kernels import ptx
from flashhopper.kernels.cta import Cta
from flashhopper.kernels.epilogue import Output
from flashhopper.kernels.fp8_softmax import Fp8ExactSoftmax
from flashhopper.kernels.gemm import gemm
from flashhopper.kernels.mask import ROWS_PER_THREAD, rows_view
from flashhopper.kernels.mma import Consumer, Operands
from flashhopper.kernels.pipeline import RingState
from flashhopper.kernels.tile_scheduler import Mailbox


class Scales:
    """What undoes the quantisation, fp32: scales of blocks of rows of Q ``(b, h, blocks)`` and K ``(b, hk, blocks)``,
    scale and mean of V's channels ``(b, hk, head_dim_v)``."""

    def __init__(self, tensors: tuple, log2_rows: tuple[Int32, Int32]):
        """``log2_rows``: of the rows of Q and of K that share a scale; a power of two each."""
        self.mQ, self.mK, self.mV, self.mMean = tensors
        self.log2_rows_Q, self.log2_rows_K = log2_rows


class Fp8Consumer(Consumer):
    """One consumer warpgroup on FP8 operands.

    The accumulator of an FP8 WGMMA keeps 14 bits: summed in it, 32k keys whose values have a mean lose a third of it.
    With ``two_level_columns`` each block's P·V starts from zero, so many columns at a time, and is added to O in fp32;
    with ``flush_blocks`` O is added to sums in shared memory, and starts from zero, after so many blocks.
    """

    def __init__(
        self, cta: Cta, operands: Operands, softmax: Fp8ExactSoftmax, output: Output, index: Int32, scales: Scales
    ):
        super().__init__(cta, operands, softmax, output, index)
        self.scales = scales
        self.packed_P = cute.make_tensor(
            cute.recast_ptr(self.rP.iterator, dtype=Int32), cute.make_layout(cute.size(self.acc_S) // 4)
        )
        config = cta.spec.config
        columns = config.two_level_columns
        self.num_chunks = cta.spec.head_dim_v // columns if columns else 0
        if const_expr(self.num_chunks > 0):
            shape = (config.tile_m, config.two_level_columns)
            self.acc_PV = cute.make_rmem_tensor(self.mma_PV.partition_shape_C(shape), Float32)
        if const_expr(config.flush_blocks > 0):
            self.num_blocks = cute.make_rmem_tensor(
                (1,), Int32
            )  # of the item, whose P V is done; -1 before the first P

    @cute.jit
    def begin_item(self, m_block: Int32, q_state: RingState):
        """The scale of this warpgroup's rows; rows past the end may have none and take that of the last."""
        head, batch = (self.word(word, q_state) for word in (Mailbox.HEAD, Mailbox.BATCH))
        head_k = head // self.cta.heads_per_kv_head
        first_row = m_block * self.cta.spec.config.tile_m + ROWS_PER_WARPGROUP * self.index
        block = cutlass.min(first_row, self.lengths(q_state).q - 1) >> self.scales.log2_rows_Q
        if const_expr(self.cta.spec.features.ragged):
            # Every sequence has blocks of its own: kernels.ragged.own_block.
            words = (Mailbox.START_Q, Mailbox.START_K)
            start_q, start_k = (self.word(word, q_state) for word in words)
            block = block + (start_q >> self.scales.log2_rows_Q) + batch
            first_K = (start_k >> self.scales.log2_rows_K) + batch
            self.scales_K = cute.domain_offset((first_K,), self.scales.mK[0, head_k, None])
            self.softmax.begin_item(self.scales.mQ[0, head, block])
        else:
            self.scales_K = self.scales.mK[batch, head_k, None]
            self.softmax.begin_item(self.scales.mQ[batch, head, block])
        if const_expr(self.cta.spec.config.flush_blocks > 0):
            self.num_blocks[0] = Int32(-1)

    @cute.jit
    def begin_block(self, n_block: Int32):
        block = (n_block * self.cta.spec.config.tile_n) >> self.scales.log2_rows_K
        self.softmax.begin_block(self.scales_K[block])

    @cute.jit
    def issue_pv(self, v_state: RingState):
        """P V as one WGMMA group: the first columns from zero, or all into O."""
        if const_expr(self.num_chunks > 0):
            self.issue_columns(v_state, 0)
        else:
            warpgroup.fence()
            gemm(self.mma_PV, self.acc_O, self.rP, self.desc_V[None, None, None, v_state.stage], False)

    @cute.jit
    def issue_columns(self, v_state: RingState, chunk: Constexpr[int]):
        """One chunk of columns of P V from zero."""
        columns = self.desc_V[None, chunk, None, v_state.stage]
        shape, stride = columns.layout.shape, columns.layout.stride
        layout = cute.make_layout((shape[0], 1, shape[1]), stride=(stride[0], 0, stride[1]))
        warpgroup.fence()
        gemm(self.mma_PV, self.acc_PV, self.rP, cute.make_tensor(columns.iterator, layout), True)

    @cute.jit
    def complete_pv(self, v_state: RingState, in_flight: Constexpr[int]):
        """Wait for P V; with two levels add it to O, and compute what columns are left."""
        warpgroup.wait_group(in_flight)
        if const_expr(self.num_chunks > 0):
            self.add_columns(0)
            for chunk in cutlass.range_constexpr(1, self.num_chunks):
                self.next_columns(v_state, chunk)
                warpgroup.wait_group(0)
                self.add_columns(chunk)

    @cute.jit
    def unmasked_softmax(self, v_state: RingState):
        """Softmax under P V. With several chunks of columns each has its part of the softmax to run under."""
        rescale = Boolean(False)
        if const_expr(self.num_chunks > 1 and self.softmax.is_lazy):
            for chunk in cutlass.range_constexpr(self.num_chunks):
                if const_expr(chunk > 0):
                    self.next_columns(v_state, chunk)
                self.softmax.unmasked_step(self.part_of_scores(chunk))
                warpgroup.wait_group(0)
                self.add_columns(chunk)
        else:
            rescale = self.softmax.unmasked_step(self.rows_S)
            self.complete_pv(v_state, 0)
        return rescale

    def part_of_scores(self, chunk: int) -> cute.Tensor:
        """The rows of S in one of ``num_chunks`` nearly equal parts of its columns."""
        groups = cute.size(self.acc_S) // 4  # of 8 columns, 4 registers each
        first, last = groups * chunk // self.num_chunks, groups * (chunk + 1) // self.num_chunks
        part = cute.make_tensor(self.acc_S.iterator + 4 * first, cute.make_layout(4 * (last - first)))
        return rows_view(part)

    @cute.jit
    def next_columns(self, v_state: RingState, chunk: Constexpr[int]):
        """Issue a chunk after the first. Its stage is full already; the branch of this wait keeps ptxas from issuing
        the WGMMA before the additions above it, which takes two sets of registers: 22 spilled at head_dim 256."""
        self.cta.v_ring.wait(v_state)
        self.issue_columns(v_state, chunk)

    @cute.jit
    def add_columns(self, chunk: Constexpr[int]):
        """O += P V, one chunk."""
        size = cute.size(self.acc_PV)
        flat_PV = cute.make_tensor(self.acc_PV.iterator, cute.make_layout(size))
        flat_O = cute.make_tensor(self.acc_O.iterator + chunk * size, cute.make_layout(size))
        for i in cutlass.range_constexpr(size):
            flat_O[i] = ptx.add_here(flat_O[i], flat_PV[i])

    @cute.jit
    def convert_p(self, masked: Constexpr[bool]):
        """P to e4m3. Where a lazy reference has been passed by too much, move it and convert again."""
        self.pack_p()
        if const_expr(self.softmax.is_lazy and not masked):
            if self.softmax.is_passed(self.packed_P):
                self.softmax.move_reference(self.rows_S, self.rows_O)
                self.pack_p()
        if const_expr(self.cta.spec.config.flush_blocks > 0):
            self.num_blocks[0] = self.num_blocks[0] + 1
            if self.num_blocks[0] % self.cta.spec.config.flush_blocks == 0 and self.num_blocks[0] > 0:
                self.flush()

    def flushed_output(self) -> cute.Tensor:
        """This thread's registers of O in shared memory, fp32, by fours: 16 bytes that follow its neighbour's."""
        sO, quads = self.epilogue.output.sO, cute.size(self.acc_O) // 4
        first = self.index * 4 * quads * WARPGROUP_THREADS
        thread = ptx.reread_thread_index() % WARPGROUP_THREADS
        base = cute.recast_ptr(
            cute.make_ptr(sO.element_type, sO.iterator.toint(), cute.AddressSpace.smem), dtype=Float32
        )
        layout = cute.make_layout((4, quads), stride=(1, 4 * WARPGROUP_THREADS))
        return cute.make_tensor((base + first + 4 * thread).align(16), layout)

    @cute.jit
    def flush(self):
        """O to shared memory, where what lies there follows the reference, and again from zero."""
        self.epilogue.free_staging()
        flushed = self.flushed_output()
        self.add_flushed(flushed, self.num_blocks[0] > self.cta.spec.config.flush_blocks)
        registers = cute.make_tensor(self.acc_O.iterator, self.output_quads())
        for quad in cutlass.range_constexpr(cute.size(registers, mode=[1])):
            cute.autovec_copy(registers[None, quad], flushed[None, quad])
        self.acc_O.fill(0.0)
        self.softmax.flushed_scale.fill(1.0)

    @cute.jit
    def gather_output(self):
        if const_expr(self.cta.spec.config.flush_blocks > 0):
            self.add_flushed(self.flushed_output(), self.num_blocks[0] >= self.cta.spec.config.flush_blocks)

    @cute.jit
    def add_flushed(self, flushed: cute.Tensor, holds: Boolean):
        """Add to O what shared memory holds of it, if it does."""
        registers = cute.make_tensor(self.acc_O.iterator, self.output_quads())
        scale = self.softmax.flushed_scale
        if holds:
            for quad in cutlass.range_constexpr(cute.size(registers, mode=[1])):
                four = cute.make_rmem_tensor((4,), Float32)
                cute.autovec_copy(flushed[None, quad], four)
                for i in cutlass.range_constexpr(4):
                    registers[i, quad] = four[i] * scale[i // 2] + registers[i, quad]

    def output_quads(self) -> cute.Layout:
        """Registers of O by fours: two neighbouring columns of both rows."""
        return cute.make_layout((4, cute.size(self.acc_O) // 4))

    @cute.jit
    def pack_p(self):
        """A register of the operand holds the pairs that a thread has of two neighbouring groups of 8 keys: V's keys
        are permuted to match (PTX ISA 9.7.15.5.1, wgmma m64nNk32)."""
        flat_S = cute.make_tensor(self.acc_S.iterator, cute.make_layout(cute.size(self.acc_S)))
        for i in cutlass.range_constexpr(cute.size(self.packed_P)):
            first = 2 * (i % 2) + 8 * (i // 2)
            four = (flat_S[first], flat_S[first + 1], flat_S[first + 4], flat_S[first + 5])
            self.packed_P[i] = ptx.pack_8bit(four, Float8E4M3FN)

    @cute.jit
    def normalise(self, head: Int32, batch: Int32):
        """O from the sums: divided by the row sums, times V's scales, plus V's means, since the weights sum to 1."""
        head_k = head // self.cta.heads_per_kv_head
        scales_V, means_V = self.scales.mV[batch, head_k, None], self.scales.mMean[batch, head_k, None]
        for c in cutlass.range_constexpr(self.cta.spec.head_dim_v // 4):
            column = 8 * (c // 2) + 2 * (self.lane % 4) + c % 2
            scale, mean = scales_V[column], means_V[column]
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                self.rows_O[r, c] = self.rows_O[r, c] * self.softmax.scores_scale[r] * scale + mean
        if const_expr(self.cta.spec.features.ragged and not self.mask.hides_positions):
            self.mask.clear_rows_without_keys(self.rows_O, self.lane)  # of sequences without keys: no mean either
