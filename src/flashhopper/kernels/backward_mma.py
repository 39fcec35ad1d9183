"""What the consumers of the backward have in common: Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, dV += Pᵀ dO and dK += dSᵀ Q are theirs."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from flashhopper.config import ROWS_PER_WARPGROUP, WARPGROUP_THREADS, BackwardConfig
from flashhopper.kernels import ptx
from flashhopper.kernels.backward_cta import BackwardCta, KeyTile, TileSlot
from flashhopper.kernels.backward_epilogue import write_rows
from flashhopper.kernels.backward_mods import BlockPlace, GradientMods, in_fours
from flashhopper.kernels.backward_scores import ScoreMath, pack, packed
from flashhopper.kernels.cta import Lengths
from flashhopper.kernels.pipeline import RingState
from flashhopper.kernels.ragged import Rows
from flashhopper.kernels.values import DynamicValues


def transposed(tile: cute.Tensor) -> cute.Tensor:
    """The same bytes with rows and columns exchanged: a K-major operand as an MN-major one."""
    modes = [1, 0, *range(2, cute.rank(tile))]
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=modes))


class BackwardTiles(NamedTuple):
    """Shared-memory tiles, as ``backward_smem.BackwardLayouts`` describes them, and the row statistics."""

    sK: cute.Tensor
    sV: cute.Tensor
    sQ: cute.Tensor
    sdO: cute.Tensor
    sdS: cute.Tensor
    sP: cute.Tensor  # words (4, 128 threads, tile_m / 16): P between two consumers
    sLSE: cute.Tensor
    sDelta: cute.Tensor


class BackwardMmas(NamedTuple):
    mma_S: cute.TiledMma  # Sᵀ and dPᵀ: (keys, queries), both operands from shared memory
    mma_dK: cute.TiledMma  # (keys, head_dim), dSᵀ from registers
    mma_dV: cute.TiledMma  # (keys, head_dim_v), Pᵀ from registers


class GradientPlace(NamedTuple):
    """Where a tile's dK and dV go: its key block, head and batch entry, and the rows of its sequence."""

    n_block: Int32
    head: Int32
    batch: Int32
    rows: Rows


class GradientOutputs(NamedTuple):
    """Where dK and dV go, ``(batch, seqlen, heads, head_dim)``, and the factor on dK."""

    mdK: cute.Tensor
    mdV: cute.Tensor
    softmax_scale: Float32


class TilePlace(NamedTuple):
    """The tile at hand: its steps and coordinates, its sequence's lengths, and K's and V's places in their rings."""

    tile: KeyTile
    n_block: Int32
    head: Int32
    batch: Int32
    lengths: Lengths
    k_state: RingState
    v_state: RingState


class ConsumerState(DynamicValues):
    """A consumer's place: the step within its head, and the stages of the rings; they advance as one value."""

    dynamic = ("step", "q", "do", "ds")

    def __init__(self, step: Int32, q: RingState, do: RingState, ds: RingState):
        self.step, self.q, self.do, self.ds = step, q, do, ds

    @classmethod
    def start(cls, config: BackwardConfig) -> "ConsumerState":
        stages = (config.num_q_stages, config.num_do_stages, config.num_ds_stages)
        return cls(Int32(0), *(RingState.start(n) for n in stages))

    @cute.jit
    def next(self, num_blocks: Int32):
        """The state of the following step; the step within the head, of ``num_blocks``, wraps."""
        step = self.step + 1
        step = Int32(0) if step == num_blocks else step
        return ConsumerState(step, self.q.next(), self.do.next(), self.ds.next())


class BackwardConsumer:
    """What the consumers have in common: their keys, the operands they read, and the way their results take."""

    def __init__(
        self,
        cta: BackwardCta,
        mmas: BackwardMmas,
        tiles: BackwardTiles,
        outputs: GradientOutputs,
        scale_log2: Float32,
        key_group: Int32,
    ):
        """``key_group`` counts the row groups of 64 keys of the tile."""
        self.cta, self.mmas, self.tiles, self.outputs, self.key_group = cta, mmas, tiles, outputs, key_group
        config = cta.spec.config
        self.lane = cute.arch.lane_idx()
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        self.element = tiles.sK.element_type
        first_thread = WARPGROUP_THREADS * key_group  # descriptors depend on the warpgroup alone
        self.thr_S, self.thr_dK, self.thr_dV = (mma.get_slice(first_thread) for mma in mmas)
        # The first of this thread's two keys in the tile.
        self.key = ROWS_PER_WARPGROUP * key_group + self.thread // 32 * 16 + self.lane // 4
        self.math = ScoreMath(cta, (tiles.sLSE, tiles.sDelta), scale_log2, self.key, self.lane)
        self.mods = GradientMods(cta, self.math) if cta.spec.features.has_mods else None
        self.scores_shape = (config.tile_n, config.tile_m)
        self.exchanged_P = tiles.sP[None, self.thread, None]
        is_masked = cta.spec.causal or cta.spec.features.window
        self.skips = is_masked and config.key_groups > 1  # else every query block visited sees these keys

    def a_operand(self, tile: cute.Tensor) -> cute.Tensor:
        """Descriptors of K or V, stage by stage."""
        return self.mmas.mma_S.make_fragment_A(self.thr_S.partition_A(tile))

    def b_operand(self, tile: cute.Tensor) -> cute.Tensor:
        """Descriptors of Q or dO, stage by stage, for the products that sum over head_dim."""
        return self.mmas.mma_S.make_fragment_B(self.thr_S.partition_B(tile))

    def scores(self) -> cute.Tensor:
        """Registers of Sᵀ or dPᵀ."""
        return cute.make_rmem_tensor(self.mmas.mma_S.partition_shape_C(self.scores_shape), Float32)

    def probabilities_operand(self) -> cute.Tensor:
        """Registers of Pᵀ or dSᵀ as the operand of the products that sum over query rows."""
        return cute.make_rmem_tensor(self.mmas.mma_dV.partition_shape_A(self.scores_shape), self.element)

    def accumulator(self, mma: cute.TiledMma, head_dim: int) -> cute.Tensor:
        """Registers of dK or dV."""
        return cute.make_rmem_tensor(mma.partition_shape_C((self.cta.spec.config.tile_n, head_dim)), Float32)

    def score_writer(self, acc: cute.Tensor, operand: cute.Tensor) -> tuple[Any, cute.Tensor, cute.Tensor]:
        """A transposing stmatrix copy of dSᵀ: the copy, its register view, its (queries, keys) target per stage."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.element)
        thread = WARPGROUP_THREADS * self.key_group + self.thread
        copy = cute.make_tiled_copy_C(atom, self.mmas.mma_S).get_slice(thread)
        source = copy.retile(cute.make_tensor(operand.iterator, acc.layout))
        return copy, source, copy.partition_D(transposed(self.tiles.sdS))

    @cute.jit
    def release(self, ring, state: RingState):
        """All lanes of the warp have read the stage, row statistics among it."""
        cute.arch.sync_warp()
        ring.release(state, self.lane)

    @cute.jit
    def copy_words(self, source: cute.Tensor, target: cute.Tensor):
        """Between registers and the exchange tile, 16 bytes at a time."""
        layout = cute.make_layout((4, cute.size(source) // 4))
        if const_expr(source.memspace == cute.AddressSpace.rmem):
            cute.autovec_copy(cute.make_tensor(source.iterator, layout), target)
        else:
            cute.autovec_copy(source, cute.make_tensor(target.iterator, layout))

    @cute.jit
    def run(self):
        """Tiles from the producer until the end mark."""
        state = ConsumerState.start(self.cta.spec.config)
        k_state, v_state = RingState.start(self.cta.spec.config.num_k_stages), RingState.start(1)
        self.start()
        n_block = self.cta.receive(k_state, self.lane)
        while n_block >= 0:
            lengths = self.cta.lengths(k_state, self.lane)
            tile = self.cta.key_tile(n_block, lengths)
            head, batch = Int32(0), Int32(0)
            if const_expr(self.cta.features.alibi is not None or self.mods is not None):
                head, batch = self.head_and_batch(k_state)
            self.clear()
            if tile.num_steps > 0:
                state = self.visit(TilePlace(tile, n_block, head, batch, lengths, k_state, v_state), state)
                self.release_values(v_state)
                v_state = v_state.next()
            head, batch = self.head_and_batch(k_state)  # again: what is kept over the loop takes registers
            start = self.cta.ragged_word(TileSlot.START_K, k_state, self.lane)
            lengths = self.cta.lengths(k_state, self.lane)
            self.cta.rings.K.release(k_state, self.lane)
            k_state = k_state.next()
            self.write(GradientPlace(n_block, head, self.cta.memory_batch(batch), Rows(start, lengths.k)))
            n_block = self.cta.receive(k_state, self.lane)

    def head_and_batch(self, k_state: RingState) -> tuple[Int32, Int32]:
        """Of the tile at hand, before K is released."""
        return tuple(self.cta.slot.read(word, k_state, self.lane) for word in (TileSlot.HEAD, TileSlot.BATCH))

    def start(self) -> None:
        """Before the first tile."""

    @cute.jit
    def release_values(self, v_state: RingState):
        """V of the tile is not needed any more."""
        self.cta.rings.V.release(v_state, self.lane)

    @cute.jit
    def visit(self, place: TilePlace, state):
        """Every step of a tile, head after head."""
        for number in cutlass.range(place.tile.num_steps, unroll=1):
            if const_expr(self.skips):
                if self.sees_nothing(place, state.step):
                    state = self.skip(place, state, number)
                else:
                    state = self.step(place, state, number)
            else:
                state = self.step(place, state, number)
        return state

    @cute.jit
    def write_gradient(self, acc: cute.Tensor, mX: cute.Tensor, place: GradientPlace, scale: Float32):
        """An accumulator to the rows of its keys."""
        row = place.n_block * self.cta.spec.config.tile_n + self.key
        rows = cute.domain_offset((place.rows.start, 0), mX[place.batch, None, place.head, None])
        write_rows(acc, rows, (row, place.rows.length), scale, self.element, self.lane)

    @cute.jit
    def to_probabilities(
        self,
        place: TilePlace,
        state,
        number: Int32,
        acc_S: cute.Tensor,
        lse: cute.Tensor,
        operand: cute.Tensor,
        operand_F: cute.Tensor,
    ):
        """S of a step to P, packed for the product with dO. Only blocks that the mask cuts are masked. With softcap
        ``operand_F`` becomes P times the factor on its gradient; so with score_mod, where it is :meth:`factors`."""
        tile = place.tile
        m_block = self.cta.m_block(tile, state.step)
        features = self.cta.features
        if const_expr(self.mods is not None):
            head = place.head * self.cta.heads_per_kv_head + number // tile.num_blocks
            block = BlockPlace(place.n_block, m_block, head, place.batch, place.lengths)
            self.mods.probabilities(acc_S, lse, block, operand, operand_F, lambda: self.cta.rings.Q.wait(state.q))
        else:
            if const_expr(features.softcap is not None):
                self.math.cap(acc_S, operand_F)
            if const_expr(features.alibi is not None):
                head = place.head * self.cta.heads_per_kv_head + number // tile.num_blocks
                self.math.add_bias(acc_S, place.n_block, m_block, place.lengths, features.alibi[place.batch, head])
            self.math.probabilities(acc_S, lse)
            if self.cta.is_masked(tile, state.step):
                self.math.hide(acc_S, place.n_block, m_block, place.lengths)
            pack(acc_S, operand)
            if const_expr(features.softcap is not None):
                self.math.cap_gradients(operand_F, operand)

    @cute.jit
    def load_lse(self, stage: Int32):
        """LSE of this thread's rows, in registers or, where functions need them for other things, in shared memory."""
        lse = self.math.sLSE[None, None, stage]
        if const_expr(self.mods is None):
            lse = self.math.load_rows(self.math.sLSE, stage)
        return lse

    def factors(self, operand_F: cute.Tensor) -> Any:
        """Registers of an operand as the target of P times the factor on dS, if functions need one."""
        if self.mods is None:
            return operand_F
        return in_fours(packed(operand_F)) if self.cta.scales_gradients else None

    @cute.jit
    def to_score_gradients(self, place: TilePlace, state, acc_dP: cute.Tensor, delta: cute.Tensor, words_P, operand):
        """dP of a step to dS, packed for the product with Q."""
        if const_expr(self.mods is not None):
            self.math.hide_gradients(acc_dP, words_P, self.element)
        else:
            if self.cta.is_masked(place.tile, state.step):
                self.math.hide_gradients(acc_dP, words_P, self.element)
        self.math.gradients(acc_dP, words_P, self.element, delta)
        pack(acc_dP, operand)

    @cute.jit
    def send_score_gradients(self, state):
        """dS to shared memory for the dQ warpgroup, while the product with Q runs."""
        self.cta.rings.dS.wait_empty(state.ds)
        cute.copy(self.write_dS, self.source_dS, self.target_dS[None, None, None, state.ds.stage])
        ptx.fence_async_shared()
        self.cta.rings.dS.commit(state.ds, self.lane)
        if const_expr(self.cta.pair is not None):
            self.cta.pair.send(state.ds, self.thread)
