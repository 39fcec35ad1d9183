"""Which tiles a problem gets. One row per case, with the measured reason; adding a head dim is adding a row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

from flashhopper.config import (
    PLAIN,
    BackwardConfig,
    BackwardSpec,
    Dtype,
    Features,
    ForwardConfig,
    KernelSpec,
)
from flashhopper.problem import DTYPES, AttentionProblem
from flashhopper.programs import Program


class TileRow(NamedTuple):
    """Serves head dims up to ``head_dim`` and ``head_dim_v`` (TMA pads smaller ones with zeros) and, if it is set, key
    sequences up to ``max_seqlen_k``. ``causal`` stands for every mask and for ragged batches, unless the row is
    ``causal_only``."""

    head_dim: int
    head_dim_v: int
    causal: bool
    max_seqlen_k: int | None
    config: ForwardConfig
    reason: str
    causal_only: bool = False


def _rows(head_dim: int, head_dim_v: int, config: ForwardConfig, reason: str) -> tuple[TileRow, TileRow]:
    """The same configuration with and without a causal mask, for any length."""
    return (
        TileRow(head_dim, head_dim_v, False, None, config, reason),
        TileRow(head_dim, head_dim_v, True, None, replace(config, group_waves=CAUSAL_WAVES), reason),
    )


# Causal tiles differ in length, and more of them to choose from fill the last wave better: at d128, 2k keys 546 against
# 526 TFLOPS with the 2 waves that keep reads from HBM even when tiles are alike.
CAUSAL_WAVES = 8
_D64 = ForwardConfig(192, 128, num_stages=4)
_D64_SHORT = ForwardConfig(128, 128, num_stages=4, num_q_stages=2, prefetch_scores=True)
_D64_SHORT_CAUSAL = replace(_D64_SHORT, warpgroup_order="free", group_waves=CAUSAL_WAVES)
_D64_SHORT_REASON = "up to 1k keys: 416 against 352 TFLOPS with 192 rows (512 keys), whose last tile is a third empty"
_D96_SHORT = ForwardConfig(128, 128, num_stages=3, num_q_stages=2)
_D96_SHORT_REASON = "up to 1k keys: 445 against 402 TFLOPS with 192 rows (512 keys), causal 295 to 290"
_D128 = ForwardConfig(128, 128, num_stages=2, num_q_stages=2)

# Searched in order; the first row that covers the problem's head dims and length is taken. Figures: H200, sustained.
TILE_TABLE: tuple[TileRow, ...] = (
    TileRow(64, 64, False, 1024, _D64_SHORT, _D64_SHORT_REASON),
    TileRow(
        64,
        64,
        True,
        1024,
        _D64_SHORT_CAUSAL,
        "at 1k keys 352 TFLOPS, staggered 310, 192 rows 308; at 512 keys 248, staggered 229 and with 64-key blocks 240",
    ),
    TileRow(
        64,
        64,
        True,
        4096,
        _D64_SHORT_CAUSAL,
        "441 and 484 TFLOPS at 2k and 4k keys, staggered 386 and 440, 192 rows 416 and 463; at 8k and 16k 497 and 499, "
        "192 rows 505 and 512; without a mask ragged batches are slower (rows_of), windows have not been tried",
        causal_only=True,
    ),
    *_rows(64, 64, _D64, "at 8k keys 555 against 530 TFLOPS with 128 rows"),
    TileRow(96, 96, False, 1024, _D96_SHORT, _D96_SHORT_REASON),
    TileRow(96, 96, True, 1024, replace(_D96_SHORT, group_waves=CAUSAL_WAVES), _D96_SHORT_REASON),
    *_rows(
        96,
        96,
        ForwardConfig(192, 96, num_stages=2, num_q_stages=2, warpgroup_order="ping_pong"),
        "128 keys do not fit 160 registers; turns in every block: 646 against 560 TFLOPS at 8k keys, 611 to 589 causal",
    ),
    TileRow(128, 128, False, 512, _D128, "prefetched scores: 460 against 470 TFLOPS at 512 keys"),
    TileRow(
        128,
        128,
        False,
        None,
        replace(_D128, prefetch_scores=True),
        "672 against 650 TFLOPS without prefetch at 8k keys",
    ),
    TileRow(
        128,
        128,
        True,
        2048,
        replace(_D128, group_waves=CAUSAL_WAVES),
        "two buffers of Q: 332, 465 and 568 TFLOPS at 512, 1k and 2k keys; Q in registers, with one: 311, 436 and 550",
    ),
    TileRow(
        128,
        128,
        True,
        None,
        ForwardConfig(128, 128, num_stages=2, q_in_registers=True, group_waves=CAUSAL_WAVES),
        "Q in registers: 702 TFLOPS at 16k keys and 611 at 4k, from shared memory 660 and 588, but in another run 687 "
        "to 679 at 16k and 552 to 542 at 2k; 160 keys with O in Q's buffer: 690 at 16k and 579 at 4k; 112 and 96 keys "
        "are 5 % slower at 8k",
    ),
    *_rows(
        192,
        128,
        ForwardConfig(128, 128, num_stages=2, share_qo_smem=True),
        "96 and 112 keys: 697 and 692 TFLOPS to 711 at 8k keys; turns in every block: 713",
    ),
    *_rows(
        192,
        192,
        ForwardConfig(128, 96, num_stages=2, share_qo_smem=True, warpgroup_order="ping_pong"),
        "112 keys, which would fill shared memory: 718 against 722 TFLOPS at 8k keys, causal 702 to 705",
    ),
    *_rows(
        256,
        256,
        ForwardConfig(128, 64, num_stages=2, share_qo_smem=True, warpgroup_order="ping_pong"),
        "80 keys, which would fill shared memory: 470 against 493 TFLOPS at 512 keys, 727 to 736 at 8k; turns in every "
        "block: causal 716 against 667 TFLOPS at 16k (with 80 keys)",
    ),
)


class BackwardRow(NamedTuple):
    """Serves head dims up to ``head_dim`` and ``head_dim_v`` and, if it is set, query sequences up to
    ``max_seqlen_q``, with a causal mask if ``causal`` is True, without if False, either way if None.

    No row is split by length now, but ``flashhopper tune`` says where that may pay.
    """

    head_dim: int
    head_dim_v: int
    config: BackwardConfig
    reason: str
    causal: bool | None = None
    max_seqlen_q: int | None = None


_D192_BACKWARD = BackwardConfig(64, 64, "operands", num_dq_stages=2)
_D192_BACKWARD_REASON = "dK and dV of 64 keys together take more registers than one warpgroup has; not searched"

_D64_64_ROWS = BackwardConfig(
    64,
    128,
    num_q_stages=4,
    num_do_stages=4,
    num_ds_stages=3,
    num_dq_stages=2,
    num_k_stages=2,
    group_waves=CAUSAL_WAVES,
)
_D128_OPERANDS = BackwardConfig(64, 64, "operands", num_q_stages=3, num_do_stages=3, num_dq_stages=2)

# Searched in order, as TILE_TABLE. Figures: H200, sustained, all three kernels.
BACKWARD_TABLE: tuple[BackwardRow, ...] = (
    BackwardRow(
        64,
        64,
        BackwardConfig(128, 128, num_q_stages=3, num_k_stages=2, group_waves=CAUSAL_WAVES),
        "two tiles of K, 3 stages of Q and 1 of dQ: 229, 343, 430, 481 and 552 TFLOPS at 512, 1k, 2k, 4k and 16k "
        "queries; 2 of each: 227, 337, 419, 469 and 527; one tile of K, 2 of dQ: 200, 304, 405, 468 and 555; 64 rows "
        "and two tiles of K: 223, 324, 388, 411 and 466; 2 waves 7 % slower",
        causal=True,
    ),
    BackwardRow(
        64,
        64,
        BackwardConfig(128, 128, num_dq_stages=2, num_k_stages=2, warpgroup_order="stagger"),
        "two tiles of K: 356, 452, 481, 529 and 541 TFLOPS at 512, 1k, 2k, 4k and 16k queries, one: 324, 428, 463, 519 "
        "and 540; 1 stage of dQ and 3 of Q and dO 2 % slower, 64 rows 20 %",
        causal=False,
    ),
    BackwardRow(
        96,
        96,
        BackwardConfig(64, 128, num_q_stages=3, num_do_stages=3, dq_columns=96, num_dq_stages=2),
        "as head_dim 128 with dQ in one pass; not searched",
    ),
    BackwardRow(
        128,
        128,
        BackwardConfig(64, 128, num_dq_stages=2, num_k_stages=2, group_waves=8),
        "two tiles of K and 2 stages of Q and dO: 353, 449, 534, 567 and 613 TFLOPS at 512, 1k, 2k, 4k and 16k "
        "queries, causal 242, 369, 446, 520 and 599; one tile and 3 stages: 348, 426, 520, 565 and 612, causal 231, "
        "360, 440, 515 and 599; 1 stage of dQ 571 at 16k; 2 waves as 8",
    ),
    BackwardRow(192, 128, _D192_BACKWARD, _D192_BACKWARD_REASON),
    BackwardRow(192, 192, _D192_BACKWARD, _D192_BACKWARD_REASON),
    BackwardRow(
        256,
        256,
        BackwardConfig(64, 64, "operands", num_do_stages=1, dq_columns=128),
        "1 stage of dO leaves room for 128 columns of dQ: 431 against 404 TFLOPS at 4k queries with 2 and 64",
    ),
)


def is_masked(problem: AttentionProblem) -> bool:
    """Whether tiles differ in length: such problems take the rows of causal masks."""
    return problem.mask.causal or problem.mask.window is not None or problem.ragged is not None


def features_of(
    problem: AttentionProblem,
    has_sink: bool = False,
    has_alibi: bool = False,
    score_mod: Program | None = None,
    mask_mod: Program | None = None,
) -> Features:
    """What the kernels of a validated problem need beside plain and causal attention."""
    window = problem.mask.window
    return Features(
        window=window is not None,
        chunk=window is not None and window[2] > 0,
        softcap=problem.options.softcap != 0.0,
        alibi=has_alibi,
        sink=has_sink,
        ragged=problem.ragged is not None,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )


@cache
def rows_of(causal: bool, window: bool, ragged: bool) -> tuple[TileRow, ...]:
    """The rows of the table that serve a kind of mask, searched in order.

    Some ragged batches take those for short sequences whatever their longest one: 16 sequences of 2k keys (and lengths
    up to 4k) at head_dim 128 572 (570) TFLOPS causal and 613 (618) without a mask, with the rows for long ones 552
    (556) and 605 (610); at head_dim 64 430 (442) against 403 (427) causal, but 489 (469) against 510 (496) without.
    """
    rows = [row for row in TILE_TABLE if row.causal == (causal or window or ragged)]
    if not causal:
        rows = [row for row in rows if not row.causal_only]
    if ragged and not window:
        return as_short(rows, {(64, 64), (128, 128)} if causal else {(128, 128)})
    return tuple(rows)


Row = TypeVar("Row", bound=Any)  # with head_dim, head_dim_v and max_seqlen_k


def as_short(rows: Sequence[Row], dims: Collection[tuple[int, int]]) -> tuple[Row, ...]:
    """Of the rows for these head dims only the first, which is for short sequences, without its limit."""
    first = {row[:2]: row._replace(max_seqlen_k=None) for row in reversed(rows) if row[:2] in dims}
    return tuple(dict.fromkeys(first.get(row[:2], row) for row in rows))


def serves(row: Any, head_dim: int, head_dim_v: int, seqlen_k: int) -> bool:
    """Whether a call's dims and keys are within a row's, which is one of ``as_short``'s kind."""
    fits_dims: bool = head_dim <= row.head_dim and head_dim_v <= row.head_dim_v
    return fits_dims and (row.max_seqlen_k is None or seqlen_k <= row.max_seqlen_k)


def select_row(problem: AttentionProblem) -> TileRow:
    """The row of the table that serves a validated problem."""
    mask, is_ragged = problem.mask, problem.ragged is not None
    for row in rows_of(mask.causal, mask.window is not None, is_ragged):
        if serves(row, problem.head_dim, problem.head_dim_v, problem.seqlen_k):
            return row
    raise AssertionError(f"no row of TILE_TABLE covers {problem}")  # validate() admits only what the last rows cover


def select_spec(
    problem: AttentionProblem, config: ForwardConfig | None = None, features: Features | None = None
) -> KernelSpec:
    """The kernel for a validated problem; ``config`` overrides the table's."""
    row = select_row(problem)
    dtype = DTYPES[problem.dtype]
    features = features_of(problem) if features is None else features
    chosen = forward_config(row, dtype, features) if config is None else config
    return KernelSpec(dtype, row.head_dim, row.head_dim_v, problem.mask.causal, chosen, features)


def forward_config(row: TileRow, dtype: Dtype, features: Features = PLAIN) -> ForwardConfig:
    """The row's configuration with what the dtype and the kernel's features ask for, without what they exclude.

    Softcap's tanh and exp2 share one unit, which is as busy then as the tensor cores: warpgroups that drift apart use
    it best. With head_dim 128, lazy softmax and a causal mask 561 TFLOPS at 16k keys and 476 at 2k, staggered 506 and
    431, in turns 546 and 460; exact softmax in turns 529 and 445, staggered 460 and 397 (H200). At head_dim 64 that
    unit is the limit, and every other exp2 as a polynomial is faster: 397 TFLOPS at 16k keys and 321 at 2k, without 354
    and 301, 3 of 8 366 and 302, 5 of 8 4 % less; 128 rows 347 and 301. At head_dim 128 it is slower: 2 of 8 506 to 540.
    """
    config = for_dtype(row.config, dtype)
    if features.has_mods:
        return with_mods(config, row.head_dim)
    if features.softcap and (row.head_dim, row.head_dim_v) == (128, 128):
        if config.softmax == "exact":
            config = replace(config, warpgroup_order="ping_pong")
        else:
            free = replace(_D128, prefetch_scores=True, warpgroup_order="free")
            config = replace(free, group_waves=config.group_waves)
    if features.softcap and (row.head_dim, row.head_dim_v) == (64, 64):
        if features.alibi:  # with 192 rows 4 to 60 registers spill
            config = replace(_D64_SHORT, softmax=config.softmax, group_waves=config.group_waves)
        elif config.softmax == "lazy":
            config = replace(_D64, group_waves=config.group_waves, exp2_on_fma=4)
    return replace(config, prefetch_scores=False) if features.window else config


def with_mods(config: ForwardConfig, head_dim: int) -> ForwardConfig:
    """For users' functions: every block is masked, and what they compute, and above all load, takes registers. With
    these tiles none of those in tests/compile spills; not searched."""
    tile_n = 96 if head_dim <= 128 else 64
    if config.num_consumer_warpgroups == 3:  # 160 registers each; with 2 there are 232
        smaller = _D64_SHORT if head_dim == 64 else _D96_SHORT
        config = replace(smaller, group_waves=config.group_waves)
    return replace(config, tile_n=tile_n, softmax="exact", prefetch_scores=False, q_in_registers=False)


def select_backward_row(problem: AttentionProblem) -> BackwardRow:
    """The row of the backward's table that serves a validated problem."""
    for row in BACKWARD_TABLE:
        fits_dims = problem.head_dim <= row.head_dim and problem.head_dim_v <= row.head_dim_v
        fits_mask = row.causal is None or row.causal == is_masked(problem)
        fits_length = row.max_seqlen_q is None or problem.seqlen_q <= row.max_seqlen_q
        if fits_dims and fits_mask and fits_length:
            return row
    raise AssertionError(f"no row of BACKWARD_TABLE covers {problem}")


def select_backward_spec(
    problem: AttentionProblem, config: BackwardConfig | None = None, features: Features | None = None
) -> BackwardSpec:
    """The main backward kernel for a validated problem; ``config`` overrides the table's."""
    row = select_backward_row(problem)
    dims = row.head_dim, row.head_dim_v
    features = replace(features_of(problem) if features is None else features, sink=False)
    chosen = with_fewer_registers(row, features) if config is None else config
    flags = problem.mask.causal, problem.options.deterministic
    return BackwardSpec(DTYPES[problem.dtype], *dims, *flags, chosen, features)


def with_fewer_registers(row: BackwardRow, features: Features) -> BackwardConfig:
    """Softcap keeps a factor per score, ALiBi a distance, users' functions what they like: what spills with the table's
    tiles gets smaller ones."""
    dims = row.head_dim, row.head_dim_v
    if features.has_mods and row.config.split == "operands":
        return replace(row.config, dq_columns=64, wide_consumers=True)
    if dims == (64, 64) and (features.softcap or features.alibi or features.has_mods):
        return _D64_64_ROWS
    if dims == (128, 128) and (features.softcap or features.has_mods):
        return _D128_OPERANDS
    return row.config


def for_dtype(config: ForwardConfig, dtype: Dtype) -> ForwardConfig:
    """float16 ends at 65504, so that its P needs the true row maximum."""
    return replace(config, softmax="exact") if dtype == "float16" else config
