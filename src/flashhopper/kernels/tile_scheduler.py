"""Which tile a CTA works on next: work order, claiming, the mailbox from producer to consumers, and redone tiles."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from flashhopper.config import ELEMENT_BYTES, KernelSpec
from flashhopper.kernels import ptx
from flashhopper.kernels.ragged import Rows, SequenceTable
from flashhopper.kernels.values import DynamicValues, ceil_div, maximum, minimum

NO_TILE = -1  # also the m_block that tells the consumers to stop
PAUSE = -2  # an m_block: whether anything follows depends on the verdict on the item at hand
MANY_HEADS, MANY_KEYS = 2**12, 2**18  # their product has 32 bits; of tiles of 64 columns L2 holds fewer
L2_KV_BYTES = 32 << 20  # K and V of the heads worked on at a time: half of the H200's 60 MB of L2, the rest is Q, O


class TileCoord(NamedTuple):
    m_block: Any
    head: Any
    batch: Any


class TileGrid(NamedTuple):
    """Order of the tiles. Plain arithmetic: runs on Python ints and on DSL integers alike.

    Heads (over all batches) are cut into groups that are worked on at a time; within a group the row blocks of all its
    heads follow each other; longest first if causal, so that the card's last wave is made of short tiles. A group is a
    few waves of CTAs, so that tiles which share K and V run together and reads from HBM spread evenly over time, and
    never more than L2 holds.
    """

    num_m_blocks: Any
    num_heads: Any
    num_heads_total: Any  # heads × batch
    group: Any  # heads in a group
    last_first: bool  # the last block of a head comes first

    @classmethod
    def create(cls, shape_q: tuple[Any, Any, Any], shape_k: tuple[Any, Any, Any], spec: KernelSpec, num_ctas: Any):
        """From extents (seqlen, heads, batch) of Q and K and the CTAs that run at once."""
        config = spec.config
        seqlen_q, num_heads, batch = shape_q
        seqlen_k, num_heads_k, _ = shape_k
        num_m_blocks, total = ceil_div(seqlen_q, config.tile_m), num_heads * batch
        heads_in_waves = ceil_div(config.group_waves * num_ctas, num_m_blocks)
        kv_heads_in_l2 = maximum(_kv_rows_in_l2(spec) // seqlen_k, 1)
        # Short keys fit by the hundred thousand; cut to what is used before the product can pass 32 bits.
        heads_in_l2 = minimum(kv_heads_in_l2, heads_in_waves) * (num_heads // num_heads_k)
        group = minimum(minimum(heads_in_l2, heads_in_waves), total)
        return cls(num_m_blocks, num_heads, total, group, spec.causal)

    @staticmethod
    def is_one_group(shape_q: tuple[Any, Any], shape_k: tuple[Any, Any], spec: KernelSpec, num_ctas: Any) -> Any:
        """Whether :meth:`create` puts all heads of one batch entry into one group, for up to MANY_HEADS key heads, but
        found without a division: each takes the producer a tenth of a microsecond. Shapes are (seqlen, heads)."""
        (seqlen_q, num_heads), (seqlen_k, num_heads_k) = shape_q, shape_k
        num_m_blocks = ceil_div(seqlen_q, spec.config.tile_m)
        in_waves = (num_heads - 1) * num_m_blocks < spec.config.group_waves * num_ctas
        num_rows = minimum(num_heads_k, MANY_HEADS) * minimum(seqlen_k, MANY_KEYS)
        return in_waves & ((num_heads_k == 1) | (num_rows <= _kv_rows_in_l2(spec)))

    @property
    def num_tiles(self) -> Any:
        return self.num_m_blocks * self.num_heads_total

    def coord(self, tile: Any) -> TileCoord:
        """Coordinates of the tile with this number, 0 ≤ tile < num_tiles."""
        tiles_per_group = self.group * self.num_m_blocks
        group_index = tile // tiles_per_group
        within = tile - group_index * tiles_per_group
        width = minimum(self.group, self.num_heads_total - group_index * self.group)
        m_block = within // width
        head_index = group_index * self.group + within - m_block * width
        batch = head_index // self.num_heads
        if self.last_first:
            m_block = self.num_m_blocks - 1 - m_block
        return TileCoord(m_block, head_index - batch * self.num_heads, batch)


def _kv_rows_in_l2(spec: KernelSpec) -> int:
    return L2_KV_BYTES // (ELEMENT_BYTES[spec.dtype] * (spec.head_dim + spec.head_dim_v))


class RaggedGrid:
    """Order of the tiles of a ragged batch: sequence after sequence, within each as :class:`TileGrid` has it."""

    def __init__(self, table: SequenceTable, spec: KernelSpec, heads: tuple[Int32, Int32], num_ctas: Int32):
        """``heads``: of Q and of K. ``num_ctas``: that run at once. ``num_tiles`` and the table's sample are there from
        :meth:`begin` on."""
        self.table, self.spec, self.heads, self.num_ctas = table, spec, heads, num_ctas

    def begin(self, lane: Int32) -> None:
        """The producer, before all else: what it needs of the table for every tile, once the schedule kernel has ended.
        Read between two tiles it delays the second."""
        self.num_tiles, self.sample = self.table.num_tiles(), self.table.sample(lane)

    @cute.jit
    def locate(self, tile: Int32, lane: Int32):
        """Coordinates of a tile, with the batch index of its sequence, and that sequence's queries and keys."""
        sequence = self.table.find(tile, lane, self.sample)
        num_heads, num_heads_k = self.heads
        extents_q = (sequence.rows.length, num_heads)
        extents_k = (maximum(sequence.others.length, 1), num_heads_k)
        within, m_block, head = tile - sequence.first_tile, Int32(0), Int32(0)
        if TileGrid.is_one_group(extents_q, extents_k, self.spec, self.num_ctas):
            m_block = within // num_heads
            head = within - m_block * num_heads
            if const_expr(self.spec.causal):
                m_block = ceil_div(sequence.rows.length, self.spec.config.tile_m) - 1 - m_block
        else:
            grid = TileGrid.create((*extents_q, 1), (*extents_k, 1), self.spec, self.num_ctas)
            m_block, head, _ = grid.coord(within)
        return TileCoord(m_block, head, sequence.batch), sequence.rows, sequence.others


class WorkItem(DynamicValues):
    """The producer's place in its sequence of items: the current tile, and what it needs to pick the next.

    ``ticket`` is what the last request gave and, if ``is_held``, stands for a fresh tile that no item has had yet.
    """

    dynamic = ("tile", "exact", "previous", "ticket", "is_held", "count", "is_open")

    def __init__(
        self,
        tile: Int32,
        exact: Int32,
        previous: Int32,
        ticket: Int32,
        is_held: Int32,
        count: Int32,
        is_open: Int32,
    ):
        self.tile, self.exact, self.previous = tile, exact, previous
        self.ticket, self.is_held, self.count, self.is_open = ticket, is_held, count, is_open


class Mailbox:
    """Items' coordinates from producer to consumers, one slot per stage of Q, guarded by its barriers; verdicts back.

    ``done[i % 2]`` completes when every consumer warp has judged item i; ``failed[i % 2]`` is then set if one of them
    found that the lazy softmax cannot be trusted.
    """

    ITEM_WORDS = 8
    # The last four only of ragged batches, START_K with FP8.
    M_BLOCK, HEAD, BATCH, EXACT, START_Q, SEQLEN_Q, SEQLEN_K, START_K = range(8)
    VERDICTS = 2

    def __init__(self, words: cute.Pointer, done: cute.Pointer, num_slots: int):
        """``words``: 8 per slot, then 2 failure flags. ``done``: 2 mbarriers."""
        self.items = cute.make_tensor(words, cute.make_layout((self.ITEM_WORDS, num_slots)))
        self.failed = cute.make_tensor(words + self.ITEM_WORDS * num_slots, cute.make_layout(self.VERDICTS))
        self.done = done

    def initialise(self, consumer_warps: int) -> None:
        """By one thread, before the CTA synchronises."""
        for i in range(self.VERDICTS):
            cute.arch.mbarrier_init(self.done + i, consumer_warps)
            self.failed[i] = Int32(0)

    def post(self, slot: Int32, item: tuple[Int32, ...]) -> None:
        """Producer, one lane, before it arrives at Q's full barrier: the words of an item, in order."""
        for word, value in enumerate(item):
            self.items[word, slot] = value

    def post_mark(self, slot: Int32, mark: int) -> None:
        """Producer, one lane: NO_TILE or PAUSE instead of an item."""
        self.items[self.M_BLOCK, slot] = Int32(mark)

    def read(self, word: Any, slot: Int32) -> Int32:
        """Consumer: one word of an item. All lanes of a warp have read before one of them hands the slot back."""
        return self.items[word, slot]

    @cute.jit
    def judge(self, item: Int32, trusted, exact: Int32, lane: Int32):
        """Consumer warp: its verdict on the item."""
        trusted = ptx.vote_all(trusted)
        failed = self.failed
        if lane == 0:
            if not trusted and exact == 0:
                failed[item & 1] = Int32(1)
            cute.arch.mbarrier_arrive(self.done + (item & 1))


class TileScheduler:
    """Hands out tiles to one CTA; each kind differs only in :meth:`draw` and :meth:`tile_of`.

    A fresh tile is requested before the last load of an item and looked at after it: the counter's answer takes as
    long as a short block, and whoever asks earlier may keep a tile from a CTA that is free before.

    ``workspace`` is int32 (4,), zero before the first launch that uses it: next tile, CTAs that left, tiles redone (a
    statistic), unused. The last CTA of a launch resets the first two.
    """

    def __init__(self, kind: str, grid: TileGrid | RaggedGrid, mailbox: Mailbox, workspace: cute.Tensor):
        self.kind, self.grid, self.mailbox, self.workspace = kind, grid, mailbox, workspace
        self.num_ctas, _, _ = cute.arch.grid_dim()

    @cute.jit
    def first_item(self, lane: Int32):
        """The CTA's own tile. There is none for it if the grid is larger than a ragged batch."""
        cta, _, _ = cute.arch.block_idx()
        tile = cta
        if const_expr(isinstance(self.grid, RaggedGrid)):
            self.grid.begin(lane)
            tile = cta if cta < self.grid.num_tiles else Int32(NO_TILE)
        return WorkItem(tile, Int32(0), Int32(NO_TILE), cta, Int32(0), Int32(0), Int32(1))

    def locate(self, tile: Int32, lane: Int32) -> tuple[TileCoord, Rows | None, Rows | None]:
        """Coordinates of a tile; of a ragged batch also the rows of its sequence in Q and in K."""
        if isinstance(self.grid, TileGrid):
            return self.grid.coord(tile), None, None
        return self.grid.locate(tile, lane)

    @cute.jit
    def request(self, item: WorkItem, lane: Int32):
        """Before the last load of ``item``: the item with a ticket, unless it holds one or no fresh tile is left.
        Nothing waits for the ticket here."""
        ticket, is_held = item.ticket, item.is_held
        if item.is_open == 1 and is_held == 0:
            ticket, is_held = self.draw(ticket, lane), Int32(1)
        return WorkItem(item.tile, item.exact, item.previous, ticket, is_held, item.count, item.is_open)

    @cute.jit
    def draw(self, last: Int32, lane: Int32):
        """The next ticket of this CTA; the counter's is in lane 0 only."""
        ticket = last
        if const_expr(self.kind == "dynamic"):
            if lane == 0:
                ticket = ptx.draw_ticket(self.workspace.iterator)
        else:  # static; a single-tile CTA gets num_tiles = num_ctas here, which ends it
            ticket = last + self.num_ctas
        return ticket

    def tile_of(self, ticket: Int32) -> Int32:
        """The tile that a ticket stands for; past the end of the grid if there is none."""
        return cute.arch.shuffle_sync(ticket, 0) + self.num_ctas if self.kind == "dynamic" else ticket

    @cute.jit
    def next_item(self, item: WorkItem, lane: Int32, may_fail: Constexpr[bool]):
        """After the last load of ``item``: a redo of the item before it if that failed, else a fresh tile, else none.

        None is not the end: ``item`` itself may yet fail, see :meth:`last_redo`.
        """
        tile, exact, count = Int32(NO_TILE), Int32(0), item.count + 1
        is_held, is_open = item.is_held, item.is_open
        if const_expr(may_fail):
            if count >= 2:
                tile = self.tile_to_redo(count - 2, item.previous, lane)
            if tile >= 0:
                exact = Int32(1)
        if exact == 0 and is_held == 1:
            fresh, is_held = self.tile_of(item.ticket), Int32(0)
            if fresh < self.grid.num_tiles:
                tile = fresh
            else:
                is_open = Int32(0)
        return WorkItem(tile, exact, item.tile, item.ticket, is_held, count, is_open)

    @cute.jit
    def last_redo(self, item: WorkItem, lane: Int32):
        """When none is left: wait for the verdict on the last item, which is redone if it failed. A redo runs exactly
        and cannot fail, so this ends."""
        tile = self.tile_to_redo(item.count - 1, item.previous, lane)
        exact = Int32(0)
        if tile >= 0:
            exact = Int32(1)
        return WorkItem(tile, exact, item.previous, item.ticket, item.is_held, item.count, item.is_open)

    @cute.jit
    def tile_to_redo(self, judged: Int32, tile: Int32, lane: Int32):
        """Wait for the verdict on an item; its tile if it must be redone, else NO_TILE."""
        cute.arch.mbarrier_wait(self.mailbox.done + (judged & 1), (judged >> 1) & 1)
        failed = self.mailbox.failed  # a tensor: the DSL cannot carry an object's attribute through a branch
        has_failed = failed[judged & 1]
        cute.arch.sync_warp()
        redo = Int32(NO_TILE)
        if has_failed != 0:
            redo = tile
            if lane == 0:
                failed[judged & 1] = Int32(0)
                ptx.atomic_increment(self.workspace.iterator + 2)
        return redo

    @cute.jit
    def leave(self, lane: Int32):
        """Once per CTA, after its last claim: the last one out resets the counters for the next launch."""
        if const_expr(self.kind == "dynamic"):
            workspace = self.workspace
            if lane == 0:
                cute.arch.fence_acq_rel_gpu()
                if ptx.atomic_increment_acq_rel(workspace.iterator + 1) == self.num_ctas - 1:
                    workspace[0], workspace[1] = Int32(0), Int32(0)
