"""The producer of the backward: one warp that claims tiles, issues every load and never touches the data."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from flashhopper.kernels import ptx
from flashhopper.kernels.backward_cta import BackwardCta
from flashhopper.kernels.backward_grid import padded_row
from flashhopper.kernels.cta import Lengths
from flashhopper.kernels.load import TmaOperand
from flashhopper.kernels.pipeline import RingState
from flashhopper.kernels.ragged import Rows, head_rows
from flashhopper.kernels.tile_scheduler import TileCoord, TileGrid


class RowStatistics:
    """One fp32 value per query row, padded to whole blocks: global ``(batch, heads, rows)``, shared (tile_m,
    stages)."""

    def __init__(self, gX: cute.Tensor, sX: cute.Tensor):
        self.gX, self.sX = gX, sX

    def load(self, query: TileCoord, first_row: Int32, stage: Int32, full: cute.Pointer) -> None:
        """The rows of a query block of a sequence that begins at ``first_row``. Issued by one thread; ``full`` counts
        the bytes."""
        tile_m = cute.size(self.sX, mode=[0])
        rows = self.gX[query.batch, query.head, None]
        source = cute.domain_offset((first_row + query.m_block * tile_m,), rows).iterator
        target = self.sX[None, stage].iterator
        ptx.bulk_load(target.toint(), Int64(source.toint()), 4 * tile_m, full.toint())


class BackwardOperands:
    """What the producer loads, and where to. Of a pair also the other CTA's K, half of its columns."""

    other_K: TmaOperand

    def __init__(
        self, K: TmaOperand, V: TmaOperand, Q: TmaOperand, dO: TmaOperand, LSE: RowStatistics, delta: RowStatistics
    ):
        self.K, self.V, self.Q, self.dO, self.LSE, self.delta = K, V, Q, dO, LSE, delta


class BackwardProducer:
    """Tile after tile: K and V once, then Q and dO of every query block that sees the tile's keys, head after head."""

    def __init__(self, cta: BackwardCta, operands: BackwardOperands, grid: Any, counter: cute.Pointer):
        """``grid``: a :class:`TileGrid` or a :class:`RaggedKeyGrid`. ``counter``: the number of tiles claimed, zero
        before the launch."""
        self.cta, self.operands, self.grid, self.counter = cta, operands, grid, counter
        self.lane = cute.arch.lane_idx()

    @cute.jit
    def run(self):
        """Tiles until none is left, then the end mark. The whole producer warp calls this."""
        config = self.cta.spec.config
        q_state, do_state = RingState.start(config.num_q_stages), RingState.start(config.num_do_stages)
        k_state, v_state = RingState.start(config.num_k_stages), RingState.start(1)
        claims = RingState.start(1)
        tile, claims = self.first_tile(claims)
        while tile < self.grid.num_tiles:
            v_state, q_state, do_state = self.load_tile(tile, k_state, v_state, q_state, do_state)
            k_state = k_state.next()
            tile, claims = self.claim(claims)  # late: whoever is free first takes the next
        cute.arch.griddepcontrol_wait()  # without a tile too: whoever waits for this kernel waits for the one before it
        cute.arch.griddepcontrol_launch_dependents()
        self.cta.rings.K.wait_empty(k_state)
        if self.lane == 0:
            self.cta.slot.post_end(k_state)
            cute.arch.mbarrier_arrive(self.cta.rings.K.full + k_state.stage)
        self.cta.rings.Q.drain(q_state)
        self.cta.rings.dO.drain(do_state)

    @cute.jit
    def first_tile(self, claims: RingState):
        """The CTA's own, unless tiles wait for others: then only a claim says that those are running."""
        cta, _, _ = cute.arch.block_idx()
        tile = cta // self.cta.spec.config.num_ctas
        if const_expr(self.cta.spec.deterministic):
            cute.arch.griddepcontrol_wait()
            tile, claims = self.claim(claims)
        return tile, claims

    @cute.jit
    def claim(self, claims: RingState):
        """The next tile's number; past the end if none is left. Of a pair the first CTA claims, and tells the other.
        ``claims`` counts them."""
        tile = Int32(0)
        if const_expr(self.cta.pair is None):
            tile = self.draw()
        else:
            if self.cta.rank == 0:
                tile = self.draw()
                self.cta.pair.tell(tile, claims, self.lane)
            else:
                tile = self.cta.pair.hear(claims, self.lane)
        return tile, claims.next()

    @cute.jit
    def draw(self):
        """The next number from the counter, after those of the tiles that are nobody's to claim."""
        tile = Int32(0)
        if self.lane == 0:
            tile = ptx.atomic_increment(self.counter)
        tile = cute.arch.shuffle_sync(tile, 0)
        if const_expr(not self.cta.spec.deterministic):
            num_ctas, _, _ = cute.arch.grid_dim()
            tile = tile + num_ctas // self.cta.spec.config.num_ctas
        return tile

    def locate(self, tile: Int32) -> tuple[TileCoord, Rows | None, Rows | None]:
        """Coordinates of a tile; of a ragged batch also the rows of its sequence in Q and in K."""
        if isinstance(self.grid, TileGrid):
            return self.grid.coord(tile), None, None
        return self.grid.locate(tile, self.lane)

    @cute.jit
    def load_tile(self, tile: Int32, k_state: RingState, v_state: RingState, q_state: RingState, do_state: RingState):
        """Every load of one tile. V follows the first Q: it is needed after the first scores."""
        (n_block, head_k, batch), queries, keys = self.locate(tile)
        n_block = n_block * self.cta.spec.config.num_ctas + self.cta.rank  # of the tile's key blocks this CTA's
        lengths, first_row = Lengths(self.cta.seqlen_q, self.cta.seqlen_k), Int32(0)
        words: tuple[Int32, ...] = (n_block, head_k, batch)
        if const_expr(queries is not None):
            first_row = padded_row(queries.start, batch)
            lengths = Lengths(queries.length, keys.length)
            words = (*words, queries.length, keys.length, keys.start, first_row)
        memory_batch = self.cta.memory_batch(batch)
        key_tile = self.cta.key_tile(n_block, lengths)
        self.cta.rings.K.wait_empty(k_state)
        if self.lane == 0:
            self.cta.slot.post(words, k_state)
        key_coord = TileCoord(n_block, head_k, memory_batch)
        k_full = self.cta.rings.K.arm(k_state, self.lane)
        self.load(self.operands.K, k_full, key_coord, keys, k_state)
        if const_expr(self.cta.pair is not None):
            other, column = self.operands.other_K, self.cta.rank * (self.cta.spec.head_dim // 2)
            rows_K = cute.domain_offset((0, column), head_rows(other.gX, head_k, memory_batch, keys))
            sK, gK = other.partition_view(rows_K)
            cute.copy(other.tma, gK[None, n_block ^ 1], sK[None, k_state.stage], tma_bar_ptr=k_full)
        # For what the preprocess kernel leaves. K and the table of a ragged batch's sequences may be read before: that
        # kernel is an ordinary launch, so that all that came before it has ended.
        cute.arch.griddepcontrol_wait()
        for index in cutlass.range(self.cta.heads_per_kv_head, unroll=1):
            head = head_k * self.cta.heads_per_kv_head + index
            for step in cutlass.range(key_tile.num_blocks, unroll=1):
                query = TileCoord(self.cta.m_block(key_tile, step), head, memory_batch)
                q_full = self.cta.rings.Q.acquire(q_state, self.lane)
                self.load(self.operands.Q, q_full, query, queries, q_state)
                if self.lane == 0:
                    self.operands.LSE.load(query, first_row, q_state.stage, q_full)
                q_state = q_state.next()
                if index + step == 0:
                    v_full = self.cta.rings.V.acquire(v_state, self.lane)
                    self.load(self.operands.V, v_full, key_coord, keys, v_state)
                do_full = self.cta.rings.dO.acquire(do_state, self.lane)
                self.load(self.operands.dO, do_full, query, queries, do_state)
                if self.lane == 0:
                    self.operands.delta.load(query, first_row, do_state.stage, do_full)
                do_state = do_state.next()
        if key_tile.num_blocks > 0:
            v_state = v_state.next()
        return v_state, q_state, do_state

    @cute.jit
    def load(self, operand, full, coord, rows, state: RingState):
        """One tile of one operand; ``rows`` are its sequence's in a ragged batch, or None."""
        block, head, batch = coord
        sX, gX = operand.partition(head, batch, rows)
        cute.copy(operand.tma, gX[None, block], sX[None, state.stage], tma_bar_ptr=full)
