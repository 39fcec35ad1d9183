"""score_mod and mask_mod through the kernels, against PyTorch that calls the same functions on torch tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from backward_checks import fenced_allocations, hidden_pairs
from checks import BF16, FP16, Result, Shape, Tensors, random_inputs
from ragged import Batch, Side
from tolerance import assert_close_to_reference, assert_lse_close, largest_error, tolerance

from flashhopper import flash_attn_func, flash_attn_varlen_func, mods

Function = Callable[..., Any]
POSITIONAL = ("causal", "window_size", "attention_chunk")


class Case(NamedTuple):
    """Functions, with what they read, and the options beside them."""

    functions: dict[str, Function]
    tensors: tuple[torch.Tensor, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012
    sink: torch.Tensor | None = None


def softcapped(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    return 3.0 * mods.tanh(score / 3.0)


def gated(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    rows, keys = tensors[0][head, q_idx], tensors[0][head, kv_idx]
    return mods.where((q_idx - kv_idx) % 3 == 0, score * mods.sigmoid(score) + rows, score * keys / (1 + batch))


def hiding(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    return mods.where((kv_idx <= q_idx) & (q_idx % 5 != head), 0.5 * mods.abs(score) - mods.exp(-score), -math.inf)


def near_or_first(batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    return (kv_idx < 16 * (head + batch)) | (mods.abs(q_idx - kv_idx) < 100)


def flagged(batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    return tensors[0][batch, kv_idx] | (q_idx == kv_idx)


def make(name: str) -> Case:
    """Tensors are made when a test runs: there may be no card when it is collected."""
    heads, rows, batch = 6, 640, 4
    if name == "bias":
        return Case({"score_mod": mods.relative_bias(50)}, (torch.randn(heads, 101, device="cuda"),), {"causal": True})
    if name == "bias in bf16, strided":
        table = torch.randn(101, heads, device="cuda").to(BF16).t()
        return Case({"score_mod": mods.relative_bias(50)}, (table,))
    if name == "softcapped":
        return Case({"score_mod": softcapped})
    if name == "gated":
        table = torch.randn(heads, rows, device="cuda")
        functions = {"score_mod": gated, "mask_mod": near_or_first}
        return Case(functions, (table,), {"window_size": (200, 60)}, torch.randn(heads, device="cuda"))
    if name == "hiding":
        return Case({"score_mod": hiding})
    if name == "documents":
        documents = torch.randint(0, 40, (batch, rows), device="cuda").sort(dim=1).values.to(torch.int32)
        return Case({"mask_mod": mods.document_mask}, (documents,), {"causal": True})
    if name == "prefix":
        return Case({"mask_mod": mods.prefix_lm}, (torch.tensor([0, 100, 37, 300], dtype=torch.int32, device="cuda"),))
    if name == "flags":
        return Case({"mask_mod": flagged}, (torch.rand(batch, rows, device="cuda") > 0.5,), {"attention_chunk": 130})
    assert name == "after softcap"
    return Case({"score_mod": softcapped, "mask_mod": near_or_first}, (), {"softcap": 2.0, "causal": True})


NAMES = [
    "bias",
    "bias in bf16, strided",
    "softcapped",
    "gated",
    "hiding",
    "documents",
    "prefix",
    "flags",
    "after softcap",
]


def plain(tensors: Tensors, case: Case, first_batch: int = 0) -> Result:
    """Attention as anyone writes it, every step rounded to the dtype of the inputs; functions compute in fp32."""
    q, k, v = tensors
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if softcap := case.options.get("softcap", 0.0):
        scores = softcap * torch.tanh(scores / softcap)
    b, h, i, j = (torch.arange(n, device=q.device) for n in scores.shape)
    pairs = (b + first_batch)[:, None, None, None], h[:, None, None], i[:, None], j
    if function := case.functions.get("score_mod"):
        scores = function(scores.float(), *pairs, case.tensors).to(q.dtype)
    hidden = hidden_pairs(seqlen_q, seqlen_k, q.device, **{x: case.options[x] for x in POSITIONAL if x in case.options})
    if function := case.functions.get("mask_mod"):
        hidden = hidden | ~function(*pairs, case.tensors)
    scores = torch.where(hidden, -math.inf, scores)
    if case.sink is not None:
        scores = torch.cat((scores, case.sink.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=3)
    has_weight = (scores > -math.inf).any(dim=-1, keepdim=True)
    scores = torch.where(has_weight, scores, 0.0)
    weights = torch.where(has_weight, scores.softmax(-1), 0.0)[..., :seqlen_k]
    lse = torch.where(has_weight[..., 0], scores.float().logsumexp(-1), -math.inf)
    return (weights @ v).transpose(1, 2), lse


def call(tensors: Tensors, case: Case, **others: Any) -> Result:
    arguments = case.functions | case.options | others
    function = flash_attn_varlen_func if "cu_seqlens_q" in others else flash_attn_func
    result: Result = function(
        *tensors, mod_tensors=case.tensors, learnable_sink=case.sink, return_lse=True, **arguments
    )
    return result


def leaves(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Inputs that need gradients."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors)
    return q, k, v


def check(tensors: Tensors, case: Case, **others: Any) -> None:
    """Out, LSE and all gradients by the numerics contract, with every allocation poisoned."""
    q, _, v = tensors
    grad_out = torch.randn(*q.shape[:3], v.shape[3], device="cuda").to(q.dtype)
    grad_lse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device="cuda")
    outcomes = []
    for dtype, function in ((q.dtype, call), (torch.float32, plain), (q.dtype, plain)):
        inputs = leaves(tensors, dtype)
        with fenced_allocations() if function is call else nullcontext():
            out, lse = function(inputs, case, **(others if function is call else {}))
            finite = lse.masked_fill(lse == -math.inf, 0.0)
            loss = (out.float() * grad_out.float()).sum() + (finite.float() * grad_lse).sum()
            outcomes.append((out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)))
    ours, reference, low = outcomes
    assert_lse_close(ours[1], reference[1].float())
    blind = (reference[1] == -math.inf).transpose(1, 2)
    assert ours[0][blind].count_nonzero() == 0
    assert ours[2][blind].count_nonzero() == 0
    for name, mine, ref, same in zip(("out", "lse", "dq", "dk", "dv"), ours, reference, low, strict=True):
        if name != "lse":
            print(f"{name}: largest error {largest_error(mine, ref):.3e}, allowed {tolerance(ref, same, 3):.3e}")
            assert_close_to_reference(mine, ref, same, 3 if "softcap" in case.options else 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_out_and_gradients(head_dim: int, name: str) -> None:
    """Lengths that are no multiple of a tile, more queries than keys and fewer, grouped heads."""
    for dtype, lengths in ((BF16, (300, 411)), (FP16, (333, 300))):
        check(random_inputs(Shape(2, *lengths, 6, 2, head_dim, head_dim), dtype), make(name))


@pytest.mark.parametrize("name", ["gated", "documents"])
@pytest.mark.parametrize("dims", [(192, 128), (64, 128), (40, 72)])
def test_other_head_dims(dims: tuple[int, int], name: str) -> None:
    check(random_inputs(Shape(2, 200, 260, 6, 6, *dims)), make(name), deterministic=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (70, 9)}], ids=["full", "causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_indices(head_dim: int, options: dict[str, Any]) -> None:
    """Scores that are numbers of their pairs and nothing else: an index that is off by one, or of another head, row or
    batch entry, shows in LSE."""

    def numbered(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
        return ((q_idx * 7 + kv_idx * 13 + head * 5 + batch * 3) % 17) * 0.5

    tensors = random_inputs(Shape(3, 390, 517, 6, 2, head_dim, head_dim))
    case = Case({"score_mod": numbered}, (), options)
    (out, lse), (expected, expected_lse) = call(tensors, case), plain(tuple(x.float() for x in tensors), case)
    assert_lse_close(lse, expected_lse)
    assert largest_error(out, expected) < 2e-2 * expected.abs().max().item()
    q, k, v = leaves(tensors, BF16)
    dq, dk = torch.autograd.grad(call((q, k, v), case)[0].sum(), (q, k))
    assert dq.count_nonzero() == dk.count_nonzero() == 0  # the score has no part in it


@pytest.mark.parametrize("name", ["gated", "documents", "bias", "hiding"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_ragged_batch_is_its_sequences(head_dim: int, name: str) -> None:
    """Sequences without queries and without keys, unused rows full of NaN; indices and batch begin anew in each."""
    batch = Batch(Side([100, 0, 333, 64], used=[90, 0, 333, 64]), Side([150, 20, 290, 0], used=[120, 20, 290, 0]))
    case = make(name)
    q, k, v = (
        torch.randn(side.total, h, head_dim, device="cuda").to(BF16)
        for side, h in ((batch.q, 6), (batch.k, 2), (batch.k, 2))
    )
    for side, x in ((batch.q, q), (batch.k, k), (batch.k, v)):
        x[side.unused.cuda()] = math.nan
    inputs = leaves((q, k, v), BF16)
    out, lse = call(inputs, case, **batch.arguments("cuda"))
    grad_out = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, grad_out)
    for i, (at, keys) in enumerate(zip(batch.q.slices, batch.k.slices, strict=True)):
        if at.stop == at.start:
            continue
        results = []
        for dtype in (torch.float32, BF16):
            alone = leaves((q[None, at], k[None, keys], v[None, keys]), dtype)
            expected = plain(alone, case, first_batch=i)
            grads = torch.autograd.grad(expected[0], alone, grad_out[None, at].to(dtype))
            results.append((expected[0].detach(), expected[1].detach(), *grads))
        assert_lse_close(lse[:, at], results[0][1][0].float())
        mine = out[at], gradients[0][at], gradients[1][keys], gradients[2][keys]
        for x, ref, low in zip(mine, (results[0][0], *results[0][2:]), (results[1][0], *results[1][2:]), strict=True):
            assert_close_to_reference(x[None].detach(), ref, low)
    for side, x in ((batch.q, out), (batch.q, gradients[0]), (batch.k, gradients[1]), (batch.k, gradients[2])):
        assert x[side.unused.cuda()].count_nonzero() == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_without_keys_and_values_that_are_not_finite(head_dim: int) -> None:
    q, k, v = random_inputs(Shape(1, 200, 300, 4, 4, head_dim, head_dim))
    v[:, 250:] = math.nan
    case = Case({"mask_mod": lambda b, h, q, k, t: (q >= 70) & (k < 250)})
    inputs = leaves((q, k, v), BF16)
    out, lse = call(inputs, case)
    assert out[:, :70].count_nonzero() == 0
    assert (lse[:, :, :70] == -math.inf).all()
    assert lse[:, :, 70:].isfinite().all()
    (dq,) = torch.autograd.grad(out[:, :70].sum(), inputs[:1])
    assert dq[:, :70].count_nonzero() == 0
    inputs = leaves(random_inputs(Shape(1, 200, 300, 4, 4, head_dim, head_dim)), BF16)
    gradients = torch.autograd.grad(call(inputs, case)[0][:, :70].sum(), inputs)
    assert sum(int(x.count_nonzero()) for x in gradients) == 0


def test_a_deterministic_backward_repeats_itself() -> None:
    tensors, case = random_inputs(Shape(2, 700, 900, 6, 2, 128, 128)), make("gated")
    case = case._replace(tensors=(torch.randn(6, 900, device="cuda"),))
    wanted = None
    for _ in range(20):
        inputs = leaves(tensors, BF16)
        result = call(inputs, case, deterministic=True)
        gradients = torch.autograd.grad(result[0].float().square().sum(), inputs)
        wanted = wanted or gradients
        assert all(torch.equal(x, y) for x, y in zip(gradients, wanted, strict=True))


def test_indices_out_of_range_read_nothing_outside() -> None:
    """The table lies in NaN; past its ends is its first or last element, negative indices count from the end."""
    buffer = torch.full((64,), math.nan, device="cuda")
    table = buffer[16:32].copy_(torch.randn(16, device="cuda"))
    tensors = random_inputs(Shape(1, 100, 100, 2, 2, 64, 64))
    found = call(tensors, Case({"score_mod": lambda s, b, h, q, k, t: s + t[0][k - 40]}, (table,)))
    index = torch.arange(100, device="cuda") - 40
    index = torch.where(index < 0, index + 16, index).clamp(0, 15)
    expected = call(tensors, Case({"score_mod": lambda s, b, h, q, k, t: s + t[0][k]}, (table[index],)))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert found[0].isfinite().all()


def test_scalars_and_expanded_tensors() -> None:
    tensors = random_inputs(Shape(2, 130, 130, 4, 2, 128, 128))
    scalar, slopes = torch.tensor(0.25, device="cuda"), torch.rand(4, 1, device="cuda").expand(4, 130)
    check(tensors, Case({"score_mod": lambda s, b, h, q, k, t: s * t[0][()] - t[1][h, k]}, (scalar, slopes)))


def test_a_changed_closure_is_another_kernel() -> None:
    tensors, factor = random_inputs(Shape(1, 128, 128, 2, 2, 64, 64)), [0.5]
    case = Case({"score_mod": lambda s, *_: s * factor[0]})
    for value in (0.5, 2.0, 0.5):
        factor[0] = value
        expected = flash_attn_func(*tensors, softmax_scale=value * 64**-0.5)
        torch.testing.assert_close(call(tensors, case)[0], expected, atol=1e-2, rtol=1e-2)


def test_in_a_compiled_program() -> None:
    """The call leaves the graph; what is around it stays compiled."""
    case = Case({"score_mod": softcapped})

    def model(x: torch.Tensor) -> torch.Tensor:
        return call((x * 2, x, x), case)[0] + 1

    x, y = (torch.randn(1, 200, 4, 64, device="cuda", dtype=BF16) for _ in range(2))
    y.copy_(x)
    for z in (x, y):
        z.requires_grad_()
    out, expected = torch.compile(model, backend="aot_eager")(x), model(y)
    assert torch.equal(out, expected)
    mine, other = (torch.autograd.grad(z[0].float().square().sum(), z[1]) for z in ((out, x), (expected, y)))
    torch.testing.assert_close(mine, other, atol=1e-2, rtol=1e-2)
