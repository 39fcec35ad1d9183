"""FP8 through ``torch.library``: the operators' own checks, ``torch.compile``, ``torch.export``, gradients, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from flashhopper import flash_attn_fp8_func, flash_attn_func, quantize_fp8, torch_library_fp8
from flashhopper.fp8 import Descales
from flashhopper.fp8_tensor import Fp8Recipe
from flashhopper.options import AttentionOptions
from flashhopper.problem import SoftmaxTensors
from flashhopper.reference_fp8 import E4M3, E5M2
from flashhopper.torch_library_fp8 import FromSixteenBits

BF16 = torch.bfloat16
OPERATORS = torch.ops.flashhopper
# All but the one that compares inputs with copies of them, for which PyTorch lacks arithmetic on e4m3: see below.
WITHOUT_SCHEMA = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
WINDOW = AttentionOptions(window_size=(9, 2))
# No two extents are equal at first: a graph would keep them so. More than one block of scales: an extent of 1 has a
# graph of its own.
LENGTHS = [(5, 70, 130), (5, 133, 300), (3, 150, 140)]


def inputs(batch: int = 2, seqlen_q: int = 20, seqlen_k: int = 150, dtype: torch.dtype = BF16) -> list[Any]:
    shapes = (batch, seqlen_q, 4, 32), (batch, seqlen_k, 2, 32), (batch, seqlen_k, 2, 48)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    """The arguments of an operator's calls."""
    calls = []
    operator = getattr(OPERATORS, name)

    def record(*arguments: Any) -> Any:
        calls.append(arguments)
        return operator(*arguments)

    monkeypatch.setattr(OPERATORS, name, record)
    return calls


each_type = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])


@each_type
@pytest.mark.parametrize("hadamard_seed", [None, 3])
@pytest.mark.parametrize("rows", [64, 128])
def test_opcheck_of_the_quantisers(rows: int, hadamard_seed: int | None, fp8: torch.dtype) -> None:
    q, _, v = inputs(seqlen_q=130)
    torch.library.opcheck(
        OPERATORS.fp8_quantize_rows.default, (q, rows, "power_of_two", hadamard_seed, fp8, "q", None, None)
    )
    torch.library.opcheck(OPERATORS.fp8_quantize_values.default, (v, "amax", hadamard_seed is None, fp8, None, None))


def opcheck_of_fp8(operator: Any, arguments: tuple[Any, ...]) -> None:
    given = [x for x in arguments if isinstance(x, torch.Tensor)]
    copies = [x.clone() for x in given]
    torch.library.opcheck(operator, arguments, test_utils=WITHOUT_SCHEMA)
    for x, copy in zip(given, copies, strict=True):
        assert torch.equal(x.float(), copy.float())


@each_type
@pytest.mark.parametrize("options", [AttentionOptions(causal=True), WINDOW], ids=["causal", "window"])
def test_opcheck_of_attention(options: AttentionOptions, fp8: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    call = FromSixteenBits(*tensors, Fp8Recipe("amax", False, True, 5, fp8), options, "fast")
    torch.library.opcheck(OPERATORS.fp8_attention.default, call.flat())
    sink = SoftmaxTensors(torch.randn(4))
    for center_v in (False, True):
        quantised = quantize_fp8(q, k, v, center_v=center_v, hadamard=center_v, dtype=fp8)
        calls = recorded(monkeypatch, "fp8_quantised_attention")
        out, lse = torch_library_fp8.attention(*quantised, options, Descales(), "two_level", sink)
        monkeypatch.undo()
        opcheck_of_fp8(OPERATORS.fp8_quantised_attention.default, calls[0])
        expected = flash_attn_func(*quantised, **options._asdict(), learnable_sink=sink[0], return_lse=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
    raw = [x.to(fp8) for x in (q, k, v)]
    factors = Descales(None, torch.ones(2, 2), torch.full((1,), 2.0))
    arguments = (*raw, *factors, *(None,) * 8, *options, "two_level")  # no softmax tensors, no lengths
    opcheck_of_fp8(OPERATORS.fp8_raw_attention.default, arguments)


def from_16_bit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out, lse = flash_attn_fp8_func(q, k, v, causal=True, seed=4, return_lse=True)
    return out * 1, lse


def in_two_steps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out, lse = flash_attn_func(*quantize_fp8(q, k, v, scales="amax"), window_size=(8, 1), return_lse=True)
    return out * 1, lse


def raw(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    factor = torch.full((1,), 0.5)
    q, k, v = (x.to(E4M3) for x in (q, k, v))
    out, lse = flash_attn_func(q, k, v, q_descale=factor, fp8_accumulate="fast", return_lse=True)
    return out * 1, lse


def all_in_e5m2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    quantised = quantize_fp8(q, k, v, dtype=E5M2)
    out = flash_attn_fp8_func(q, k, v, dtype=E5M2)
    return out * 1, flash_attn_func(*quantised), flash_attn_func(*(x.to(E5M2) for x in (q, k, v)), causal=True)


@pytest.mark.parametrize("attend", [from_16_bit, in_two_steps, raw, all_in_e5m2])
def test_compiled_once_for_all_lengths(attend: Callable[..., Any]) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for lengths in LENGTHS:
        tensors = inputs(*lengths)
        for mine, expected in zip(compiled(*tensors), attend(*tensors), strict=True):
            assert torch.equal(mine, expected)
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3
    assert any("flashhopper.fp8_" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)


def test_quantised_tensors_may_be_inputs_and_results_of_a_graph() -> None:
    counter, attending = (CompileCounterWithBackend("aot_eager") for _ in range(2))
    quantise = torch.compile(quantize_fp8, fullgraph=True, dynamic=True, backend=counter)
    attend = torch.compile(lambda *x: flash_attn_func(*x, causal=True), fullgraph=True, dynamic=True, backend=attending)
    graphs = []
    for lengths in LENGTHS:
        tensors = inputs(*lengths)
        mine, expected = quantise(*tensors), quantize_fp8(*tensors)
        for x, y in zip(mine, expected, strict=True):
            assert (x.role, x.shape, x.source_dtype, x.rows_per_scale) == (
                y.role,
                y.shape,
                y.source_dtype,
                y.rows_per_scale,
            )
            assert torch.equal(x.data.view(torch.uint8), y.data.view(torch.uint8))
            assert torch.equal(x.scale, y.scale)
        assert torch.equal(attend(*mine), flash_attn_func(*expected, causal=True))
        graphs.append((counter.frame_count, attending.frame_count))
    assert graphs == graphs[:1] * 3


def test_compiled_gradients_are_those_of_an_eager_call() -> None:
    compiled = torch.compile(from_16_bit, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in LENGTHS:
        tensors = [x.requires_grad_() for x in inputs(*lengths)]
        results = []
        for run in (compiled, from_16_bit):
            out, lse = run(*tensors)
            results.append(torch.autograd.grad(out.square().sum() + (lse * (lse > -1e9)).sum(), tensors))
        for mine, expected in zip(*results, strict=True):
            assert torch.equal(mine, expected)
            assert mine.count_nonzero() > 0


def test_gradients_of_one_output_and_of_some_inputs() -> None:
    q, k, v = inputs()
    k.requires_grad_()
    call = FromSixteenBits(q, k, v, Fp8Recipe(), AttentionOptions(), "two_level")
    for output in (0, 1):
        mine = torch_library_fp8.attention_from_16_bit(call)[output]
        eager = flash_attn_fp8_func(q, k, v, return_lse=True)[output]
        assert torch.equal(*(torch.autograd.grad(x.sum(), k)[0] for x in (mine, eager)))


def test_a_second_derivative_is_an_error() -> None:
    q, k, v = inputs()
    q.requires_grad_()
    (dq,) = torch.autograd.grad(flash_attn_fp8_func(q, k, v).float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        dq.square().sum().backward()


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = flash_attn_fp8_func(q, k, v, causal=True)
            return out

    batch, seqlen_q, seqlen_k = (torch.export.Dim(name) for name in ("batch", "seqlen_q", "seqlen_k"))
    keys = {0: batch, 1: seqlen_k}
    shapes = {"q": {0: batch, 1: seqlen_q}, "k": keys, "v": keys}
    program = torch.export.export(Attend(), tuple(inputs()), dynamic_shapes=shapes, strict=strict)
    assert sum(node.target is OPERATORS.fp8_attention.default for node in program.graph.nodes) == 1
    others = inputs(5, 17, 260)
    assert torch.equal(program.module()(*others), flash_attn_fp8_func(*others, causal=True))


@each_type
def test_fake_tensors_have_the_shapes_and_dtypes_of_a_call(fp8: torch.dtype) -> None:
    with FakeTensorMode():
        shapes = (2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 32)
        q, k, v = (torch.empty(shape, device="cuda", dtype=torch.float16) for shape in shapes)
        quantised = quantize_fp8(q, k, v, dtype=fp8)
        assert {x.dtype for x in quantised} == {fp8}
        assert [tuple(x.data.shape) for x in quantised] == [shapes[0], shapes[1], (2, 2, 32, 128)]
        assert [tuple(x.scale.shape) for x in quantised] == [(2, 4, 1), (2, 2, 1), (2, 2, 32)]
        results = [
            flash_attn_func(*quantised, return_lse=True),
            flash_attn_fp8_func(q, k, v, dtype=fp8, return_lse=True),
        ]
    for out, lse in results:
        assert (out.shape, out.dtype, out.device.type) == ((2, 5, 4, 32), torch.float16, "cuda")
        assert (lse.shape, lse.dtype, lse.device.type) == ((2, 4, 5), torch.float32, "cuda")


def test_a_call_that_cannot_be_compiled_names_the_argument() -> None:
    q, k, v = inputs()
    eager = torch.compile(lambda x, **options: flash_attn_fp8_func(x, x, x, **options), backend="aot_eager")
    for options, error, fragment in (
        ({"causal": 1}, TypeError, "causal must be a bool, got int"),
        ({"scales": "block"}, ValueError, "scales is 'block'"),
        ({"fp8_accumulate": "slow"}, ValueError, "fp8_accumulate is 'slow'"),
        ({"dtype": BF16}, TypeError, r"dtype is torch\.bfloat16; accepted are"),
    ):
        with pytest.raises(error, match=fragment):
            eager(q, **options)
    whole = torch.compile(flash_attn_fp8_func, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"q has dtype torch\.float32; accepted are"):
        whole(q.float(), k.float(), v.float())
    torch.compiler.reset()
    with pytest.raises(Exception, match="k has head_dim 16, q has 32"):
        whole(q, k[..., :16].contiguous(), v)
    q8, k8, v8 = quantize_fp8(q, k, v)
    attend = torch.compile(flash_attn_func, backend="aot_eager")
    with pytest.raises(ValueError, match="q was quantised as k"):
        attend(k8, k8, v8)
    with pytest.raises(TypeError, match="must all come from quantize_fp8"):
        attend(q8, k, v8)
    with pytest.raises(ValueError, match="quantised tensors carry their scales"):
        attend(q8, k8, v8, q_descale=torch.ones(1))
    with pytest.raises(TypeError, match=r"k has dtype torch\.bfloat16; with another of q, k and v in"):
        attend(q.to(E4M3), k, v)
    with pytest.raises(TypeError, match=r"k has dtype torch\.float8_e5m2; with another of q, k and v in"):
        attend(q.to(E4M3), k.to(E5M2), v.to(E5M2))
    with pytest.raises(TypeError, match=r"k was quantised to torch\.float8_e5m2, q to torch\.float8_e4m3fn"):
        attend(q8, quantize_fp8(k=k, dtype=E5M2).k, v8)
    with pytest.raises(NotImplementedError, match="learnable_sink requires a gradient"):
        attend(q8, k8, v8, learnable_sink=torch.randn(4).requires_grad_())


def test_torch_func_is_an_error() -> None:
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match=r"torch\.func does not transform FP8 attention"):
        torch.func.grad(lambda q: flash_attn_fp8_func(q, k, v).float().sum())(q)
