"""Validation: every error is the right type and names the argument, what was got and what is accepted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashhopper import flash_attn_func
from flashhopper.options import AttentionOptions
from flashhopper.problem import MAX_EXTENT, AttentionProblem, SoftmaxTensors, TensorFacts
from flashhopper.reference import visible_keys

BF16 = torch.bfloat16


def tensors(
    q: tuple[int, ...] = (2, 5, 6, 64),
    k: tuple[int, ...] = (2, 7, 3, 64),
    v: tuple[int, ...] = (2, 7, 3, 32),
    dtype: torch.dtype = BF16,
) -> dict[str, Any]:
    return {"q": torch.empty(q, dtype=dtype), "k": torch.empty(k, dtype=dtype), "v": torch.empty(v, dtype=dtype)}


def validate(replaced: dict[str, Any], **options: Any) -> AttentionProblem:
    return AttentionProblem.from_tensors(**(tensors() | replaced), options=AttentionOptions(**options)).validate()


def facts(shape: tuple[int, ...], dtype: torch.dtype = BF16, device: str = "cuda:0") -> TensorFacts:
    """Of a tensor on a card that this machine need not have."""
    return TensorFacts.of(torch.empty(shape, dtype=dtype))._replace(device=torch.device(device))


def test_valid_problem_reports_its_facts() -> None:
    problem = validate({}, causal=True)
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (2, 5, 7)
    assert (problem.num_heads, problem.num_heads_k, problem.head_dim, problem.head_dim_v) == (6, 3, 64, 32)
    assert (problem.dtype, problem.device) == (BF16, torch.device("cpu"))
    assert problem.softmax_scale == 0.125
    assert problem.options.causal is True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_cpu_accepts_the_dtypes_of_the_reference(dtype: torch.dtype) -> None:
    assert validate(tensors(dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("scale, expected", [(None, 64**-0.5), (0, 0.0), (0.0, 0.0), (2, 2.0), (1.5, 1.5)])
def test_softmax_scale(scale: float | None, expected: float) -> None:
    problem = validate({}, softmax_scale=scale)
    assert problem.softmax_scale == expected
    assert isinstance(problem.softmax_scale, float)


def test_zero_sized_batch_and_sequences_are_valid() -> None:
    problem = validate(tensors(q=(0, 0, 6, 64), k=(0, 0, 3, 64), v=(0, 0, 3, 32)))
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (0, 0, 0)


def test_any_strides_but_the_last_are_valid() -> None:
    heads_first = torch.empty(2, 6, 5, 64, dtype=BF16).transpose(1, 2)
    one_key_head = torch.empty(2, 7, 1, 64, dtype=BF16).expand(2, 7, 3, 64)
    problem = validate({"q": heads_first, "k": one_key_head})
    assert problem.q.stride == (1920, 64, 320, 1)
    assert problem.k.stride == (448, 64, 0, 1)


def test_equal_calls_are_equal_hashable_and_printable() -> None:
    one, same, other = validate({}), validate({}), validate({}, causal=True)
    assert one == same
    assert hash(one) == hash(same)
    assert len({one, same, other}) == 2
    assert "shape=torch.Size([2, 5, 6, 64])" in repr(one)
    assert "causal=False" in repr(one)


WRONG_TENSORS = [
    # not a tensor
    ({"q": [1.0]}, TypeError, ("q must be a torch.Tensor", "got list")),
    ({"k": None}, TypeError, ("k must be a torch.Tensor", "got NoneType")),
    ({"v": SimpleNamespace(shape=(2, 7, 3, 32))}, TypeError, ("v must be a torch.Tensor", "got SimpleNamespace")),
    # dtypes
    ({"q": torch.zeros(2, 5, 6, 64, dtype=torch.int32)}, TypeError, ("q has dtype torch.int32", "torch.bfloat16")),
    ({"k": torch.zeros(2, 7, 3, 64, dtype=torch.bool)}, TypeError, ("k has dtype torch.bool", "torch.float64")),
    (
        {"k": torch.zeros(2, 7, 3, 64)},
        TypeError,
        ("k has dtype torch.float32", "q has torch.bfloat16", "the same dtype"),
    ),
    ({"v": torch.zeros(2, 7, 3, 32).half()}, TypeError, ("v has dtype torch.float16", "q has torch.bfloat16")),
    # devices
    ({"q": torch.empty(2, 5, 6, 64, device="meta")}, ValueError, ("q is on device meta", "cpu and cuda")),
    ({"v": torch.empty(2, 7, 3, 32, device="meta")}, ValueError, ("v is on device meta", "cpu and cuda")),
    # number of dimensions and extents
    (tensors(q=(5, 6, 64)), ValueError, ("q must have 4 dimensions", "(batch, seqlen, heads, head_dim)", "(5, 6, 64)")),
    (tensors(k=(64,)), ValueError, ("k must have 4 dimensions", "got shape (64,)")),
    (tensors(v=(1, 2, 7, 3, 32)), ValueError, ("v must have 4 dimensions", "got shape (1, 2, 7, 3, 32)")),
    (
        {"q": torch.empty(2, 1, 6, 64, dtype=BF16).expand(2, 2**31, 6, 64)},
        ValueError,
        ("q has shape (2, 2147483648, 6, 64)", f"at most {MAX_EXTENT}"),
    ),
    # extents that must agree
    (tensors(k=(3, 7, 3, 64)), ValueError, ("k has batch size 3", "q has 2", "equal")),
    (tensors(v=(1, 7, 3, 32)), ValueError, ("v has batch size 1", "q has 2", "equal")),
    (tensors(v=(2, 8, 3, 32)), ValueError, ("v has seqlen 8", "k has 7", "equal")),
    (tensors(v=(2, 7, 6, 32)), ValueError, ("v has heads 6", "k has 3", "equal")),
    (tensors(k=(2, 7, 3, 32)), ValueError, ("k has head_dim 32", "q has 64", "equal")),
    # head dims
    (
        tensors(q=(2, 5, 6, 60), k=(2, 7, 3, 60)),
        ValueError,
        ("q has head_dim 60", "multiples of 8 from 8 to 256"),
    ),
    (tensors(q=(2, 5, 6, 264), k=(2, 7, 3, 264)), ValueError, ("q has head_dim 264", "multiples of 8 from 8 to 256")),
    (tensors(q=(2, 5, 6, 0), k=(2, 7, 3, 0)), ValueError, ("q has head_dim 0", "multiples of 8 from 8 to 256")),
    (tensors(v=(2, 7, 3, 4)), ValueError, ("v has head_dim 4", "multiples of 8 from 8 to 256")),
    (tensors(v=(2, 7, 3, 512)), ValueError, ("v has head_dim 512", "multiples of 8 from 8 to 256")),
    # heads
    (tensors(q=(2, 5, 4, 64)), ValueError, ("q has 4 heads", "k has 3", "multiple")),
    (tensors(q=(2, 5, 2, 64)), ValueError, ("q has 2 heads", "k has 3", "multiple")),
    (tensors(q=(2, 5, 0, 64)), ValueError, ("q has 0 heads", "k has 3", "at least 1")),
    (tensors(k=(2, 7, 0, 64), v=(2, 7, 0, 32)), ValueError, ("q has 6 heads", "k has 0", "at least 1")),
    # strides
    (
        {"q": torch.empty(2, 5, 64, 6, dtype=BF16).transpose(2, 3)},
        ValueError,
        ("q has strides (1920, 384, 1, 6)", "last dimension (head_dim) must be contiguous"),
    ),
    ({"k": torch.empty(2, 7, 3, 128, dtype=BF16)[..., ::2]}, ValueError, ("k has strides (2688, 384, 128, 2)",)),
    (
        {"v": torch.empty(2, 7, 3, 1, dtype=BF16).expand(2, 7, 3, 32)},
        ValueError,
        ("v has strides (21, 3, 1, 0)", "contiguous"),
    ),
]


@pytest.mark.parametrize(
    "replaced, error, fragments", WRONG_TENSORS, ids=lambda x: x[0] if isinstance(x, tuple) else ""
)
def test_wrong_tensors(replaced: dict[str, Any], error: type[Exception], fragments: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        validate(replaced)
    assert type(raised.value) is error
    for fragment in fragments:
        assert fragment in str(raised.value)


ON_CARD = {"q": facts((2, 5, 6, 64)), "k": facts((2, 7, 3, 64)), "v": facts((2, 7, 3, 32))}


@pytest.mark.parametrize(
    "replaced, error, fragments",
    [
        (
            {"q": facts((2, 5, 6, 64), torch.float32)},
            TypeError,
            ("q has dtype torch.float32", "accepted on cuda are torch.bfloat16, torch.float16"),
        ),
        (
            {"v": facts((2, 7, 3, 32), torch.float64)},
            TypeError,
            ("v has dtype torch.float64", "accepted on cuda are torch.bfloat16, torch.float16"),
        ),
        ({"k": facts((2, 7, 3, 64), device="cpu")}, ValueError, ("k is on cpu", "q on cuda:0", "same device")),
        ({"v": facts((2, 7, 3, 32), device="cuda:1")}, ValueError, ("v is on cuda:1", "q on cuda:0", "same device")),
    ],
)
def test_wrong_tensors_on_a_card(
    replaced: dict[str, TensorFacts], error: type[Exception], fragments: tuple[str, ...]
) -> None:
    assert AttentionProblem(**ON_CARD, options=AttentionOptions()).validate().device == torch.device("cuda:0")
    with pytest.raises(error) as raised:
        AttentionProblem(**(ON_CARD | replaced), options=AttentionOptions()).validate()
    for fragment in fragments:
        assert fragment in str(raised.value)


WRONG_OPTIONS = [
    ("softmax_scale", "1", TypeError, ("float or None", "got str")),
    ("softmax_scale", True, TypeError, ("float or None", "got bool")),
    ("softmax_scale", torch.tensor(0.5), TypeError, ("float or None", "got Tensor")),
    ("softmax_scale", -0.5, ValueError, ("is -0.5", "from 0 to 2**20, or None")),
    ("softmax_scale", float("inf"), ValueError, ("is inf", "from 0 to 2**20")),
    ("softmax_scale", float("nan"), ValueError, ("is nan", "from 0 to 2**20")),
    ("softmax_scale", 1e300, ValueError, ("is 1e+300", "from 0 to 2**20")),
    ("softmax_scale", 10**400, ValueError, ("from 0 to 2**20",)),
    ("causal", 1, TypeError, ("must be a bool", "got int")),
    ("causal", None, TypeError, ("must be a bool", "got NoneType")),
    ("deterministic", "yes", TypeError, ("must be a bool", "got str")),
    ("sm_margin", 1.0, TypeError, ("must be an int", "got float")),
    ("sm_margin", True, TypeError, ("must be an int", "got bool")),
    ("sm_margin", -1, ValueError, ("is -1", "at least 0")),
    ("pack_gqa", "auto", TypeError, ("NoneType or bool", "got str")),
    ("pack_gqa", 0, TypeError, ("NoneType or bool", "got int")),
    ("window_size", [-1, -1], TypeError, ("must be tuple", "got list")),
    ("num_splits", True, TypeError, ("must be int", "got bool")),
    ("softcap", "1", TypeError, ("float or int", "got str")),
    ("pack_gqa", True, NotImplementedError, ("pack_gqa=True", "accepted today: None and False")),
    ("window_size", (-1, -2), ValueError, ("(-1, -2)", "each side is -1 (without bound) or a number of keys")),
    ("window_size", (1, 2, 3), TypeError, ("two ints (left, right)", "(1, 2, 3)")),
    ("window_size", (1, None), TypeError, ("two ints (left, right)", "(1, None)")),
    ("window_size", (True, 0), TypeError, ("two ints (left, right)", "(True, 0)")),
    ("attention_chunk", -1, ValueError, ("is -1", "or 0 for no chunks")),
    ("softcap", -1.0, ValueError, ("is -1.0", "finite numbers over 0")),
    ("softcap", float("nan"), ValueError, ("is nan", "finite numbers over 0")),
    ("softcap", float("inf"), ValueError, ("is inf", "finite numbers over 0")),
    ("num_splits", 4, NotImplementedError, ("num_splits=4", "accepted today: 1")),
]


@pytest.mark.parametrize("name, value, error, fragments", WRONG_OPTIONS, ids=lambda x: str(x)[:20])
def test_wrong_options(name: str, value: Any, error: type[Exception], fragments: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        validate({}, **{name: value})
    assert type(raised.value) is error
    for fragment in (name, *fragments):
        assert fragment in str(raised.value)


@pytest.mark.parametrize(
    "name, value",
    [
        ("pack_gqa", False),
        ("deterministic", True),
        ("sm_margin", 8),
        ("softcap", 0),
        ("softcap", 30.0),
        ("window_size", (128, 0)),
        ("attention_chunk", 64),
    ],
)
def test_accepted_options_arrive_unchanged(name: str, value: Any) -> None:
    assert getattr(validate({}, **{name: value}).options, name) == value


@pytest.mark.parametrize("name, good, bad", [("causal", True, 1), ("deterministic", False, 0), ("sm_margin", 1, True)])
def test_equal_values_of_another_type_are_refused_after_a_good_call(name: str, good: Any, bad: Any) -> None:
    """1 == True: a plan cached for the one must not serve the other."""
    q = torch.randn(1, 4, 2, 8)
    flash_attn_func(q, q, q, **{name: good})
    with pytest.raises(TypeError, match=name):
        flash_attn_func(q, q, q, **{name: bad})


def test_an_unhashable_option_is_named() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(TypeError, match="window_size must be tuple, got list"):
        flash_attn_func(q, q, q, window_size=[-1, -1])


@pytest.mark.parametrize(
    "options, causal, window",
    [
        ({}, False, None),
        ({"causal": True}, True, None),
        ({"window_size": (-1, 0)}, True, None),  # ends where a causal row does
        ({"window_size": (-1, 0), "causal": True}, True, None),
        ({"window_size": (-1, 3), "causal": True}, True, None),  # causal: no look ahead
        ({"window_size": (3, -1)}, False, (3, -1, 0)),
        ({"window_size": (3, 2)}, False, (3, 2, 0)),
        ({"window_size": (3, 2), "causal": True}, False, (3, 0, 0)),
        ({"window_size": (3, -1), "causal": True}, False, (3, 0, 0)),
        ({"window_size": (6, 4)}, False, None),  # of 5 queries and 7 keys hides none
        ({"window_size": (5, 4)}, False, (5, -1, 0)),
        ({"window_size": (6, 3)}, False, (-1, 3, 0)),
        ({"window_size": (6, 0)}, True, None),
        ({"window_size": (2**40, 2**40)}, False, None),
        ({"attention_chunk": 4}, False, (-1, -1, 4)),
        ({"attention_chunk": 4, "causal": True}, False, (-1, 0, 4)),
        ({"attention_chunk": 4, "window_size": (2, 9)}, False, (2, -1, 4)),
    ],
)
def test_what_mask_options_come_to(options: dict[str, Any], causal: bool, window: tuple[int, ...] | None) -> None:
    """The mask hides exactly what the options hide, and is the simplest that does."""
    shapes = (2, 5, 6, 64), (2, 7, 3, 64), (2, 7, 3, 32)
    problem = AttentionProblem(*map(facts, shapes), AttentionOptions(**options)).validate()
    assert problem.mask == (causal, window)
    left, right, chunk = window or (-1, -1, 0)
    simplest = visible_keys(5, 7, causal=causal, window_size=(left, right), attention_chunk=chunk)
    for mine, asked in zip(simplest[:2], visible_keys(5, 7, **options)[:2], strict=True):
        assert torch.equal(mine.clamp(0, 7), asked.clamp(0, 7))


def test_a_negative_softcap_is_refused_on_a_card() -> None:
    shapes = (2, 5, 6, 64), (2, 7, 3, 64), (2, 7, 3, 32)
    with pytest.raises(ValueError, match=r"softcap is -30.0; accepted are finite numbers over 0"):
        AttentionProblem(*map(facts, shapes), AttentionOptions(softcap=-30.0)).validate()


def test_windows_end_at_30_bits_on_a_card() -> None:
    long = facts((1, 1, 1, 64))._replace(shape=(1, 2**30, 1, 64))
    AttentionProblem(long, long, long, AttentionOptions(causal=True)).validate()
    with pytest.raises(ValueError, match=f"q has {2**30} rows; at most"):
        AttentionProblem(long, long, long, AttentionOptions(window_size=(128, 0))).validate()


@pytest.mark.parametrize(
    "sink, device, error, fragment",
    [
        ([0.0] * 6, "cpu", TypeError, "learnable_sink must be a torch.Tensor or None, got list"),
        (torch.zeros(6, dtype=torch.int64), "cpu", TypeError, "learnable_sink has dtype torch.int64"),
        (torch.zeros(3), "cpu", ValueError, "learnable_sink has shape (3,); one number per head of q: (6,)"),
        (torch.zeros(6), "cuda:0", ValueError, "learnable_sink is on cpu, q on cuda:0"),
    ],
    ids=["type", "dtype", "shape", "device"],
)
def test_wrong_sinks(sink: Any, device: str, error: type[Exception], fragment: str) -> None:
    shapes = (2, 5, 6, 64), (2, 7, 3, 64), (2, 7, 3, 32)
    problem = AttentionProblem(*(facts(shape, device=device) for shape in shapes), AttentionOptions())
    with pytest.raises(error) as raised:
        problem.check_softmax_tensors(SoftmaxTensors(learnable_sink=sink))
    assert fragment in str(raised.value)


@pytest.mark.parametrize(
    "slopes, device, error, fragment",
    [
        ([0.5] * 6, "cpu", TypeError, "alibi_slopes must be a torch.Tensor or None, got list"),
        (torch.zeros(6, dtype=BF16), "cpu", TypeError, "alibi_slopes has dtype torch.bfloat16; accepted is"),
        (torch.zeros(3), "cpu", ValueError, "has shape (3,); accepted are (heads,), here (6,), and (batch, heads)"),
        (torch.zeros(6, 2), "cpu", ValueError, "has shape (6, 2); accepted are (heads,), here (6,)"),
        (torch.zeros(1, 6), "cpu", ValueError, "has shape (1, 6); accepted are (heads,), here (6,)"),
        (torch.zeros(6), "cuda:0", ValueError, "alibi_slopes is on cpu, q on cuda:0"),
        (torch.zeros(6).requires_grad_(), "cpu", NotImplementedError, "requires a gradient, which is not there yet"),
    ],
    ids=["type", "dtype", "heads", "transposed", "batch", "device", "gradient"],
)
def test_wrong_slopes(slopes: Any, device: str, error: type[Exception], fragment: str) -> None:
    shapes = (2, 5, 6, 64), (2, 7, 3, 64), (2, 7, 3, 32)
    problem = AttentionProblem(*(facts(shape, device=device) for shape in shapes), AttentionOptions())
    with pytest.raises(error) as raised:
        problem.check_softmax_tensors(SoftmaxTensors(alibi_slopes=slopes))
    assert fragment in str(raised.value)


def test_tensor_arguments_that_are_not_there_yet_are_refused() -> None:
    q = torch.randn(1, 4, 2, 8)
    assert torch.equal(flash_attn_func(q, q, q, qv=None), flash_attn_func(q, q, q))
    with pytest.raises(NotImplementedError, match="qv is not there yet; accepted today: None, got Tensor"):
        flash_attn_func(q, q, q, qv=torch.ones(1))
