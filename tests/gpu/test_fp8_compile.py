"""FP8's operators on the kernels: their own checks, compiled calls bit by bit against eager ones, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashhopper import flash_attn_fp8_func, flash_attn_func, quantize_fp8
from flashhopper.fp8_tensor import Fp8Recipe
from flashhopper.options import AttentionOptions
from flashhopper.reference_fp8 import E4M3
from flashhopper.torch_library_fp8 import FromSixteenBits

BF16 = torch.bfloat16
OPERATORS = torch.ops.flashhopper
OPTIONS = {"causal": True, "window_size": (200, -1), "deterministic": True, "return_lse": True}


def inputs(batch: int = 3, seqlen: int = 300, head_dim: int = 64) -> list[torch.Tensor]:
    shapes = ((batch, seqlen, heads, head_dim) for heads in (4, 2, 2))
    return [torch.randn(shape, device="cuda").to(BF16).requires_grad_() for shape in shapes]


def from_16_bit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = flash_attn_fp8_func(q, k, v, **OPTIONS)
    return out, lse


def in_two_steps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = flash_attn_func(*quantize_fp8(q, k, v, seed=3), **OPTIONS)
    return out, lse


def raw(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = flash_attn_func(
        *(x.to(E4M3) for x in (q, k, v)), k_descale=torch.full((1,), 0.5, device="cuda"), **OPTIONS
    )
    return out, lse


def test_opcheck() -> None:
    q, k, v = inputs()
    options = AttentionOptions(causal=True, deterministic=True)
    call = FromSixteenBits(q, k, v, Fp8Recipe(), options, "two_level")
    torch.library.opcheck(OPERATORS.fp8_attention.default, call.flat())
    q, k, v = (x.detach() for x in (q, k, v))
    torch.library.opcheck(OPERATORS.fp8_quantize_rows.default, (q, 64, "power_of_two", 1, E4M3, "q", None, None))
    torch.library.opcheck(OPERATORS.fp8_quantize_values.default, (v, "power_of_two", True, E4M3, None, None))
    arguments = (*(x.to(E4M3) for x in (q, k, v)), *(None,) * 11, *options, "fast")
    # Not test_schema: PyTorch lacks the arithmetic on e4m3 with which it compares inputs and copies.
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(OPERATORS.fp8_raw_attention.default, arguments, test_utils=checks)


@pytest.mark.parametrize("attend", [from_16_bit, in_two_steps, raw])
def test_compiled_calls_give_the_same_bits(attend: Any) -> None:
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, seqlen in ((3, 300), (5, 450)):
        tensors = inputs(batch, seqlen)
        for mine, expected in zip(compiled(*tensors), attend(*tensors), strict=True):
            assert torch.equal(mine, expected)
            assert mine.count_nonzero() > 0.9 * mine.numel()


def test_compiled_gradients_give_the_same_bits() -> None:
    compiled = torch.compile(from_16_bit, fullgraph=True, dynamic=True, backend="aot_eager")
    tensors = inputs()
    grad_out, grad_lse = torch.randn_like(tensors[0]), torch.randn(3, 4, 300, device="cuda")
    results = [torch.autograd.grad(run(*tensors), tensors, (grad_out, grad_lse)) for run in (compiled, from_16_bit)]
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(mine, expected)
        assert mine.count_nonzero() > 0.9 * mine.numel()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor(mode: str) -> None:
    compiled = torch.compile(from_16_bit, fullgraph=True, mode=mode)
    for _ in range(4):  # the graph is recorded in the second or third, and replayed
        tensors = [x.detach() for x in inputs()]
        out, lse = (x.clone() for x in compiled(*tensors))
        expected, expected_lse = from_16_bit(*tensors)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
