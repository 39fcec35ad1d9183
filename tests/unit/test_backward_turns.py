"""The order in which the backward's consumers begin a tile, played through in random schedules.

With two stages of K a consumer may be a whole tile ahead of the other: the turn it passes must not complete the barrier
of the tile before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from flashhopper.heuristics import BACKWARD_TABLE
from flashhopper.kernels.backward_smem import BackwardBarrier
from flashhopper.kernels.turns import turn_barrier

TILES = 6
LIMIT = 20_000  # moves; a tile takes about 30


class Play:
    """Producer, two consumers and the dQ warpgroup; each list counts fills or releases of one use of a stage."""

    def __init__(self, k_stages: int, steps: int, barrier_of: Callable[[int], int]):
        self.k_stages, self.steps, self.barrier_of = k_stages, steps, barrier_of
        self.q_stages = self.ds_stages = 2
        uses = TILES * steps
        self.k_full, self.k_released, self.v_full, self.v_released = ([0] * TILES for _ in range(4))
        self.q_full, self.q_released, self.ds_full, self.ds_released = ([0] * uses for _ in range(4))
        self.arrived: dict[int, int] = {}
        self.passed_early = 0

    def producer(self) -> Iterator[None]:
        for tile in range(TILES):
            while tile >= self.k_stages and self.k_released[tile - self.k_stages] < 3:
                yield
            self.k_full[tile] = 1
            for use in range(tile * self.steps, (tile + 1) * self.steps):
                while use >= self.q_stages and self.q_released[use - self.q_stages] < 2:
                    yield
                self.q_full[use] = 1
                yield
                if use == tile * self.steps:
                    while tile > 0 and self.v_released[tile - 1] < 2:
                        yield
                    self.v_full[tile] = 1
                    yield

    def consumer(self, index: int) -> Iterator[None]:
        for tile in range(TILES):
            while not self.k_full[tile]:
                yield
            barrier = self.barrier_of(tile % self.k_stages)
            for use in range(tile * self.steps, (tile + 1) * self.steps):
                while not self.q_full[use]:
                    yield
                if use == tile * self.steps:
                    if index == 0:  # arrives and goes on: a second arrival would complete the barrier by itself
                        self.passed_early += self.arrived.get(barrier, 0)
                        self.arrived[barrier] = self.arrived.get(barrier, 0) + 1
                    else:
                        while not self.arrived.get(barrier, 0):
                            yield
                        self.arrived[barrier] -= 1
                while not self.v_full[tile]:
                    yield
                yield
                while use >= self.ds_stages and not self.ds_released[use - self.ds_stages]:
                    yield
                self.ds_full[use] += 1
                self.q_released[use] += 1
                yield
            self.v_released[tile] += 1
            self.k_released[tile] += 1
            for _ in range(3):  # dK and dV are written after K has been released
                yield

    def dq(self) -> Iterator[None]:
        for tile in range(TILES):
            for use in range(tile * self.steps, (tile + 1) * self.steps):
                while self.ds_full[use] < 2:
                    yield
                self.ds_released[use] = 1
            self.k_released[tile] += 1

    def run(self, chance: random.Random) -> bool:
        """Whether all come to an end."""
        roles = [self.producer(), self.consumer(0), self.consumer(1), self.dq()]
        weights = [chance.random() ** 3 + 0.01 for _ in roles]  # some are slow
        for _ in range(LIMIT):
            index = chance.choices(range(len(roles)), weights)[0]
            if next(roles[index], self) is self:
                del roles[index], weights[index]
            if not roles:
                return True
        return False


def of_slot(slot: int) -> int:
    return int(turn_barrier(1, slot, BackwardBarrier.TURN))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("k_stages", [1, 2])
def test_no_turn_is_passed_twice(k_stages: int, steps: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(300):
        play = Play(k_stages, steps, of_slot)
        assert play.run(chance)
        assert play.passed_early == 0


def test_the_play_finds_turns_passed_twice() -> None:
    """One barrier for both stages of K, and tiles of one step."""
    chance = random.Random(1)
    plays = [Play(2, 1, lambda slot: 1) for _ in range(300)]
    assert all(play.run(chance) for play in plays)  # here an arrival waits for its partner, on a card it is lost
    assert any(play.passed_early for play in plays)


def test_named_barriers_are_distinct() -> None:
    turns = [turn_barrier(consumer, slot, BackwardBarrier.TURN) for consumer in range(2) for slot in range(2)]
    others = [BackwardBarrier.P_FULL, BackwardBarrier.P_EMPTY, BackwardBarrier.ADD, BackwardBarrier.ADD + 1]
    assert sorted(map(int, (*turns, *others))) == [*range(1, 7), 9, 10]
    assert max(row.config.num_k_stages for row in BACKWARD_TABLE) == 2
