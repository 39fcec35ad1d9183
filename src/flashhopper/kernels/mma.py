"""The consumers: S = Q Kᵀ, online softmax and O += P V on one warpgroup's 64 query rows."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from flashhopper.config import ROWS_PER_WARPGROUP, WARPGROUP_THREADS
from flashhopper.kernels import ptx
from flashhopper.kernels.block_range import BlockRange
from flashhopper.kernels.cta import Cta, Lengths
from flashhopper.kernels.epilogue import Epilogue, Output, Place
from flashhopper.kernels.features import ScoreModifier
from flashhopper.kernels.forward_mods import ScoreMods
from flashhopper.kernels.gemm import gemm
from flashhopper.kernels.mask import ROWS_PER_THREAD, KeyMask, rows_view
from flashhopper.kernels.pipeline import WARPS_PER_WARPGROUP, RingState
from flashhopper.kernels.ragged import Rows
from flashhopper.kernels.softmax import LOG2_E, ExactSoftmax
from flashhopper.kernels.tile_scheduler import PAUSE, Mailbox
from flashhopper.kernels.turns import TurnTaking


class Operands(NamedTuple):
    """The two tiled MMAs and the shared-memory tiles they read: sQ, sK (tile, stages) and sV."""

    mma_QK: cute.TiledMma
    mma_PV: cute.TiledMma
    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor


class Consumer:
    """One consumer warpgroup."""

    def __init__(self, cta: Cta, operands: Operands, softmax: ExactSoftmax, output: Output, index: Int32):
        """``index`` counts the consumer warpgroups. Takes the registers of S, P and O."""
        config, spec = cta.spec.config, cta.spec
        self.cta, self.softmax, self.index = cta, softmax, index
        self.mailbox = cta.scheduler.mailbox
        tidx, _, _ = cute.arch.thread_idx()
        self.lane = tidx % 32
        self.mma_QK, self.mma_PV = operands.mma_QK, operands.mma_PV
        # Operands in shared memory depend on the warpgroup alone; from its first thread they stay in uniform registers.
        first_thread = WARPGROUP_THREADS * index
        thr_QK, thr_PV = self.mma_QK.get_slice(first_thread), self.mma_PV.get_slice(first_thread)
        self.desc_K = self.mma_QK.make_fragment_B(thr_QK.partition_B(operands.sK))
        self.desc_V = self.mma_PV.make_fragment_B(thr_PV.partition_B(operands.sV))
        if const_expr(config.q_in_registers):
            shape_Q = (config.tile_m, spec.head_dim)
            self.a_Q = cute.make_rmem_tensor(self.mma_QK.partition_shape_A(shape_Q), operands.sQ.element_type)
            ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), operands.sQ.element_type)
            self.copy_Q, self.sQ = cute.make_tiled_copy_A(ldmatrix, self.mma_QK), operands.sQ
        else:
            self.desc_Q = self.mma_QK.make_fragment_A(thr_QK.partition_A(operands.sQ))
        shape_S, shape_O = (config.tile_m, config.tile_n), (config.tile_m, spec.head_dim_v)
        self.acc_S = cute.make_rmem_tensor(self.mma_QK.partition_shape_C(shape_S), Float32)
        self.acc_O = cute.make_rmem_tensor(self.mma_PV.partition_shape_C(shape_O), Float32)
        self.rP = cute.make_rmem_tensor(self.mma_PV.partition_shape_A(shape_S), self.mma_PV.op.a_dtype)
        self.rows_S, self.rows_O = rows_view(self.acc_S), rows_view(self.acc_O)
        self.item = cute.make_rmem_tensor((1,), Int32)  # one word of it, by lane
        self.rows_lse = cute.make_rmem_tensor((ROWS_PER_THREAD,), Float32)
        self.mask = KeyMask(config.tile_n, spec.causal, cta.window)
        self.modifier = ScoreModifier(cta.features, config.tile_n)
        self.mods = ScoreMods(spec.features, cta.features, config.tile_n) if spec.features.has_mods else None
        self.turns = TurnTaking(config.warpgroup_order, config.num_consumer_warpgroups, index)
        is_storing_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0
        self.epilogue = Epilogue(cta, output, index, is_storing_warp, self.lane)

    @cute.jit
    def run(self):
        """Items from the mailbox until the end mark. At the top of the loop acc_S holds the item's first scores."""
        config = self.cta.spec.config
        q_state = RingState.start(config.num_q_stages)
        k_state, v_state = RingState.start(config.num_stages), RingState.start(config.num_stages)
        self.turns.start()
        item = Int32(0)
        m_block = self.receive(q_state)
        if m_block >= 0:
            k_state, v_state = self.first_scores(m_block, q_state, k_state, v_state)
        while m_block >= 0:
            k_state, v_state = self.visit_blocks(m_block, q_state, k_state, v_state)
            m_block, q_state, k_state, v_state = self.finish(item, m_block, q_state, k_state, v_state)
            item += 1
        if const_expr(config.tma_store):
            self.epilogue.wait_staging_read()  # shared memory must outlive the stores

    @cute.jit
    def receive(self, q_state: RingState):
        """Wait for the next item; its m_block, or a mark below 0."""
        self.cta.q_ring.wait(q_state)
        if const_expr(self.cta.spec.config.items_by_shuffle):
            self.item[0] = self.mailbox.read(self.lane % Mailbox.ITEM_WORDS, q_state.stage)
        return self.word(Mailbox.M_BLOCK, q_state)

    def word(self, word: int, q_state: RingState) -> Int32:
        """Of the item received last."""
        if self.cta.spec.config.items_by_shuffle:
            return cute.arch.shuffle_sync(self.item[0], word)
        return self.mailbox.read(word, q_state.stage)

    @cute.jit
    def release_item(self, q_state: RingState):
        """A warp: done with Q and with its item."""
        if const_expr(not self.cta.spec.config.items_by_shuffle):
            cute.arch.sync_warp()  # all lanes have read; a shuffle has waited for them already
        self.cta.q_ring.release(q_state, self.lane)

    @cute.jit
    def lengths(self, q_state: RingState):
        """Of the sequence of the item at hand."""
        lengths = Lengths(self.cta.seqlen_q, self.cta.seqlen_k)
        if const_expr(self.cta.spec.features.ragged):
            words = (Mailbox.SEQLEN_Q, Mailbox.SEQLEN_K)
            lengths = Lengths(*(self.word(word, q_state) for word in words))
        return lengths

    def tile_blocks(self, m_block: Int32, lengths: Lengths) -> BlockRange:
        """The key blocks that are loaded for the tile."""
        tile_m = self.cta.spec.config.tile_m
        return self.cta.key_blocks(m_block * tile_m, tile_m, lengths)

    def own_blocks(self, m_block: Int32, lengths: Lengths) -> BlockRange:
        """The key blocks of this warpgroup's 64 rows."""
        first_row = m_block * self.cta.spec.config.tile_m + ROWS_PER_WARPGROUP * self.index
        return self.cta.key_blocks(first_row, ROWS_PER_WARPGROUP, lengths)

    def num_skipped(self, m_block: Int32, lengths: Lengths) -> Int32:
        """Blocks loaded for the tile's later rows that this warpgroup's do not see."""
        return self.tile_blocks(m_block, lengths).end - self.own_blocks(m_block, lengths).end

    def q_operand(self, q_state: RingState) -> cute.Tensor:
        """Q as WGMMA's A operand: registers, or descriptors of a stage."""
        if self.cta.spec.config.q_in_registers:
            return self.a_Q
        return self.desc_Q[None, None, None, q_state.stage]

    @cute.jit
    def first_scores(self, m_block: Int32, q_state: RingState, k_state: RingState, v_state: RingState):
        """S of the block an item visits first, with nothing to overlap it."""
        if const_expr(self.cta.spec.config.q_in_registers):
            self.load_q(q_state)
        num_skipped = self.num_skipped(m_block, self.lengths(q_state))
        if num_skipped > 0:
            # Before the skipped blocks: the others, which free the stages that this warpgroup's block is loaded into,
            # must not wait for its turn.
            self.turns.await_tile(q_state.stage)
            self.turns.pass_tile(q_state.stage)
        k_state, v_state = self.skip_blocks(num_skipped, k_state, v_state)
        self.cta.k_ring.wait(k_state)
        if num_skipped == 0:
            self.turns.await_tile(q_state.stage)
        self.turns.await_block()
        self.issue_qk(q_state, k_state)
        self.turns.pass_issued()
        warpgroup.wait_group(0)
        self.turns.pass_ready()
        if num_skipped == 0:
            self.turns.pass_tile(q_state.stage)
        self.cta.k_ring.release(k_state, self.lane)
        return k_state.next(), v_state

    @cute.jit
    def load_q(self, q_state: RingState):
        """Q into registers. Its addresses, one for each 16 or 32 of head_dim, are found anew for every item: kept, they
        spill."""
        thr_copy = self.copy_Q.get_slice(ptx.reread_thread_index() - WARPGROUP_THREADS)
        tQsQ, tQrQ = thr_copy.partition_S(self.sQ), thr_copy.retile(self.a_Q)
        cute.copy(self.copy_Q, tQsQ[None, None, None, q_state.stage], tQrQ)

    @cute.jit
    def forget_scores(self):
        """Before O leaves: S, and Q in registers, are not needed any more. The item after may come, or not, and in the
        second case the compiler would keep them as they are."""
        if const_expr(not self.cta.spec.config.prefetch_scores):
            self.acc_S.fill(0.0)
        if const_expr(self.cta.spec.config.q_in_registers):
            words = cute.size(self.a_Q) * self.a_Q.element_type.width // 32
            cute.make_tensor(cute.recast_ptr(self.a_Q.iterator, dtype=Int32), cute.make_layout(words)).fill(0)

    @cute.jit
    def skip_blocks(self, count: Int32, k_state: RingState, v_state: RingState):
        """Release blocks that only other warpgroups see, and let turns pass."""
        for _ in cutlass.range(count, unroll=1):
            self.cta.k_ring.wait(k_state)
            self.cta.k_ring.release(k_state, self.lane)
            self.turns.await_block()
            self.turns.pass_block()
            self.cta.v_ring.wait(v_state)
            self.cta.v_ring.release(v_state, self.lane)
            k_state, v_state = k_state.next(), v_state.next()
        return k_state, v_state

    @cute.jit
    def issue_qk(self, q_state: RingState, k_state: RingState):
        """S = Q Kᵀ as one WGMMA group."""
        warpgroup.fence()
        stage_K = self.desc_K[None, None, None, k_state.stage]
        gemm(self.mma_QK, self.acc_S, self.q_operand(q_state), stage_K, True)

    @cute.jit
    def issue_pv(self, v_state: RingState):
        """O += P V as one WGMMA group."""
        warpgroup.fence()
        gemm(self.mma_PV, self.acc_O, self.rP, self.desc_V[None, None, None, v_state.stage], False)

    @cute.jit
    def visit_blocks(self, m_block: Int32, q_state: RingState, k_state: RingState, v_state: RingState):
        """P of every block and P·V of all but the last: the first block, the masked loop, the unmasked loop."""
        config = self.cta.spec.config
        lengths = self.lengths(q_state)
        blocks = self.own_blocks(m_block, lengths)
        num_unmasked, last_block = blocks.num_unmasked, blocks.end - 1
        if const_expr(not config.split_masked_loop):
            num_unmasked = Int32(0)
        if const_expr(self.cta.may_fail):
            if self.word(Mailbox.EXACT, q_state) != 0:
                num_unmasked = Int32(0)
        row = self.first_row(m_block)
        self.mask.set_rows(row, self.lane, *lengths)
        if const_expr(self.cta.features.alibi is not None):
            head, batch = (self.word(word, q_state) for word in (Mailbox.HEAD, Mailbox.BATCH))
            self.modifier.set_rows(row + lengths.k - lengths.q, head, batch, self.lane)
        if const_expr(self.mods is not None):
            head, batch = (self.word(word, q_state) for word in (Mailbox.HEAD, Mailbox.BATCH))
            self.mods.set_rows(row, head, batch, lengths)
        self.softmax.reset()
        self.begin_item(m_block, q_state)
        self.begin_block(last_block)
        self.modifier.apply(self.rows_S, last_block)
        if const_expr(self.mods is not None):
            self.mods.apply(self.rows_S, last_block, self.lane, lambda: self.cta.q_ring.wait(q_state))
        if self.mask.cuts_last_block(lengths.k):
            self.mask.apply(self.rows_S, last_block)
        self.softmax.exact_step(self.rows_S)
        self.convert_p(True)
        self.acc_O.fill(0.0)
        num_right = blocks.num_blocks - blocks.num_left - num_unmasked
        if const_expr(self.mods is not None):
            num_right = blocks.num_blocks  # nobody knows what they leave whole
        for j in cutlass.range(1, num_right, unroll=1):
            k_state, v_state = self.one_n_block(q_state, k_state, v_state, last_block - j, True)
        if const_expr(self.mods is None):
            for j in cutlass.range(num_right, num_right + num_unmasked, unroll=1):
                k_state, v_state = self.one_n_block(q_state, k_state, v_state, last_block - j, False)
        if const_expr(self.cta.window is not None and self.mods is None):
            for j in cutlass.range(num_right + num_unmasked, blocks.num_blocks, unroll=1):
                k_state, v_state = self.one_n_block(q_state, k_state, v_state, last_block - j, True)
        return k_state, v_state

    def first_row(self, m_block: Int32) -> Int32:
        """The first of this thread's two rows in the query sequence."""
        tile_m = self.cta.spec.config.tile_m
        thread = ptx.reread_thread_index() % WARPGROUP_THREADS
        return m_block * tile_m + ROWS_PER_WARPGROUP * self.index + 16 * (thread // 32) + thread % 32 // 4

    @cute.jit
    def one_n_block(
        self, q_state: RingState, k_state: RingState, v_state: RingState, n_block: Int32, masked: Constexpr[bool]
    ):
        """S of this block and P·V of the one before; softmax runs while P·V is in flight."""
        overlap = self.cta.spec.config.overlap_gemm_softmax
        self.begin_block(n_block)
        if const_expr(not overlap):
            self.cta.v_ring.wait(v_state)
            self.issue_pv(v_state)
            warpgroup.wait_group(0)
        self.cta.k_ring.wait(k_state)
        self.turns.await_block()
        self.issue_qk(q_state, k_state)
        if const_expr(overlap):
            self.cta.v_ring.wait(v_state)
            self.issue_pv(v_state)
        self.turns.pass_issued()
        warpgroup.wait_group(1 if overlap else 0)
        self.turns.pass_ready()
        self.cta.k_ring.release(k_state, self.lane)
        rescale = Boolean(True)
        self.modifier.apply(self.rows_S, n_block)
        if const_expr(self.mods is not None):
            self.mods.apply(self.rows_S, n_block, self.lane, lambda: self.cta.q_ring.wait(q_state))
        if const_expr(masked):
            self.mask.apply(self.rows_S, n_block)
            self.softmax.exact_step(self.rows_S)
            self.complete_pv(v_state, 0)
        else:
            rescale = self.unmasked_softmax(v_state)
        self.cta.v_ring.release(v_state, self.lane)
        if rescale:
            self.softmax.scale_rows(self.rows_O)
        self.convert_p(masked)  # only now: P·V of the block before has read these registers
        return k_state.next(), v_state.next()

    @cute.jit
    def begin_item(self, m_block: Int32, q_state: RingState):
        """Before the softmax of an item's first block: what FP8 needs of the item."""

    @cute.jit
    def begin_block(self, n_block: Int32):
        """Before the softmax of a block: what FP8 needs of the block."""

    @cute.jit
    def unmasked_softmax(self, v_state: RingState):
        """Softmax of a block that no mask cuts, and the end of the P·V it runs under. Returns whether O must be
        rescaled."""
        rescale = self.softmax.unmasked_step(self.rows_S)
        self.complete_pv(v_state, 0)
        return rescale

    @cute.jit
    def complete_pv(self, v_state: RingState, in_flight: Constexpr[int]):
        """Wait for P·V; ``in_flight`` WGMMA groups were issued after it and may go on."""
        warpgroup.wait_group(in_flight)

    @cute.jit
    def gather_output(self):
        """After the last P·V: what FP8 keeps of O elsewhere."""

    @cute.jit
    def normalise(self, head: Int32, batch: Int32):
        """``batch``: entry or sequence. O from the sums: divided by the row sums."""
        self.softmax.scale_rows(self.rows_O)

    @cute.jit
    def convert_p(self, masked: Constexpr[bool]):
        """P to the operand's dtype: accumulator order is register-operand order for 16-bit types."""
        pairs = cute.size(self.acc_S) // 2
        flat_S = cute.make_tensor(self.acc_S.iterator, cute.make_layout(2 * pairs))
        packed_P = cute.make_tensor(cute.recast_ptr(self.rP.iterator, dtype=Int32), cute.make_layout(pairs))
        for i in cutlass.range_constexpr(pairs):
            packed_P[i] = ptx.pack_16bit(flat_S[2 * i], flat_S[2 * i + 1], self.rP.element_type)

    @cute.jit
    def sink(self, head: Int32, lengths: Lengths):
        """The sink's logit in base 2, or None. Rows that belong to no sequence have none: their LSE is -inf."""
        sink = None
        if const_expr(self.cta.features.sink is not None):
            sink = self.cta.features.sink[head] * LOG2_E
            if const_expr(self.cta.spec.features.ragged):
                sink = sink if lengths.k >= 0 else -Float32.inf
        return sink

    @cute.jit
    def finish(self, item: Int32, m_block: Int32, q_state: RingState, k_state: RingState, v_state: RingState):
        """The last P·V, O and LSE out, and the next item's first scores, if possible before O leaves."""
        config = self.cta.spec.config
        words = (Mailbox.HEAD, Mailbox.BATCH, Mailbox.EXACT)
        head, batch, exact = (self.word(word, q_state) for word in words)
        lengths, start, entry = self.lengths(q_state), Int32(0), batch
        if const_expr(self.cta.spec.features.ragged):
            start, entry = self.word(Mailbox.START_Q, q_state), Int32(0)
        place = Place(entry, head, Rows(start, lengths.q))
        row = self.first_row(m_block)
        self.cta.v_ring.wait(v_state)
        self.issue_pv(v_state)
        self.release_item(q_state)
        trusted = self.softmax.finalize(self.rows_lse, self.mask, self.lane, self.sink(head, lengths))
        self.epilogue.write_lse(self.rows_lse, row, place)

        next_q, next_m_block, is_issued = q_state.next(), Int32(0), Boolean(False)
        if const_expr(config.prefetch_scores):
            next_m_block = self.receive(next_q)
            is_issued = next_m_block >= 0
            if is_issued:
                is_issued = self.num_skipped(next_m_block, self.lengths(next_q)) == 0
            if is_issued:
                self.turns.await_tile(next_q.stage)
                self.turns.await_block()
                self.cta.k_ring.wait(k_state)
            # Issued in any case, ptxas serialises conditional WGMMAs; without an item the scores are not used.
            self.issue_qk(next_q, k_state)
            if is_issued:
                self.turns.pass_block()
                self.turns.pass_tile(next_q.stage)
        self.complete_pv(v_state, 1 if config.prefetch_scores else 0)
        self.cta.v_ring.release(v_state, self.lane)
        v_state = v_state.next()
        if const_expr(self.cta.window is not None):
            num_skipped = self.own_blocks(m_block, lengths).first - self.tile_blocks(m_block, lengths).first
            k_state, v_state = self.skip_blocks(num_skipped, k_state, v_state)

        self.forget_scores()
        self.gather_output()
        if const_expr(self.cta.may_fail):
            trusted = trusted & self.softmax.is_finite(self.acc_O)
            self.mailbox.judge(item, trusted, exact, self.lane)
        self.normalise(head, batch)
        if const_expr(self.mask.hides_positions):
            self.mask.clear_rows_without_keys(self.rows_O, self.lane)
        if const_expr(self.mods is not None):
            self.softmax.clear_rows_without_weight(self.rows_O)
        if const_expr(config.tma_store):
            self.epilogue.write_by_tma(self.acc_O, m_block, place)
        else:
            self.epilogue.write_from_registers(self.acc_O, row, place)

        if const_expr(config.prefetch_scores):
            warpgroup.wait_group(0)
            if is_issued:
                self.cta.k_ring.release(k_state, self.lane)
                k_state = k_state.next()
            if next_m_block == PAUSE:
                self.release_item(next_q)
                next_q = next_q.next()
                next_m_block = self.receive(next_q)
        else:
            next_m_block = self.receive(next_q)
        if next_m_block >= 0 and not is_issued:
            k_state, v_state = self.first_scores(next_m_block, next_q, k_state, v_state)
        return next_m_block, next_q, k_state, v_state
