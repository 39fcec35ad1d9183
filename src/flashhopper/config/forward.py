"""The forward kernel: its tile configuration, and the specialisation it is built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from flashhopper.config.common import (
    ELEMENT_BYTES,
    FP8_MAX_EXPONENT,
    KEYS_PER_SCALE,
    MAX_REGISTERS_PER_THREAD,
    REGISTER_FILE,
    ROWS_PER_WARPGROUP,
    SMEM_BYTES_PER_CTA,
    WARPGROUP_THREADS,
    ConfigError,
    Dtype,
    WarpgroupOrder,
    check_padded_dims,
)
from flashhopper.config.features import FP8_FEATURES, PLAIN, Features, check_features, mask_name

Scheduler = Literal["single", "static", "dynamic"]
Softmax = Literal["exact", "lazy"]

FLUSHED_BYTES = 4  # of an element of O in shared memory
STAGED_COLUMNS = 32  # of O, or a multiple
OUTPUT_BYTES = 2  # of an element of O, which is 16-bit whatever the inputs are
WGMMA_K_BYTES = 32  # of one WGMMA's summed extent: 16 elements of 16 bits, 32 of 8


class RegisterBudget(NamedTuple):
    """Registers per thread: at kernel entry, and of each role after ``setmaxnreg``."""

    entry: int
    producer: int
    consumer: int


# Producer and consumer registers by the number of consumer warpgroups; setmaxnreg may not hand out more than the launch
# allocated at entry. With 2 the producer keeps 40: at 24 the tile scheduler's addresses spilled.
_ROLE_REGISTERS = {1: (56, 248), 2: (40, 232), 3: (32, 160), 4: (32, 112)}


@dataclass(frozen=True)
class ForwardConfig:
    """How the forward kernel cuts and orders the work. Each field switches one technique.

    ``tile_m`` × ``tile_n`` is the block of the score matrix one CTA works on: ``tile_m // 64`` consumer warpgroups of
    64 query rows each, against ``tile_n`` keys.
    """

    tile_m: int
    tile_n: int
    num_stages: int = 2
    """Stages of the K ring and of the V ring. 1 leaves loads exposed: the ablation without load/compute overlap."""
    num_q_stages: int = 1
    """Buffers of Q. With 2 the next tile's Q is loaded while this one is still read."""
    q_in_registers: bool = False
    """Keep Q as WGMMA's register operand: S = Q Kᵀ then reads half as many operands from shared memory."""
    num_o_parts: int = 1
    """Groups of columns in which O is staged, one when the one before has left: where there is no room for all of it
    beside Q, whose bytes the next Q needs before O leaves."""
    scheduler: Scheduler = "dynamic"
    """``single``: one CTA per tile; ``static``: persistent, strided; ``dynamic``: persistent, atomic tile counter."""
    group_waves: int = 2
    """Size of the group of heads worked on at a time: as many as give each CTA this many tiles, if L2 holds them."""
    softmax: Softmax = "lazy"
    """``exact``: online softmax; ``lazy``: row maximum of the first blocks kept as reference, tile redone if unsafe."""
    exp2_on_fma: int = 0
    """Of each 8 exponentials in blocks that keep the lazy reference, so many as a polynomial: for kernels whose scores
    go through the unit of exp2 before. 16-bit inputs only."""
    warpgroup_order: WarpgroupOrder = "stagger"
    """``ping_pong``: warpgroups take turns at issuing every block's GEMMs; ``relay``: and keep the turn until S is
    there; ``stagger``: once per tile; ``free``: never."""
    overlap_gemm_softmax: bool = True
    """Issue S of the next block before P·V of this one, so that softmax runs under a GEMM (the paper's 2 stages)."""
    split_masked_loop: bool = True
    """Run blocks that no mask cuts through a loop without masking. Off: every block is masked."""
    prefetch_scores: bool = False
    """Issue the next tile's first Q·Kᵀ before this tile's O leaves. Needs 2 buffers of Q."""
    items_by_shuffle: bool = True
    """A consumer warp reads an item's coordinates once, a word a lane, and passes them on by shuffles. Off: every lane
    reads from shared memory what it needs, where it needs it. Warpgroups fall into other steps: 1 to 5 % either way."""
    reallocate_registers: bool = True
    """``setmaxnreg``: registers move from the producer to the consumers."""
    tma_store: bool = True
    """O leaves through shared memory and TMA. Off: predicated stores from registers."""
    two_level_columns: int = 0
    """FP8 only. If not 0, P·V goes into a fresh accumulator of so many columns, at most head_dim_v, which one fp32
    addition per key block adds to O: an FP8 WGMMA keeps 14 bits of its accumulator. 0: O stays in the tensor core."""
    flush_blocks: int = 0
    """FP8 only. If not 0, O in the tensor core is added after so many key blocks to an fp32 O in shared memory, and
    starts from zero: the other way to two levels, without registers for a second O. 0: never."""

    @property
    def num_consumer_warpgroups(self) -> int:
        return self.tile_m // ROWS_PER_WARPGROUP

    @property
    def num_threads(self) -> int:
        return WARPGROUP_THREADS * (1 + self.num_consumer_warpgroups)

    def registers(self) -> RegisterBudget:
        """Registers per thread at entry and per role (PTX ISA 9.7.19.5, setmaxnreg)."""
        entry = min(MAX_REGISTERS_PER_THREAD, REGISTER_FILE // self.num_threads) // 8 * 8
        if not self.reallocate_registers:
            return RegisterBudget(entry, entry, entry)
        return RegisterBudget(entry, *_ROLE_REGISTERS[self.num_consumer_warpgroups])

    @property
    def two_level(self) -> bool:
        return self.two_level_columns > 0 or self.flush_blocks > 0

    def accumulator_registers(self, head_dim: int, head_dim_v: int, element_bytes: int = 2) -> int:
        """Registers per consumer thread that S, P, O, P·V beside O and, if it is kept there, Q take."""
        per_thread = ROWS_PER_WARPGROUP / WARPGROUP_THREADS
        words = self.tile_n * (1 + element_bytes / 4) + head_dim_v + self.two_level_columns
        words += head_dim * element_bytes / 4 if self.q_in_registers else 0
        return int(words * per_thread)

    def smem_bytes(self, head_dim: int, head_dim_v: int, element_bytes: int = 2) -> int:
        """Bytes of shared memory of one CTA, computed as ``kernels/smem.py`` lays it out."""
        q = self.num_q_stages * self.tile_m * head_dim * element_bytes
        o = self.tile_m * head_dim_v // self.num_o_parts * OUTPUT_BYTES if self.tma_store else 0
        if self.flush_blocks > 0:  # the staging tile of a warpgroup lies in its part of the fp32 O
            o *= FLUSHED_BYTES // OUTPUT_BYTES
        ring = self.num_stages * self.tile_n * (head_dim + head_dim_v) * element_bytes
        barriers = 1024  # mbarriers and scheduler mailbox, rounded up to the tiles' alignment
        return barriers + q + o + ring

    def check_feasible(self, head_dim: int, head_dim_v: int, element_bytes: int = 2) -> None:
        """Raise :class:`ConfigError` unless the kernel fits the card (a wrong register sum hangs it silently)."""
        groups = self.num_consumer_warpgroups
        problems = []
        if self.tile_m % ROWS_PER_WARPGROUP or groups not in _ROLE_REGISTERS:
            problems.append(f"tile_m={self.tile_m} must be 64, 128, 192 or 256")
        unit = WGMMA_K_BYTES // element_bytes
        if self.tile_n % unit or not unit <= self.tile_n <= 256:
            problems.append(f"tile_n={self.tile_n} must be a multiple of {unit} from {unit} to 256")
        if element_bytes == 1:
            problems += self._fp8_problems(head_dim_v)
        elif self.two_level:
            problems.append("two_level_columns and flush_blocks are for FP8: a 16-bit WGMMA accumulates in fp32")
        if self.num_q_stages > 2:
            problems.append(f"num_q_stages={self.num_q_stages} must be 1 or 2: the turn barriers know two items")
        for name in ("num_stages", "num_q_stages", "num_o_parts", "group_waves"):
            if getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_o_parts > 1 and head_dim_v % (self.num_o_parts * STAGED_COLUMNS):
            problems.append(
                f"num_o_parts={self.num_o_parts} must leave multiples of {STAGED_COLUMNS} columns of "
                f"head_dim_v={head_dim_v}"
            )
        if problems:
            raise ConfigError(f"{self}: {'; '.join(problems)}")
        smem = self.smem_bytes(head_dim, head_dim_v, element_bytes)
        if smem > SMEM_BYTES_PER_CTA:
            problems.append(f"needs {smem} bytes of shared memory, the card has {SMEM_BYTES_PER_CTA}")
        budget = self.registers()
        handed_out = WARPGROUP_THREADS * (budget.producer + groups * budget.consumer)
        if handed_out > budget.entry * self.num_threads:
            problems.append(f"setmaxnreg hands out {handed_out} of {budget.entry * self.num_threads} registers")
        held = self.accumulator_registers(head_dim, head_dim_v, element_bytes)
        if held > budget.consumer - 16:
            problems.append(f"S, P, O and Q take {held} of {budget.consumer} registers, at least 16 must be left")
        if self.prefetch_scores and (self.num_q_stages < 2 or self.q_in_registers):
            problems.append("prefetch_scores reads the next Q beside this one: num_q_stages=2, q_in_registers=False")
        if self.num_o_parts > 1 and not self.tma_store:
            problems.append(f"num_o_parts={self.num_o_parts} without tma_store: nothing is staged")
        if self.exp2_on_fma and (not 0 <= self.exp2_on_fma <= 8 or self.softmax != "lazy" or element_bytes == 1):
            problems.append(f"exp2_on_fma={self.exp2_on_fma} must be 0 to 8, and 0 with softmax='exact' or FP8")
        if self.softmax == "lazy" and not self.split_masked_loop:
            problems.append("softmax='lazy' runs in the unmasked loop, split_masked_loop=False leaves none")
        if problems:
            raise ConfigError(f"{self}: {'; '.join(problems)}")

    def _fp8_problems(self, head_dim_v: int) -> list[str]:
        problems = []
        if KEYS_PER_SCALE % self.tile_n:
            problems.append(f"tile_n={self.tile_n} must divide the {KEYS_PER_SCALE} keys of a scale")
        columns = self.two_level_columns
        if columns and (columns % 8 or head_dim_v % columns):
            problems.append(f"two_level_columns={columns} must be a multiple of 8 that divides head_dim_v={head_dim_v}")
        if self.flush_blocks & self.flush_blocks - 1:
            problems.append(f"flush_blocks={self.flush_blocks} must be a power of two or 0")
        if self.flush_blocks < 0 or (self.flush_blocks and (columns or self.num_o_parts > 1 or not self.tma_store)):
            problems.append(
                f"flush_blocks={self.flush_blocks} goes with tma_store, not with two_level_columns or num_o_parts"
            )
        if not self.overlap_gemm_softmax:
            problems.append("FP8 kernels overlap: no separate GEMMs")
        return problems


@dataclass(frozen=True)
class KernelSpec:
    """Everything a compiled forward kernel is specialised for, and the key of the kernel cache.

    ``head_dim`` and ``head_dim_v`` are the padded sizes of the tiles: TMA fills what the tensors lack with zeros.
    """

    dtype: Dtype
    head_dim: int
    head_dim_v: int
    causal: bool
    config: ForwardConfig
    features: Features = PLAIN
    out_dtype: Dtype | None = None
    """Of O where it is not that of the inputs, which is so with FP8."""

    def __post_init__(self) -> None:
        check_padded_dims(self.dtype, self.head_dim, self.head_dim_v)
        check_features(self.features, self.causal)
        if self.features.window and self.config.prefetch_scores:
            raise ConfigError("prefetch_scores with a window: blocks at the end of a tile may have to be skipped first")
        if self.features.ragged and self.config.scheduler == "single":
            raise ConfigError("scheduler='single' takes the number of tiles on the host, unknown for ragged batches")
        if self.features.has_mods and self.config.softmax == "lazy":
            raise ConfigError("softmax='lazy' with score_mod or mask_mod: no block is known to be unmasked")
        if self.dtype == "float16" and self.config.softmax == "lazy":
            raise ConfigError("softmax='lazy' lets P grow to 2**30, float16 ends at 65504: use softmax='exact'")
        if self.is_fp8 != (self.out_dtype is not None) or self.out_dtype in FP8_MAX_EXPONENT:
            raise ConfigError(f"out_dtype={self.out_dtype!r} with dtype={self.dtype!r}: 16-bit with FP8, else None")
        lacking = [name for name in self.features.names if name not in FP8_FEATURES]
        if self.is_fp8 and lacking:
            raise ConfigError(f"{', '.join(lacking)}: not in FP8 kernels yet")
        self.config.check_feasible(self.head_dim, self.head_dim_v, ELEMENT_BYTES[self.dtype])

    @property
    def is_fp8(self) -> bool:
        return self.dtype in FP8_MAX_EXPONENT

    @property
    def name(self) -> str:
        """A readable name, one line in logs: ``fwd_bfloat16_d128x128_causal_128x128``."""
        kind = mask_name(self.features, self.causal)
        tile = f"{self.config.tile_m}x{self.config.tile_n}"
        if self.out_dtype is not None:
            levels = "two_level" if self.config.two_level else "fast"
            tile = f"{tile}_{levels}_{self.out_dtype}"
        return f"fwd_{self.dtype}_d{self.head_dim}x{self.head_dim_v}_{kind}_{tile}"
