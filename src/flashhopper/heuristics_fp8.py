"""Which tiles an FP8 problem gets: a table like that of the 16-bit kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from flashhopper.config import E4M3, PLAIN, Dtype, Features, ForwardConfig, KernelSpec
from flashhopper.heuristics import CAUSAL_WAVES, features_of, serves
from flashhopper.problem import DTYPES, AttentionProblem


class Fp8Row(NamedTuple):
    """Serves FP8 inputs of head dims up to ``head_dim`` and ``head_dim_v`` and, if it is set, key sequences up to
    ``max_seqlen_k``: with two levels of accumulation and with ``fp8_accumulate="fast"``. If V is centred two levels are
    ``centered``: what has been summed up after 2048 keys is small then, and O need not be flushed before."""

    head_dim: int
    head_dim_v: int
    two_level: ForwardConfig
    fast: ForwardConfig
    reason: str
    centered: ForwardConfig
    max_seqlen_k: int | None = None

    def config(self, fast: bool, is_centered: bool, seqlen_k: int | None = None) -> ForwardConfig:
        """For a way to accumulate. Where ``seqlen_k`` keys end before O would be flushed, two levels are as one."""
        two_level = self.centered if is_centered else self.two_level
        is_flushed = seqlen_k is None or two_level.flush_blocks == 0 or seqlen_k > keys_per_flush(two_level)
        return two_level if is_flushed and not fast else self.fast

    def spec(
        self,
        out_dtype: Dtype,
        causal: bool,
        fast: bool,
        is_centered: bool = False,
        config: ForwardConfig | None = None,
        features: Features = PLAIN,
        dtype: Dtype = E4M3,
        seqlen_k: int | None = None,
    ) -> KernelSpec:
        """The kernel for an output type, a mask, features, an input type and, if it is given, up to so many keys;
        ``config`` overrides the row's."""
        if config is None:
            is_masked = causal or features.window or features.ragged
            config = self.config(fast, is_centered, seqlen_k)
            config = replace(config, group_waves=CAUSAL_WAVES) if is_masked else config
            if features.window:
                config = replace(config, prefetch_scores=False)
        return KernelSpec(dtype, self.head_dim, self.head_dim_v, causal, config, features, out_dtype)


def keys_per_flush(config: ForwardConfig) -> int:
    return config.flush_blocks * config.tile_n


_FP8_D64 = ForwardConfig(192, 128, num_stages=4, q_in_registers=True, warpgroup_order="relay")
_FP8_D64_FOUR = ForwardConfig(256, 64, num_stages=6, q_in_registers=True, warpgroup_order="relay")
_FP8_TWO = ForwardConfig(128, 128, num_stages=3, num_q_stages=2, prefetch_scores=True, warpgroup_order="free")
_FP8_D96 = ForwardConfig(192, 128, num_stages=3, warpgroup_order="relay")
_FP8_D128 = ForwardConfig(192, 64, num_stages=4, q_in_registers=True, warpgroup_order="relay")
_FP8_D192 = ForwardConfig(128, 128, num_stages=2, warpgroup_order="ping_pong")
_FP8_D256 = ForwardConfig(128, 64, num_stages=2, q_in_registers=True, warpgroup_order="ping_pong")

# Searched in order. Two levels take registers for another O, or shared memory for one: by columns, which is more exact,
# where the former suffice and V is not centred, else by flushing. Figures: H200, TFLOPS, sustained; V centred means the
# kernel that flushes, also where keys are too few for it to be chosen.
FP8_TABLE: tuple[Fp8Row, ...] = (
    Fp8Row(
        64,
        64,
        replace(_FP8_D64_FOUR, flush_blocks=16),
        _FP8_D64_FOUR,
        "up to 4k keys: fast 467, 586, 669 and 703 at 512, 1k, 2k and 4k keys, causal 277, 421, 546 and 636; 192 rows "
        "of 128 keys 396, 541, 656 and 698, 223, 353, 510 and 621, but at 16k 758 and 738 to 703 and 709; two buffers "
        "of Q 452, 536, 586 and 606",
        centered=replace(_FP8_D64_FOUR, flush_blocks=32),
        max_seqlen_k=4096,
    ),
    Fp8Row(
        64,
        64,
        replace(_FP8_D64, flush_blocks=8),
        _FP8_D64,
        "V centred 727 at 16k keys, causal 719; Q from shared memory 728 and 709, and staggered 724 and 698; 64 keys "
        "598; four warpgroups of 64 keys 669 and 704; one exp2 in eight as a polynomial 703; fast 758 and 738",
        centered=replace(_FP8_D64, flush_blocks=16),
    ),
    Fp8Row(
        96,
        96,
        replace(_FP8_TWO, two_level_columns=96),
        replace(_FP8_D96, num_stages=4),
        "V centred 925 and 870 at 16k and 2k keys, causal 866 and 678; 64 keys 808 and 778, 781 and 644; 128 rows by "
        "columns 762 and 712, 797 and 613; fast 947 and 872, causal 894 and 672",
        centered=replace(_FP8_D96, flush_blocks=16),
    ),
    Fp8Row(
        128,
        128,
        replace(_FP8_TWO, two_level_columns=128),
        _FP8_TWO,
        "up to 512 keys: fast 656, causal 351; 192 rows of 64 keys 604 and 361; at 1k keys 794 to 794, 553 to 558",
        centered=replace(_FP8_D128, flush_blocks=32),  # for more keys than the row serves
        max_seqlen_k=512,
    ),
    Fp8Row(
        128,
        128,
        replace(_FP8_TWO, two_level_columns=128),
        replace(_FP8_D128, num_stages=5),
        "V centred 994, 972 and 746 at 16k, 4k and 1k keys, causal 1019, 899 and 555; staggered 926, 931 and 708, "
        "1003, 901 and 555; Q from shared memory, staggered 957, 944 and 724, 961, 873 and 553; flushed every 16 "
        "blocks 963, 940 and 746; 128 rows of 128 keys by columns 905 and 819 at 16k and 2k; fast 1028, 991 and 760, "
        "causal 1042, 916 and 557",
        centered=replace(_FP8_D128, flush_blocks=32),
    ),
    Fp8Row(
        192,
        128,
        ForwardConfig(128, 128, num_stages=3, two_level_columns=128),
        replace(_FP8_D128, num_stages=5),
        "V centred 1057 and 982 at 16k and 2k keys, causal 1119 and 804; 128 rows of 128 keys by columns 996 and 870, "
        "1114 and 760; fast 1096 and 998, causal 1160 and 823",
        centered=replace(_FP8_D128, flush_blocks=32),
    ),
    Fp8Row(
        192,
        192,
        replace(_FP8_D192, flush_blocks=8),
        _FP8_D192,
        "bursts at 16k and 2k keys: 1130 and 1011, free 1073 and 1018, in chunks of 64 columns 929 and 843; in relay "
        "1129 and 1107 to 1184 and 1105, sustained, Q in registers 1197 and 1082",
        centered=replace(_FP8_D192, flush_blocks=16),
    ),
    Fp8Row(
        256,
        256,
        replace(_FP8_D256, flush_blocks=16),
        replace(_FP8_D256, num_stages=3, warpgroup_order="free"),
        "V centred 1195 and 1142 at 16k and 4k keys, causal 1165 and 1023; free 1141 and 1131, staggered 1140 and "
        "1117; Q from shared memory 1097 and 1071, 1113 and 1000; fast 1260 at 16k, 1166, 1099, 981 and 762 at 4k, 2k, "
        "1k and 512 keys, causal 1230, 1099, 966, 763 and 473; in turns with Q from shared memory 1078, 943, 915 and "
        "731, 1000, 886, 724 and 460; two buffers of Q 1050 at 2k; 128 keys spill even with one level",
        centered=replace(_FP8_D256, flush_blocks=32),
    ),
)


def fp8_row(head_dim: int, head_dim_v: int, seqlen_k: int) -> Fp8Row:
    """The row that serves a call."""
    for row in FP8_TABLE:
        if serves(row, head_dim, head_dim_v, seqlen_k):
            return row
    raise AssertionError(f"no row of FP8_TABLE covers head dims {head_dim} and {head_dim_v}")  # the last covers all


def select_fp8_spec(
    problem: AttentionProblem,
    fast: bool,
    is_centered: bool = False,
    config: ForwardConfig | None = None,
    dtype: Dtype = E4M3,
) -> KernelSpec:
    """The FP8 kernel for a validated problem, whose dtype is that of the output; ``dtype`` is that of the inputs.
    ``is_centered``: V is. ``config`` overrides the table's."""
    out_dtype, causal, features = DTYPES[problem.dtype], problem.mask.causal, features_of(problem)
    row = fp8_row(problem.head_dim, problem.head_dim_v, problem.seqlen_k)
    return row.spec(out_dtype, causal, fast, is_centered, config, features, dtype, problem.seqlen_k)
