"""The dQ warpgroup: dQ = dS K of one query block at a time, added to the fp32 accumulator in global memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from flashhopper.config import ROWS_PER_WARPGROUP, WARPGROUP_THREADS
from flashhopper.kernels import ptx
from flashhopper.kernels.backward_cta import BackwardCta, TileSlot
from flashhopper.kernels.backward_smem import BackwardBarrier
from flashhopper.kernels.gemm import gemm
from flashhopper.kernels.pipeline import RingState


class DqTiles:
    """The tiles that dQ is made of: dS (tile_m, tile_n, stages), Kᵀ (head_dim, tile_n), and the staging tile."""

    def __init__(self, mma: cute.TiledMma, sdS: cute.Tensor, sKt: cute.Tensor, sdQ: cute.Pointer):
        self.mma, self.sdS, self.sKt, self.sdQ = mma, sdS, sKt, sdQ


class DqWarpgroup:
    """Accumulates 64 rows × ``dq_columns`` columns at a time, stages them, and lets the copy engine add them.

    Chunks lie in global memory in the order of the accumulator's fragments: 16 bytes of each of the 128 threads in
    turn, so that neither side has bank conflicts; the postprocess kernel undoes it. If deterministic, chunks of a query
    block are added in the order of key blocks: a semaphore counts the key blocks whose additions have completed.
    """

    def __init__(self, cta: BackwardCta, tiles: DqTiles, mdQ: cute.Tensor, semaphores: Any):
        """``mdQ``: fp32 (batch · heads, rows / 64, chunks, 64 · dq_columns). ``semaphores``: int32 (batch · heads,
        query blocks)."""
        self.cta, self.tiles, self.mdQ, self.semaphores = cta, tiles, mdQ, semaphores
        self.tidx = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        self.lane = cute.arch.lane_idx()
        config = cta.spec.config
        self.acc = cute.make_rmem_tensor(tiles.mma.partition_shape_C((ROWS_PER_WARPGROUP, config.dq_columns)), Float32)
        fragments = (4, config.dq_columns // 8)
        shape = (4, WARPGROUP_THREADS, fragments[1], config.num_dq_stages)
        staging = cute.make_tensor(tiles.sdQ, cute.make_ordered_layout(shape, order=(0, 1, 2, 3)))
        self.sdQ = staging[None, self.tidx, None, None]
        self.rdQ = cute.make_tensor(self.acc.iterator, cute.make_layout(fragments))

    @cute.jit
    def run(self):
        """Every tile, every step, in the consumers' order."""
        ds_state, k_state = RingState.start(self.cta.spec.config.num_ds_stages), RingState.start(1)
        signalled = Int64(0)  # address of the semaphore to release once the last addition has completed
        n_block = self.cta.receive(k_state, self.lane)
        while n_block >= 0:
            head_k, batch = (self.cta.slot.read(word, self.lane) for word in (TileSlot.HEAD, TileSlot.BATCH))
            tile = self.cta.key_tile(n_block)
            for index in cutlass.range(self.cta.heads_per_kv_head, unroll=1):
                head = batch * self.cta.num_heads + head_k * self.cta.heads_per_kv_head + index
                for step in cutlass.range(tile.num_blocks, unroll=1):
                    m_block = self.cta.m_block(tile, step)
                    signalled = self.one_m_block(head, m_block, n_block, ds_state, signalled)
                    ds_state = ds_state.next()
            self.cta.rings.K.release(k_state, self.lane)
            k_state = k_state.next()
            if const_expr(self.cta.spec.deterministic):
                signalled = self.release_last(signalled)  # the next tile may take long to get here
            n_block = self.cta.receive(k_state, self.lane)
        if self.tidx == 0:
            ptx.bulk_store_wait_read()  # shared memory must outlive the copies

    @cute.jit
    def release_last(self, signalled: Int64):
        """Complete the tile's last additions and release their semaphore."""
        if self.tidx == 0:
            ptx.bulk_store_wait()
            if signalled != 0:
                self.release(signalled)
        return Int64(0)

    @cute.jit
    def one_m_block(self, head: Int32, m_block: Int32, n_block: Int32, ds_state: RingState, signalled: Int64):
        """dQ of one query block. Returns the address of its semaphore, which is released with the next block."""
        config = self.cta.spec.config
        row_blocks, chunks = config.tile_m // ROWS_PER_WARPGROUP, self.cta.spec.head_dim // config.dq_columns
        thr = self.tiles.mma.get_slice(0)  # shared-memory operands do not depend on the thread
        self.cta.rings.dS.wait(ds_state)
        address = Int64(0)
        if const_expr(self.cta.spec.deterministic):
            address = self.semaphore(head, m_block)
        for row_block in cutlass.range_constexpr(row_blocks):
            for chunk in cutlass.range_constexpr(chunks):
                sdS = cute.local_tile(
                    self.tiles.sdS[None, None, ds_state.stage], (ROWS_PER_WARPGROUP, config.tile_n), (row_block, 0)
                )
                sKt = cute.local_tile(self.tiles.sKt, (config.dq_columns, config.tile_n), (chunk, 0))
                desc_dS = self.tiles.mma.make_fragment_A(thr.partition_A(sdS))
                desc_Kt = self.tiles.mma.make_fragment_B(thr.partition_B(sKt))
                warpgroup.fence()
                gemm(self.tiles.mma, self.acc, desc_dS, desc_Kt, True)
                warpgroup.wait_group(0)
                if const_expr(row_block == row_blocks - 1 and chunk == chunks - 1):
                    self.cta.rings.dS.release(ds_state, self.lane)
                target = self.mdQ[head, m_block * row_blocks + row_block, chunk, None].iterator
                turn = (address, n_block, signalled)
                self.add_chunk(Int64(target.toint()), row_block * chunks + chunk, turn)
        return address

    @cute.jit
    def add_chunk(self, target: Int64, index: Constexpr[int], turn: tuple):
        """Accumulator -> staging tile -> added to ``target`` by the copy engine. ``index`` counts the step's chunks.

        ``turn``: the query block's semaphore, the key block whose turn to await there, and the semaphore to release.
        """
        address, n_block, signalled = turn
        config = self.cta.spec.config
        takes_turn = const_expr(self.cta.spec.deterministic and index == 0)
        stage = index % config.num_dq_stages
        if const_expr(config.num_dq_stages == 1):
            if self.tidx == 0:
                ptx.bulk_store_wait_read()
            ptx.named_barrier_wait(BackwardBarrier.STAGING, WARPGROUP_THREADS)
        cute.autovec_copy(self.rdQ, self.sdQ[None, None, stage])
        ptx.fence_async_shared()
        if self.tidx == 0:
            if const_expr(takes_turn):
                ptx.bulk_store_wait()  # complete, not only read: the next key block may add now
                if signalled != 0:
                    self.release(signalled)
            elif const_expr(config.num_dq_stages == 2):
                ptx.bulk_store_wait_read()  # the other tile is free once everybody knows of this
        ptx.named_barrier_wait(BackwardBarrier.STAGING, WARPGROUP_THREADS)
        if self.tidx == 0:
            if const_expr(takes_turn):
                self.await_turn(address, n_block)
            num_bytes = 4 * ROWS_PER_WARPGROUP * config.dq_columns
            source = self.tiles.sdQ + stage * ROWS_PER_WARPGROUP * config.dq_columns
            ptx.bulk_add_f32(target, source.toint(), num_bytes)
            ptx.bulk_store_commit()

    def semaphore(self, head: Int32, m_block: Int32) -> Int64:
        """Address of a query block's semaphore."""
        return Int64(cute.domain_offset((m_block,), self.semaphores[head, None]).iterator.toint())

    @cute.jit
    def await_turn(self, address: Int64, n_block: Int32):
        """One thread: until every key block before this one has added its part of the query block."""
        turn = ptx.load_acquire(address)
        while turn != n_block:
            turn = ptx.load_acquire(address)
        ptx.fence_async_global()

    @cute.jit
    def release(self, address: Int64):
        """One thread, its additions complete: the next key block's turn."""
        ptx.fence_async_global()
        ptx.increment_release(address)
