"""Which tiles an FP8 problem gets: a table like that of the 16-bit kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from flashhopper.config import E4M3, PLAIN, Dtype, Features, ForwardConfig, KernelSpec
from flashhopper.heuristics import CAUSAL_WAVES, as_short, features_of, serves
from flashhopper.problem import DTYPES, AttentionProblem


class Fp8Row(NamedTuple):
    """Serves FP8 inputs of head dims up to ``head_dim`` and ``head_dim_v`` and, if it is set, key sequences up to
    ``max_seqlen_k``: with two levels of accumulation, without a mask and with a causal one, and with
    ``fp8_accumulate="fast"``. If V is centred two levels are ``centered``: what has been summed up after 2048 keys is
    small then, and O need not be flushed before."""

    head_dim: int
    head_dim_v: int
    two_level: ForwardConfig
    two_level_causal: ForwardConfig
    fast: ForwardConfig
    reason: str
    centered: ForwardConfig | None = None
    max_seqlen_k: int | None = None

    def spec(
        self,
        out_dtype: Dtype,
        causal: bool,
        fast: bool,
        is_centered: bool = False,
        config: ForwardConfig | None = None,
        features: Features = PLAIN,
        dtype: Dtype = E4M3,
    ) -> KernelSpec:
        """The kernel for an output type, a mask, features and an input type; ``config`` overrides the row's."""
        if config is None:
            is_masked = causal or features.window or features.ragged
            config = self.fast if fast else self.two_level_causal if is_masked else self.two_level
            if is_centered and not fast and self.centered is not None:
                config = self.centered
            config = replace(config, group_waves=CAUSAL_WAVES) if is_masked else config
            if features.window:
                config = replace(config, prefetch_scores=False)
            if features.window or (features.ragged and not causal):
                # At head_dim 256 consumers with 224 registers spill 3 with chunks, and 1 if ragged without a mask.
                config = replace(config, wide_producer=False)
        return KernelSpec(dtype, self.head_dim, self.head_dim_v, causal, config, features, out_dtype)


_FP8_D96 = ForwardConfig(128, 128, num_stages=4, num_q_stages=2, prefetch_scores=True, warpgroup_order="free")
_FP8_D128_SHORT = replace(_FP8_D96, num_stages=3)
_FP8_D128 = ForwardConfig(192, 64, num_stages=4)
_FP8_D192 = ForwardConfig(128, 128, num_stages=2, warpgroup_order="ping_pong")
_FP8_D256 = ForwardConfig(128, 64, num_stages=2, warpgroup_order="ping_pong", wide_producer=True)

# Searched in order. Two levels take registers for another O, or shared memory for one: by columns where the former
# suffice, by flushing where they do not. Figures: H200, TFLOPS at 16k and 2k keys, bursts of 6 to 20 launches.
FP8_TABLE: tuple[Fp8Row, ...] = (
    Fp8Row(
        64,
        64,
        ForwardConfig(192, 128, num_stages=4, flush_blocks=8),
        ForwardConfig(192, 128, num_stages=4, flush_blocks=8),
        ForwardConfig(192, 128, num_stages=4),
        "706 and 606, causal 687 and 496; by columns 742 and 636, but then 6 registers spill (if causal 7); 128 rows "
        "by columns 631 and 548, causal 630 and 474; flushed every 32 blocks 2 to 3 % faster than every 8",
        centered=ForwardConfig(192, 128, num_stages=4, flush_blocks=16),
    ),
    Fp8Row(
        96,
        96,
        replace(_FP8_D96, two_level_columns=96),
        replace(_FP8_D96, two_level_columns=96),
        _FP8_D96,
        "not searched",
    ),
    Fp8Row(
        128,
        128,
        replace(_FP8_D128_SHORT, two_level_columns=128),
        replace(_FP8_D128_SHORT, two_level_columns=128),
        _FP8_D128_SHORT,
        "192 rows leave a third of the last tile empty at 512 keys, two at 1k; 911 and 873, causal 904 and 716; "
        "staggered 863 and 832, 895 and 682; turns in every block 872 and 850; exact softmax 748 and 765; flushed 835 "
        "and 780",
        max_seqlen_k=1024,
    ),
    Fp8Row(
        128,
        128,
        replace(_FP8_D128_SHORT, two_level_columns=128),
        replace(_FP8_D128_SHORT, two_level_columns=128),
        replace(_FP8_D128, num_stages=5, warpgroup_order="free"),
        "V centred, three warpgroups, flushed every 32 blocks 944 and 888 (causal at 2k 742), free 906 and 875 (746), "
        "in turns 934 and 881 (745), with two buffers of Q 810 and 786; two by columns 905 and 819 (694); fast 976 and "
        "892 (749), two warpgroups 968 and 866 (693), three with 128 keys, which spill, 851 and 770",
        centered=replace(_FP8_D128, flush_blocks=32),
    ),
    Fp8Row(
        192,
        128,
        ForwardConfig(128, 128, num_stages=3, two_level_columns=128, wide_producer=True),
        ForwardConfig(128, 128, num_stages=3, two_level_columns=128),
        ForwardConfig(128, 128, num_stages=3),
        "as head_dim 128, in what shared memory is left; not searched",
    ),
    Fp8Row(
        192,
        192,
        replace(_FP8_D192, flush_blocks=8),
        replace(_FP8_D192, flush_blocks=8),
        _FP8_D192,
        "1130 and 1011, free 1073 and 1018, in chunks of 64 columns 929 and 843",
        centered=replace(_FP8_D192, flush_blocks=16),
    ),
    Fp8Row(
        256,
        256,
        replace(_FP8_D256, flush_blocks=16),
        replace(_FP8_D256, flush_blocks=16),
        replace(_FP8_D256, num_stages=3),
        "1097 and 1029, every 32 blocks 1137 and 1074; in chunks of 64 columns 873 and 740; fast 1359 and 1097, "
        "staggered 1160 and 992; 128 keys spill even with one level; every 32 blocks 5 % faster than every 16 at 16k",
        centered=replace(_FP8_D256, flush_blocks=32),
    ),
)


def fp8_rows_of(window_or_ragged: bool) -> tuple[Fp8Row, ...]:
    """The rows of the table that serve dense calls without a window, or the others, searched in order. Three warpgroups
    at head_dim 128 have been tried with neither windows nor ragged batches: those take the row for short sequences."""
    return as_short(FP8_TABLE, {(128, 128)}) if window_or_ragged else FP8_TABLE


def fp8_row(head_dim: int, head_dim_v: int, seqlen_k: int, window_or_ragged: bool) -> Fp8Row:
    """The row that serves a call."""
    for row in fp8_rows_of(window_or_ragged):
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
    row = fp8_row(problem.head_dim, problem.head_dim_v, problem.seqlen_k, features.window or features.ragged)
    return row.spec(out_dtype, causal, fast, is_centered, config, features, dtype)
