"""What every role of one CTA of the backward kernel shares: its rings, the tile it works on, and that tile's steps."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from flashhopper.config import BackwardSpec
from flashhopper.kernels.block_range import key_blocks, query_blocks
from flashhopper.kernels.cta import Lengths
from flashhopper.kernels.features import FeatureArgs
from flashhopper.kernels.pipeline import WARPS_PER_WARPGROUP, RingState, TmaRing
from flashhopper.kernels.tile_scheduler import NO_TILE
from flashhopper.kernels.values import DynamicValues

NUM_CONSUMERS = 2  # warpgroups


class BackwardRings(NamedTuple):
    """Full/empty barriers by what they guard. ``dS`` and ``dQ`` are filled by warps, the others by TMA."""

    K: TmaRing  # with the tile's coordinates
    V: TmaRing
    Q: TmaRing  # with the rows' LSE
    dO: TmaRing  # with the rows' delta
    dS: TmaRing
    dQ: TmaRing  # staging tiles


class BackwardExtents(NamedTuple):
    seqlen_q: Int32
    seqlen_k: Int32
    num_heads: Int32
    heads_per_kv_head: Int32


class KeyTile(DynamicValues):
    """The query blocks of the tile at hand: see :class:`QueryRange`. ``num_steps`` counts them over all query heads."""

    dynamic = ("first", "num_masked", "num_blocks", "num_whole", "num_steps")

    def __init__(self, first: Any, num_masked: Any, num_blocks: Any, num_whole: Any, num_steps: Any):
        self.first, self.num_masked, self.num_blocks = first, num_masked, num_blocks
        self.num_whole, self.num_steps = num_whole, num_steps


class TileSlot:
    """A tile's coordinates in shared memory, from the producer to all others; K's ring guards them, stage by stage."""

    WORDS = 7
    N_BLOCK, HEAD, BATCH, SEQLEN_Q, SEQLEN_K, START_K, FIRST_ROW = range(7)  # the last four only of ragged batches

    def __init__(self, words: cute.Pointer, num_stages: int):
        self.words = cute.make_tensor(words, cute.make_layout((self.WORDS, num_stages)))

    def post(self, tile: tuple[Int32, ...], k_state: RingState) -> None:
        """Producer, one lane, before K's full barrier is armed."""
        for word, value in enumerate(tile):
            self.words[word, k_state.stage] = value

    def post_end(self, k_state: RingState) -> None:
        """Producer, one lane: no tile follows."""
        self.words[self.N_BLOCK, k_state.stage] = Int32(NO_TILE)

    @cute.jit
    def read(self, word: Constexpr[int], k_state: RingState, lane: Int32):
        """One word. Lane 0 reads for its warp: it is also the lane that hands the slot back."""
        words, value = self.words, Int32(0)
        if lane == 0:
            value = words[word, k_state.stage]
        return cute.arch.shuffle_sync(value, 0)


class BackwardCta:
    """The kernel's specialisation, its rings and the problem's extents."""

    def __init__(
        self,
        spec: BackwardSpec,
        rings: BackwardRings,
        slot: TileSlot,
        extents: BackwardExtents,
        features: FeatureArgs,
        pair: Any = None,
    ):
        """``pair``: a :class:`Pair` if two CTAs work on a tile together."""
        self.pair = pair
        self.spec, self.rings, self.slot, self.features = spec, rings, slot, features
        self.window = features.key_window(spec.features)
        self.seqlen_q, self.seqlen_k, self.num_heads, self.heads_per_kv_head = extents
        self.scales_gradients = spec.features.scales_gradients
        self.num_adders = 2 if spec.deterministic else 1  # warps
        self.rank = Int32(0) if pair is None else pair.rank  # among the CTAs that work on a tile

    @cute.jit
    def lengths(self, k_state: RingState, lane: Int32):
        """Of the sequence of the tile at hand. Read before K's stage is released."""
        lengths = Lengths(self.seqlen_q, self.seqlen_k)
        if const_expr(self.spec.features.ragged):
            words = (TileSlot.SEQLEN_Q, TileSlot.SEQLEN_K)
            lengths = Lengths(*(self.slot.read(word, k_state, lane) for word in words))
        return lengths

    @cute.jit
    def memory_batch(self, batch: Int32):
        """The batch entry in the tensors: packed sequences are one."""
        return Int32(0) if const_expr(self.spec.features.ragged) else batch

    @cute.jit
    def ragged_word(self, word: Constexpr[int], k_state: RingState, lane: Int32):
        """A word of the tile's slot that is 0 without a ragged batch."""
        return self.slot.read(word, k_state, lane) if const_expr(self.spec.features.ragged) else Int32(0)

    def key_tile(self, n_block: Int32, lengths: Lengths) -> KeyTile:
        """The steps of the tile with this key block, which are those of all its key blocks."""
        config = self.spec.config
        blocks = query_blocks(
            n_block // config.num_ctas,
            *lengths,
            tile_m=config.tile_m,
            tile_n=config.keys_per_tile,
            causal=self.spec.causal,
            window=self.window,
        )
        return KeyTile(*blocks, blocks.num_blocks * self.heads_per_kv_head)

    def last_key_tile(self, m_block: Int32, lengths: Lengths) -> Any:
        """The last of a head's tiles that meet a query block."""
        config = self.spec.config
        blocks = key_blocks(
            m_block * config.tile_m,
            *lengths,
            num_rows=config.tile_m,
            tile_n=config.keys_per_tile,
            causal=self.spec.causal,
            window=self.window,
        )
        return blocks.end - 1

    def m_block(self, tile: KeyTile, step: Int32) -> Int32:
        """The query block of a step within a head, 0 ≤ step < num_blocks."""
        return tile.first + step

    def is_masked(self, tile: KeyTile, step: Int32) -> Any:
        """Whether the query block of a step needs the element mask."""
        if self.window is not None:
            return (step < tile.num_masked) | (step >= tile.num_masked + tile.num_whole)
        return step < tile.num_masked

    @cute.jit
    def receive(self, k_state: RingState, lane: Int32):
        """All but the producer: wait for the next tile and its K. Returns its key block, or NO_TILE."""
        self.rings.K.wait(k_state)
        return self.slot.read(TileSlot.N_BLOCK, k_state, lane)

    @cute.jit
    def initialise_barriers(self):
        """One warp initialises every mbarrier, the copy engine is told, and the CTA synchronises."""
        one, both = WARPS_PER_WARPGROUP, WARPS_PER_WARPGROUP * NUM_CONSUMERS
        splits_keys = cutlass.const_expr(self.spec.config.split == "keys")
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                self.rings.K.initialise(both + one + self.num_adders)  # consumers, dQ warpgroup, warps that add
                self.rings.V.initialise(both if splits_keys else one)
                self.rings.Q.initialise(both)
                self.rings.dO.initialise(both)
                self.rings.dS.initialise(one, filling_warps=both if splits_keys else one)
                self.rings.dQ.initialise(1, filling_warps=one)
                if const_expr(self.pair is not None):
                    self.pair.initialise()
        cute.arch.mbarrier_init_fence()
        if const_expr(self.pair is not None):
            self.pair.synchronise()
        else:
            cute.arch.sync_threads()
