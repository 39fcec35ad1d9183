"""score_mod and mask_mod on CPU tensors, against attention in which the functions are called on torch tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from posed_card import pose
from ragged import Batch, Side
from row_by_row import F64, sees

from flashhopper import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    launch,
    launch_backward,
    mods,
    ops,
    reference,
)
from flashhopper.compiler import kernel_key
from flashhopper.config import BackwardSpec, Features, KernelSpec
from flashhopper.fp8 import E4M3
from flashhopper.heuristics import BACKWARD_TABLE, TILE_TABLE, backward_config
from flashhopper.kernel_list import backward_specs, forward_specs
from flashhopper.launch import Given, given, kernel_tensors
from flashhopper.mod_call import Mods
from flashhopper.options import AttentionOptions
from flashhopper.problem import AttentionProblem, SoftmaxTensors
from flashhopper.programs import trace_mask, trace_score
from flashhopper.toolchain import Toolchain

HEADS, HEADS_K, DIM = 4, 2, 16
BIAS = torch.randn(HEADS, 40, dtype=F64)
GROUPS = torch.randint(0, 3, (4, 40), dtype=torch.int32)
TENSORS = (BIAS, GROUPS)
Function = Callable[..., Any]


def score_mod(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    bias = tensors[0][head, mods.abs(q_idx - kv_idx)]
    return mods.where(q_idx == kv_idx, score, 1.5 * mods.tanh(score) + bias * (1 + batch))


def mask_mod(batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    groups = tensors[1]
    return (groups[batch, q_idx] == groups[batch, kv_idx]) & ((head != 1) | (q_idx % 3 > 0))


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    functions: dict[str, Function],
    sink: torch.Tensor | None = None,
    first_batch: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE with the functions as they are written, called on tensors of indices that broadcast."""
    _, seqlen_q, heads, _ = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * DIM**-0.5
    if softcap := options.get("softcap", 0.0):
        scores = softcap * torch.tanh(scores / softcap)
    b, h, i, j = (torch.arange(n) for n in scores.shape)
    pairs = (b + first_batch)[:, None, None, None], h[:, None, None], i[:, None], j
    if "score_mod" in functions:
        scores = functions["score_mod"](scores, *pairs, TENSORS)
    rows = range(seqlen_q), range(seqlen_k)
    by_position = options.get("causal", False), options.get("window_size", (-1, -1)), options.get("attention_chunk", 0)
    seen = [[sees(x, y, seqlen_q, seqlen_k, *by_position) for y in rows[1]] for x in rows[0]]
    visible = torch.tensor(seen, dtype=torch.bool).view(seqlen_q, seqlen_k)
    if "mask_mod" in functions:
        visible = visible & functions["mask_mod"](*pairs, TENSORS)
    scores = torch.where(visible, scores, -math.inf)
    if sink is not None:
        extra = sink[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, extra), dim=3)
    has_weight = (scores > -math.inf).any(dim=-1, keepdim=True)
    scores = torch.where(has_weight, scores, 0.0)
    weights = torch.where(has_weight, scores.softmax(-1), 0.0)[..., :seqlen_k]
    lse = torch.where(has_weight[..., 0], scores.logsumexp(-1), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def inputs(seqlen_q: int, seqlen_k: int, batch: int = 2) -> list[torch.Tensor]:
    shapes = (seqlen_q, HEADS), (seqlen_k, HEADS_K), (seqlen_k, HEADS_K)
    return [torch.randn(batch, n, h, DIM, dtype=F64).requires_grad_() for n, h in shapes]


FUNCTIONS: dict[str, dict[str, Function]] = {
    "score": {"score_mod": score_mod},
    "mask": {"mask_mod": mask_mod},
    "both": {"score_mod": score_mod, "mask_mod": mask_mod},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "softcap": {"softcap": 1.5, "causal": True},
    "chunks": {"attention_chunk": 4},
}


@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("functions", FUNCTIONS.values(), ids=list(FUNCTIONS))
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(11, 11), (5, 13), (13, 5)])
def test_against_the_functions_themselves(
    seqlen_q: int, seqlen_k: int, functions: dict[str, Function], options: dict[str, Any], with_sink: bool
) -> None:
    tensors = inputs(seqlen_q, seqlen_k)
    sink = torch.randn(HEADS, dtype=F64).requires_grad_() if with_sink else None
    leaves = tensors if sink is None else [*tensors, sink]
    found = flash_attn_func(*tensors, mod_tensors=TENSORS, learnable_sink=sink, return_lse=True, **functions, **options)
    expected = plain(*tensors, functions, sink, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(found[0]), torch.randn_like(found[1])

    def gradients(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = (out * weights[0]).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * weights[1]).sum()
        return torch.autograd.grad(loss, leaves)

    for mine, other in zip(gradients(*found), gradients(*expected), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    without = flash_attn_func(*tensors, learnable_sink=sink, **options)
    assert (found[0] - without).abs().max() > 1e-3


def test_sequences_of_a_ragged_batch_are_numbered_and_count_from_0() -> None:
    batch = Batch(Side([7, 0, 12, 5], used=[7, 0, 9, 5]), Side([9, 3, 11, 0], used=[8, 3, 11, 0]))
    q = torch.randn(batch.q.total, HEADS, DIM, dtype=F64, requires_grad=True)
    k, v = (torch.randn(batch.k.total, HEADS_K, DIM, dtype=F64, requires_grad=True) for _ in range(2))
    given_functions = FUNCTIONS["both"] | {"mod_tensors": TENSORS}
    out, lse = flash_attn_varlen_func(
        q, k, v, **batch.arguments("cpu"), **given_functions, causal=True, return_lse=True
    )
    grad_out, expected = torch.randn_like(out), torch.zeros_like(out)
    wanted_lse = torch.full_like(lse, -math.inf)
    for i, (at, keys) in enumerate(zip(batch.q.slices, batch.k.slices, strict=True)):
        part = plain(q[None, at], k[None, keys], v[None, keys], FUNCTIONS["both"], first_batch=i, causal=True)
        expected[at], wanted_lse[:, at] = part[0][0], part[1][0]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, wanted_lse)
    mine, other = (torch.autograd.grad(x, (q, k, v), grad_out) for x in (out, expected))
    torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_packed_tensors() -> None:
    qkv = torch.randn(2, 9, 3, HEADS, DIM, dtype=F64)
    arguments: dict[str, Any] = FUNCTIONS["both"] | {"mod_tensors": TENSORS}
    assert torch.equal(flash_attn_qkvpacked_func(qkv, **arguments), flash_attn_func(*qkv.unbind(2), **arguments))


@pytest.mark.parametrize("functions", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_in_chunks_of_rows(functions: dict[str, Function], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(11, 13)
    whole = flash_attn_func(*tensors, mod_tensors=TENSORS, window_size=(4, 1), **functions)
    monkeypatch.setattr(reference, "CHUNK_SCORES", 2 * HEADS * 13 * 3)
    cut = flash_attn_func(*tensors, mod_tensors=TENSORS, window_size=(4, 1), **functions)
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)
    grad_out = torch.randn_like(whole)
    expected, found = (torch.autograd.grad(x, tensors, grad_out) for x in (whole, cut))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("hide", ["score", "mask"])
def test_rows_from_which_a_function_hides_all(hide: str) -> None:
    """Out 0, LSE -inf, and no gradient, nor NaN from a V that is not finite."""
    q, k, v = (x.detach() for x in inputs(6, 6))
    v[0, 5] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    hidden: dict[str, Function] = {
        "mask": {"mask_mod": lambda b, h, q, k, t: (q > 2) & (k < 5)},
        "score": {"score_mod": lambda s, b, h, q, k, t: mods.where((q > 2) & (k < 5), s, -math.inf)},
    }[hide]
    out, lse = flash_attn_func(*leaves, return_lse=True, **hidden)
    assert out[:, :3].count_nonzero() == 0
    assert (lse[:, :, :3] == -math.inf).all()
    assert lse[:, :, 3:].isfinite().all()
    dq, _, _ = torch.autograd.grad(out[:, :3].sum(), leaves)
    assert dq[:, :3].count_nonzero() == 0
    no_keys, lse = flash_attn_func(q, k[:, :0], v[:, :0], return_lse=True, **hidden)
    assert no_keys.count_nonzero() == 0
    assert (lse == -math.inf).all()


Q = torch.zeros(1, 4, 2, 8)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "score": ({"score_mod": 1.0}, TypeError, "score_mod must be a function or None, got float"),
    "mask": ({"mask_mod": Q}, TypeError, "mask_mod must be a function or None, got Tensor"),
    "tensors": ({"mask_mod": mask_mod, "mod_tensors": Q}, TypeError, "mod_tensors must be a tuple of tensors"),
    "entry": ({"mask_mod": mask_mod, "mod_tensors": (1,)}, TypeError, r"mod_tensors\[0\] must be a torch.Tensor"),
    "dtype": (
        {"mask_mod": mask_mod, "mod_tensors": (None, Q.long())},
        TypeError,
        r"mod_tensors\[1\] has dtype torch.i",
    ),
    "unread": ({"mod_tensors": (Q,)}, ValueError, "without a score_mod or mask_mod"),
    "gradient": (
        {"score_mod": score_mod, "mod_tensors": (torch.zeros(1, requires_grad=True),)},
        NotImplementedError,
        r"mod_tensors\[0\] requires a gradient",
    ),
    "device": (
        {"mask_mod": lambda b, h, q, k, t: True, "mod_tensors": (Q.to("meta"),)},
        ValueError,
        "mod_tensors is on meta, q on cpu",
    ),
    "index": (
        {"mask_mod": lambda b, h, q, k, t: t[0][k] > 0, "mod_tensors": (torch.zeros(3),)},
        IndexError,
        "out of bounds",
    ),
}


@pytest.mark.parametrize("arguments, error, message", WRONG.values(), ids=list(WRONG))
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_func(Q, Q, Q, **arguments)


@pytest.mark.parametrize("name, function", [("score_mod", lambda s, *_: s), ("mask_mod", lambda *_: True)])
def test_fp8_refuses(name: str, function: Function) -> None:
    q = torch.zeros(1, 4, 2, 16).to(E4M3)
    with pytest.raises(NotImplementedError, match=f"{name} is not there yet with FP8"):
        flash_attn_func(q, q, q, **{name: function})


def attend(x: torch.Tensor, factor: float) -> torch.Tensor:
    out: torch.Tensor = flash_attn_func(x * 2, x, x, score_mod=lambda s, b, h, q, k, t: s * factor + q)
    return out + 1


def test_compiled_programs_leave_their_graph_for_it() -> None:
    compiled = torch.compile(attend, backend="eager")
    for factor in (0.5, 3.0):
        x, y = (torch.linspace(-1, 1, 160).view(1, 5, 2, 16).requires_grad_() for _ in range(2))
        out = compiled(x, factor)
        torch.testing.assert_close(out, attend(y, factor))
        mine, other = torch.autograd.grad(out.sum(), x), torch.autograd.grad(attend(y, factor).sum(), y)
        torch.testing.assert_close(mine, other)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="run outside of graphs"):
        torch.compile(attend, backend="eager", fullgraph=True)(x.detach(), 0.25)


def test_what_records_calls_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(NotImplementedError, match="score_mod and mask_mod are not there for tensors"):
        attend(torch.zeros(1, 4, 2, 16), 1.0)


def test_functions_and_tensors_reach_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The autograd function of CUDA tensors, with the reference in place of the kernels; with lengths and without."""
    batch = Batch(Side([4, 3]), Side([4, 5]))
    arguments = batch.arguments("cpu")
    lengths = launch.RaggedTensors(**{name: arguments[name] for name in launch.RaggedTensors._fields})
    traced = Mods.of(score_mod, mask_mod, TENSORS)
    seen: list[Mods] = []

    def backward(dout: torch.Tensor, *saved: Any, mods: Mods, **others: Any) -> tuple[torch.Tensor | None, ...]:
        seen.append(mods)
        leaves = [x.detach().requires_grad_() for x in saved[:3]]
        with torch.enable_grad():
            out, _ = launch.forward(*leaves, saved[5], mods=mods, **others)
        return *torch.autograd.grad(out, leaves, dout), None

    monkeypatch.setattr(launch_backward, "backward", backward)
    for ragged in (None, lengths):
        shapes = [(7, HEADS), (9, HEADS_K), (9, HEADS_K)]
        leaves = [torch.randn(*([] if ragged else [2]), n, h, DIM, dtype=F64).requires_grad_() for n, h in shapes]
        options = AttentionOptions(causal=True)
        plan = launch.new_plan(*leaves, options, SoftmaxTensors(), ragged, traced)
        results = (
            ops._Attention.apply(*leaves, None, plan, SoftmaxTensors(), ragged, traced),
            launch.forward(*leaves, options, ragged=ragged, mods=traced),
        )
        mine, other = (torch.autograd.grad(result[0].sum(), leaves) for result in results)
        torch.testing.assert_close(mine, other)
        assert traced is not None
        assert seen[-1][:2] == traced[:2]
        assert all(x is y for x, y in zip(seen[-1].tensors, TENSORS, strict=True))


def test_a_tensor_that_is_written_to_before_the_backward_is_an_error() -> None:
    bias = torch.randn(HEADS, 40, dtype=F64)
    traced = Mods.of(score_mod, None, (bias,))
    q, k, v = inputs(5, 5)
    plan = launch.new_plan(q, k, v, AttentionOptions(), SoftmaxTensors(), None, traced)
    out, _ = ops._Attention.apply(q, k, v, None, plan, SoftmaxTensors(), None, traced)
    bias.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_kernels_of_other_functions_have_other_keys() -> None:
    """In memory and on disk: closures and constants count, where a function was made does not."""
    toolchain = Toolchain("4", "0.1", "cu13", "x86-64-v2")

    def keys(factor: float) -> set[str]:
        features = Features(score_mod=trace_score(lambda s, *_: s * factor, ()))
        return {kernel_key(spec, toolchain, "") for spec in (*forward_specs(features), *backward_specs(features))}

    two, again, three = keys(2.0), keys(2.0), keys(3.0)
    assert two == again
    shared = {kernel_key(spec, toolchain, "") for spec in backward_specs() if "pre" in spec.name or "post" in spec.name}
    assert two & three <= shared


def test_plans_tell_functions_apart() -> None:
    arguments = Q, Q, Q, AttentionOptions(), SoftmaxTensors(), None
    two, again, three = (Mods.of(lambda s, *_, c=c: s * c, None, ()) for c in (2.0, 2.0, 3.0))
    plan = launch.new_plan(*arguments, two)
    assert launch.known_plan(*arguments, again) is plan
    assert launch.known_plan(*arguments, three) is None
    assert launch.known_plan(*arguments) is not plan
    problem = AttentionProblem.from_tensors(Q, Q, Q, AttentionOptions())
    found = [given(problem, SoftmaxTensors(), Mods.of(lambda s, *_, c=c: s * c, None, ())) for c in (2.0, 2.0, 3.0)]
    assert found[0] == found[1] != found[2]
    masked = given(problem, SoftmaxTensors(), Mods.of(None, lambda *_: False, ()))
    assert masked == Given(False, False, None, trace_mask(lambda *_: False, ()))


def test_kernels_take_tensors_with_an_element_and_a_dimension() -> None:
    flags = torch.tensor([True, False])
    traced = Mods.of(lambda s, *_: s, None, (torch.tensor(2.0), torch.zeros(3, 0), flags, BIAS.t()))
    found = kernel_tensors(traced)
    assert found is not None
    scalar, empty, bits, strided = found
    assert scalar.shape == (1,)
    assert empty.shape == (3, 1)
    assert bits.tolist() == [1, 0]
    assert bits.dtype == torch.uint8
    assert strided.stride() == BIAS.t().stride()
    assert kernel_tensors(None) is None


def test_every_table_row_has_a_configuration_for_functions() -> None:
    """Exact softmax, and registers for a factor per score."""
    scaled = Features(score_mod=trace_score(lambda s, *_: s * s, ()))
    for features in (scaled, Features(window=True, ragged=True, mask_mod=trace_mask(lambda *_: False, ()))):
        specs = forward_specs(features)
        assert {(s.head_dim, s.head_dim_v) for s in specs} == {(row.head_dim, row.head_dim_v) for row in TILE_TABLE}
        for spec in specs:
            config, dims = spec.config, (spec.head_dim, spec.head_dim_v)
            left = config.registers().consumer - config.accumulator_registers(*dims)
            assert (config.softmax, config.prefetch_scores, config.q_in_registers) == ("exact", False, False)
            assert left >= (96 if spec.head_dim <= 128 else 48)
        for row in BACKWARD_TABLE:
            backward_config(row, features).check_feasible(row.head_dim, row.head_dim_v)
    assert scaled.scales_gradients
    assert not Features(score_mod=trace_score(lambda s, b, h, q, k, t: s + q, ())).scales_gradients


@pytest.mark.parametrize("is_ragged", [False, True])
def test_what_kernels_are_asked_for(is_ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, with the launchers as they are: programs of this call's functions, tensors, units."""
    card = pose(monkeypatch)
    bias, groups = BIAS.float(), GROUPS
    lengths = torch.tensor([0, 5, 9], dtype=torch.int32)
    for factor in (2.0, 3.0, 2.0):

        def scaled(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any, factor: float = factor) -> Any:
            return s * factor + t[0][h, j]

        shape = (9, HEADS, DIM) if is_ragged else (1, 9, HEADS, DIM)
        q, k, v = (torch.randn(shape).bfloat16().requires_grad_() for _ in range(3))
        arguments: dict[str, Any] = {"score_mod": scaled, "mask_mod": mask_mod, "mod_tensors": (bias, groups)}
        if is_ragged:
            out = flash_attn_varlen_func(q, k, v, lengths, lengths, 5, 5, softmax_scale=0.5, **arguments)
        else:
            out = flash_attn_func(q, k, v, softmax_scale=0.5, **arguments)
        forward = card.launches[-1]
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        traced = Mods.of(scaled, mask_mod, (bias, groups))
        assert traced is not None
        for (spec, given_arguments), kind in ((forward, KernelSpec), (card.launches[-2], BackwardSpec)):
            assert isinstance(spec, kind)
            assert (spec.features.score_mod, spec.features.mask_mod) == traced[:2]
            *_, sequences, unit, tensors = given_arguments[-1]
            assert (sequences is not None) == is_ragged
            assert unit == pytest.approx(0.5)
            assert [x.data_ptr() for x in tensors] == [bias.data_ptr(), groups.data_ptr()]
        assert forward[1][-3] == launch.LOG2_E
        assert card.launches[-2][1][-4:-2] == (0.5, launch.LOG2_E)
    assert len(launch._plans) == len(launch_backward._plans) == 2
