"""score_mod and mask_mod as programs: traced, evaluated and differentiated, against the functions themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashhopper import mods
from flashhopper.mod_call import Mods, Pairs, TorchEngine
from flashhopper.programs import MAX_INSTRUCTIONS, Program, TensorType, evaluate, trace_mask, trace_score
from flashhopper.slopes import scales_gradients, with_slope

F64 = torch.float64
BATCH, HEADS, QUERIES, KEYS = 2, 3, 5, 7
BIAS, FLAGS = torch.randn(HEADS, KEYS, dtype=F64), torch.rand(KEYS) > 0.5
NUMBERS = torch.arange(KEYS, dtype=torch.int32) % 3
TENSORS = (BIAS, None, NUMBERS, FLAGS, torch.tensor(0.25))


def softcapped(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    return 2.0 * mods.tanh(score / 2.0)


def biased(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    return score + tensors[0][head, kv_idx] - tensors[4][()] * mods.abs(q_idx - kv_idx)


def chosen(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    return mods.where((q_idx - kv_idx) % 3 == tensors[2][kv_idx], score * 0.5, -score) / (1 + batch)


def hiding(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    return mods.where(q_idx >= kv_idx, score, -math.inf)


def in_torch(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    near = torch.logical_and(q_idx // 2 >= kv_idx // 2, torch.logical_not(tensors[3][kv_idx]))
    return torch.where(near, torch.tanh(score), torch.sigmoid(score) + torch.abs(score))


def all_functions(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    positive = mods.exp(0.5 * score) + mods.sqrt(score * score + 1.0)
    logarithm = mods.log(positive) / (2.0 + mods.sigmoid(score))
    return mods.maximum(logarithm, 0.3 * score) - mods.minimum(score**3, 1.5) + abs(score - 0.1) * (head != 1)


def constant(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    return (q_idx - kv_idx) * 0.25


SCORE_MODS = [softcapped, biased, chosen, hiding, in_torch, all_functions, constant, mods.relative_bias(3)]


def types(tensors: tuple[torch.Tensor | None, ...] = TENSORS) -> tuple[TensorType | None, ...]:
    return tuple(None if x is None else TensorType(str(x.dtype).removeprefix("torch."), x.dim()) for x in tensors)


def pairs() -> Pairs:
    batch, head, q_idx, kv_idx = (torch.arange(n, dtype=torch.int32) for n in (BATCH, HEADS, QUERIES, KEYS))
    return Pairs(batch[:, None, None, None], head[:, None, None], q_idx[:, None], kv_idx)


def run(program: Program, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    engine = TorchEngine(F64, torch.device("cpu"), tuple(x for x in TENSORS if x is not None))
    return evaluate(program, pairs()._asdict() | inputs, engine)


def tensors_for(function: Callable[..., Any]) -> tuple[torch.Tensor | None, ...]:
    return TENSORS if function.__name__ != "score_mod" else (BIAS,)


@pytest.mark.parametrize("function", SCORE_MODS, ids=lambda f: f.__name__)
def test_values_and_slopes_are_those_of_the_function_itself(function: Callable[..., Any]) -> None:
    """The function called with torch tensors, and its derivative by autograd, against program and duals."""
    tensors = tensors_for(function)
    score = torch.randn(BATCH, HEADS, QUERIES, KEYS, dtype=F64, requires_grad=True)
    expected = torch.broadcast_to(function(score, *pairs(), tensors), score.shape).to(F64)
    program = trace_score(function, types(tensors))
    torch.testing.assert_close(torch.broadcast_to(run(program, score=score)[0], score.shape), expected)
    (slope,) = (
        torch.autograd.grad(expected.sum(), score, materialize_grads=True)
        if expected.requires_grad
        else (torch.zeros_like(score),)
    )
    value, *found = run(with_slope(program), score=score.detach())
    torch.testing.assert_close(torch.broadcast_to(value, score.shape), expected.detach())
    assert len(found) == int(scales_gradients(program))
    mine = torch.broadcast_to(found[0], score.shape).to(F64) if found else torch.ones_like(score)
    torch.testing.assert_close(mine, slope, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [biased, mods.relative_bias(3)])
def test_a_bias_costs_the_gradient_nothing(function: Callable[..., Any]) -> None:
    program = trace_score(function, types(tensors_for(function)))
    assert with_slope(program) == program
    assert not scales_gradients(program)


def test_at_kinks_slopes_are_pytorch_s() -> None:
    score = torch.tensor([-1.0, 0.0, 1.0], dtype=F64, requires_grad=True)
    for function in (
        lambda s, *_: mods.abs(s),
        lambda s, *_: mods.maximum(s, 0.0 * s),
        lambda s, *_: mods.minimum(2.0 * s, s),
    ):
        (expected,) = torch.autograd.grad(function(score).sum(), score)
        _, slope = run(with_slope(trace_score(function, ())), score=score.detach())
        torch.testing.assert_close(slope, expected)


MASKS: dict[str, tuple[Callable[..., Any], Callable[[int, int, int, int], bool]]] = {
    "integers": (lambda b, h, q, k, t: (q - k) % 3 != (k - q) // 2, lambda b, h, q, k: (q - k) % 3 != (k - q) // 2),
    "flags": (
        lambda b, h, q, k, t: t[3][k] | (q == k) & ~(h == 1),
        lambda b, h, q, k: bool(FLAGS[k]) or (q == k and h != 1),
    ),
    "bits": (lambda b, h, q, k, t: (q & k) ^ (~b | 4) < 2, lambda b, h, q, k: (q & k) ^ (~b | 4) < 2),
    "floats": (lambda b, h, q, k, t: q / 2 > k * 0.75 - b, lambda b, h, q, k: q / 2 > k * 0.75 - b),
    "constant": (lambda b, h, q, k, t: True, lambda b, h, q, k: True),
}


@pytest.mark.parametrize("function, plain", MASKS.values(), ids=list(MASKS))
def test_masks_pair_by_pair(function: Callable[..., Any], plain: Callable[[int, int, int, int], bool]) -> None:
    """Against Python's own integers and floats: // and % round down, / does not."""
    (found,) = run(trace_mask(function, types()))
    found = torch.broadcast_to(found, (BATCH, HEADS, QUERIES, KEYS))
    for b, h, q, k in torch.cartesian_prod(*(torch.arange(n) for n in found.shape)).tolist():
        assert bool(found[b, h, q, k]) == plain(b, h, q, k), (b, h, q, k)


def test_ready_masks() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1]], dtype=torch.int32)
    prefix = torch.tensor([1, 3], dtype=torch.int32)
    for function, tensor, plain in (
        (mods.document_mask, documents, lambda b, q, k: documents[b, q] == documents[b, k]),
        (mods.prefix_lm, prefix, lambda b, q, k: k <= q or k < prefix[b]),
    ):
        found = Mods.of(None, function, (tensor,))
        assert found is not None
        index = torch.arange(5, dtype=torch.int32)
        hidden = Pairs(index[:2, None, None], torch.tensor(0), index[:, None], index).hidden(found)
        for b, q, k in torch.cartesian_prod(torch.arange(2), torch.arange(5), torch.arange(5)).tolist():
            assert bool(hidden[b, q, k]) != bool(plain(b, q, k))


def scaled_by(factor: float) -> Callable[..., Any]:
    return lambda score, batch, head, q_idx, kv_idx, tensors: score * factor


def test_a_program_is_what_the_function_computes_and_nothing_else() -> None:
    """Closures and constants tell functions apart; names, dead code and identity do not."""
    assert trace_score(scaled_by(2.0), ()) != trace_score(scaled_by(3.0), ())
    assert trace_score(scaled_by(0.0), ()) != trace_score(scaled_by(-0.0), ())
    assert trace_score(scaled_by(2.0), ()) == trace_score(scaled_by(2.0), ())
    assert trace_score(scaled_by(2), ()) == trace_score(scaled_by(2.0), ())

    def with_dead_code(s: Any, batch: Any, head: Any, q: Any, k: Any, tensors: Any) -> Any:
        mods.exp(q - k + head)
        return s * 2.0

    assert trace_score(with_dead_code, ()) == trace_score(scaled_by(2.0), ())
    assert trace_score(scaled_by(2.0), types()) != trace_score(scaled_by(2.0), ())  # reads other tensors' types
    integer, number = trace_mask(lambda b, h, q, k, t: q < 1, ()), trace_mask(lambda b, h, q, k, t: q < 1.0, ())
    assert integer != number
    assert trace_mask(lambda b, h, q, k, t: True, ()) != trace_mask(lambda b, h, q, k, t: False, ())
    again = eval(repr(integer))
    assert again == integer


def test_a_changed_closure_is_another_program() -> None:
    window = [3]
    function = lambda b, h, q, k, t: q - k < window[0]  # noqa: E731
    before = trace_mask(function, ())
    window[0] = 4
    assert trace_mask(function, ()) != before


REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "if": (lambda s, b, h, q, k, t: s if q > k else 0.0, TypeError, "flashhopper.mods.where"),
    "min": (lambda s, b, h, q, k, t: min(s, 1.0), TypeError, "minimum"),
    "captured tensor": (lambda s, b, h, q, k, t: s + BIAS[0, 0], TypeError, "mod_tensors"),
    "indexed tensor": (lambda s, b, h, q, k, t: s + BIAS[h, k], (TypeError, IndexError), "."),
    "torch function": (lambda s, b, h, q, k, t: torch.erf(s), TypeError, "erf"),
    "math function": (lambda s, b, h, q, k, t: math.exp(s), TypeError, "real number"),
    "number of indices": (lambda s, b, h, q, k, t: s + t[0][h], IndexError, "2 dimensions and was given 1"),
    "index": (lambda s, b, h, q, k, t: s + t[0][h, s], TypeError, "must be an integer"),
    "slice": (lambda s, b, h, q, k, t: s + t[0][h, :], TypeError, "slice"),
    "condition": (lambda s, b, h, q, k, t: mods.where(q, s, 0.0), TypeError, "truth value"),
    "exponent": (lambda s, b, h, q, k, t: s**0.5, TypeError, "whole exponent"),
    "float division": (lambda s, b, h, q, k, t: s // 2, TypeError, "takes integers"),
    "by zero": (lambda s, b, h, q, k, t: s + q % 0, ZeroDivisionError, "by 0"),
    "large": (lambda s, b, h, q, k, t: s + (q + 2**31), ValueError, "32-bit"),
    "not of a float": (lambda s, b, h, q, k, t: ~s, TypeError, "not a float"),
    "and of floats": (lambda s, b, h, q, k, t: s & s, TypeError, "not floats"),
    "none": (lambda s, b, h, q, k, t: None, TypeError, "score_mod must return a number"),
    "a tensor": (lambda s, b, h, q, k, t: t[0], TypeError, "score_mod must return a number"),
}


@pytest.mark.parametrize("function, error, message", REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_traced(function: Callable[..., Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        trace_score(function, types())


def test_masks_are_truth_values() -> None:
    with pytest.raises(TypeError, match="mask_mod must return a truth value, got a int"):
        trace_mask(lambda b, h, q, k, t: q - k, ())


def test_values_of_another_call_and_endless_functions() -> None:
    kept: list[Any] = []
    trace_score(lambda s, *_: kept.append(s) or s, ())
    with pytest.raises(TypeError, match="used in another call"):
        trace_score(lambda s, *_: s + kept[0], ())

    def endless(score: Any, *_: Any) -> Any:
        for number in range(MAX_INSTRUCTIONS):
            score = score + 1.0 / (number + 2)
        return score

    with pytest.raises(ValueError, match="operations per score"):
        trace_score(endless, ())


def test_mods_on_numbers() -> None:
    assert mods.where(False, 1, 2) == 2
    assert mods.minimum(1, 2.5) == 1
    assert mods.maximum(1, 2.5) == 2.5
    assert mods.abs(-3) == 3
    assert mods.exp(1.0) == math.e
    assert mods.sigmoid(0.0) == 0.5
    torch.testing.assert_close(mods.maximum(torch.tensor([1, 5]), 2.5), torch.tensor([2.5, 5.0]))
    torch.testing.assert_close(mods.minimum(3, torch.tensor([1, 5])), torch.tensor([1, 3]))
