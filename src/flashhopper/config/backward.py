"""The backward's three kernels: the main one's tile configuration, and the specialisations they are built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from flashhopper.config.common import (
    FP8_MAX_EXPONENT,
    ROWS_PER_WARPGROUP,
    SMEM_BYTES_PER_CTA,
    WARPGROUP_THREADS,
    ConfigError,
    Dtype,
    WarpgroupOrder,
    check_padded_dims,
)
from flashhopper.config.features import PLAIN, Features, check_features, mask_name

PREPROCESS_WARPS = 8
PREPROCESS_WORDS = 3  # that a CTA zeroes: the counter, and a semaphore for each CTA that works on a tile

BackwardSplit = Literal["keys", "operands"]

# Producer, dQ warpgroup and consumers. With all four products a consumer of head_dim 128 spilled at 200.
# The producer of a pair also claims for the other CTA, and a dQ of few columns needs fewer.
_ROLE_REGISTERS = {
    "keys": (24, 72, 208),
    "operands": (40, 88, 192),
    "wide": (32, 96, 192),
    "narrow": (56, 72, 192),
}


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class BackwardRegisters(NamedTuple):
    """Registers per thread of the backward kernel: at entry, and of each role after ``setmaxnreg``."""

    entry: int
    producer: int
    dq: int
    consumer: int


@dataclass(frozen=True)
class BackwardConfig:
    """How the backward kernel cuts and orders the work.

    One CTA keeps ``tile_n`` keys and loops over blocks of ``tile_m`` query rows. Its four warpgroups: the producer, one
    that computes dQ = dS K and adds it to global memory, and two consumers, which share the other four products.
    """

    tile_m: int
    tile_n: int
    split: BackwardSplit = "keys"
    """``keys``: each consumer has 64 keys and both accumulators, dK and dV. ``operands``: 64 keys, one consumer has S
    and dV, the other dP and dK; for head dims whose two accumulators do not fit one warpgroup's registers."""
    num_q_stages: int = 2
    num_do_stages: int = 2
    num_ds_stages: int = 2
    dq_columns: int = 64
    """Columns of dQ that are accumulated, staged and added at a time."""
    num_dq_stages: int = 1
    """Staging tiles of dQ. With 2 the next one is written while the copy engine reads this one."""
    warpgroup_order: WarpgroupOrder = "free"
    """``stagger``: with ``split="keys"`` the second consumer's first GEMM of a tile waits for the first's. Turns in
    every block (``ping_pong``) were never faster and are not there."""
    num_k_stages: int = 1
    """Tiles of K. With 2 the next one, and with it the first Q, is loaded while this one is worked on."""
    group_waves: int = 2
    """Size of the group of key heads worked on at a time: as many as give each SM this many tiles, if L2 holds them."""
    paired: bool = False
    """Two CTAs, a cluster, work on neighbouring key blocks in step. They exchange dS, and each computes half of dQ's
    columns for the keys of both: half as many bytes are added to global memory. Needs ``split="operands"``."""
    wide_consumers: bool = False
    """The registers of ``split="keys"``, 208 for a consumer, with ``operands`` too; needs ``dq_columns`` up to 64."""

    @property
    def num_threads(self) -> int:
        return WARPGROUP_THREADS * 4

    @property
    def key_groups(self) -> int:
        """Row groups of 64 keys, which are the warpgroups that share an MMA over the tile's keys."""
        return self.tile_n // ROWS_PER_WARPGROUP

    @property
    def num_ctas(self) -> int:
        """CTAs that work on a tile together."""
        return 2 if self.paired else 1

    @property
    def keys_per_tile(self) -> int:
        """What one unit of the schedule covers: the keys of all its CTAs."""
        return self.tile_n * self.num_ctas

    def dq_chunks(self, head_dim: int) -> int:
        """Groups of ``dq_columns`` columns of dQ that one CTA computes."""
        return head_dim // self.num_ctas // self.dq_columns

    def registers(self) -> BackwardRegisters:
        """Registers per thread at entry and per role; 128 at entry is what 512 threads can have."""
        case: str = "wide" if self.dq_columns > 64 else "keys" if self.wide_consumers else self.split
        case = "narrow" if self.paired and self.dq_columns < 64 and case == "operands" else case
        return BackwardRegisters(128, *_ROLE_REGISTERS[case])

    def accumulator_registers(self, head_dim: int, head_dim_v: int) -> int:
        """Registers per consumer thread that the accumulators, P and dS take."""
        per_thread = ROWS_PER_WARPGROUP / WARPGROUP_THREADS
        outputs = head_dim + head_dim_v if self.split == "keys" else max(head_dim, head_dim_v)
        return int((outputs + 1.5 * self.tile_m) * per_thread)

    def smem_bytes(self, head_dim: int, head_dim_v: int, element_bytes: int = 2) -> int:
        """Bytes of shared memory of one CTA, computed as ``kernels/backward_smem.py`` lays it out."""
        stages = self.num_q_stages + self.num_do_stages + self.num_ds_stages + self.num_dq_stages
        barriers = 8 * (2 + 2 * stages) + 44 * self.num_k_stages  # V's, the rings', K's with the tile's coordinates
        statistics = 4 * self.tile_m * (self.num_q_stages + self.num_do_stages)
        keys = self.tile_n * (self.num_k_stages * head_dim + head_dim_v) * element_bytes
        rows = (self.num_q_stages * head_dim + self.num_do_stages * head_dim_v) * self.tile_m * element_bytes
        scores = (self.num_ds_stages + int(self.split == "operands")) * self.tile_m * self.tile_n * element_bytes
        staging = self.num_dq_stages * ROWS_PER_WARPGROUP * self.dq_columns * 4
        if self.paired:  # the other CTA's dS, and its K where this one computes dQ
            barriers += 8 * (self.num_ds_stages + 2) + 4
            keys += self.num_k_stages * self.tile_n * head_dim // 2 * element_bytes
            scores += self.num_ds_stages * self.tile_m * self.tile_n * element_bytes
        return _round_up(_round_up(barriers, 128) + statistics, 1024) + keys + rows + scores + staging

    def check_feasible(self, head_dim: int, head_dim_v: int) -> None:
        """Raise :class:`ConfigError` unless the kernel fits the card (a wrong register sum hangs it silently)."""
        problems = []
        if self.tile_m not in (64, 128):
            problems.append(f"tile_m={self.tile_m} must be 64 or 128")
        keys = {"keys": 128, "operands": 64}[self.split]
        if self.tile_n != keys:
            problems.append(f"tile_n={self.tile_n} must be {keys} with split={self.split!r}")
        if self.dq_columns % 32 or not 32 <= self.dq_columns <= 128 or head_dim // self.num_ctas % self.dq_columns:
            problems.append(
                f"dq_columns={self.dq_columns} must be 32, 64, 96 or 128 and divide head_dim={head_dim}"
                + (", halved for a pair" if self.paired else "")
            )
        elif self.dq_columns == 96 and head_dim != 96:
            problems.append("dq_columns=96 would cut the 64-column blocks of a head_dim other than 96")
        if self.group_waves < 1:
            problems.append(f"group_waves={self.group_waves} must be at least 1")
        if self.wide_consumers and self.dq_columns > 64:
            problems.append(f"dq_columns={self.dq_columns} must be at most 64 with wide_consumers")
        if self.paired and self.split != "operands":
            problems.append(f"paired with split={self.split!r}: the only way to send dS that is there is of 'operands'")
        orders = ("free", "stagger") if self.split == "keys" else ("free",)
        if self.warpgroup_order not in orders:
            problems.append(f"warpgroup_order={self.warpgroup_order!r}: only 'free', and with split='keys' 'stagger'")
        for name in ("num_q_stages", "num_do_stages", "num_ds_stages", "num_dq_stages"):
            if not 1 <= getattr(self, name) <= 4:
                problems.append(f"{name}={getattr(self, name)} must be from 1 to 4")
        if self.num_k_stages not in (1, 2):
            problems.append(f"num_k_stages={self.num_k_stages} must be 1 or 2")
        smem = self.smem_bytes(head_dim, head_dim_v)
        if smem > SMEM_BYTES_PER_CTA:
            problems.append(f"needs {smem} bytes of shared memory, the card has {SMEM_BYTES_PER_CTA}")
        budget = self.registers()
        handed_out = budget.producer + budget.dq + 2 * budget.consumer
        if handed_out > 4 * budget.entry:
            problems.append(f"setmaxnreg hands out {handed_out} of {4 * budget.entry} registers per thread of four")
        held = self.accumulator_registers(head_dim, head_dim_v)
        if held > budget.consumer - 8:
            problems.append(f"accumulators, P and dS take {held} of {budget.consumer} registers, 8 must be left")
        if problems:
            raise ConfigError(f"{self}: {'; '.join(problems)}")


@dataclass(frozen=True)
class BackwardSpec:
    """Everything the main backward kernel is specialised for, and its key in the kernel cache."""

    dtype: Dtype
    head_dim: int
    head_dim_v: int
    causal: bool
    deterministic: bool
    config: BackwardConfig
    features: Features = PLAIN

    def __post_init__(self) -> None:
        check_padded_dims(self.dtype, self.head_dim, self.head_dim_v)
        check_features(self.features, self.causal)
        if self.features.sink:
            raise ConfigError("the backward has no sink of its own: the LSE contains it")
        if self.dtype in FP8_MAX_EXPONENT:
            raise ConfigError(f"dtype={self.dtype!r}: the backward is computed in 16 bits")
        self.config.check_feasible(self.head_dim, self.head_dim_v)

    @property
    def name(self) -> str:
        """A readable name, one line in logs: ``bwd_bfloat16_d128x128_causal_64x128``."""
        kind = mask_name(self.features, self.causal)
        order = "_deterministic" if self.deterministic else ""
        dims, tile = f"d{self.head_dim}x{self.head_dim_v}", f"{self.config.tile_m}x{self.config.tile_n}"
        tile += "_paired" if self.config.paired else ""
        return f"bwd_{self.dtype}_{dims}_{kind}{order}_{tile}"


@dataclass(frozen=True)
class PreprocessSpec:
    """The kernel before the main one: delta, the base-2 LSE, the sink's gradient and a zeroed dQ accumulator."""

    dtype: Dtype
    head_dim: int
    head_dim_v: int
    has_lse_grad: bool
    ragged: bool = False
    has_sink: bool = False

    @property
    def name(self) -> str:
        of_call = {"lse": self.has_lse_grad, "sink": self.has_sink, "ragged": self.ragged}
        flags = "".join(f"_{name}" for name, is_set in of_call.items() if is_set)
        return f"bwd_pre_{self.dtype}_d{self.head_dim}x{self.head_dim_v}{flags}"


@dataclass(frozen=True)
class PostprocessSpec:
    """The kernel after the main one: dQ from the fp32 accumulator."""

    dtype: Dtype
    head_dim: int
    ragged: bool = False

    @property
    def name(self) -> str:
        return f"bwd_post_{self.dtype}_d{self.head_dim}{'_ragged' if self.ragged else ''}"
