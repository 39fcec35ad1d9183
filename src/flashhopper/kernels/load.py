"""The producer: one warp that issues every TMA load and never touches the data."""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from flashhopper.kernels.cta import Cta
from flashhopper.kernels.pipeline import RingState
from flashhopper.kernels.ragged import Rows, head_rows
from flashhopper.kernels.tile_scheduler import NO_TILE, PAUSE


class TmaOperand:
    """A tensor seen by TMA: the descriptor atom, its coordinate tensor ``(rows, columns, heads, batch)``, its tiles."""

    def __init__(self, tma: cute.CopyAtom, gX: cute.Tensor, sX: cute.Tensor, tile: tuple[int, int], along: int):
        """Tiles of extents ``tile`` are counted along mode ``along``; ``sX`` is (tile…, stages)."""
        self.tma, self.gX, self.sX = tma, gX, sX
        self.tile, self.along, self.steps = tile, along, tuple(None if mode == along else 0 for mode in (0, 1))

    def partition(self, head: Int32, batch: Int32, rows: Rows | None = None) -> tuple[cute.Tensor, cute.Tensor]:
        """Shared stages and global tiles of one head, as TMA's (bytes, index) tensors."""
        return self.partition_view(head_rows(self.gX, head, batch, rows, self.along))

    def partition_view(self, gX: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """The same of a matrix in TMA's coordinates."""
        gX_tiles = cute.local_tile(gX, self.tile, self.steps)
        return cpasync.tma_partition(
            self.tma, 0, cute.make_layout(1), cute.group_modes(self.sX, 0, 2), cute.group_modes(gX_tiles, 0, 2)
        )


class Producer:
    """Loads Q once per item and K and V tiles into their rings, last key block first."""

    def __init__(self, cta: Cta, operands: tuple[TmaOperand, TmaOperand, TmaOperand]):
        self.cta = cta
        self.tma_Q, self.tma_K, self.tma_V = operands
        self.lane = cute.arch.lane_idx()

    @cute.jit
    def run(self):
        """Items until the scheduler has none left, then the end mark. The whole producer warp calls this."""
        num_stages = self.cta.spec.config.num_stages
        q_state = RingState.start(self.cta.spec.config.num_q_stages)
        k_state, v_state = RingState.start(num_stages), RingState.start(num_stages)
        item = self.cta.scheduler.first_item(self.lane)
        while item.tile >= 0:
            item, k_state, v_state = self.load_item(item, q_state, k_state, v_state)
            q_state = q_state.next()
            item = self.cta.scheduler.next_item(item, self.lane, self.cta.may_fail)
            if const_expr(self.cta.may_fail):
                if item.tile < 0:
                    if const_expr(self.cta.spec.config.prefetch_scores):
                        self.post_mark(q_state, PAUSE)  # consumers look ahead before they judge the item at hand
                        q_state = q_state.next()
                    item = self.cta.scheduler.last_redo(item, self.lane)
        self.post_mark(q_state, NO_TILE)
        self.cta.scheduler.leave(self.lane)
        cute.arch.griddepcontrol_launch_dependents()  # as far as they come without what this kernel writes
        self.cta.v_ring.drain(v_state)  # V of the last block is the last stage to be released

    @cute.jit
    def post_mark(self, q_state: RingState, mark: Constexpr[int]):
        """A mark in place of an item: Q's full barrier completes without bytes."""
        self.cta.q_ring.wait_empty(q_state)
        if self.lane == 0:
            self.cta.scheduler.mailbox.post_mark(q_state.stage, mark)
            cute.arch.mbarrier_arrive(self.cta.q_ring.full + q_state.stage)

    @cute.jit
    def load_item(self, item, q_state: RingState, k_state: RingState, v_state: RingState):
        """K of the last block first (Q's buffer may still be in use), then Q, then K and V in the consumers' order.
        Returns the item with the next one's ticket, and the rings' states."""
        (m_block, head, batch), queries, keys = self.cta.scheduler.locate(item.tile, self.lane)
        tile_m = self.cta.spec.config.tile_m
        blocks = self.cta.key_blocks(m_block * tile_m, tile_m, self.cta.lengths_of(queries, keys))
        last_block, num_blocks = blocks.end - 1, blocks.num_blocks
        head_k = head // self.cta.heads_per_kv_head
        sQ, gQ = self.tma_Q.partition(head, batch, queries)
        sK, gK = self.tma_K.partition(head_k, batch, keys)
        sV, gV = self.tma_V.partition(head_k, batch, keys)

        k_full = self.cta.k_ring.acquire(k_state, self.lane)
        cute.copy(self.tma_K.tma, gK[None, last_block], sK[None, k_state.stage], tma_bar_ptr=k_full)
        k_state = k_state.next()

        self.cta.q_ring.wait_empty(q_state)
        if self.lane == 0:
            words: tuple[Int32, ...] = (m_block, head, batch, item.exact)
            if const_expr(queries is not None):
                words = (*words, queries.start, queries.length, keys.length)
                if const_expr(self.cta.spec.is_fp8):
                    words = (*words, keys.start)
            self.cta.scheduler.mailbox.post(q_state.stage, words)
        q_full = self.cta.q_ring.arm(q_state, self.lane)
        cute.copy(self.tma_Q.tma, gQ[None, m_block], sQ[None, q_state.stage], tma_bar_ptr=q_full)

        for j in cutlass.range(1, num_blocks, unroll=1):
            k_full = self.cta.k_ring.acquire(k_state, self.lane)
            cute.copy(self.tma_K.tma, gK[None, last_block - j], sK[None, k_state.stage], tma_bar_ptr=k_full)
            k_state = k_state.next()
            v_full = self.cta.v_ring.acquire(v_state, self.lane)
            cute.copy(self.tma_V.tma, gV[None, last_block + 1 - j], sV[None, v_state.stage], tma_bar_ptr=v_full)
            v_state = v_state.next()
        item = self.cta.scheduler.request(item, self.lane)
        v_full = self.cta.v_ring.acquire(v_state, self.lane)
        cute.copy(self.tma_V.tma, gV[None, blocks.first], sV[None, v_state.stage], tma_bar_ptr=v_full)
        return item, k_state, v_state.next()
