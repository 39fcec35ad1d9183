"""The operators that torch.compile, torch.export, torch.func and dispatch modes see, on CPU tensors."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flashhopper import flash_attn_func, flash_attn_varlen_func, torch_library
from flashhopper.options import AttentionOptions
from flashhopper.problem import RaggedTensors, SoftmaxTensors

NO_SOFTMAX_TENSORS = SoftmaxTensors()
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window and softcap": {"window_size": (3, 1), "softcap": 5.0},
    "chunks, scale": {"causal": True, "attention_chunk": 4, "softmax_scale": 0.7},
    "sink": {"causal": True, "learnable_sink": True},
    "ALiBi and softcap": {"causal": True, "alibi_slopes": True, "softcap": 5.0},
}
# batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v
SHAPES = {
    "GQA, longer keys": (2, 9, 13, 4, 2, 16, 24),
    "rows without keys": (1, 7, 4, 2, 2, 8, 8),
    "no row": (1, 0, 4, 2, 1, 8, 8),
}
FP32_SUMS = {"atol": 1e-4, "rtol": 1e-5}  # of few products of normal numbers


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v = shape
    sizes = ((seqlen_q, heads, head_dim), (seqlen_k, heads_k, head_dim), (seqlen_k, heads_k, head_dim_v))
    return [torch.randn(batch, *size).to(dtype).requires_grad_() for size in sizes]


def ragged_inputs(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], RaggedTensors]:
    """Lengths of 0, rows that are not used, and rows after the last sequence; no sequence uses all of its keys."""
    cu_seqlens = [torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 14, 20], [0, 9, 12, 12, 25])]
    used = [torch.tensor(x, dtype=torch.int32) for x in ([5, 0, 7, 6], [7, 3, 0, 11])]
    tensors = [x[0].detach().requires_grad_() for x in inputs((1, 23, 26, 4, 2, 16, 24), dtype)]
    return tensors, RaggedTensors(7, 11, *cu_seqlens, *used)


def split_options(name: str, heads: int) -> tuple[AttentionOptions, SoftmaxTensors]:
    given = dict(OPTIONS[name])
    sink = torch.randn(heads).requires_grad_() if given.pop("learnable_sink", False) else None
    slopes = torch.rand(heads) if given.pop("alibi_slopes", False) else None
    return AttentionOptions(**given), SoftmaxTensors(sink, slopes)


def through_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
    ragged: RaggedTensors | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch_library.attention(q, k, v, options, softmax_tensors, ragged)


def directly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
    ragged: RaggedTensors | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    keywords = options._asdict() | softmax_tensors._asdict() | {"return_lse": True}
    if ragged is None:
        out, lse = flash_attn_func(q, k, v, **keywords)
    else:
        out, lse = flash_attn_varlen_func(q, k, v, **ragged._asdict(), **keywords)
    return out, lse


def problem(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], RaggedTensors | None]:
    return ragged_inputs(dtype) if name == "ragged" else (inputs(SHAPES[name], dtype), None)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [*SHAPES, "ragged"])
def test_opcheck(shape: str, options: str) -> None:
    tensors, ragged = problem(shape)
    values, softmax_tensors = split_options(options, tensors[0].shape[-2])
    call = torch_library.Call(*tensors, softmax_tensors, ragged, values)
    torch.library.opcheck(torch.ops.flashhopper.attention.default, call.flat())
    out, lse = through_operator(*tensors, values, softmax_tensors, ragged)
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in call.flat()]
    for grad_lse in (None, torch.randn_like(lse)):
        results = (torch.randn_like(out), grad_lse, out.detach(), lse.detach())
        torch.library.opcheck(torch.ops.flashhopper.attention_backward.default, (*results, *arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [*SHAPES, "ragged"])
def test_same_result_and_gradients_as_a_direct_call(shape: str, options: str, dtype: torch.dtype) -> None:
    """The operator's gradients are formulas, the direct call's are autograd's."""
    tensors, ragged = problem(shape, dtype)
    values, softmax_tensors = split_options(options, tensors[0].shape[-2])
    sink = softmax_tensors.learnable_sink
    leaves = tensors if sink is None else [*tensors, sink]
    results = []
    grad_out = grad_lse = None
    for attend in (through_operator, directly):
        out, lse = attend(*tensors, values, softmax_tensors, ragged)
        if grad_out is None or grad_lse is None:
            grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
        gradients = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))
        results.append((out, lse, *gradients))
    mine, expected = results
    assert torch.equal(mine[0], expected[0])
    assert torch.equal(mine[1], expected[1])
    is_fp64 = dtype == torch.float64 and all(x is None for x in softmax_tensors)  # sink and slopes are fp32
    tolerance = {"atol": 1e-12, "rtol": 1e-12} if is_fp64 else FP32_SUMS
    torch.testing.assert_close(mine[2:], expected[2:], **tolerance)


def test_gradients_of_many_rows_are_those_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs((2, 33, 50, 4, 2, 16, 24), torch.float64)
    options = AttentionOptions(causal=True, window_size=(7, -1))
    sink = torch.randn(4, dtype=torch.float64).requires_grad_()
    out, lse = through_operator(*tensors, options, SoftmaxTensors(sink))
    loss = out.square().sum() + lse.square().sum()
    whole = torch.autograd.grad(loss, [*tensors, sink], retain_graph=True)
    monkeypatch.setattr("flashhopper.reference_backward.CHUNK_SCORES", 2 * 4 * 50 * 5)  # 5 rows at once
    torch.testing.assert_close(torch.autograd.grad(loss, [*tensors, sink]), whole, atol=1e-12, rtol=1e-12)


def test_gradients_of_a_part_of_the_keys_add_up() -> None:
    """As ring attention calls it: with out and LSE of all keys, each part of them gives its share."""
    q, k, v = inputs((2, 9, 12, 4, 2, 16, 24), torch.float64)
    out, lse = through_operator(q, k, v, AttentionOptions())
    grad_out = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
    parts = [
        torch.ops.flashhopper.attention_backward(
            grad_out,
            None,
            out,
            lse,
            *torch_library.Call(q, *part, NO_SOFTMAX_TENSORS, None, AttentionOptions()).flat(),
        )
        for part in zip(k.chunk(3, dim=1), v.chunk(3, dim=1), strict=True)
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), dq)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], dim=1), dk)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], dim=1), dv)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)])
def test_only_the_gradients_that_are_asked_for(needed: tuple[int, ...]) -> None:
    tensors = [x.requires_grad_(i in needed) for i, x in enumerate(inputs(SHAPES["GQA, longer keys"]))]
    out, _ = through_operator(*tensors, AttentionOptions())
    out.sum().backward()
    assert [x.grad is not None for x in tensors] == [i in needed for i in range(3)]


def test_gradients_of_rows_without_keys_reach_nothing() -> None:
    tensors = inputs(SHAPES["rows without keys"], torch.float64)
    out, lse = through_operator(*tensors, AttentionOptions(causal=True), NO_SOFTMAX_TENSORS)
    grad_out, grad_lse = torch.ones_like(out), torch.ones_like(lse)
    grad_out[:, :3] = math.inf  # 7 queries, 4 keys
    grad_lse[:, :, :3] = math.nan
    gradients = torch.autograd.grad((out, lse), tensors, (grad_out, grad_lse))
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("linear", [True, False])
def test_a_second_derivative_is_an_error(linear: bool) -> None:
    q, k, v = inputs(SHAPES["GQA, longer keys"])
    out, _ = through_operator(q, k, v, AttentionOptions())
    (dq,) = torch.autograd.grad(out.sum() if linear else out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attn_func can be differentiated once"):
        (out.sum() + dq.square().sum()).backward()


class Block(torch.nn.Module):
    """Pre-norm attention and MLP with grouped heads, as in Llama."""

    def __init__(self, width: int = 32, heads: int = 4, heads_k: int = 2, **options: Any) -> None:
        super().__init__()
        self.heads, self.heads_k, self.head_dim, self.options = heads, heads_k, width // heads, options
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, (heads + 2 * heads_k) * self.head_dim, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate, self.up = (torch.nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.heads_k, self.heads_k], dim=2)
        x = x + self.out(flash_attn_func(q, k, v, causal=True, **self.options).flatten(2))
        h = self.norms[1](x)
        result: torch.Tensor = x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))
        return result


def compare_compiled(compiled: Callable[..., torch.Tensor], block: Block, x: torch.Tensor) -> None:
    results = []
    for run in (compiled, block):
        block.zero_grad()
        out = run(x)
        out.square().sum().backward()
        results.append([out, *(parameter.grad for parameter in block.parameters())])
    torch.testing.assert_close(*results, atol=1e-3, rtol=1e-4)


def test_a_compiled_block_compiles_once_for_all_lengths() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    block = Block(window_size=(20, 0), softcap=30.0)
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for batch, seqlen in ((2, 20), (2, 33), (3, 64), (5, 7)):
        compare_compiled(compiled, block, torch.randn(batch, seqlen, 32))
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 4
    assert any(node.target is torch.ops.flashhopper.attention for graph in counter.graphs for node in graph.graph.nodes)


def test_a_second_length_makes_the_length_dynamic() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for seqlen in (20, 33, 64, 7, 50):
        compare_compiled(compiled, block, torch.randn(2, seqlen, 32))
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_block_compiled_by_inductor(mode: str) -> None:
    block = Block()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, mode=mode)
    for seqlen in (20, 33):
        compare_compiled(compiled, block, torch.randn(2, seqlen, 32))


def test_a_compiled_sink_learns() -> None:
    sink = torch.randn(4).requires_grad_()
    q, k, v = inputs(SHAPES["GQA, longer keys"])

    def loss(sink: torch.Tensor) -> torch.Tensor:
        out, lse = flash_attn_func(q, k, v, learnable_sink=sink, return_lse=True)
        return (out.square().sum() + lse).sum()

    (mine,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(sink), sink)
    (expected,) = torch.autograd.grad(loss(sink), sink)
    torch.testing.assert_close(mine, expected, **FP32_SUMS)


def test_a_call_that_cannot_be_compiled_names_the_argument() -> None:
    compiled = torch.compile(lambda x, **options: flash_attn_func(x, x, x, **options), backend="aot_eager")
    with pytest.raises(TypeError, match="causal must be a bool, got int"):
        compiled(torch.randn(1, 4, 2, 16), causal=1)
    with pytest.raises(NotImplementedError, match="num_splits=2 is not there yet"):
        compiled(torch.randn(1, 4, 2, 16), num_splits=2)
    whole = torch.compile(lambda x: flash_attn_func(x, x, x), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="q has head_dim 15; accepted are multiples of 8"):
        whole(torch.randn(1, 4, 2, 15))
    sunk = torch.compile(lambda x, s: flash_attn_func(x, x, x, learnable_sink=s), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="learnable_sink has shape"):
        sunk(torch.randn(1, 4, 2, 16), torch.randn(3))


class Attend(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        return out, lse


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_named_lengths(strict: bool) -> None:
    """Dimensions without bounds: no check of a length narrows them."""
    batch, seqlen_q, seqlen_k = (torch.export.Dim(name) for name in ("batch", "seqlen_q", "seqlen_k"))
    keys = {0: batch, 1: seqlen_k}
    example = tuple(x.detach() for x in inputs(SHAPES["GQA, longer keys"]))
    shapes = {"q": {0: batch, 1: seqlen_q}, "k": keys, "v": keys}
    program = torch.export.export(Attend(), example, dynamic_shapes=shapes, strict=strict)
    calls = [node for node in program.graph.nodes if node.target is torch.ops.flashhopper.attention.default]
    assert len(calls) == 1
    others = inputs((5, 17, 3, 4, 2, 16, 24))
    for mine, expected in zip(program.module()(*others), Attend()(*others), strict=True):
        assert torch.equal(mine, expected)


def test_fake_tensors_have_the_shapes_and_dtypes_of_a_call() -> None:
    with FakeTensorMode():
        shapes = ((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 24))
        out, lse = Attend()(*(torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes))
    assert (out.shape, out.dtype, out.device.type) == ((2, 5, 4, 24), torch.bfloat16, "cuda")
    assert (lse.shape, lse.dtype, lse.device.type) == ((2, 4, 5), torch.float32, "cuda")


def test_selective_checkpointing_saves_the_operator() -> None:
    """The policy sees it by name; with its result saved it runs once."""
    runs = 0

    def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        nonlocal runs
        is_ours = operator is torch.ops.flashhopper.attention.default
        runs += is_ours and not context.is_recompute
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    tensors = inputs(SHAPES["GQA, longer keys"])
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    loss = checkpoint(lambda *x: Attend()(*x)[0].square().sum(), *tensors, use_reentrant=False, context_fn=contexts)
    mine = torch.autograd.grad(loss, tensors)
    expected = torch.autograd.grad(Attend()(*tensors)[0].square().sum(), tensors)
    torch.testing.assert_close(mine, expected, **FP32_SUMS)
    assert runs == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_reaches_attention_through_the_projection(compiled: bool) -> None:
    """Attention takes its inputs as they come; autocast has made them 16-bit ones."""
    projection = torch.nn.Linear(32, 3 * 32)

    def attend(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q, k, v = projection(x).unflatten(-1, (3, 2, 16)).unbind(2)
            out: torch.Tensor = flash_attn_func(q, k, v)
        return out

    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    x = torch.randn(2, 10, 32)
    out = run(x)
    assert out.dtype == torch.bfloat16
    q, k, v = projection.bfloat16()(x.bfloat16()).unflatten(-1, (3, 2, 16)).unbind(2)
    assert torch.equal(out, flash_attn_func(q, k, v))
    out.float().sum().backward()


def transformable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``torch.func`` transforms on CUDA tensors."""
    return torch_library.transformable_attention(q, k, v, AttentionOptions(causal=True), NO_SOFTMAX_TENSORS)


FUNCTIONS = [pytest.param(Attend(), id="on CPU tensors"), pytest.param(transformable, id="as on CUDA tensors")]


@pytest.mark.parametrize("attend", FUNCTIONS)
@pytest.mark.parametrize("in_dims", [(0, None, 0), (1, 2, 0), (None, None, 3)])
def test_vmap(attend: Callable[..., Any], in_dims: tuple[int | None, ...]) -> None:
    tensors = [x.detach() for x in inputs(SHAPES["GQA, longer keys"])]
    mapped = [
        x if dim is None else torch.stack([x, 2 * x, -x], dim=dim) for x, dim in zip(tensors, in_dims, strict=True)
    ]
    mine = torch.func.vmap(attend, in_dims)(*mapped)
    for i in range(3):
        single = [x if dim is None else x.select(dim, i) for x, dim in zip(mapped, in_dims, strict=True)]
        torch.testing.assert_close([x[i] for x in mine], list(Attend()(*single)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attend", FUNCTIONS)
def test_gradients_by_torch_func(attend: Callable[..., Any]) -> None:
    q, k, v = (x.detach() for x in inputs(SHAPES["GQA, longer keys"]))
    queries = torch.stack([q, -q])

    def loss(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out, lse = attend(q, k, v)
        return out.square().sum() + lse.sin().sum()

    mine = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), (0, None))(queries, k)
    for i, query in enumerate(queries):
        leaves = [x.clone().requires_grad_() for x in (query, k)]
        out, lse = Attend()(*leaves, v)
        expected = torch.autograd.grad(out.square().sum() + lse.sin().sum(), leaves)
        torch.testing.assert_close([x[i] for x in mine], list(expected), **FP32_SUMS)


def test_what_torch_func_cannot_do_with_kernels_is_an_error() -> None:
    q, k, v = (x.detach() for x in inputs(SHAPES["GQA, longer keys"]))

    def loss(q: torch.Tensor) -> torch.Tensor:
        return transformable(q, k, v)[0].square().sum()

    with pytest.raises(RuntimeError, match="flash_attn_func can be differentiated once"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(q)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(loss, (q,), (q,))

    def sunk(sink: torch.Tensor) -> torch.Tensor:
        return torch_library.transformable_attention(q, k, v, AttentionOptions(), SoftmaxTensors(sink))[0]

    with pytest.raises(NotImplementedError, match="vmap over learnable_sink"):
        torch.func.vmap(sunk)(torch.randn(3, 4))
    (q, k, v), lengths = ragged_inputs()

    def ragged(q: torch.Tensor) -> torch.Tensor:
        return torch_library.transformable_attention(q, k, v, AttentionOptions(), NO_SOFTMAX_TENSORS, lengths)[0]

    with pytest.raises(NotImplementedError, match="vmap over a ragged batch"):
        torch.func.vmap(ragged)(torch.stack([q, q]))


def test_slopes_that_want_a_gradient_are_an_error() -> None:
    q, k, v = inputs(SHAPES["GQA, longer keys"])
    slopes = torch.rand(4).requires_grad_()
    with pytest.raises(NotImplementedError, match="alibi_slopes requires a gradient"):
        through_operator(q, k, v, AttentionOptions(), SoftmaxTensors(None, slopes))
    with torch.no_grad():
        out, _ = through_operator(q, k, v, AttentionOptions(), SoftmaxTensors(None, slopes))
        assert torch.equal(out, flash_attn_func(q, k, v, alibi_slopes=slopes))


def test_a_compiled_ragged_batch_compiles_once_for_all_lengths() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def attend(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        q, k, v = x.unbind(1)
        out: torch.Tensor = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)
        return out * 2

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for lengths in ([3, 9, 5], [30, 1], [4, 4, 7, 2]):
        x = torch.randn(sum(lengths), 3, 2, 16).requires_grad_()
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        results = []
        for run in (compiled, attend):
            out = run(x, cu_seqlens, max(lengths))
            results.append([out, *torch.autograd.grad(out.square().sum(), x)])
        torch.testing.assert_close(*results, **FP32_SUMS)
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3
