"""A call is recognised if it is like the last one in all that a plan depends on; each other is looked up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from posed_card import PosedCard, pose
from torch.utils._python_dispatch import TorchDispatchMode

from flashhopper import flash_attn_func, last_call, launch, launch_backward, ops
from flashhopper.options import AttentionOptions, options_of
from flashhopper.reference import attention

BF16 = torch.bfloat16


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> PosedCard:
    return pose(monkeypatch)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was found for each call that was not recognised."""
    found: list[Any] = []
    known_plan = launch.known_plan

    def spy(*arguments: Any) -> Any:
        found.append(known_plan(*arguments))
        return found[-1]

    monkeypatch.setattr(launch, "known_plan", spy)
    return found


def dense(seqlen: int = 6, head_dim: int = 16, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(2, seqlen, 4, head_dim).to(dtype)


Q, K, V = dense(), dense(5), dense(5)


def recognised(looked_up: list[Any], q: Any = Q, k: Any = K, v: Any = V, **options: Any) -> bool:
    before = len(looked_up)
    flash_attn_func(q, k, v, **options)
    return len(looked_up) == before


def test_the_fourth_call_is_recognised_and_is_a_call_of_its_own(card: PosedCard, looked_up: list[Any]) -> None:
    for call in range(5):
        q, k, v = dense(), dense(5), dense(5)
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        _, (*inputs, given_out, given_lse, _, _, _, features) = card.launches[-1]
        assert all(x is y for x, y in zip((*inputs, given_out, given_lse), (q, k, v, out, lse), strict=True))
        assert features is None
        assert len(looked_up) == min(call + 1, 3)
    assert flash_attn_func(q, k, v, causal=True) is card.launches[-1][1][3]
    assert (len(card.launches), len(card.specs)) == (6, 1)


class Subclass(torch.Tensor):
    pass


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return Q.clone()


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "shape": lambda: dense(7),
    "batch": lambda: Q[:1],
    "dimensions": lambda: Q[0],
    "stride": lambda: torch.randn(2, 6, 4, 24).to(BF16)[..., :16],
    "dtype": lambda: Q.half(),
    "parameter": lambda: torch.nn.Parameter(Q, requires_grad=False),
    "requires_grad": lambda: Q.clone().requires_grad_(),
    "subclass": lambda: Q.as_subclass(Subclass),
    "device": lambda: Q.to("meta"),
    "inference": inference_tensor,
    "negative bit": lambda: torch._neg_view(Q),
    "fp8": lambda: Q.to(torch.float8_e4m3fn),
    "nested": lambda: torch.nested.nested_tensor([Q[0], Q[1]]),  # whose size has no answer but an exception
    "sparse": lambda: Q.to_sparse(),
    "list": Q.tolist,
    "None": lambda: None,  # type: ignore[return-value,arg-type]
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_differs_in_a_tensor_is_not_recognised(name: str, card: PosedCard) -> None:
    for _ in range(3):
        flash_attn_func(Q, K, V)
    options = options_of(*AttentionOptions())
    other = OTHERS[name]()
    assert ops._last_calls.find(options, Q, K, V) is not None
    for tensors in ((other, K, V), (Q, other, V), (Q, K, other)):
        assert ops._last_calls.find(options, *tensors) is None


def test_the_stride_of_one_row_counts(card: PosedCard) -> None:
    """As in keys: a plan for TMA has its views."""
    one, other = dense(1), torch.randn(2, 3, 4, 16).to(BF16)[:, :1]
    for _ in range(3):
        flash_attn_func(one, K, V)
    options = options_of(*AttentionOptions())
    assert (one.shape, one.stride(1)) == (other.shape, other.stride(1))
    assert ops._last_calls.find(options, one, K, V) is not None
    assert ops._last_calls.find(options, other, K, V) is None


@pytest.mark.parametrize(
    "first, second",
    [
        ({}, {"causal": True}),
        ({"softmax_scale": 1.0}, {"softmax_scale": 1}),
        ({"window_size": (3, 1)}, {"window_size": (3, 2)}),
        ({"softcap": 30}, {"softcap": 30.0}),
    ],
)
def test_options_have_last_calls_of_their_own(
    first: dict[str, Any], second: dict[str, Any], card: PosedCard, looked_up: list[Any]
) -> None:
    for options in (first, second) * 3:
        assert not recognised(looked_up, **options)
    for options in (first, second, first, second):
        assert recognised(looked_up, **options)


@pytest.mark.parametrize("options", [{"causal": 1}, {"window_size": (-1, True)}, {"window_size": (-1.0, -1)}])
def test_a_wrong_option_that_equals_a_right_one_is_refused(options: dict[str, Any], card: PosedCard) -> None:
    for _ in range(3):
        flash_attn_func(Q, K, V, causal=True)
        flash_attn_func(Q, K, V, window_size=(-1, 1))
        flash_attn_func(Q, K, V)
    for _ in range(3):
        with pytest.raises(TypeError, match="must be"):
            flash_attn_func(Q, K, V, **options)


def test_options_of_other_types_are_not_kept() -> None:
    """They are refused later, and may be anything: a tensor that holds memory of a card."""
    scale = torch.tensor(0.5)
    options = options_of(scale, False, (-1, -1))
    assert options.softmax_scale is scale
    assert options_of(scale, False, (-1, -1)) is not options
    assert options_of(None, False, (-1, -1), 0, scale) is not options_of(None, False, (-1, -1), 0, scale)


def test_options_are_one_object_if_equal_and_of_equal_types() -> None:
    given = (0.5, True, (3, 4), 0, 0.0, 1, None, False, 0)
    assert options_of(*given) == AttentionOptions(*given)
    assert options_of(*given) is options_of(0.5, True, (3, int("4")), 0, 0.0, 1, None, False, 0)
    for other in (
        (0.5, 1, *given[2:]),
        (*given[:3], False, *given[4:]),
        (0.5, True, (3, 4.0), *given[3:]),
        (0.5, True, [3, 4], *given[3:]),
        (0.5, True, None, *given[3:]),
        ([], *given[1:]),
    ):
        made = options_of(*other)
        assert tuple(made) == other
        assert list(map(type, made)) == list(map(type, other))
        assert made is not options_of(*given)


def test_what_else_a_call_has_is_not_forgotten(card: PosedCard, looked_up: list[Any]) -> None:
    for _ in range(3):
        assert not recognised(looked_up)
    assert not recognised(looked_up, learnable_sink=torch.zeros(4))
    assert card.launches[-1][1][-1] is not None
    assert not recognised(looked_up, alibi_slopes=torch.zeros(4))
    assert not recognised(looked_up, score_mod=lambda score, *_: score * 2)
    for wrong in ({"qv": Q}, {"v_descale": torch.ones(1)}, {"fp8_accumulate": "fast"}, {"mod_tensors": (Q,)}):
        with pytest.raises((NotImplementedError, ValueError)):
            flash_attn_func(Q, K, V, **wrong)  # type: ignore[arg-type]
    assert recognised(looked_up)


def test_shapes_in_turn_are_looked_up(card: PosedCard, looked_up: list[Any]) -> None:
    for _ in range(3):
        for q in (Q, dense(7)):
            assert not recognised(looked_up, q=q)
    assert len(ops._last_calls) == 0


def test_one_tensor_twice_is_looked_up_each_time(card: PosedCard, looked_up: list[Any]) -> None:
    for _ in range(4):
        assert not recognised(looked_up, q=K)
        flash_attn_func(K, K, K)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [Mode, lambda: torch.autocast("cpu")])
def test_a_state_of_torch_in_which_dispatch_differs_is_not_recognised(
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    x = [torch.randn(1, 4, 2, 8) for _ in range(3)]
    options = options_of(*AttentionOptions())
    for _ in range(3):
        expected = flash_attn_func(*x)
    assert ops._last_calls.find(options, *x) is not None
    with context():
        assert ops._last_calls.find(options, *x) is None
        assert torch.equal(flash_attn_func(*x), expected)


def test_transforms_are_not_recognised() -> None:
    """On the CPU, where the reference runs under them."""
    x = [torch.randn(3, 4, 2, 8) for _ in range(3)]
    batched = [y.unsqueeze(1) for y in x]
    expected, _ = attention(*x, softmax_scale=8**-0.5, causal=False)
    for _ in range(3):
        flash_attn_func(*x)
        flash_attn_func(*(y[0] for y in batched))
        mapped = torch.vmap(flash_attn_func)(*batched)
        torch.testing.assert_close(mapped.squeeze(1), expected)


def test_gradients_are_recorded_if_wanted_and_needed(card: PosedCard, looked_up: list[Any]) -> None:
    leaf = K.clone().requires_grad_()
    for k in (leaf, K):
        for _ in range(3):
            flash_attn_func(Q, k, V)
        before = len(looked_up)
        assert flash_attn_func(Q, k, V).requires_grad == k.requires_grad
        with torch.no_grad():
            assert not flash_attn_func(Q, k, V).requires_grad
        assert flash_attn_func(Q, k, V).requires_grad == k.requires_grad
        assert len(looked_up) == before


def test_last_calls_are_forgotten_before_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch, card: PosedCard, looked_up: list[Any]
) -> None:
    monkeypatch.setattr(last_call, "MAX_CALLS", 3)
    for scale in range(1, 9):
        for _ in range(3):
            recognised(looked_up, softmax_scale=scale / 8)
        assert recognised(looked_up, softmax_scale=scale / 8)
        assert len(ops._last_calls) <= 3


def test_a_backward_like_the_last_one_is_recognised(card: PosedCard, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []
    call_key = launch_backward.call_key
    monkeypatch.setattr(launch_backward, "call_key", lambda *x: keys.append(call_key(*x)) or keys[-1])
    odd = torch.randn(2, 6, 4, 24).to(BF16)[..., :16]
    for dout, looked_up in (
        (Q, True),
        (Q, True),
        (Q.clone(), True),
        (Q.clone(), False),
        *[(odd, True)] * 3,
        (odd, False),
    ):
        leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
        out = flash_attn_func(*leaves)
        before = len(keys)
        gradients = torch.autograd.grad(out, leaves, dout)
        assert (len(keys) > before) == looked_up
        q, k, v, given = card.launches[-2][1][0]
        assert [x.data_ptr() for x in (q, k, v, given)] == [x.data_ptr() for x in (*leaves, dout)]
        assert [x.data_ptr() for x in card.launches[-2][1][4]] == [x.data_ptr() for x in gradients[1:]]
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    out, lse = flash_attn_func(*leaves, return_lse=True)
    torch.autograd.grad((out, lse), leaves, (odd, torch.ones_like(lse)))
    assert card.launches[-3][1][3] is not None  # the gradient of LSE
    with pytest.raises(ValueError, match="dout is"):
        launch_backward.backward(Q[:, :5], Q, K, V, out.detach(), lse.detach(), ops.AttentionOptions())


def test_a_torch_without_such_guards_looks_every_call_up(
    card: PosedCard, looked_up: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_call, "_TensorGuards", None)
    assert not any(recognised(looked_up) for _ in range(5))
