"""Compile-time facts of one forward kernel: the tile configuration and the specialisation it is built for.

Everything here is plain Python on plain values, so that a wrong configuration is found on any machine, before ptxas or
the card sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from flashhopper.programs import Program, TensorType
from flashhopper.slopes import scales_gradients

WARP_THREADS = 32
WARPGROUP_THREADS = 128
PREPROCESS_WARPS = 8
ROWS_PER_WARPGROUP = 64  # M of one WGMMA instruction (PTX ISA 9.7.15, wgmma.mma_async)
REGISTER_FILE = 65536  # 32-bit registers of one Hopper SM
MAX_REGISTERS_PER_THREAD = 255
KEYS_PER_SCALE = 128  # FP8: rows of K that share a scale
QUERIES_PER_SCALE = ROWS_PER_WARPGROUP  # FP8: rows of Q that share a scale
SMEM_BYTES_PER_CTA = 232448  # 227 KiB, the opt-in limit of compute capability 9.0


Dtype = Literal["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
Scheduler = Literal["single", "static", "dynamic"]
Softmax = Literal["exact", "lazy"]
WarpgroupOrder = Literal["free", "stagger", "ping_pong"]
BackwardSplit = Literal["keys", "operands"]
ScaleKind = Literal["power_of_two", "amax"]

ELEMENT_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
E4M3: Dtype = "float8_e4m3fn"
E5M2: Dtype = "float8_e5m2"
FP8_MAX_EXPONENT: dict[Dtype, int] = {E4M3: 8, E5M2: 15}
"""FP8 types. The largest number of each is 1.75 times 2 to this power."""
FLUSHED_BYTES = 4  # of an element of O in shared memory
OUTPUT_BYTES = 2  # of an element of O, which is 16-bit whatever the inputs are
WGMMA_K_BYTES = 32  # of one WGMMA's summed extent: 16 elements of 16 bits, 32 of 8


class ConfigError(ValueError):
    """A configuration that cannot run on the card; the message says which limit it breaks and by how much."""


class RegisterBudget(NamedTuple):
    """Registers per thread: at kernel entry, and of each role after ``setmaxnreg``."""

    entry: int
    producer: int
    consumer: int


# Producer and consumer registers by the number of consumer warpgroups; setmaxnreg may not hand out more than the launch
# allocated at entry. With 2 the producer keeps 40: at 24 the tile scheduler's addresses spilled.
_ROLE_REGISTERS = {1: (56, 248), 2: (40, 232), 3: (32, 160)}
_WIDE_PRODUCER_REGISTERS = (56, 224)  # with 2


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
    share_qo_smem: bool = False
    """Stage O in Q's shared memory (where both do not fit); the next Q then waits for the store to have read it."""
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
    """``ping_pong``: warpgroups take turns in every block; ``stagger``: once per tile; ``free``: never."""
    overlap_gemm_softmax: bool = True
    """Issue S of the next block before P·V of this one, so that softmax runs under a GEMM (the paper's 2 stages)."""
    split_masked_loop: bool = True
    """Run blocks that no mask cuts through a loop without masking. Off: every block is masked."""
    prefetch_scores: bool = False
    """Issue the next tile's first Q·Kᵀ before this tile's O leaves. Needs 2 buffers of Q."""
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

    wide_producer: bool = False
    """With 2 consumer warpgroups: 56 registers for the producer and 224 for a consumer. At 40, 1 to 4 registers of FP8
    kernels for head dims over 128 spilled with CUDA 12's compiler."""

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
        groups = self.num_consumer_warpgroups
        wide = self.wide_producer and groups == 2
        return RegisterBudget(entry, *(_WIDE_PRODUCER_REGISTERS if wide else _ROLE_REGISTERS[groups]))

    @property
    def two_level(self) -> bool:
        return self.two_level_columns > 0 or self.flush_blocks > 0

    def accumulator_registers(self, head_dim: int, head_dim_v: int, element_bytes: int = 2) -> int:
        """Registers per consumer thread that S, P, O, P·V beside O and, if it is kept there, Q take."""
        per_thread = ROWS_PER_WARPGROUP / WARPGROUP_THREADS
        words = self.tile_n * (1 + element_bytes / 4) + head_dim_v + self.two_level_columns
        words += head_dim / 2 if self.q_in_registers else 0
        return int(words * per_thread)

    def smem_bytes(self, head_dim: int, head_dim_v: int, element_bytes: int = 2) -> int:
        """Bytes of shared memory of one CTA, computed as ``kernels/smem.py`` lays it out."""
        q = self.num_q_stages * self.tile_m * head_dim * element_bytes
        o = self.tile_m * head_dim_v * OUTPUT_BYTES if self.tma_store else 0
        if self.flush_blocks > 0:  # the staging tile of a warpgroup lies in its part of the fp32 O
            o *= FLUSHED_BYTES // OUTPUT_BYTES
        ring = self.num_stages * self.tile_n * (head_dim + head_dim_v) * element_bytes
        barriers = 1024  # mbarriers and scheduler mailbox, rounded up to the tiles' alignment
        return barriers + (max(q, o) if self.share_qo_smem else q + o) + ring

    def check_feasible(self, head_dim: int, head_dim_v: int, element_bytes: int = 2) -> None:
        """Raise :class:`ConfigError` unless the kernel fits the card (a wrong register sum hangs it silently)."""
        groups = self.num_consumer_warpgroups
        problems = []
        if self.tile_m % ROWS_PER_WARPGROUP or groups not in _ROLE_REGISTERS:
            problems.append(f"tile_m={self.tile_m} must be 64, 128 or 192")
        unit = WGMMA_K_BYTES // element_bytes
        if self.tile_n % unit or not unit <= self.tile_n <= 256:
            problems.append(f"tile_n={self.tile_n} must be a multiple of {unit} from {unit} to 256")
        if element_bytes == 1:
            problems += self._fp8_problems(head_dim_v)
        elif self.two_level:
            problems.append("two_level_columns and flush_blocks are for FP8: a 16-bit WGMMA accumulates in fp32")
        if self.num_q_stages > 2:
            problems.append(f"num_q_stages={self.num_q_stages} must be 1 or 2: the turn barriers know two items")
        for name in ("num_stages", "num_q_stages", "group_waves"):
            if getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)} must be at least 1")
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
        if self.q_in_registers and self.share_qo_smem:
            problems.append("q_in_registers with share_qo_smem: head dims that must share have no registers for Q")
        if self.share_qo_smem and self.num_q_stages > 1:
            problems.append("share_qo_smem stages O in the only buffer of Q, num_q_stages must be 1")
        if self.prefetch_scores and (self.num_q_stages < 2 or self.q_in_registers):
            problems.append("prefetch_scores reads the next Q beside this one: num_q_stages=2, q_in_registers=False")
        if self.share_qo_smem and not self.tma_store:
            problems.append("share_qo_smem without tma_store has nothing to share")
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
        if self.flush_blocks < 0 or (self.flush_blocks and (columns or self.share_qo_smem or not self.tma_store)):
            problems.append(
                f"flush_blocks={self.flush_blocks} goes with tma_store, not with two_level_columns or sharing"
            )
        if self.q_in_registers or not self.overlap_gemm_softmax:
            problems.append("FP8 kernels read Q from shared memory and overlap: no q_in_registers, no separate GEMMs")
        return problems


def _mask_name(spec: KernelSpec | BackwardSpec) -> str:
    """For the names of kernels: ``causal``, ``window_softcap``, ``full_ragged``."""
    mask = [] if spec.features.window else ["causal" if spec.causal else "full"]
    return "_".join(mask + spec.features.names)


def _check_features(spec: KernelSpec | BackwardSpec) -> None:
    if spec.features.window and spec.causal:
        raise ConfigError("causal with a window: a causal mask is a window that ends at the row's own position")


def _check_padded_dims(dtype: str, head_dim: int, head_dim_v: int) -> None:
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype={dtype!r}: accepted are {', '.join(ELEMENT_BYTES)}")
    for name, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if value % 32 or not 64 <= value <= 256:
            raise ConfigError(f"{name}={value} must be a multiple of 32 from 64 to 256; TMA pads what is smaller")


@dataclass(frozen=True)
class Features:
    """What a kernel has beside plain and causal attention. Each costs something, so each is compiled in on request."""

    window: bool = False
    """A row sees a run of keys around its own position: ``window_size``."""
    chunk: bool = False
    """A row sees the keys of its chunk: ``attention_chunk``. Comes with ``window``."""
    softcap: bool = False
    alibi: bool = False
    sink: bool = False
    """A learnable sink in the denominator. The backward needs only the LSE that contains it."""
    ragged: bool = False
    """Sequences one after another in one tensor: ``cu_seqlens``."""
    score_mod: Program | None = None
    mask_mod: Program | None = None

    def __post_init__(self) -> None:
        if self.chunk and not self.window:
            raise ConfigError("chunk without window: a chunk is cut out of a window, which may be unbounded")

    @property
    def names(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name)]

    @property
    def has_mods(self) -> bool:
        """Whether users' functions are traced into the kernel."""
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def mod_tensors(self) -> tuple[TensorType, ...]:
        """What those functions read."""
        program = self.score_mod or self.mask_mod
        return () if program is None else program.tensors

    @property
    def scales_gradients(self) -> bool:
        """Whether dS has a factor of its own for each score."""
        return self.softcap or (self.score_mod is not None and scales_gradients(self.score_mod))


SWITCHES = tuple(field.name for field in fields(Features) if field.default is False)
"""The features that are on or off."""


PLAIN = Features()
FP8_FEATURES = ("window", "chunk", "ragged")


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
        _check_padded_dims(self.dtype, self.head_dim, self.head_dim_v)
        _check_features(self)
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
        kind = _mask_name(self)
        tile = f"{self.config.tile_m}x{self.config.tile_n}"
        if self.out_dtype is not None:
            levels = "two_level" if self.config.two_level else "fast"
            tile = f"{tile}_{levels}_{self.out_dtype}"
        return f"fwd_{self.dtype}_d{self.head_dim}x{self.head_dim_v}_{kind}_{tile}"


# Producer, dQ warpgroup and consumers. With all four products a consumer of head_dim 128 spilled at 200.
_BACKWARD_ROLE_REGISTERS = {"keys": (24, 72, 208), "operands": (40, 88, 192), "wide": (32, 96, 192)}


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
    wide_consumers: bool = False
    """The registers of ``split="keys"``, 208 for a consumer, with ``operands`` too; needs ``dq_columns`` up to 64."""

    @property
    def num_threads(self) -> int:
        return WARPGROUP_THREADS * 4

    @property
    def key_groups(self) -> int:
        """Row groups of 64 keys, which are the warpgroups that share an MMA over the tile's keys."""
        return self.tile_n // ROWS_PER_WARPGROUP

    def registers(self) -> BackwardRegisters:
        """Registers per thread at entry and per role; 128 at entry is what 512 threads can have."""
        case = "wide" if self.dq_columns > 64 else "keys" if self.wide_consumers else self.split
        return BackwardRegisters(128, *_BACKWARD_ROLE_REGISTERS[case])

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
        return _round_up(_round_up(barriers, 128) + statistics, 1024) + keys + rows + scores + staging

    def check_feasible(self, head_dim: int, head_dim_v: int) -> None:
        """Raise :class:`ConfigError` unless the kernel fits the card (a wrong register sum hangs it silently)."""
        problems = []
        if self.tile_m not in (64, 128):
            problems.append(f"tile_m={self.tile_m} must be 64 or 128")
        keys = {"keys": 128, "operands": 64}[self.split]
        if self.tile_n != keys:
            problems.append(f"tile_n={self.tile_n} must be {keys} with split={self.split!r}")
        if self.dq_columns % 32 or not 32 <= self.dq_columns <= 128 or head_dim % self.dq_columns:
            problems.append(f"dq_columns={self.dq_columns} must be 32, 64, 96 or 128 and divide head_dim={head_dim}")
        elif self.dq_columns == 96 and head_dim != 96:
            problems.append("dq_columns=96 would cut the 64-column blocks of a head_dim other than 96")
        if self.group_waves < 1:
            problems.append(f"group_waves={self.group_waves} must be at least 1")
        if self.wide_consumers and self.dq_columns > 64:
            problems.append(f"dq_columns={self.dq_columns} must be at most 64 with wide_consumers")
        if self.warpgroup_order == "ping_pong" or (self.split == "operands" and self.warpgroup_order != "free"):
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
        _check_padded_dims(self.dtype, self.head_dim, self.head_dim_v)
        _check_features(self)
        if self.features.sink:
            raise ConfigError("the backward has no sink of its own: the LSE contains it")
        if self.dtype in FP8_MAX_EXPONENT:
            raise ConfigError(f"dtype={self.dtype!r}: the backward is computed in 16 bits")
        self.config.check_feasible(self.head_dim, self.head_dim_v)

    @property
    def name(self) -> str:
        """A readable name, one line in logs: ``bwd_bfloat16_d128x128_causal_64x128``."""
        kind = _mask_name(self)
        order = "_deterministic" if self.deterministic else ""
        dims, tile = f"d{self.head_dim}x{self.head_dim_v}", f"{self.config.tile_m}x{self.config.tile_n}"
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


@dataclass(frozen=True)
class ScheduleSpec:
    """The kernel that lists a ragged batch's sequences, longest first, for the tile schedulers."""

    has_used_rows: bool
    """Whether ``seqused`` says how many rows of the side that is cut into tiles are used …"""
    has_used_others: bool
    """… and of the other side."""

    @property
    def name(self) -> str:
        return f"schedule{'_used_rows' if self.has_used_rows else ''}{'_used_others' if self.has_used_others else ''}"


def _quantize_name(spec: QuantizeRowsSpec | ValueScalesSpec | QuantizeValuesSpec) -> str:
    """For the names of kernels: what is not usual about the batch and the result."""
    return ("_ragged" if spec.ragged else "") + ("" if spec.out_dtype == E4M3 else f"_{spec.out_dtype}")


@dataclass(frozen=True)
class QuantizeRowsSpec:
    """The kernel that quantises Q or K; ``head_dim`` is the tensor's own, ``rows`` share a scale."""

    dtype: Dtype
    head_dim: int
    rows: int
    scales: ScaleKind
    hadamard: bool
    ragged: bool = False
    out_dtype: Dtype = E4M3

    @property
    def name(self) -> str:
        flags = ("_hadamard" if self.hadamard else "") + _quantize_name(self)
        return f"quantize_rows_{self.dtype}_d{self.head_dim}_{self.rows}_{self.scales}{flags}"


@dataclass(frozen=True)
class ValueStatisticsSpec:
    """The kernel that takes sums, minima and maxima of V's channels."""

    dtype: Dtype
    head_dim: int
    ragged: bool = False

    @property
    def name(self) -> str:
        return f"value_statistics_{self.dtype}_d{self.head_dim}{'_ragged' if self.ragged else ''}"


@dataclass(frozen=True)
class ValueScalesSpec:
    """The kernel that turns statistics into scales and means of V's channels."""

    dtype: Dtype
    head_dim: int
    scales: ScaleKind
    center: bool
    ragged: bool = False
    out_dtype: Dtype = E4M3
    """Of V once it is quantised."""

    @property
    def name(self) -> str:
        flags = ("_centred" if self.center else "") + _quantize_name(self)
        return f"value_scales_{self.dtype}_d{self.head_dim}_{self.scales}{flags}"


@dataclass(frozen=True)
class QuantizeValuesSpec:
    """The kernel that converts V and transposes it; with dtype e4m3 it transposes alone."""

    dtype: Dtype
    head_dim: int
    ragged: bool = False
    out_dtype: Dtype = E4M3

    @property
    def name(self) -> str:
        return f"quantize_values_{self.dtype}_d{self.head_dim}{_quantize_name(self)}"


QuantizeSpec = QuantizeRowsSpec | ValueStatisticsSpec | ValueScalesSpec | QuantizeValuesSpec
AnySpec = KernelSpec | BackwardSpec | PreprocessSpec | PostprocessSpec | ScheduleSpec | QuantizeSpec
