"""Producer, scheduler, mailbox and rings of one CTA as they are in ``kernels/``, run on plain ints.

The DSL's decorators are taken off and the instructions below them replaced: mbarriers count arrivals, atomics add, TMA
completes at once. Only the consumers are a model: what they wait for and release, in their order. Whatever the speeds
and the pattern of failures, each tile must end with one trusted run, in at most two, and nobody may wait for ever.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from flashhopper.config import ROWS_PER_WARPGROUP, KernelSpec
from flashhopper.kernels import cta, load, pipeline, tile_scheduler
from flashhopper.kernels.cta import Cta, Lengths
from flashhopper.kernels.features import FeatureArgs
from flashhopper.kernels.load import Producer
from flashhopper.kernels.pipeline import WARPS_PER_WARPGROUP, RingState, TmaRing
from flashhopper.kernels.tile_scheduler import PAUSE, Mailbox, TileGrid, TileScheduler
from flashhopper.kernels.turns import turn_barrier

Blocked = Callable[[], bool]
Consumer = Generator[Blocked, None, None]

EVERY_BLOCK = ("ping_pong", "relay")
DISTRUSTING_WARPS = 3  # of those that judge an untrusted tile


class Pointer(NamedTuple):
    cells: list[Any]
    index: int = 0

    def __add__(self, offset: int) -> Pointer:  # type: ignore[override]
        return Pointer(self.cells, self.index + offset)

    @property
    def target(self) -> Any:
        return self.cells[self.index]


class Barrier:
    """An mbarrier: a phase completes when all have arrived and the announced bytes are there."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes_due = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, expected_bytes: int = 0) -> None:
        assert self.missing > 0, "one arrival too many"
        self.missing -= 1
        self.bytes_due += expected_bytes
        self.complete()

    def complete(self, delivered: bool = False) -> None:
        if delivered:
            assert self.bytes_due > 0, "a copy that was not announced"
            self.bytes_due = 0
        if self.missing == 0 and self.bytes_due == 0:
            self.phase += 1
            self.missing = self.count

    def has_completed(self, parity: int) -> bool:
        return self.phase % 2 != parity


def go_on() -> bool:
    """What a consumer waits for where only time passes."""
    return True


def barriers(count: int) -> Pointer:
    return Pointer([Barrier() for _ in range(count)])


class Workspace(list[int]):
    @property
    def iterator(self) -> Pointer:
        return Pointer(self)


class AnyTile:
    """Stands for a TMA operand's tensors: any index will do."""

    tma = None

    def partition(self, head: int, batch: int, rows: None) -> tuple[AnyTile, AnyTile]:
        return self, self

    def __getitem__(self, index: Any) -> AnyTile:
        return self


class Run(NamedTuple):
    """One pass over a tile by all consumers."""

    tile: tuple[int, int, int]
    exact: bool
    trusted: bool


class Machine:
    """One CTA of a launch: the instructions of the kernels' modules, and who else is there."""

    def __init__(
        self,
        spec: KernelSpec,
        extents: tuple[int, int, int, int],
        random: Random,
        failing: float,
        window: tuple[int, int, int] | None = None,
    ):
        """``extents``: seqlen_q, seqlen_k, heads, batch. ``failing``: share of tiles that are not trusted. ``window``:
        keys to the left and to the right, keys per chunk."""
        self.window = window
        self.spec, self.random, self.failing = spec, random, failing
        self.seqlen_q, self.seqlen_k, self.heads, self.batch = extents
        shape_q, shape_k = (self.seqlen_q, self.heads, self.batch), (self.seqlen_k, self.heads, self.batch)
        self.grid = TileGrid.create(shape_q, shape_k, spec, 3)
        self.num_ctas = self.grid.num_tiles if spec.config.scheduler == "single" else min(self.grid.num_tiles, 3)
        self.index = random.randrange(self.num_ctas)
        self.is_last = random.random() < 0.5  # to leave
        self.workspace = Workspace([0, self.num_ctas - 1 if self.is_last else 0, 0, 0])
        self.other_claims: list[int] = []
        self.runs: list[Run] = []
        self.distrust: dict[int, set[int]] = {}
        self.consumers: list[Consumer] = []
        self.blocked: dict[int, Blocked] = {}
        self.turns: Counter[int] = Counter()  # that were passed and not yet taken, by named barrier

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arch = SimpleNamespace(
            grid_dim=lambda: (self.num_ctas, 1, 1),
            block_idx=lambda: (self.index, 0, 0),
            warp_idx=lambda: 0,
            lane_idx=lambda: 0,
            elect_one=nullcontext,
            sync_warp=lambda: None,
            sync_threads=lambda: None,
            mbarrier_init_fence=lambda: None,
            fence_acq_rel_gpu=lambda: None,
            griddepcontrol_launch_dependents=lambda: None,
            shuffle_sync=lambda value, lane: value,
            mbarrier_init=lambda pointer, count: pointer.target.init(count),
            mbarrier_arrive=lambda pointer: pointer.target.arrive(),
            mbarrier_arrive_and_expect_tx=lambda pointer, expected: pointer.target.arrive(expected),
            mbarrier_wait=self.producer_waits,
        )
        cute = SimpleNamespace(
            arch=arch,
            copy=lambda tma, source, target, tma_bar_ptr: tma_bar_ptr.target.complete(delivered=True),
            make_layout=lambda shape: None,
            make_tensor=lambda pointer, layout: {},
        )
        ptx = SimpleNamespace(
            draw_ticket=self.draw_ticket,
            atomic_increment=self.increment,
            atomic_increment_acq_rel=self.increment,
            vote_all=bool,
        )
        plain = {
            "cute": cute,
            "ptx": ptx,
            "Int32": int,
            "cutlass": SimpleNamespace(range=lambda *bounds, unroll: range(*bounds), range_constexpr=range),
        }
        for module in (cta, load, pipeline, tile_scheduler):
            for name, stand_in in plain.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, stand_in)
        for cls in (Cta, Producer, RingState, TmaRing, Mailbox, TileScheduler):
            for name, member in vars(cls).items():
                if inspect.isfunction(member) and hasattr(member, "__wrapped__"):
                    monkeypatch.setattr(cls, name, member.__wrapped__)

    def increment(self, pointer: Pointer) -> int:
        pointer.cells[pointer.index] += 1
        return int(pointer.target) - 1

    def draw_ticket(self, pointer: Pointer) -> int:
        """The claim counter is shared with the other CTAs, which may come first."""
        while self.random.random() < 0.3:
            self.other_claims.append(self.increment(pointer) + self.num_ctas)
        return self.increment(pointer)

    def producer_waits(self, pointer: Pointer, parity: int) -> None:
        """The consumers run while the producer waits, and sometimes when it need not."""
        while self.random.random() < 0.3:
            self.step()
        while not pointer.target.has_completed(parity):
            assert self.step(), "deadlock: the producer waits for consumers that wait for it"

    def step(self) -> bool:
        """Let one consumer that can go on run to its next wait; False if there is none."""
        ready = [index for index, is_free in self.blocked.items() if is_free()]
        if not ready:
            return False
        index = self.random.choice(ready)
        try:
            self.blocked[index] = next(self.consumers[index])
        except StopIteration:
            del self.blocked[index]
        return True

    def run(self) -> None:
        spec, config = self.spec, self.spec.config
        mailbox = Mailbox(Pointer([]), barriers(Mailbox.VERDICTS), config.num_q_stages)
        scheduler = TileScheduler(config.scheduler, self.grid, mailbox, self.workspace)  # type: ignore[arg-type]
        stages = (config.num_q_stages, config.num_stages, config.num_stages)
        rings = tuple(TmaRing(barriers(2 * count), count, 16) for count in stages)
        features = FeatureArgs(window=self.window)  # type: ignore[arg-type]
        self.cta = Cta(spec, rings, scheduler, (self.seqlen_q, self.seqlen_k, 1), features)  # type: ignore[arg-type]
        self.cta.initialise_barriers()
        groups = range(config.num_consumer_warpgroups)
        if self.spec.config.warpgroup_order in EVERY_BLOCK:
            self.turns[turn_barrier(0, 0)] = 1  # by the last warpgroup
        self.consumers = [self.consumer(index) for index in groups]
        self.blocked = {index: next(consumer) for index, consumer in enumerate(self.consumers)}
        Producer(self.cta, (AnyTile(), AnyTile(), AnyTile())).run()  # type: ignore[arg-type]
        while self.blocked:
            assert self.step(), "deadlock: consumers wait for a producer that has left"

    def consumer(self, index: int) -> Consumer:
        """One warpgroup, as ``mma.Consumer`` uses the rings, the turns and the mailbox."""
        config, mailbox = self.spec.config, self.cta.scheduler.mailbox
        q = RingState.start(config.num_q_stages)
        k, v = RingState.start(config.num_stages), RingState.start(config.num_stages)
        item = 0
        yield self.full(self.cta.q_ring, q)
        m_block = mailbox.read(Mailbox.M_BLOCK, q.stage)
        if m_block >= 0:
            k, v = yield from self.first_scores(index, m_block, q, k, v)
        while m_block >= 0:
            _, visited, left_over = self.blocks(index, m_block)
            for _ in range(visited - 1):
                yield self.full(self.cta.k_ring, k)
                yield from self.await_block(index)
                yield self.full(self.cta.v_ring, v)
                if config.warpgroup_order == "relay":
                    yield go_on
                self.pass_block(index)
                self.release(self.cta.k_ring, k, WARPS_PER_WARPGROUP)
                yield go_on
                self.release(self.cta.v_ring, v, WARPS_PER_WARPGROUP)
                k, v = k.next(), v.next()
            words = (Mailbox.HEAD, Mailbox.BATCH, Mailbox.EXACT)
            head, batch, exact = (mailbox.read(word, q.stage) for word in words)
            yield self.full(self.cta.v_ring, v)
            self.release(self.cta.q_ring, q, WARPS_PER_WARPGROUP)
            following, m_block_ahead, is_issued = q.next(), 0, False
            if config.prefetch_scores:
                yield self.full(self.cta.q_ring, following)
                m_block_ahead = mailbox.read(Mailbox.M_BLOCK, following.stage)
                is_issued = m_block_ahead >= 0 and self.blocks(index, m_block_ahead)[0] == 0
                if is_issued:
                    yield from self.await_turn(index, following)
                    yield from self.await_block(index)
                    yield self.full(self.cta.k_ring, k)
                    self.pass_block(index)
                    self.pass_turn(index, following)
            yield go_on
            self.release(self.cta.v_ring, v, WARPS_PER_WARPGROUP)
            v = v.next()
            k, v = yield from self.skip(index, left_over, k, v)
            if self.cta.may_fail:
                self.judge(index, item, (m_block, head, batch), exact)
            elif index == 0:
                self.runs.append(Run((m_block, head, batch), False, True))
            yield go_on
            if is_issued:
                self.release(self.cta.k_ring, k, WARPS_PER_WARPGROUP)
                k = k.next()
            if m_block_ahead == PAUSE:
                self.release(self.cta.q_ring, following, WARPS_PER_WARPGROUP)
                following = following.next()
            yield self.full(self.cta.q_ring, following)
            m_block, q = mailbox.read(Mailbox.M_BLOCK, following.stage), following
            if m_block >= 0 and not is_issued:
                k, v = yield from self.first_scores(index, m_block, q, k, v)
            item += 1

    def blocks(self, index: int, m_block: int) -> tuple[int, int, int]:
        """Blocks of the tile that the warpgroup skips, those it visits, and those it skips after them."""
        tile_m, lengths = self.spec.config.tile_m, Lengths(self.seqlen_q, self.seqlen_k)
        first_row = m_block * tile_m
        loaded = self.cta.key_blocks(first_row, tile_m, lengths)  # type: ignore[arg-type]
        own = self.cta.key_blocks(first_row + ROWS_PER_WARPGROUP * index, ROWS_PER_WARPGROUP, lengths)  # type: ignore[arg-type]
        return loaded.end - own.end, own.num_blocks, own.first - loaded.first

    def skip(self, index: int, count: int, k: RingState, v: RingState) -> Any:
        """Blocks that only other warpgroups see."""
        for _ in range(count):
            yield self.full(self.cta.k_ring, k)
            self.release(self.cta.k_ring, k, WARPS_PER_WARPGROUP)
            yield from self.await_block(index)
            self.pass_block(index)
            yield self.full(self.cta.v_ring, v)
            self.release(self.cta.v_ring, v, WARPS_PER_WARPGROUP)
            k, v = k.next(), v.next()
        return k, v

    def first_scores(self, index: int, m_block: int, q: RingState, k: RingState, v: RingState) -> Any:
        skipped = self.blocks(index, m_block)[0]
        if skipped > 0:
            yield from self.await_turn(index, q)
            self.pass_turn(index, q)
        k, v = yield from self.skip(index, skipped, k, v)
        yield self.full(self.cta.k_ring, k)
        if skipped == 0:
            yield from self.await_turn(index, q)
        yield from self.await_block(index)
        yield go_on
        self.pass_block(index)
        if skipped == 0:
            self.pass_turn(index, q)
        self.release(self.cta.k_ring, k, WARPS_PER_WARPGROUP)
        return k.next(), v

    def await_turn(self, index: int, q: RingState) -> Consumer:
        """The staggered start of a tile, as ``turns.TurnTaking`` has it."""
        if self.spec.config.warpgroup_order == "stagger" and index > 0:
            barrier = turn_barrier(index, q.stage)
            yield lambda: self.turns[barrier] > 0
            self.turns[barrier] -= 1

    def pass_turn(self, index: int, q: RingState) -> None:
        config = self.spec.config
        if config.warpgroup_order == "stagger" and index < config.num_consumer_warpgroups - 1:
            barrier = turn_barrier(index + 1, q.stage)
            self.turns[barrier] += 1
            assert self.turns[barrier] == 1, "a turn passed twice completes the barrier without its waiter"

    def await_block(self, index: int) -> Consumer:
        """A turn in every block, of those that the warpgroup skips too."""
        if self.spec.config.warpgroup_order in EVERY_BLOCK:
            barrier = turn_barrier(index, 0)
            yield lambda: self.turns[barrier] > 0
            self.turns[barrier] -= 1

    def pass_block(self, index: int) -> None:
        config = self.spec.config
        if config.warpgroup_order in EVERY_BLOCK:
            barrier = turn_barrier((index + 1) % config.num_consumer_warpgroups, 0)
            self.turns[barrier] += 1
            assert self.turns[barrier] == 1, "a turn passed twice completes the barrier without its waiter"

    def full(self, ring: TmaRing, state: RingState) -> Blocked:
        barrier, parity = (ring.full + state.stage).target, state.phase
        return lambda: barrier.has_completed(parity)

    def release(self, ring: TmaRing, state: RingState, warps: int) -> None:
        for _ in range(warps):
            ring.release(state, 0)

    def judge(self, index: int, item: int, tile: tuple[int, int, int], exact: int) -> None:
        """Four warps' verdicts; which warps of the tile have reason to distrust it is drawn once per item."""
        warps = WARPS_PER_WARPGROUP * self.spec.config.num_consumer_warpgroups
        if item not in self.distrust:
            fails = self.random.random() < self.failing
            self.distrust[item] = set(self.random.sample(range(warps), DISTRUSTING_WARPS)) if fails else set()
            self.runs.append(Run(tile, bool(exact), not self.distrust[item]))
            assert len(self.runs) <= 2 * self.grid.num_tiles, "tiles are redone for ever"
        for warp in range(WARPS_PER_WARPGROUP):
            trusted = warp + WARPS_PER_WARPGROUP * index not in self.distrust[item]
            self.cta.scheduler.mailbox.judge(item, trusted, exact, 0)
