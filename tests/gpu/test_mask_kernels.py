"""Windows, chunks, softcap and sinks, alone and combined, forward and backward: against fp32 by the contract."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from backward_checks import Incoming
from checks import BF16, FP16, Shape, Tensors, dense, guarded_inputs, random_inputs, redone_tiles
from feature_checks import Call, Outcome, assert_same, check, compare, count_differing, incoming_of, run, take

from flashhopper.options import AttentionOptions

MASKS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (100, 37)},
    "left": {"window_size": (200, -1)},
    "right": {"window_size": (-1, 50)},
    "narrow": {"window_size": (3, 2)},
    "own key": {"window_size": (0, 0)},
    "wider than all": {"window_size": (5000, 5000)},
    "causal window": {"window_size": (128, 0), "causal": True},
    "causal, right side cut": {"window_size": (70, 300), "causal": True},
    "chunks": {"attention_chunk": 100},
    "causal chunks": {"attention_chunk": 192, "causal": True},
    "chunks in a window": {"attention_chunk": 256, "window_size": (90, 20)},
}
SCORES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "causal softcap": {"softcap": 15.0, "causal": True},
    "window softcap": {"softcap": 5.0, "window_size": (100, 37)},
}
# Equal; fewer queries; more, so that rows see nothing; whole tiles; one query; one key.
LENGTHS = [(333, 333), (200, 777), (777, 200), (512, 512), (1, 513), (513, 1)]
SHAPE = Shape(2, 333, 333, 6, 2, 128, 128)
EVERY_HEAD_DIM = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (72, 40)]


def call_of(features: dict[str, Any], sink: torch.Tensor | None = None) -> Call:
    return Call(AttentionOptions(**features), sink)


def random_sink(heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(heads, device="cuda").to(dtype)


def with_lengths(lengths: tuple[int, int], shape: Shape = SHAPE) -> Shape:
    return shape._replace(seqlen_q=lengths[0], seqlen_k=lengths[1])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("features", MASKS.values(), ids=list(MASKS))
def test_masks(features: dict[str, Any], lengths: tuple[int, int]) -> None:
    check(random_inputs(with_lengths(lengths)), call_of(features))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("features", SCORES.values(), ids=list(SCORES))
def test_softcap(features: dict[str, Any], lengths: tuple[int, int]) -> None:
    check(random_inputs(with_lengths(lengths)), call_of(features))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("features", [{}, {"causal": True}, MASKS["window"]], ids=["full", "causal", "window"])
def test_sinks(features: dict[str, Any], lengths: tuple[int, int]) -> None:
    # As many heads as make the largest of plain PyTorch's errors, the measure, more than luck.
    shape = with_lengths(lengths)._replace(heads=24, heads_k=8)
    for dtype in (torch.float32, BF16):
        outcome = check(random_inputs(shape), call_of(features, random_sink(24, dtype)))
        assert outcome.dsink is not None
        assert outcome.dsink.dtype == dtype
        assert outcome.dsink.count_nonzero() == 24


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim, head_dim_v", EVERY_HEAD_DIM)
def test_head_dims_and_dtypes(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    shape = Shape(2, 300, 420, 4, 2, head_dim, head_dim_v)
    sink = random_sink(4)
    if dtype == BF16:  # more keys than the tables' rows for short sequences serve
        check(
            random_inputs(Shape(1, 300, 4200, 2, 2, head_dim, head_dim_v)), call_of({"window_size": (2100, 37)}, None)
        )
    for features, with_sink in (
        ({"window_size": (100, 37)}, False),
        ({"window_size": (128, 0), "causal": True}, True),
        ({"attention_chunk": 100, "causal": True}, False),
        ({"softcap": 10.0, "window_size": (100, 37)}, False),
        ({"softcap": 10.0, "causal": True}, True),
    ):
        check(random_inputs(shape, dtype), call_of(features, sink if with_sink else None))


@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("softcap", [0.0, 8.0])
@pytest.mark.parametrize("causal", [False, True])
def test_combinations(causal: bool, softcap: float, with_sink: bool) -> None:
    """Of everything, in one head_dim; lengths are fresh in every run."""
    for window, chunk in itertools.product(((-1, -1), (60, 30), (40, -1), (-1, 25)), (0, 150)):
        shape = Shape(1, random.randint(1, 500), random.randint(1, 500), 4, 2, 64, 64)
        features = {"causal": causal, "softcap": softcap, "window_size": window, "attention_chunk": chunk}
        check(random_inputs(shape), call_of(features, random_sink(4) if with_sink else None))


@pytest.mark.parametrize("left", [0, 1, 62, 63, 64, 65, 127, 128, 129, 176, 255])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows_around_tiles(head_dim: int, left: int) -> None:
    for right in (0, 1, 63, 64, 127, 128):
        check(random_inputs(Shape(1, 400, 530, 2, 1, head_dim, head_dim)), call_of({"window_size": (left, right)}))


@pytest.mark.parametrize("chunk", [1, 2, 63, 64, 65, 127, 128, 129, 500, 10_000])
@pytest.mark.parametrize("causal", [False, True])
def test_chunks_around_tiles(causal: bool, chunk: int) -> None:
    for lengths in ((400, 530), (530, 400)):
        features = {"attention_chunk": chunk, "causal": causal}
        check(random_inputs(with_lengths(lengths, Shape(1, 0, 0, 2, 1, 128, 128))), call_of(features))


@pytest.mark.parametrize("heads, heads_k", [(3, 3), (6, 1), (12, 2), (5, 1), (16, 2)])
def test_grouped_heads(heads: int, heads_k: int) -> None:
    shape = Shape(2, 260, 390, heads, heads_k, 128, 128)
    check(random_inputs(shape), call_of({"window_size": (90, 10)}, random_sink(heads)))
    check(random_inputs(shape), call_of({"softcap": 10.0, "causal": True}))


@pytest.mark.parametrize("features", [{"window_size": (-1, 0)}, {"window_size": (-1, 9), "causal": True}], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_windows_that_are_causal_masks(features: dict[str, Any], lengths: tuple[int, int]) -> None:
    """Both calls are held to the reference of the causal mask."""
    tensors = random_inputs(with_lengths(lengths))
    incoming = incoming_of(tensors)
    causal = call_of({"causal": True})
    check(tensors, causal, incoming)
    compare(tensors, causal, incoming, run(tensors, call_of(features), incoming))


@pytest.mark.parametrize("size", [2**30, 2**31 - 1, 2**40])
def test_windows_and_chunks_that_pass_32_bits_are_none(size: int) -> None:
    """Position plus window would wrap around."""
    tensors = random_inputs(with_lengths((300, 410)))
    incoming = incoming_of(tensors)
    for features in ({"window_size": (size, size)}, {"window_size": (-1, size)}, {"window_size": (size, -1)}):
        compare(tensors, Call(), incoming, run(tensors, call_of(features), incoming))
    compare(tensors, Call(), incoming, run(tensors, call_of({"attention_chunk": size}), incoming))


BLIND = {
    "window": ({"window_size": (20, 30)}, 700 - 150 - 30),
    "right": ({"window_size": (-1, 0)}, 700 - 150),
    "causal window": ({"window_size": (64, 5), "causal": True}, 700 - 150),
    "chunks": ({"attention_chunk": 64}, 700 - 150),  # those of keys before the first
}


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("features, blind", BLIND.values(), ids=list(BLIND))
def test_rows_that_see_nothing(features: dict[str, Any], blind: int, dtype: torch.dtype) -> None:
    """Whatever lies in them or arrives there changes no bit of any other result."""
    tensors = random_inputs(Shape(2, 700, 150, 4, 2, 128, 128), dtype)
    incoming = incoming_of(tensors)
    call = call_of(features | {"deterministic": True})
    outcome = check(tensors, call, incoming)
    assert int((outcome.lse == -math.inf).sum()) == 2 * 4 * blind
    q, k, v = (x.clone() for x in tensors)
    grad_out, grad_lse = (x.clone() for x in incoming if x is not None)
    q[:, :blind], grad_out[:, :blind] = 7.0, -5.0
    for sent in (1e4, math.inf, math.nan):
        grad_lse[:, :, :blind] = sent
        assert_same(run((q, k, v), call, Incoming(grad_out, grad_lse)), outcome)


def test_rows_that_see_nothing_have_the_sink_as_lse() -> None:
    tensors, sink = random_inputs(Shape(2, 300, 100, 4, 2, 128, 128)), random_sink(4)
    outcome = check(tensors, call_of({"causal": True}, sink))
    torch.testing.assert_close(outcome.lse[:, :, :200], sink[:, None].expand(2, 4, 200), atol=1e-5, rtol=1e-6)


UNREAD: dict[str, tuple[dict[str, Any], int, int]] = {
    "window": ({"window_size": (128, 0)}, 64, 1600),
    "causal window": ({"window_size": (200, 0), "causal": True}, 64, 1600),
    "chunk": ({"attention_chunk": 256}, 64, 1600),
    "left of a whole window": ({"window_size": (60, 60)}, 128, 1600),
}


@pytest.mark.parametrize("features, seqlen_q, unread", UNREAD.values(), ids=list(UNREAD))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_that_no_row_can_see_are_not_loaded(
    head_dim: int, features: dict[str, Any], seqlen_q: int, unread: int
) -> None:
    """The queries stand at the last of 2048 keys; the first are NaN."""
    q, k, v = random_inputs(Shape(2, seqlen_q, 2048, 4, 2, head_dim, head_dim))
    incoming = incoming_of((q, k, v))
    call = call_of(features | {"deterministic": True})
    outcome = check((q, k, v), call, incoming)
    k, v = k.clone(), v.clone()
    k[:, :unread], v[:, :unread] = math.nan, math.nan
    assert_same(run((q, k, v), call, incoming), outcome)


@pytest.mark.parametrize("size", [20.0, 1e4, -1e4, -math.inf])
def test_sinks_of_any_size(size: float) -> None:
    """Far above all scores nothing is left of out; far below, and at -inf, they are none."""
    tensors = random_inputs(with_lengths((300, 410)))
    incoming = incoming_of(tensors)
    sink = torch.full((6,), size, device="cuda")
    if size > 0:
        check(tensors, call_of({"causal": True}, sink), incoming)
        return
    outcome = run(tensors, call_of({"causal": True}, sink), incoming)
    assert outcome.dsink is not None
    assert outcome.dsink.count_nonzero() == 0
    compare(tensors, call_of({"causal": True}), incoming, outcome._replace(dsink=None))


def test_a_sink_of_minus_infinity_where_rows_see_nothing() -> None:
    """LSE is -inf there, and the weight of the sink exp(-inf + inf) if taken at its word."""
    tensors = random_inputs(with_lengths((410, 300)))
    incoming = incoming_of(tensors)
    outcome = run(tensors, call_of({"causal": True}, torch.full((6,), -math.inf, device="cuda")), incoming)
    assert outcome.dsink is not None
    assert outcome.dsink.tolist() == [0.0] * 6
    compare(tensors, call_of({"causal": True}), incoming, outcome._replace(dsink=None))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("softcap", [1.0, 5.0, 50.0])
def test_softcap_of_large_scores(softcap: float, dtype: torch.dtype) -> None:
    """Scores of 9 to 36 times the ordinary size: tanh is flat there and the gradients are small."""
    for size in (3.0, 6.0):
        check(random_inputs(with_lengths((300, 410)), dtype, size), call_of({"softcap": softcap, "causal": True}))


@pytest.mark.parametrize(
    "features", [{"causal": True}, MASKS["causal window"], {"softcap": 30.0, "causal": True}], ids=str
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fp16_of_inputs_times_three(head_dim: int, features: dict[str, Any]) -> None:
    tensors = random_inputs(Shape(2, 512, 512, 4, 4, head_dim, head_dim), FP16, 3.0)
    outcome = check(tensors, call_of(features))
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert getattr(outcome, name).isfinite().all(), name


@pytest.mark.parametrize("features", [MASKS["window"], MASKS["causal window"], MASKS["causal chunks"]], ids=str)
def test_more_tiles_than_multiprocessors(features: dict[str, Any]) -> None:
    for shape in (Shape(2, 2048, 2048, 16, 4, 128, 128), Shape(100, 200, 200, 3, 1, 64, 64)):
        check(random_inputs(shape), call_of(features))


@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0])
def test_softmax_scales(scale: float) -> None:
    for features in (MASKS["window"], {"softcap": 4.0}):
        check(random_inputs(with_lengths((260, 390))), call_of(features | {"softmax_scale": scale}))


REPEATED = [
    {"window_size": (100, 37)},
    {"window_size": (128, 0), "causal": True, "softcap": 10.0},
    {"attention_chunk": 192, "causal": True},
]


@pytest.mark.parametrize("features", REPEATED, ids=str)
def test_repeats_are_bitwise_equal(features: dict[str, Any]) -> None:
    """Forward and backward, the sink's gradient too."""
    tensors = random_inputs(Shape(2, 500, 700, 6, 2, 128, 128))
    incoming = incoming_of(tensors)
    call = call_of(features | {"deterministic": True}, random_sink(6))
    first: Outcome = check(tensors, call, incoming)
    differing = sum(count_differing(take(tensors, call, incoming), first) for _ in range(100))
    assert isinstance(differing, torch.Tensor)
    assert differing.tolist() == [0] * 6


def test_nothing_past_the_ends_is_read() -> None:
    """NaN lies before and after every batch, row, head and column."""
    for features in (MASKS["window"], MASKS["left"], MASKS["causal chunks"], SCORES["softcap"]):
        for lengths in ((129, 333), (333, 129), (1, 70)):
            tensors: Tensors = guarded_inputs(with_lengths(lengths))
            incoming = incoming_of(tensors)
            call = call_of(features | {"deterministic": True})
            assert_same(run(dense(tensors), call, incoming), check(tensors, call, incoming))


def test_rows_past_the_end_redo_no_tile() -> None:
    """With a narrow window they see no key, so that their sums are 0: that is not a failure of the lazy maximum."""
    for features in ({"window_size": (16, 0)}, {"window_size": (5, 3)}, {"attention_chunk": 32}):
        tensors = random_inputs(with_lengths((333, 333), Shape(2, 333, 333, 6, 2, 64, 64)))
        before = redone_tiles()
        check(tensors, call_of(features))
        assert redone_tiles() == before
