"""Calls with equal keys are equally valid and launched alike, whatever else differs: by random changes of calls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from flashhopper import launch, launch_backward, launch_schedule
from flashhopper.device import hopper_multiprocessors
from flashhopper.options import AttentionOptions
from flashhopper.plan import EmptyPlan
from flashhopper.plan_key import Key, call_key
from flashhopper.problem import (
    MAX_EXTENT,
    MAX_WINDOW_ROWS,
    AttentionProblem,
    RaggedFacts,
    RaggedTensors,
    SoftmaxTensors,
    TensorFacts,
)

BF16, CARDS = torch.bfloat16, [torch.device("cuda:0"), torch.device("cuda:1")]


class Posed(torch.Tensor):
    """Facts of a tensor, without a tensor: no card is needed, nor memory for 2^30 rows."""

    facts: TensorFacts
    shape = property(lambda self: self.facts.shape)
    dtype = property(lambda self: self.facts.dtype)
    device = property(lambda self: self.facts.device)
    requires_grad = False

    def stride(self, *_: Any) -> tuple[int, ...]:  # type: ignore[override]
        return self.facts.stride

    @classmethod
    def of(cls, facts: TensorFacts) -> Posed:
        made = torch.empty(0).as_subclass(cls)
        made.facts = facts
        return made


class Side(NamedTuple):
    """A tensor of q, k and v: its strides are contiguous ones after ``odd`` has been at them."""

    rows: int
    heads: int
    head_dim: int
    odd: str = ""
    dtype: torch.dtype = BF16
    card: int = 0

    def tensor(self, batch: int | None) -> Posed:
        row = self.heads * self.head_dim + 8 * (self.odd == "padded") + (self.odd == "row")
        shape: tuple[int, ...] = (self.rows, self.heads, self.head_dim)
        stride: tuple[int, ...] = (row, self.head_dim + (self.odd == "head"), 2 if self.odd == "last" else 1)
        if batch is not None:
            shape, stride = (batch, *shape), (row * self.rows, *stride)
        return Posed.of(TensorFacts(shape, stride, self.dtype, CARDS[self.card]))


class Lengths(NamedTuple):
    ends: int
    dtype: torch.dtype = torch.int32
    step: int = 1
    card: int = 0

    def tensor(self) -> Posed:
        return Posed.of(TensorFacts((self.ends,), (self.step,), self.dtype, CARDS[self.card]))


class Call(NamedTuple):
    q: Side = Side(9, 4, 64)
    k: Side = Side(12, 2, 64)
    v: Side = Side(12, 2, 32)
    batch: int = 2
    """Of a dense call."""
    max_seqlens: tuple[Any, Any] = (5, 7)
    cu_seqlens: tuple[Lengths, Lengths] = (Lengths(3), Lengths(3))
    seqused: tuple[Lengths | None, Lengths | None] = (None, None)
    options: AttentionOptions = AttentionOptions()
    sink: tuple[int, ...] | None = None
    slopes: tuple[int, ...] | None = None

    def arguments(self, is_ragged: bool) -> tuple[Any, ...]:
        batch = None if is_ragged else self.batch
        ragged = None
        if is_ragged:
            used = (None if x is None else x.tensor() for x in self.seqused)
            ragged = RaggedTensors(*self.max_seqlens, *(x.tensor() for x in self.cu_seqlens), *used)
        extra = (
            None if shape is None else Posed.of(TensorFacts(shape, (1,) * len(shape), torch.float32, CARDS[0]))
            for shape in (self.sink, self.slopes)
        )
        return *(x.tensor(batch) for x in self[:3]), self.options, SoftmaxTensors(*extra), ragged


ROWS = st.sampled_from([0, 1, 2, 9, 12, 700, 4096, MAX_WINDOW_ROWS, MAX_WINDOW_ROWS + 1, MAX_EXTENT, MAX_EXTENT + 1])
BOUNDS = st.sampled_from([-5, -1, 0, 1, 5, 127, 128, 129, 512, 513, 1024, 1025, 2048, 2049, 9999, 2**31, True, 5.0])
WINDOW_SIDES = st.sampled_from([-2, -1, 0, 1, 126, 127, 128, 511, 1024, 9999, True, 127.0])
ENDS = st.sampled_from([0, 1, 2, 3, 4, 50])
LENGTHS = st.builds(
    Lengths,
    ENDS,
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from([0, 0, 1]),
)


def changed_side(side: Side, draw: Callable[[Any], Any]) -> Side:
    match draw(st.sampled_from(["rows", "heads", "head_dim", "odd", "dtype", "card"])):
        case "rows":
            return side._replace(rows=draw(ROWS))
        case "heads":
            return side._replace(heads=draw(st.sampled_from([0, 1, 2, 4, 6])))
        case "head_dim":
            return side._replace(head_dim=draw(st.sampled_from([32, 60, 64, 128, 264])))
        case "odd":
            return side._replace(odd=draw(st.sampled_from(["", "padded", "row", "head", "last"])))
        case "dtype":
            return side._replace(dtype=draw(st.sampled_from([BF16, torch.float16, torch.float32])))
    return side._replace(card=draw(st.integers(0, 1)))


OPTIONS: dict[str, Any] = {
    "softmax_scale": st.sampled_from([None, 0.5, 1, 1.0, True, -1.0]),
    "causal": st.sampled_from([True, False, 0, 1]),
    "window_size": st.tuples(WINDOW_SIDES, WINDOW_SIDES),
    "attention_chunk": st.sampled_from([0, 64, False, -1]),
    "softcap": st.sampled_from([0.0, 0, 30, 30.0, False]),
    "num_splits": st.sampled_from([1, True, 2]),
    "pack_gqa": st.sampled_from([None, False, True]),
    "deterministic": st.sampled_from([True, False, 1]),
    "sm_margin": st.sampled_from([0, 1, 131, 132, True]),
}


def changed(call: Call, draw: Callable[[Any], Any]) -> Call:
    """One change; half of them are of lengths, which keys may not depend on."""
    lengths = ["rows", "keys", "sequences", "max_seqlens"]
    match draw(st.sampled_from([*lengths, *lengths, "q", "k", "v", "options", "options", "others"])):
        case "rows":
            return call._replace(q=call.q._replace(rows=draw(ROWS)))
        case "keys":
            rows = draw(ROWS)
            return call._replace(k=call.k._replace(rows=rows), v=call.v._replace(rows=rows))
        case "sequences":
            ends = draw(ENDS)
            cu_q, cu_k = (x._replace(ends=ends) for x in call.cu_seqlens)
            used_q, used_k = (None if x is None else x._replace(ends=ends - 1) for x in call.seqused)
            return call._replace(cu_seqlens=(cu_q, cu_k), seqused=(used_q, used_k), batch=ends)
        case "max_seqlens":
            return call._replace(max_seqlens=(draw(BOUNDS), draw(BOUNDS)))
        case "q" | "k" | "v" as name:
            return call._replace(**{name: changed_side(getattr(call, name), draw)})
        case "options":
            name = draw(st.sampled_from(list(OPTIONS)))
            return call._replace(options=call.options._replace(**{name: draw(OPTIONS[name])}))
    match draw(st.sampled_from(["cu_seqlens_k", "seqused_q", "seqused_k", "sink", "slopes"])):
        case "cu_seqlens_k":
            return call._replace(cu_seqlens=(call.cu_seqlens[0], draw(LENGTHS)))
        case "seqused_q":
            return call._replace(seqused=(draw(st.none() | LENGTHS), call.seqused[1]))
        case "seqused_k":
            return call._replace(seqused=(call.seqused[0], draw(st.none() | LENGTHS)))
        case "sink":
            return call._replace(sink=draw(st.sampled_from([None, (4,), (2,)])))
    return call._replace(slopes=draw(st.sampled_from([None, (4,), (2, 4), (3, 4)])))


BASES = [
    Call(),
    Call(options=AttentionOptions(window_size=(127, 5))),
    Call(options=AttentionOptions(window_size=(511, 0), causal=True), max_seqlens=(128, 512)),
    Call(seqused=(Lengths(2), Lengths(2)), sink=(4,)),
    Call(cu_seqlens=(Lengths(2), Lengths(2)), seqused=(Lengths(1, step=2), None)),
]


@st.composite
def two_calls(draw: Callable[[Any], Any]) -> tuple[Call, Call]:
    """Calls with a common past, a few changes apart."""
    first = draw(st.sampled_from(BASES))
    for _ in range(draw(st.integers(0, 4))):
        first = changed(first, draw)
    second = first
    for _ in range(draw(st.integers(1, 3))):
        second = changed(second, draw)
    return first, second


def key_of(arguments: tuple[Any, ...]) -> Key | None:
    """None where a call has none; such calls are planned each time."""
    try:
        key = call_key(*arguments)
        hash(key)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return key


def views_of(plan: Any) -> Any:
    """What a plan does to strides, but for that of a packed tensor's batch of 1."""
    return None if plan.views is None else [(x.copies, x.stride[1:]) for x in plan.views]


def forward_facts(arguments: tuple[Any, ...]) -> Any:
    """All that a plan knows, or the type of the error."""
    try:
        plan: Any = launch.make_plan(*launch._validated(*arguments))
    except (TypeError, ValueError, NotImplementedError) as error:
        return type(error)
    known = {name: value for name, value in vars(plan).items() if name not in ("views", "schedule", "kernel")}
    if isinstance(plan, EmptyPlan):
        return type(plan), known
    schedule = getattr(plan, "schedule", None)
    return type(plan), known, views_of(plan), None if schedule is None else (schedule.tile_rows, schedule.heads)


def backward_facts(arguments: tuple[Any, ...]) -> Any:
    q, k, v, options, softmax_tensors, ragged = arguments
    try:
        problem = AttentionProblem.from_tensors(q, k, v, options, ragged).validate()
        shape = problem.out_shape
        out = TensorFacts(shape, launch.compact(shape)[1], problem.dtype, problem.device)
        has = launch.given(problem, softmax_tensors)
        plan: Any = launch_backward.make_plan(problem, (out, out), has)
    except (TypeError, ValueError, NotImplementedError) as error:
        return type(error)
    if plan is None:
        return None
    of_lengths = ("views", "schedules", "kernel", "preprocess", "postprocess", "workspaces", "gradient_layouts")
    known = {name: value for name, value in vars(plan).items() if name not in of_lengths}
    if ragged is None:
        return known, views_of(plan), plan.workspaces, plan.gradient_layouts
    return known, views_of(plan), [(shape[1:], strides) for shape, strides in plan.gradient_layouts]


@pytest.fixture(autouse=True, scope="module")
def _no_card() -> Any:
    card = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: card)
        for module in (launch, launch_backward, launch_schedule):
            patch.setattr(module, "get_kernel", lambda spec: spec)
        hopper_multiprocessors.cache_clear()
        yield
        hopper_multiprocessors.cache_clear()


@pytest.mark.parametrize("is_ragged", [False, True])
@given(calls=two_calls())
@settings(max_examples=1000, deadline=None)
def test_equal_keys_mean_equal_plans_and_errors(is_ragged: bool, calls: tuple[Call, Call]) -> None:
    first, second = (call.arguments(is_ragged) for call in calls)
    keys = key_of(first), key_of(second)
    if keys[0] is None or keys[0] != keys[1]:
        event("different keys")
        return
    facts = forward_facts(first)
    event("equal keys of " + ("good" if isinstance(facts, tuple) else "bad") + " calls")
    assert forward_facts(second) == facts
    of_backward = backward_facts(first)
    if not isinstance(of_backward, type):  # one that fails, here of too many tiles for its semaphores, leaves no plan
        assert backward_facts(second) == of_backward or backward_facts(second) is ValueError


GOOD_RAGGED = [
    Call(),
    Call(q=Side(700, 4, 64), k=Side(4096, 2, 64), v=Side(4096, 2, 32), max_seqlens=(512, 300)),
    Call(cu_seqlens=(Lengths(50), Lengths(50)), max_seqlens=(1, 511)),
]


def test_what_differs_from_step_to_step_is_no_part_of_a_key() -> None:
    keys = {key_of(call.arguments(True)) for call in GOOD_RAGGED}
    assert len(keys) == 1
    assert None not in keys


USED = Call(seqused=(Lengths(2), Lengths(2)), sink=(4,), slopes=(4,), options=AttentionOptions(window_size=(126, 5)))
ONE = Call(cu_seqlens=(Lengths(2), Lengths(2)), seqused=(Lengths(1, step=2), None))
# Pairs between which something differs, in validity or in what is launched; most second calls are wrong.
TOLD_APART = [
    *((USED, USED._replace(q=x)) for x in (Side(9, 2, 64), Side(9, 4, 32), Side(0, 4, 64), Side(1, 4, 64))),
    *((USED, USED._replace(q=USED.q._replace(odd=odd))) for odd in ("padded", "row", "head", "last")),
    *((USED, USED._replace(k=USED.k._replace(odd=odd))) for odd in ("padded", "row", "head", "last")),
    *((USED, USED._replace(v=USED.v._replace(odd=odd))) for odd in ("padded", "row", "head", "last")),
    *((USED, USED._replace(**{x: getattr(USED, x)._replace(dtype=torch.float16)})) for x in "qkv"),
    *((USED, USED._replace(**{x: getattr(USED, x)._replace(card=1)})) for x in "qkv"),
    *((USED, USED._replace(**{x: getattr(USED, x)._replace(rows=11)})) for x in "kv"),
    *((USED, USED._replace(q=USED.q._replace(rows=x))) for x in (MAX_WINDOW_ROWS + 1, MAX_EXTENT + 1)),
    *(
        (USED, USED._replace(cu_seqlens=(Lengths(3), x)))
        for x in (Lengths(4), Lengths(3, torch.int64), Lengths(3, step=2))
    ),
    *(
        (USED, USED._replace(cu_seqlens=(x, Lengths(3))))
        for x in (Lengths(4), Lengths(3, torch.int64), Lengths(3, card=1))
    ),
    *(
        (USED, USED._replace(seqused=(Lengths(2), x)))
        for x in (None, Lengths(3), Lengths(2, step=2), Lengths(2, card=1))
    ),
    *((USED, USED._replace(seqused=(x, Lengths(2)))) for x in (None, Lengths(1), Lengths(2, torch.int64))),
    *((USED, USED._replace(max_seqlens=(5, x))) for x in (-1, 128, 2049, 2**31, True, 7.0)),
    *((USED, USED._replace(max_seqlens=(x, 7))) for x in (-1, 6000, 2**31, True, 5.0)),
    *((USED, USED._replace(sink=x)) for x in (None, (2,))),
    *((USED, USED._replace(slopes=x)) for x in (None, (2,), (2, 4))),
    (ONE, ONE._replace(cu_seqlens=(Lengths(3), Lengths(3)), seqused=(Lengths(2, step=2), None))),
    *(
        (Call(), Call(options=AttentionOptions(**{name: value})))
        for name, value in (
            ("softmax_scale", 0.125),
            ("causal", True),
            ("causal", 0),
            ("window_size", (-1.0, -1)),
            ("window_size", (3, -1)),
            ("attention_chunk", 64),
            ("attention_chunk", False),
            ("softcap", 30.0),
            ("softcap", False),
            ("num_splits", True),
            ("pack_gqa", False),
            ("deterministic", True),
            ("deterministic", 0),
            ("sm_margin", 1),
            ("sm_margin", False),
        )
    ),
]


@pytest.mark.parametrize("first, second", TOLD_APART, ids=map(str, range(len(TOLD_APART))))
def test_what_matters_tells_keys_apart(first: Call, second: Call) -> None:
    assert key_of(first.arguments(True)) is not None
    assert key_of(first.arguments(True)) != key_of(second.arguments(True))


def test_a_problem_on_the_host_is_the_same_one() -> None:
    """Facts are posed here and gathered there: both ways give one problem."""
    q, k, v, options, _, ragged = Call().arguments(True)
    problem = AttentionProblem.from_tensors(q, k, v, options, ragged)
    assert problem.ragged == RaggedFacts(5, 7, ragged.cu_seqlens_q.facts, ragged.cu_seqlens_k.facts, None, None)
    assert problem.validate() is problem
