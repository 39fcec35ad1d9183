"""dQ: one warpgroup computes dS K of one query block at a time, one warp adds it to the fp32 accumulator in memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from flashhopper.config import ROWS_PER_WARPGROUP, WARP_THREADS, WARPGROUP_THREADS
from flashhopper.kernels import ptx
from flashhopper.kernels.backward_cta import BackwardCta, TileSlot
from flashhopper.kernels.backward_smem import BackwardBarrier
from flashhopper.kernels.gemm import gemm
from flashhopper.kernels.pipeline import RingState


class DqTiles:
    """What dQ is made of: dS (tile_m, tile_n, stages), Kᵀ (head_dim, tile_n, stages), and the staging tiles. Of a pair
    also the other CTA's Kᵀ (head_dim / 2, tile_n, stages)."""

    other_Kt: cute.Tensor

    def __init__(self, mma: cute.TiledMma, sdS: cute.Tensor, sKt: cute.Tensor, sdQ: cute.Pointer):
        self.mma, self.sdS, self.sKt, self.sdQ = mma, sdS, sKt, sdQ


class DqWarpgroup:
    """Accumulates 64 rows × ``dq_columns`` columns at a time and stages them.

    Staging tiles are in the order of the accumulator's fragments: 16 bytes of each of the 128 threads in turn, so that
    there are no bank conflicts. So is the accumulator in global memory; the postprocess kernel undoes it.
    """

    def __init__(self, cta: BackwardCta, tiles: DqTiles):
        self.cta, self.tiles = cta, tiles
        self.lane = cute.arch.lane_idx()
        config = cta.spec.config
        self.acc = cute.make_rmem_tensor(tiles.mma.partition_shape_C((ROWS_PER_WARPGROUP, config.dq_columns)), Float32)
        fragments = (4, config.dq_columns // 8)
        shape = (4, WARPGROUP_THREADS, fragments[1], config.num_dq_stages)
        staging = cute.make_tensor(tiles.sdQ, cute.make_ordered_layout(shape, order=(0, 1, 2, 3)))
        self.sdQ = staging[None, cute.arch.thread_idx()[0] % WARPGROUP_THREADS, None, None]
        self.rdQ = cute.make_tensor(self.acc.iterator, cute.make_layout(fragments))

    @cute.jit
    def run(self):
        """Every tile, every step, in the consumers' order."""
        config = self.cta.spec.config
        ds_state, dq_state = RingState.start(config.num_ds_stages), RingState.start(config.num_dq_stages)
        k_state = RingState.start(config.num_k_stages)
        n_block = self.cta.receive(k_state, self.lane)
        while n_block >= 0:
            tile = self.cta.key_tile(n_block, self.cta.lengths(k_state, self.lane))
            for _ in cutlass.range(tile.num_steps, unroll=1):
                dq_state = self.one_m_block(k_state, ds_state, dq_state)
                ds_state = ds_state.next()
            self.cta.rings.K.release(k_state, self.lane)
            k_state = k_state.next()
            n_block = self.cta.receive(k_state, self.lane)

    @cute.jit
    def one_m_block(self, k_state: RingState, ds_state: RingState, dq_state: RingState):
        """dQ of one query block, chunk by chunk: rows outside, columns inside. Of a pair each CTA has its half of the
        columns, for its own keys and, once their dS has come, for the other's."""
        config, tiles, pair = self.cta.spec.config, self.tiles, self.cta.pair
        row_blocks, chunks = config.tile_m // ROWS_PER_WARPGROUP, config.dq_chunks(self.cta.spec.head_dim)
        sKt, sdS = tiles.sKt[None, None, k_state.stage], tiles.sdS[None, None, ds_state.stage]
        self.cta.rings.dS.wait(ds_state)
        for index in cutlass.range_constexpr(row_blocks * chunks):
            rows, columns = index // chunks, index % chunks
            warpgroup.fence()
            self.multiply(sdS, sKt, (rows, self.cta.rank * chunks + columns), True)
            if const_expr(pair is not None):
                if const_expr(index == 0):
                    pair.wait(ds_state)
                other_Kt, other_dS = tiles.other_Kt[None, None, k_state.stage], pair.other_dS
                warpgroup.fence()  # after a wait, or the compiler puts one and lets the products wait for each other
                self.multiply(other_dS[None, None, ds_state.stage], other_Kt, (rows, columns), False)
            warpgroup.wait_group(0)
            if const_expr(index == row_blocks * chunks - 1):
                self.cta.rings.dS.release(ds_state, self.lane)
            self.cta.rings.dQ.wait_empty(dq_state)
            cute.autovec_copy(self.rdQ, self.sdQ[None, None, dq_state.stage])
            ptx.fence_async_shared()
            self.cta.rings.dQ.commit(dq_state, self.lane)
            dq_state = dq_state.next()
        return dq_state

    @cute.jit
    def multiply(self, sdS: cute.Tensor, sKt: cute.Tensor, place: tuple, zero_init: Constexpr[bool]):
        """acc (+)= dS K of ``place``: a block of 64 rows and one of ``dq_columns`` columns."""
        config, mma, (rows, columns) = self.cta.spec.config, self.tiles.mma, place
        tile_dS = cute.local_tile(sdS, (ROWS_PER_WARPGROUP, config.tile_n), (rows, 0))
        tile_Kt = cute.local_tile(sKt, (config.dq_columns, config.tile_n), (columns, 0))
        thr = mma.get_slice(0)  # shared-memory operands do not depend on the thread
        desc_dS, desc_Kt = mma.make_fragment_A(thr.partition_A(tile_dS)), mma.make_fragment_B(thr.partition_B(tile_Kt))
        gemm(mma, self.acc, desc_dS, desc_Kt, zero_init)


class DqAdder:
    """One warp that lets the copy engine add staged chunks to global memory.

    If deterministic, chunks of a query block are added from its last tile to its first: a semaphore counts those whose
    additions have completed. Two warps then take query blocks in turn, since completion takes as long as half a
    step: one waits for it while the other adds. A warp hands over when its last chunk has been read: until then the
    other could not tell the phases of the staging ring apart.
    """

    def __init__(self, cta: BackwardCta, sdQ: cute.Pointer, mdQ: cute.Tensor, semaphores: Any, index: int):
        """``mdQ``: fp32 (batch · heads, rows / 64, chunks, 64 · dq_columns). ``semaphores``: int32 (batch · heads,
        query blocks · CTAs of a tile), or None. ``index`` counts the warps that add."""
        self.cta, self.sdQ, self.mdQ, self.semaphores, self.index = cta, sdQ, mdQ, semaphores, index
        self.lane = cute.arch.lane_idx()

    @cute.jit
    def run(self):
        """Every tile, every step, in the consumers' order. The whole warp calls this."""
        config = self.cta.spec.config
        dq_state, k_state = RingState.start(config.num_dq_stages), RingState.start(config.num_k_stages)
        number = Int32(0)
        if const_expr(self.index > 0):
            self.hand_over()  # the first warp begins
        n_block = self.cta.receive(k_state, self.lane)
        while n_block >= 0:
            head_k, batch = (self.cta.slot.read(word, k_state, self.lane) for word in (TileSlot.HEAD, TileSlot.BATCH))
            lengths = self.cta.lengths(k_state, self.lane)
            first_row = self.cta.ragged_word(TileSlot.FIRST_ROW, k_state, self.lane)
            self.cta.rings.K.release(k_state, self.lane)
            k_state = k_state.next()
            batch = self.cta.memory_batch(batch)
            tile = self.cta.key_tile(n_block, lengths)
            for index in cutlass.range(self.cta.heads_per_kv_head, unroll=1):
                head = batch * self.cta.num_heads + head_k * self.cta.heads_per_kv_head + index
                for step in cutlass.range(tile.num_blocks, unroll=1):
                    m_block = self.cta.m_block(tile, step)
                    turn = self.cta.last_key_tile(m_block, lengths) - n_block // config.num_ctas
                    block = first_row // self.cta.spec.config.tile_m + m_block
                    if const_expr(self.cta.num_adders == 1):
                        dq_state = self.add_block(head, block, turn, dq_state)
                    else:
                        if number % self.cta.num_adders == self.index:
                            dq_state = self.add_block(head, block, turn, dq_state)
                        else:
                            dq_state = self.pass_block(dq_state)
                        number += 1
            n_block = self.cta.receive(k_state, self.lane)

    def num_chunks(self) -> tuple[int, int]:
        """Of a query block: row blocks, and this CTA's chunks of columns of each."""
        config = self.cta.spec.config
        return config.tile_m // ROWS_PER_WARPGROUP, config.dq_chunks(self.cta.spec.head_dim)

    def hand_over(self) -> None:
        """The other warp's turn at the staging ring."""
        following = (self.index + 1) % self.cta.num_adders
        ptx.named_barrier_arrive(BackwardBarrier.ADD + following, self.cta.num_adders * WARP_THREADS)

    @cute.jit
    def pass_block(self, dq_state: RingState):
        """The state after a query block that the other warp adds."""
        row_blocks, chunks = self.num_chunks()
        for _ in cutlass.range_constexpr(row_blocks * chunks):
            dq_state = dq_state.next()
        return dq_state

    @cute.jit
    def add_block(self, head: Int32, m_block: Int32, turn: Int32, dq_state: RingState):
        """The chunks of one query block, counted in the workspace; if deterministic, after ``turn`` others."""
        row_blocks, chunks = self.num_chunks()
        elements = ROWS_PER_WARPGROUP * self.cta.spec.config.dq_columns
        if const_expr(self.cta.spec.deterministic):
            if self.lane == 0:
                self.await_turn(self.semaphore(head, m_block), turn)
            ptx.named_barrier_wait(BackwardBarrier.ADD + self.index, self.cta.num_adders * WARP_THREADS)
        for index in cutlass.range_constexpr(row_blocks * chunks):
            self.cta.rings.dQ.wait(dq_state)
            if self.lane == 0:
                chunk = self.cta.rank * chunks + index % chunks
                target = self.mdQ[head, m_block * row_blocks + index // chunks, chunk, None].iterator
                source = self.sdQ + dq_state.stage * elements
                ptx.bulk_add_f32(Int64(target.toint()), source.toint(), 4 * elements)
                ptx.bulk_store_commit()
                ptx.bulk_store_wait_read()
            cute.arch.sync_warp()
            self.cta.rings.dQ.release(dq_state, self.lane)
            dq_state = dq_state.next()
        if const_expr(self.cta.spec.deterministic):
            self.hand_over()
            if self.lane == 0:
                ptx.bulk_store_wait()  # complete, not only read: the next key block may add now
                ptx.fence_async_global()
                ptx.increment_release(self.semaphore(head, m_block))
        return dq_state

    def semaphore(self, head: Int32, m_block: Int32) -> Int64:
        """Address of a query block's semaphore; each CTA of a pair has its own."""
        number = m_block * self.cta.spec.config.num_ctas + self.cta.rank
        return Int64(cute.domain_offset((number,), self.semaphores[head, None]).iterator.toint())

    @cute.jit
    def await_turn(self, address: Int64, turn: Int32):
        """One thread: until every key block before this one has added its part of the query block."""
        count = ptx.load_acquire(address)
        while count != turn:
            count = ptx.load_acquire(address)
        ptx.fence_async_global()
