"""Which tiles a problem gets. One row per case, with the measured reason; adding a head dim is adding a row."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

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
    sequences up to ``max_seqlen_k``. ``causal`` stands for every mask and for ragged batches. ``exact``: the
    configuration for dtypes whose softmax must be exact, if it is another: maxima and their shuffles cost the less the
    longer the key blocks are."""

    head_dim: int
    head_dim_v: int
    causal: bool
    max_seqlen_k: int | None
    config: ForwardConfig
    reason: str
    exact: ForwardConfig | None = None


def _rows(
    head_dim: int,
    head_dim_v: int,
    config: ForwardConfig,
    reason: str,
    max_seqlen_k: int | None = None,
    exact: ForwardConfig | None = None,
) -> tuple[TileRow, TileRow]:
    """The same configuration with and without a causal mask."""
    masked = replace(config, group_waves=CAUSAL_WAVES)
    masked_exact = None if exact is None else replace(exact, group_waves=CAUSAL_WAVES)
    return (
        TileRow(head_dim, head_dim_v, False, max_seqlen_k, config, reason, exact),
        TileRow(head_dim, head_dim_v, True, max_seqlen_k, masked, reason, masked_exact),
    )


# Causal tiles differ in length, and more of them to choose from fill the last wave better: at d128, 2k keys 546 against
# 526 TFLOPS with the 2 waves that keep reads from HBM even when tiles are alike.
CAUSAL_WAVES = 8
# Three warpgroups of 64 rows, or four, with short key blocks keep the tensor cores busier than two with long ones: two
# fall into step, and while both are at their softmax nobody multiplies.
_D64 = ForwardConfig(192, 128, num_stages=4)
_D64_FOUR = ForwardConfig(256, 64, num_stages=5, num_q_stages=2, prefetch_scores=True)
_D64_TWO = ForwardConfig(128, 128, num_stages=4, num_q_stages=2, prefetch_scores=True)
_D96_TWO = ForwardConfig(128, 128, num_stages=3, num_q_stages=2)
_D96 = ForwardConfig(192, 96, num_stages=2, num_q_stages=2, warpgroup_order="ping_pong")
_D128 = ForwardConfig(192, 64, num_stages=4)
_D128_EXACT = ForwardConfig(128, 128, num_stages=2, num_q_stages=2, softmax="exact")
_D128_EXACT_REASON = (
    "exact at 16k and 2k keys 631 and 583, causal 633 and 580; 192 rows of 64 keys 579 and 575, 588 and 559"
)
_D128_TWO = ForwardConfig(128, 64, num_stages=4, num_q_stages=2, prefetch_scores=True, warpgroup_order="free")
_D128_TWO_REASON = (
    "up to 1k keys: 539 and 605 TFLOPS at 512 and 1k keys, causal 348 and 487; 128 keys 526 and 595, 341 and 470; 192 "
    "rows 508 and 601, 343 and 471; exact at 512 keys 517, causal 326"
)

_D192 = ForwardConfig(128, 64, num_stages=3, num_o_parts=2, warpgroup_order="relay")
_D192_LONG = ForwardConfig(128, 96, num_stages=2, num_o_parts=2, warpgroup_order="ping_pong")

# Searched in order; the first row that covers the problem's head dims and length is taken. Figures: H200, sustained.
TILE_TABLE: tuple[TileRow, ...] = (
    TileRow(
        64,
        64,
        False,
        4096,
        _D64_FOUR,
        "up to 4k keys: 459, 500, 533 and 528 TFLOPS at 512, 1k, 2k and 4k keys; 192 rows of 128 keys 355, 421, 496 "
        "and 508, 128 rows 405, 474, 508 and 510; exact at 512 and 2k 338 and 433, 192 rows 298 and 453, 128 rows 307 "
        "and 385",
    ),
    TileRow(
        64,
        64,
        False,
        None,
        replace(_D64, warpgroup_order="relay"),
        "551, 568 and 571 TFLOPS at 8k, 16k and 32k keys, staggered 543, 558 and 565; 256 rows 542, 543 and 559; 128 "
        "rows 521, 538 and 539",
        _D64,
    ),
    TileRow(
        64,
        64,
        True,
        None,
        replace(_D64_FOUR, group_waves=CAUSAL_WAVES, items_by_shuffle=False),
        "295, 386, 456 and 545 TFLOPS at 512, 1k, 2k and 8k keys, items by shuffle 282, 377, 455 and 539. So before: "
        "295, 385, 458, 514 and 567 TFLOPS at 512, 1k, 2k, 4k and 16k keys; one buffer of Q, in turns 281, 380, 452, "
        "516 and 570; 192 rows 224, 298, 392, 460 and 552; 80 keys, which spill, 486 at 16k, 48 keys 509; exact at "
        "512, 2k and 16k 235, 387 and 491, 192 rows 185, 343 and 498, 128 rows 205, 351 and 443",
    ),
    TileRow(
        96,
        96,
        False,
        1024,
        replace(_D96_TWO, prefetch_scores=True),
        "431 and 506 TFLOPS at 512 and 1k keys, without first scores ahead 426 and 499; with 192 rows 10 % less at 512",
        _D96_TWO,
    ),
    TileRow(
        96,
        96,
        True,
        1024,
        replace(_D96_TWO, warpgroup_order="ping_pong", group_waves=CAUSAL_WAVES),
        "279 and 385 TFLOPS at 512 and 1k keys, in relay 280 and 385, staggered 266 and 354, read in place 274 and 380",
        replace(_D96_TWO, group_waves=CAUSAL_WAVES),
    ),
    TileRow(
        96,
        96,
        False,
        None,
        ForwardConfig(192, 64, num_stages=4),
        "593, 627 and 654 TFLOPS at 2k, 4k and 16k keys; in relay 549, 574 and 596, with items read in place 590, 626 "
        "and 652; so before, in place: 671 and 624 at 16k and 2k in relay; 80 keys 667 and 615; 96 keys 622 and 582",
        _D96,
    ),
    TileRow(
        96,
        96,
        True,
        2048,
        replace(_D96, group_waves=CAUSAL_WAVES),
        "490 TFLOPS at 2k keys, 80 keys 481; 552 and 592 at 4k and 16k",
    ),
    TileRow(
        96,
        96,
        True,
        None,
        replace(_D96, tile_n=80, group_waves=CAUSAL_WAVES),
        "558 and 614 TFLOPS at 4k and 16k keys, 96 keys 552 and 592, with 3 stages 553 and 593; 64 keys were 9 % "
        "slower than 96 at 16k; 128 keys do not fit 160 registers",
        replace(_D96, group_waves=CAUSAL_WAVES),
    ),
    *_rows(128, 128, _D128_TWO, _D128_TWO_REASON, 1024, _D128_EXACT),
    TileRow(
        128,
        128,
        False,
        None,
        replace(_D128, warpgroup_order="relay"),
        "736, 684 and 668 TFLOPS at 16k, 4k and 2k keys, staggered 728, 685 and 672; 80 keys 1 to 6 % less; 128 rows "
        "of 128 keys 689, 657 and 631, of 64 keys 677, 616 and 620; with Q in registers 497 at 16k; "
        + _D128_EXACT_REASON,
        _D128_EXACT,
    ),
    TileRow(
        128,
        128,
        True,
        None,
        replace(_D128, warpgroup_order="free", group_waves=CAUSAL_WAVES),
        "739, 680 and 597 TFLOPS at 16k, 4k and 2k keys, staggered 734, 674 and 592; 128 rows of 128 keys with Q in "
        "registers 707, 642 and 558; two buffers of Q 734, 602 and 553; " + _D128_EXACT_REASON,
        replace(_D128_EXACT, group_waves=CAUSAL_WAVES),
    ),
    *_rows(
        192,
        128,
        ForwardConfig(128, 128, num_stages=2, num_o_parts=2),
        "511, 631, 729 and 725 TFLOPS at 512, 2k, 8k and 16k keys, causal 325, 608, 740 and 751; 192 rows of 64 keys "
        "518, 596, 657 and 649, 337, 601, 676 and 668; 128 rows of 96 keys 478, 623, 732 and 734, 323, 599, 715 and "
        "719, of 64 keys 491, 585, 663 and 654",
    ),
    TileRow(
        192,
        192,
        False,
        None,
        _D192,
        "520, 653, 686, 690 and 729 TFLOPS at 512, 2k, 4k, 8k and 16k keys; 96 keys 478, 630, 674, 697 and 725; two "
        "buffers of Q 493, 639, 677, 685 and 720",
    ),
    TileRow(
        192,
        192,
        True,
        4096,
        replace(_D192, warpgroup_order="free", group_waves=CAUSAL_WAVES),
        "up to 4k keys: 333, 468, 524 and 612 TFLOPS at 512, 1k, 2k and 4k keys, in relay 332, 465, 516 and 607; 96 "
        "keys 319, 455, 517 and 605, but at 16k 701 to 667 and 686",
    ),
    TileRow(
        192,
        192,
        True,
        None,
        replace(_D192_LONG, group_waves=CAUSAL_WAVES),
        "627 and 701 TFLOPS at 8k and 16k keys; 64 keys 616 and 686; 112 keys do not fit",
    ),
    *_rows(
        256,
        256,
        ForwardConfig(128, 64, num_stages=2, num_o_parts=2, warpgroup_order="ping_pong"),
        "507, 649, 724 and 722 TFLOPS at 512, 2k, 8k and 16k keys, causal 406, 629, 729 and 730; causal and free 409, "
        "619, 683 and 684; O in 4 parts 1 % less; with O in Q's bytes, so that the next Q comes when O has left, "
        "in another run causal 348 to 394 and 593 to 618 at 512 and 2k keys; so before: 80 keys 470 to 493 at 512, 727 "
        "to 736 at 8k",
    ),
)


class BackwardRow(NamedTuple):
    """Serves head dims up to ``head_dim`` and ``head_dim_v`` and, if it is set, query sequences up to
    ``max_seqlen_q``, with a causal mask if ``causal`` is True, without if False, either way if None."""

    head_dim: int
    head_dim_v: int
    config: BackwardConfig
    reason: str
    causal: bool | None = None
    max_seqlen_q: int | None = None


_D192_BACKWARD = BackwardConfig(64, 64, "operands", dq_columns=32, num_dq_stages=2, paired=True)
_D192_BACKWARD_REASON = (
    "in pairs with head_dim_v 128 331, 467 and 529 TFLOPS at 512, 2k and 16k queries, causal 200, 404 and 527, with "
    "192 321, 441 and 524, 201, 399 and 531; 1 stage of dS 1 to 10 % slower; alone, with 64 columns of dQ at a time, "
    "280, 411 and 472, 181, 354 and 466, and 279, 410 and 495, 185, 374 and 498"
)

_D96_BACKWARD = BackwardConfig(64, 128, num_q_stages=3, num_do_stages=3, dq_columns=96, num_dq_stages=2)
_D128_BACKWARD = BackwardConfig(64, 128, num_dq_stages=2, num_k_stages=2, group_waves=8)
_D128_BACKWARD_REASON = (
    "two tiles of K and 2 stages of Q and dO: 353, 449, 534, 567 and 613 TFLOPS at 512, 1k, 2k, 4k and 16k queries, "
    "causal 242, 369, 446, 520 and 599; one tile and 3 stages: 348, 426, 520, 565 and 612, causal 231, 360, 440, 515 "
    "and 599; 1 stage of dQ 571 at 16k"
)
_D256_BACKWARD = BackwardConfig(64, 64, "operands", num_do_stages=1, num_ds_stages=1, paired=True)

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
        BackwardConfig(128, 128, num_q_stages=3, num_ds_stages=1, num_k_stages=2, group_waves=CAUSAL_WAVES),
        "1 stage of dS: 218, 320, 407, 474 and 541 TFLOPS at 512, 1k, 2k, 4k and 16k queries, 2: 214, 310, 389, 452 "
        "and 515; 4 stages of Q 214, 316, 403, 468 and 536. So before, with 2 stages of dS: 229, 343, 430, 481 and "
        "552; 2 of Q and of dQ 227, 337, 419, 469 and 527; one tile of K, 2 of dQ: 200, 304, 405, 468 and 555; 64 rows "
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
        replace(_D96_BACKWARD, num_k_stages=2, group_waves=4),
        "217, 328, 409, 470 and 532 TFLOPS at 512, 1k, 2k, 4k and 16k queries, with 2 waves 217, 312, 411, 463 and "
        "533; one tile of K 9, 6, 4, 1 and 0 % less than 2 waves",
        causal=True,
    ),
    BackwardRow(
        96,
        96,
        replace(_D96_BACKWARD, num_ds_stages=1),
        "330, 425, 485, 537 and 581 TFLOPS at 512, 1k, 2k, 4k and 16k queries; 2 stages of dS 325, 412, 468, 507 and "
        "548, with two tiles of K 353, 435, 474, 512 and 543",
        causal=False,
    ),
    BackwardRow(
        128,
        128,
        replace(_D128_BACKWARD, group_waves=1),
        "up to 1k queries: 360 and 444 TFLOPS at 512 and 1k, with 8 waves 336 and 441, but at 16k 606 to 599",
        causal=False,
        max_seqlen_q=1024,
    ),
    BackwardRow(128, 128, _D128_BACKWARD, _D128_BACKWARD_REASON, causal=False),
    BackwardRow(128, 128, _D128_BACKWARD, _D128_BACKWARD_REASON, causal=True, max_seqlen_q=512),
    BackwardRow(
        128,
        128,
        replace(_D128_BACKWARD, num_ds_stages=1),
        "342, 448, 515 and 596 TFLOPS at 1k, 2k, 4k and 16k queries, 2 stages of dS 340, 438, 513 and 588, but at 512 "
        "233 to 232; with 2 stages of dS " + _D128_BACKWARD_REASON,
        causal=True,
    ),
    BackwardRow(192, 128, _D192_BACKWARD, _D192_BACKWARD_REASON),
    BackwardRow(192, 192, _D192_BACKWARD, _D192_BACKWARD_REASON),
    BackwardRow(
        256,
        256,
        replace(_D256_BACKWARD, group_waves=1),
        "312, 454 and 527 TFLOPS at 512, 2k and 16k queries, with 2 waves 300, 452 and 527; 32 columns of dQ and 2 "
        "stages of it 298, 453 and 538; before, 321, 461 and 539: alone, with 128 columns of dQ at a time, 264, 374 "
        "and 445; in pairs with 32 columns and 2 stages of dS 474 at 16k; with Q and dO multicast 509",
        causal=False,
    ),
    BackwardRow(
        256,
        256,
        replace(_D256_BACKWARD, wide_consumers=True),
        "209, 397 and 534 TFLOPS at 512, 2k and 16k queries; with 192 registers 208, 388 and 514; 1 stage of Q and 2 "
        "of dQ 208, 398 and 528; before, 214, 411 and 537: alone, with 128 columns of dQ at a time, 194, 357 and 436",
        causal=True,
    ),
)


def is_masked(problem: AttentionProblem) -> bool:
    """Whether tiles of the forward differ in length: such problems take the rows of causal masks."""
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
def rows_of(is_masked: bool) -> tuple[TileRow, ...]:
    """The rows of the table for problems with a mask or ragged batches, or for the others, searched in order."""
    return tuple(row for row in TILE_TABLE if row.causal == is_masked)


def serves(row: Any, head_dim: int, head_dim_v: int, seqlen_k: int) -> bool:
    """Whether a call's dims and keys are within those of a row of a forward table."""
    fits_dims: bool = head_dim <= row.head_dim and head_dim_v <= row.head_dim_v
    return fits_dims and (row.max_seqlen_k is None or seqlen_k <= row.max_seqlen_k)


def select_row(problem: AttentionProblem) -> TileRow:
    """The row of the table that serves a validated problem."""
    for row in rows_of(is_masked(problem)):
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
    causal = problem.mask.causal
    chosen = forward_config(row, dtype, features, causal) if config is None else config
    return KernelSpec(dtype, row.head_dim, row.head_dim_v, causal, chosen, features)


def forward_config(row: TileRow, dtype: Dtype, features: Features = PLAIN, causal: bool | None = None) -> ForwardConfig:
    """The row's configuration with what the dtype and the kernel's features ask for, without what they exclude;
    ``causal`` (None: the row's) matters for ragged batches, which share their rows with masks.

    Softcap's tanh and exp2 share one unit, which is as busy then as the tensor cores: warpgroups that drift apart use
    it best, and exponentials as polynomials take some of its work. Head_dim 128, causal, 16k and 2k keys: 576 and 499
    TFLOPS with one in eight, 555 and 487 without, two in eight 7 % less; 128 rows of 128 keys 524 and 452; with exact
    softmax 504 and 484, 128 rows in turns 483 and 466. At head_dim 64 that unit is the limit: 401 and 310 with every
    other one, 354 and 301 without, 256 rows 369 and 323.

    256 rows at head_dim 64: windows of 128, 512 to both sides and 1k are 47, 21 and 22 % faster than with 192, and
    slower in any order but ``free``. Ragged batches (16 sequences of 2k; Zipf up to 8k; one of 16k and 128 of 128) are
    fastest with items by shuffle there: causal and free with 7 stages 477, 501 and 535 TFLOPS, staggered 473, 493 and
    534, with 5 stages 469, 496 and 534, read in place 447, 465 and 495; without a mask 536, 541 and 549, in place 533,
    532 and 545. At head_dim 128 in place: causal free 621, 645 and 701, by shuffle 598, 623 and 683; without a mask in
    relay 657, 677 and 708, by shuffle 629, 646 and 666.
    """
    if features.has_mods:
        return with_mods(row)
    config, dims = for_dtype(row, dtype), (row.head_dim, row.head_dim_v)
    is_lazy, is_causal = config.softmax == "lazy", row.causal if causal is None else causal

    def capped(base: ForwardConfig) -> ForwardConfig:
        return replace(base, softmax=config.softmax, group_waves=config.group_waves)

    if features.softcap and dims == (128, 128):
        config = replace(capped(_D128), warpgroup_order="free", exp2_on_fma=1 if is_lazy else 0)
    elif features.softcap and dims == (64, 64):
        # With ALiBi too 4 to 60 registers of 192 rows spill.
        exp2_on_fma = 4 if is_lazy and not features.alibi else 0
        config = replace(capped(_D64_TWO if features.alibi else _D64), exp2_on_fma=exp2_on_fma)
    elif features.alibi and dims == (64, 64):
        config = capped(_D64)  # with a window too 1 register of 256 rows spills
    elif features.alibi and dims == (96, 96) and config.tile_n == 80:
        config = replace(config, tile_n=_D96.tile_n)  # with a window and softcap 1 register of 80 keys spills
    elif config.num_consumer_warpgroups == 4 and features.window:
        config = replace(config, warpgroup_order="free", items_by_shuffle=True)
    elif config.num_consumer_warpgroups == 4 and features.ragged:
        config = replace(config, items_by_shuffle=True)
        if is_causal:
            config = replace(config, num_stages=7, warpgroup_order="free")
    elif dims == (128, 128) and config.num_consumer_warpgroups == 3 and features.ragged and not features.window:
        config = replace(config, warpgroup_order="free" if is_causal else "relay", items_by_shuffle=False)
    return replace(config, prefetch_scores=config.prefetch_scores and not features.window)


# 128 rows, so that a consumer has 232 registers: users' functions take them, above all if they load.
_WITH_MODS = {
    64: ForwardConfig(128, 96, num_stages=4, num_q_stages=2, softmax="exact"),
    96: ForwardConfig(128, 96, num_stages=3, num_q_stages=2, softmax="exact"),
    128: ForwardConfig(128, 96, num_stages=2, num_q_stages=2, softmax="exact"),
}


def with_mods(row: TileRow) -> ForwardConfig:
    """For users' functions, which leave every block masked. None of those in tests/compile spills; not searched."""
    if row.head_dim in _WITH_MODS:
        return replace(_WITH_MODS[row.head_dim], group_waves=row.config.group_waves)
    base = row.exact or row.config  # of 128 rows in either case
    return replace(base, tile_n=64, softmax="exact", prefetch_scores=False)


def select_backward_row(problem: AttentionProblem) -> BackwardRow:
    """The row of the backward's table that serves a validated problem. A ragged batch as such is no mask here."""
    has_mask = problem.mask.causal or problem.mask.window is not None
    for row in BACKWARD_TABLE:
        fits_dims = problem.head_dim <= row.head_dim and problem.head_dim_v <= row.head_dim_v
        fits_mask = row.causal is None or row.causal == has_mask
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
    chosen = backward_config(row, features) if config is None else config
    flags = problem.mask.causal, problem.options.deterministic
    return BackwardSpec(DTYPES[problem.dtype], *dims, *flags, chosen, features)


def within(spec: BackwardSpec, max_ctas: int) -> BackwardSpec:
    """The kernel with as many CTAs on a tile as may run: where ``sm_margin`` leaves a single SM, a CTA works alone."""
    if max_ctas < spec.config.num_ctas:
        return replace(spec, config=replace(spec.config, paired=False))
    return spec


def backward_config(row: BackwardRow, features: Features) -> BackwardConfig:
    """The row's configuration with what the kernel's features ask for.

    Softcap keeps a factor per score, ALiBi a distance, users' functions what they like: what spills with the table's
    tiles gets smaller ones. Ragged batches of head_dim 64 without a mask (16 sequences of 2k; Zipf up to 8k): 477 and
    490 TFLOPS, staggered 471 and 479, with 2 waves 476 and 487, with the row of masks 469 and 475.
    """
    dims = row.head_dim, row.head_dim_v
    if (features.has_mods or features.softcap) and dims == (96, 96):
        return replace(row.config, num_ds_stages=2)
    if (features.has_mods or features.softcap) and row.config.split == "operands":
        return replace(row.config, dq_columns=min(row.config.dq_columns, 64), wide_consumers=True)
    if features.alibi and row.config.wide_consumers:
        return replace(row.config, wide_consumers=False)  # up to 72 bytes spill with them
    if dims == (64, 64) and (features.softcap or features.alibi or features.has_mods):
        return _D64_64_ROWS
    if dims == (128, 128) and (features.softcap or features.has_mods):
        return _D128_OPERANDS
    if dims == (64, 64) and features.ragged and not row.causal:
        return replace(row.config, warpgroup_order="free", group_waves=CAUSAL_WAVES)
    return row.config


def for_dtype(row: TileRow, dtype: Dtype) -> ForwardConfig:
    """float16 ends at 65504, so that its P needs the true row maximum."""
    return replace(row.exact or row.config, softmax="exact") if dtype == "float16" else row.config
