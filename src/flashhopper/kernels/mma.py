"""The consumers: S = Q Kᵀ, online softmax and O += P V on one warpgroup's 64 query rows."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from flashhopper.config import ROWS_PER_WARPGROUP, WARPGROUP_THREADS
from flashhopper.kernels import ptx
from flashhopper.kernels.cta import Cta
from flashhopper.kernels.epilogue import Epilogue, Output
from flashhopper.kernels.mask import ROWS_PER_THREAD, KeyMask, rows_view
from flashhopper.kernels.pipeline import RingState
from flashhopper.kernels.smem import NamedBarrier
from flashhopper.kernels.softmax import ExactSoftmax


class Operands(NamedTuple):
    """The two tiled MMAs and the shared-memory tiles they read: sQ, sK (tile, stages) and sV."""

    mma_QK: cute.TiledMma
    mma_PV: cute.TiledMma
    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor


@cute.jit
def gemm(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, zero_init: Constexpr[bool]):
    """Issue acc (+)= a · bᵀ as one WGMMA group. The atom is private: ``set`` on the caller's would escape the loop."""
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero_init)
    for k_block in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k_block], b[None, None, k_block], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


class TurnTaking:
    """Named barriers that order the warpgroups, so that one's softmax runs under another's GEMMs.

    ``ping_pong``: every block's GEMMs are issued in turn. ``stagger``: only the first GEMM of a tile waits, for the one of
    the warpgroup before; from there they stay apart by themselves.
    """

    def __init__(self, order: str, num_warpgroups: int, index: Int32):
        self.ping_pong = order == "ping_pong" and num_warpgroups > 1
        self.stagger = order == "stagger" and num_warpgroups > 1
        self.last, self.index = num_warpgroups - 1, index
        self.mine = NamedBarrier.TURN + index
        self.next = NamedBarrier.TURN + (index + 1) % num_warpgroups

    @cute.jit
    def start(self):
        if const_expr(self.ping_pong):
            if self.index == self.last:
                ptx.named_barrier_arrive(NamedBarrier.TURN, 2 * WARPGROUP_THREADS)

    @cute.jit
    def await_block(self):
        if const_expr(self.ping_pong):
            ptx.named_barrier_wait(self.mine, 2 * WARPGROUP_THREADS)

    @cute.jit
    def pass_block(self):
        if const_expr(self.ping_pong):
            ptx.named_barrier_arrive(self.next, 2 * WARPGROUP_THREADS)

    @cute.jit
    def await_tile(self):
        if const_expr(self.stagger):
            if self.index > 0:
                ptx.named_barrier_wait(self.mine, 2 * WARPGROUP_THREADS)

    @cute.jit
    def pass_tile(self):
        if const_expr(self.stagger):
            if self.index < self.last:
                ptx.named_barrier_arrive(self.next, 2 * WARPGROUP_THREADS)


class Consumer:
    """One consumer warpgroup."""

    def __init__(self, cta: Cta, operands: Operands, softmax: ExactSoftmax, output: Output, index: Int32):
        """``index`` counts the consumer warpgroups. Takes the registers of S, P and O."""
        config, spec = cta.spec.config, cta.spec
        self.cta, self.softmax, self.index = cta, softmax, index
        tidx, _, _ = cute.arch.thread_idx()
        self.lane = tidx % 32
        consumer_thread = tidx - WARPGROUP_THREADS
        self.first_row = ROWS_PER_WARPGROUP * index + 16 * (cute.arch.warp_idx() % 4) + self.lane // 4
        self.mma_QK, self.mma_PV = operands.mma_QK, operands.mma_PV
        thr_QK, thr_PV = self.mma_QK.get_slice(consumer_thread), self.mma_PV.get_slice(consumer_thread)
        self.desc_K = self.mma_QK.make_fragment_B(thr_QK.partition_B(operands.sK))
        self.desc_V = self.mma_PV.make_fragment_B(thr_PV.partition_B(operands.sV))
        if const_expr(config.q_in_registers):
            shape_Q = (config.tile_m, spec.head_dim)
            self.a_Q = cute.make_rmem_tensor(self.mma_QK.partition_shape_A(shape_Q), operands.sQ.element_type)
            ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), operands.sQ.element_type)
            self.copy_Q = cute.make_tiled_copy_A(ldmatrix, self.mma_QK)
            thr_copy = self.copy_Q.get_slice(consumer_thread)
            self.tQsQ, self.tQrQ = thr_copy.partition_S(operands.sQ), thr_copy.retile(self.a_Q)
        else:
            self.desc_Q = self.mma_QK.make_fragment_A(thr_QK.partition_A(operands.sQ))
        shape_S, shape_O = (config.tile_m, config.tile_n), (config.tile_m, spec.head_dim_v)
        self.acc_S = cute.make_rmem_tensor(self.mma_QK.partition_shape_C(shape_S), Float32)
        self.acc_O = cute.make_rmem_tensor(self.mma_PV.partition_shape_C(shape_O), Float32)
        self.rP = cute.make_rmem_tensor(self.mma_PV.partition_shape_A(shape_S), operands.sV.element_type)
        self.rows_S, self.rows_O = rows_view(self.acc_S), rows_view(self.acc_O)
        self.rows_lse = cute.make_rmem_tensor((ROWS_PER_THREAD,), Float32)
        self.mask = KeyMask(config.tile_n, spec.causal)
        self.turns = TurnTaking(config.warpgroup_order, config.num_consumer_warpgroups, index)
        self.epilogue = Epilogue(cta, output, index, consumer_thread % WARPGROUP_THREADS)

    @cute.jit
    def run(self):
        """Items from the mailbox until the end mark."""
        config = self.cta.spec.config
        q_state = RingState.start(config.num_q_stages)
        k_state, v_state = RingState.start(config.num_stages), RingState.start(config.num_stages)
        self.turns.start()
        item = Int32(0)
        self.cta.q_ring.wait(q_state)
        m_block = self.cta.scheduler.mailbox.read_m_block(q_state.stage)
        while m_block >= 0:
            k_state, v_state = self.attend(item, m_block, q_state, k_state, v_state)
            item += 1
            q_state = q_state.next()
            self.cta.q_ring.wait(q_state)
            m_block = self.cta.scheduler.mailbox.read_m_block(q_state.stage)
        if const_expr(self.cta.spec.config.tma_store):
            self.epilogue.wait_staging_read()  # shared memory must outlive the stores

    @cute.jit
    def attend(self, item: Int32, m_block: Int32, q_state: RingState, k_state: RingState, v_state: RingState):
        """One tile: the masked loop, the unmasked loop, the last P·V, and the results out."""
        config = self.cta.spec.config
        head, batch, exact = self.cta.scheduler.mailbox.read_rest(q_state.stage)
        num_blocks, num_unmasked = self.cta.key_blocks(m_block)
        if const_expr(not config.split_masked_loop):
            num_unmasked = Int32(0)
        if const_expr(self.cta.may_fail):
            if exact != 0:
                num_unmasked = Int32(0)
        row = m_block * config.tile_m + self.first_row
        self.mask.set_rows(row, self.lane, self.cta.seqlen_q, self.cta.seqlen_k)
        if const_expr(config.q_in_registers):
            cute.copy(self.copy_Q, self.tQsQ[None, None, None, q_state.stage], self.tQrQ)
            self.cta.q_ring.release(q_state, self.lane)
            a_Q = self.a_Q
        else:
            a_Q = self.desc_Q[None, None, None, q_state.stage]

        k_state = self.first_n_block(a_Q, k_state, num_blocks - 1)
        for j in cutlass.range(1, num_blocks - num_unmasked, unroll=1):
            k_state, v_state = self.one_n_block(a_Q, k_state, v_state, num_blocks - 1 - j, True)
        for j in cutlass.range(num_blocks - num_unmasked, num_blocks, unroll=1):
            k_state, v_state = self.one_n_block(a_Q, k_state, v_state, num_blocks - 1 - j, False)
        if const_expr(not config.q_in_registers and not config.share_qo_smem):
            self.cta.q_ring.release(q_state, self.lane)
        v_state = self.finish(v_state, item, m_block, head, batch, exact)
        if const_expr(config.share_qo_smem):
            self.epilogue.wait_staging_read()
            if self.epilogue.thread < 32:
                self.cta.q_ring.release(q_state, self.lane)
        return k_state, v_state

    @cute.jit
    def first_n_block(self, a_Q: cute.Tensor, k_state: RingState, n_block: Int32):
        """S and P of the block visited first; O starts at zero."""
        self.softmax.reset()
        self.cta.k_ring.wait(k_state)
        self.turns.await_tile()
        self.turns.await_block()
        warpgroup.fence()
        gemm(self.mma_QK, self.acc_S, a_Q, self.desc_K[None, None, None, k_state.stage], True)
        self.turns.pass_block()
        warpgroup.wait_group(0)
        self.turns.pass_tile()
        self.cta.k_ring.release(k_state, self.lane)
        self.mask.apply(self.rows_S, n_block)
        self.softmax.exact_step(self.rows_S)
        self.convert_p()
        self.acc_O.fill(0.0)
        return k_state.next()

    @cute.jit
    def one_n_block(
        self, a_Q: cute.Tensor, k_state: RingState, v_state: RingState, n_block: Int32, masked: Constexpr[bool]
    ):
        """S of this block and P·V of the one before; softmax runs while P·V is in flight."""
        overlap = self.cta.spec.config.overlap_gemm_softmax
        if const_expr(not overlap):
            v_state = self.last_pv(v_state)
        self.cta.k_ring.wait(k_state)
        self.turns.await_block()
        warpgroup.fence()
        gemm(self.mma_QK, self.acc_S, a_Q, self.desc_K[None, None, None, k_state.stage], True)
        if const_expr(overlap):
            self.cta.v_ring.wait(v_state)
            warpgroup.fence()
            gemm(self.mma_PV, self.acc_O, self.rP, self.desc_V[None, None, None, v_state.stage], False)
        self.turns.pass_block()
        warpgroup.wait_group(1 if overlap else 0)
        self.cta.k_ring.release(k_state, self.lane)
        rescale = cutlass.Boolean(True)
        if const_expr(masked):
            self.mask.apply(self.rows_S, n_block)
            self.softmax.exact_step(self.rows_S)
        else:
            rescale = self.softmax.unmasked_step(self.rows_S)
        if const_expr(overlap):
            warpgroup.wait_group(0)
            self.cta.v_ring.release(v_state, self.lane)
            v_state = v_state.next()
        if rescale:
            self.softmax.scale_rows(self.rows_O)
        self.convert_p()  # only now: P·V of the block before has read these registers
        return k_state.next(), v_state

    @cute.jit
    def last_pv(self, v_state: RingState):
        """O += P V with nothing to overlap it."""
        self.cta.v_ring.wait(v_state)
        warpgroup.fence()
        gemm(self.mma_PV, self.acc_O, self.rP, self.desc_V[None, None, None, v_state.stage], False)
        warpgroup.wait_group(0)
        self.cta.v_ring.release(v_state, self.lane)
        return v_state.next()

    @cute.jit
    def convert_p(self):
        """P to the operand's dtype: accumulator order is register-operand order for 16-bit types."""
        pairs = cute.size(self.acc_S) // 2
        flat_S = cute.make_tensor(self.acc_S.iterator, cute.make_layout(2 * pairs))
        packed_P = cute.make_tensor(cute.recast_ptr(self.rP.iterator, dtype=Int32), cute.make_layout(pairs))
        for i in cutlass.range_constexpr(pairs):
            packed_P[i] = ptx.pack_16bit(flat_S[2 * i], flat_S[2 * i + 1], self.rP.element_type)

    @cute.jit
    def finish(self, v_state: RingState, item: Int32, m_block: Int32, head: Int32, batch: Int32, exact: Int32):
        """The last P·V, verdict, late normalisation, O and LSE out."""
        config = self.cta.spec.config
        row = m_block * config.tile_m + self.first_row
        self.cta.v_ring.wait(v_state)
        warpgroup.fence()
        gemm(self.mma_PV, self.acc_O, self.rP, self.desc_V[None, None, None, v_state.stage], False)
        trusted = self.softmax.finalize(self.rows_lse, self.mask, self.lane)
        self.epilogue.write_lse(self.rows_lse, row, head, batch)
        warpgroup.wait_group(0)
        self.cta.v_ring.release(v_state, self.lane)
        v_state = v_state.next()
        if const_expr(self.cta.may_fail):
            trusted = trusted & self.softmax.is_finite(self.acc_O)
            self.cta.scheduler.mailbox.judge(item, trusted, exact, self.lane)
        self.softmax.scale_rows(self.rows_O)
        if const_expr(config.tma_store):
            self.epilogue.write_by_tma(self.acc_O, m_block, head, batch)
        else:
            self.epilogue.write_from_registers(self.acc_O, row, head, batch)
        return v_state
