"""FP8 of ragged batches on CPU tensors: against dense calls of each sequence, and what lies between the sequences."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import Batch, Side
from torch._dynamo.testing import CompileCounterWithBackend

from flashhopper import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_varlen_fp8_func,
    flash_attn_varlen_func,
    quantize_fp8,
    torch_library_fp8,
)
from flashhopper.fp8 import Descales
from flashhopper.fp8_tensor import Fp8Recipe
from flashhopper.kernels import ragged as ragged_kernels
from flashhopper.options import AttentionOptions
from flashhopper.problem import RaggedTensors, SoftmaxTensors
from flashhopper.reference_fp8 import E4M3, E5M2
from flashhopper.reference_fp8_varlen import num_blocks, own_block
from flashhopper.torch_library_fp8 import FromSixteenBits

BF16 = torch.bfloat16
OPERATORS = torch.ops.flashhopper
BATCHES = {
    "equal": Batch(Side([150, 150]), Side([200, 200])),
    "around blocks": Batch(Side([63, 64, 65, 1]), Side([127, 128, 129, 257])),
    "empty sequences": Batch(Side([0, 70, 0, 5]), Side([30, 0, 0, 140])),
    "used": Batch(Side([90, 40, 70], [65, 0, 70], 7), Side([140, 30, 260], [129, 30, 0], 5), slack=9),
    "none": Batch(Side([], outside=3), Side([], outside=4)),
}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 3)},
    "chunks": {"attention_chunk": 50},
}


def inputs(batch: Batch, spoilt: bool = True) -> list[torch.Tensor]:
    """Values have a mean. ``spoilt``: rows that count for nothing are NaN."""
    shapes = (batch.q.total, 4, 32), (batch.k.total, 2, 32), (batch.k.total, 2, 48)
    q, k, v = (torch.randn(shape) for shape in shapes)
    v = v + torch.randn(2, 48)
    if spoilt:
        q[batch.q.unused] = math.nan
        k[batch.k.unused], v[batch.k.unused] = math.nan, 1e30
    return [x.to(BF16) for x in (q, k, v)]


def quantised(tensors: list[torch.Tensor], lengths: dict[str, Any], **recipe: Any) -> Any:
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    return quantize_fp8(*tensors, **{name: lengths[name] for name in names}, **recipe)


@given(st.lists(st.integers(0, 700), max_size=9), st.integers(0, 300), st.sampled_from([64, 128, 512, 2**30]))
def test_every_sequence_has_blocks_of_its_own(lengths: list[int], outside: int, rows: int) -> None:
    starts = list(accumulate(lengths, initial=0))
    end = 0
    for i, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        first = own_block(start, i, rows)
        assert first == ragged_kernels.own_block(start, i, rows) >= end
        end = first + -(-length // rows)
    assert end <= num_blocks(starts[-1] + outside, len(lengths), rows)


@pytest.mark.parametrize(
    "recipe",
    [{}, {"scales": "amax", "hadamard": False, "center_v": False}, {"dtype": E5M2}],
    ids=["default", "plain", "e5m2"],
)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
def test_sequences_are_quantised_as_if_alone(batch: Batch, recipe: dict[str, Any]) -> None:
    tensors = inputs(batch)
    found = quantised(tensors, batch.arguments(), **recipe)
    for x, source, side in zip(found, tensors, (batch.q, batch.k, batch.k), strict=True):
        assert (x.shape, x.dtype) == (source.shape, recipe.get("dtype", E4M3))
        plain, scales_seen = x.dequantize(), torch.ones_like(x.scale, dtype=torch.bool)
        assert (plain[side.unused] == 0).all()
        for i, rows in enumerate(side.slices):
            alone = quantize_fp8(**{x.role: source[None, rows]}, **recipe)._asdict()[x.role]
            if x.role == "v":
                assert torch.equal(x.scale[i], alone.scale[0])
                assert (x.mean is None) == (alone.mean is None) == (recipe.get("center_v") is False)
                assert x.mean is None or torch.equal(x.mean[i], alone.mean[0])
                first = own_block(rows.start, i, 128) * 128
                slots = x.data[..., first : first + alone.data.shape[-1]].view(torch.uint8)
                assert torch.equal(slots, alone.data[0].view(torch.uint8))
            else:
                first = own_block(rows.start, i, x.rows_per_scale)
                blocks = slice(first, first + alone.scale.shape[2])
                assert torch.equal(x.scale[:, blocks], alone.scale[0])
                scales_seen[:, blocks] = False
                assert torch.equal(x.data[rows].view(torch.uint8), alone.data[0].view(torch.uint8))
            assert torch.equal(plain[rows], alone.dequantize()[0])
        if x.role != "v":
            assert (x.scale[scales_seen] == 1).all()


@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
def test_attention_and_gradients_are_those_of_each_sequence(batch: Batch, masks: dict[str, Any]) -> None:
    tensors = [x.requires_grad_() for x in inputs(batch)]
    lengths = batch.arguments()
    out, lse = flash_attn_varlen_fp8_func(*tensors, **lengths, **masks, return_lse=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), tensors, (grad_out, grad_lse))
    in_two_steps = flash_attn_varlen_func(*quantised(tensors, lengths), **lengths, **masks, return_lse=True)
    assert torch.equal(out, in_two_steps[0])
    assert torch.equal(lse, in_two_steps[1])
    for x, side in zip((out, *gradients), (batch.q, batch.q, batch.k, batch.k), strict=True):
        assert (x[side.unused] == 0).all()
    assert (lse[:, batch.q.unused] == -math.inf).all()
    for q_rows, k_rows in zip(batch.q.slices, batch.k.slices, strict=True):
        rows = q_rows, k_rows, k_rows
        alone = [x.detach()[None, at].requires_grad_() for x, at in zip(tensors, rows, strict=True)]
        expected = flash_attn_fp8_func(*alone, **masks, return_lse=True)
        torch.testing.assert_close(out[q_rows], expected[0][0], atol=1e-2, rtol=2**-7)
        torch.testing.assert_close(lse[:, q_rows], expected[1][0], atol=1e-5, rtol=1e-5)
        grads = grad_out[None, q_rows], grad_lse[None, :, q_rows]
        for mine, at, theirs in zip(gradients, rows, torch.autograd.grad(expected, alone, grads), strict=True):
            torch.testing.assert_close(mine[at], theirs[0], atol=2e-2, rtol=2**-6)


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_raw_tensors_with_descales(per_sequence: bool, fp8: torch.dtype) -> None:
    batch = BATCHES["used"]
    q, k, v = (x.to(fp8) for x in inputs(batch, spoilt=False))
    factors = [0.5 + torch.rand(3, 2) if per_sequence else 0.5 + torch.rand(1) for _ in range(3)]
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    out, lse = flash_attn_varlen_func(q, k, v, **batch.arguments(), **descales, causal=True, return_lse=True)
    assert out.dtype == BF16
    for i, (q_rows, k_rows) in enumerate(zip(batch.q.slices, batch.k.slices, strict=True)):
        own = {name: factor[i : i + 1] if per_sequence else factor for name, factor in descales.items()}
        alone = q[None, q_rows], k[None, k_rows], v[None, k_rows]
        expected = flash_attn_func(*alone, **own, causal=True, return_lse=True)
        torch.testing.assert_close(out[q_rows], expected[0][0], atol=1e-2, rtol=2**-7)
        torch.testing.assert_close(lse[:, q_rows], expected[1][0], atol=1e-5, rtol=1e-5)


def test_the_one_call_form_in_e5m2_is_the_one_in_two_steps() -> None:
    batch = BATCHES["used"]
    tensors, lengths = inputs(batch), batch.arguments()
    out = flash_attn_varlen_fp8_func(*tensors, **lengths, causal=True, dtype=E5M2)
    assert torch.equal(out, flash_attn_varlen_func(*quantised(tensors, lengths, dtype=E5M2), **lengths, causal=True))
    assert not torch.equal(out, flash_attn_varlen_fp8_func(*tensors, **lengths, causal=True))


def test_lengths_must_be_the_ones_that_were_quantised_with() -> None:
    batch = BATCHES["used"]
    tensors, lengths = inputs(batch), batch.arguments()
    q, k, v = quantised(tensors, lengths)
    again = lengths | {"cu_seqlens_k": batch.k.cu_seqlens()}
    with pytest.raises(ValueError, match="cu_seqlens_k is not the tensor that k was quantised with"):
        flash_attn_varlen_func(q, k, v, **again)
    with pytest.raises(ValueError, match="seqused_q is not what q was quantised with"):
        flash_attn_varlen_func(q, k, v, **(lengths | {"seqused_q": None}))
    with pytest.raises(ValueError, match="q was quantised as a ragged batch: flash_attn_varlen_func takes it"):
        flash_attn_func(q, k, v)
    dense = quantize_fp8(*(torch.ones(1, 4, 2, 32, dtype=BF16) for _ in range(3)))
    with pytest.raises(ValueError, match="q was quantised without cu_seqlens_q"):
        flash_attn_varlen_func(*dense, **lengths)
    short = lengths | {"max_seqlen_k": 100}
    with pytest.raises(ValueError, match="max_seqlen_k is 100, but sequence 0 has length 129"):
        flash_attn_varlen_func(q, k, v, **short)


ROWS = torch.ones(8, 2, 32, dtype=BF16)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    "arguments, error, fragment",
    [
        ({"q": ROWS}, ValueError, "q must have 4 dimensions"),
        ({"q": ROWS[None], "cu_seqlens_q": CU}, ValueError, "q must have 3 dimensions (total, heads, head_dim)"),
        ({"q": ROWS, "cu_seqlens_q": CU.long()}, TypeError, "cu_seqlens_q has dtype torch.int64"),
        ({"v": ROWS, "cu_seqlens_k": CU.long()}, TypeError, "cu_seqlens_k has dtype torch.int64"),
        ({"k": ROWS, "cu_seqlens_k": [0, 8]}, TypeError, "cu_seqlens_k must be a torch.Tensor, got list"),
        ({"k": ROWS, "cu_seqlens_k": CU, "seqused_k": CU}, ValueError, "seqused_k has shape (3,), cu_seqlens_k (3,)"),
        ({"k": ROWS[None], "seqused_k": CU}, ValueError, "seqused_k is given, cu_seqlens_k is not"),
        ({"q": ROWS, "seqused_q": CU}, ValueError, "seqused_q is given, cu_seqlens_q is not"),
        ({"q": ROWS[None], "cu_seqlens_k": CU}, ValueError, "cu_seqlens_k is given, but no tensor"),
        ({"k": ROWS, "cu_seqlens_k": CU.to("meta")}, ValueError, "cu_seqlens_k is on meta"),
        ({"k": ROWS, "cu_seqlens_k": CU + 1}, ValueError, "cu_seqlens_k begins with 1"),
        ({"q": ROWS, "cu_seqlens_q": 2 * CU}, ValueError, "cu_seqlens_q ends with 16; there are 8 rows"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], fragment: str) -> None:
    with pytest.raises(error) as raised:
        quantize_fp8(**arguments)
    assert fragment in str(raised.value)


def test_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = BATCHES["used"]
    lengths, options = RaggedTensors(**batch.arguments()), AttentionOptions(causal=True)
    q, k, v = inputs(batch)
    side = lengths.cu_seqlens_k, lengths.seqused_k
    torch.library.opcheck(OPERATORS.fp8_quantize_rows.default, (k, 128, "amax", 1, E4M3, "k", *side))
    torch.library.opcheck(OPERATORS.fp8_quantize_values.default, (v, "power_of_two", True, E4M3, *side))
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    call = FromSixteenBits(*tensors, Fp8Recipe(), options, "two_level", lengths)
    torch.library.opcheck(OPERATORS.fp8_attention.default, call.flat())
    # Not test_schema: PyTorch lacks the arithmetic on e4m3 with which it compares inputs and copies.
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    cases = {
        "fp8_quantised_attention": quantised([q, k, v], lengths._asdict()),
        "fp8_raw_attention": [x.to(E4M3) for x in (q, k, v)],
    }
    for name, given_tensors in cases.items():
        operator = getattr(OPERATORS, name)
        calls: list[tuple[Any, ...]] = []

        def record(*arguments: Any, to: Any = operator, calls: list[tuple[Any, ...]] = calls) -> Any:
            calls.append(arguments)
            return to(*arguments)

        monkeypatch.setattr(OPERATORS, name, record)
        torch_library_fp8.attention(*given_tensors, options, Descales(), "fast", SoftmaxTensors(), lengths)
        monkeypatch.undo()
        torch.library.opcheck(operator.default, calls[0], test_utils=checks)


def from_16_bit(x: list[torch.Tensor], lengths: dict[str, Any]) -> torch.Tensor:
    out: torch.Tensor = flash_attn_varlen_fp8_func(*x, **lengths, causal=True)
    return out * 2


def in_two_steps(x: list[torch.Tensor], lengths: dict[str, Any]) -> torch.Tensor:
    out: torch.Tensor = flash_attn_varlen_func(*quantised(x, lengths), **lengths, causal=True)
    return out * 2


@pytest.mark.parametrize("attend", [from_16_bit, in_two_steps])
def test_compiled_once_for_all_lengths(attend: Any) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for q, k in (
        ([150, 20, 7, 0, 3, 1], [130, 200, 9, 4, 0, 5]),
        ([300, 1, 64, 31], [128, 129, 50, 3]),
        ([40, 90, 0, 7, 8], [260, 31, 1, 1, 2]),
    ):
        batch = Batch(Side(q), Side(k))
        tensors, lengths = inputs(batch), batch.arguments()
        assert torch.equal(compiled(tensors, lengths), attend(tensors, lengths))
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3
