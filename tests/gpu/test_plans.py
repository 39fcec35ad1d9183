"""Plans that are known, on a card: calls that share one are right one after another, whatever differs between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import BF16, Shape, assert_same_bits, compare, dense, random_inputs
from feature_checks import Call, check, ragged_inputs
from fp8_checks import compare as compare_fp8
from ragged import Batch, Side

from flashhopper import flash_attn_func, fp8, launch, launch_backward, launch_fp8, quantize_fp8
from flashhopper.options import AttentionOptions
from flashhopper.reference import attention

STEPS = [
    Batch(Side([100, 0, 333, 5]), Side([130, 20, 290, 500])),
    Batch(Side([7, 9]), Side([300, 1]), slack=100),
    Batch(Side([64] * 20, outside=30), Side([65] * 20)),
    Batch(Side([500, 1, 2]), Side([2, 1, 500], outside=9)),
    Batch(Side([100, 0, 333, 5]), Side([130, 20, 290, 500])),
]


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(),
        AttentionOptions(causal=True),
        AttentionOptions(window_size=(20, 30)),
        AttentionOptions(causal=True, deterministic=True, softcap=20.0),
    ],
    ids=["full", "causal", "window", "deterministic"],
)
def test_new_lengths_with_the_plan_of_others(options: AttentionOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, as the steps of a training loop: the first step plans, and no other does."""
    for module in (launch, launch_backward):
        monkeypatch.setattr(module, "_plans", {})
    for batch in STEPS:
        check(ragged_inputs(batch, 4, 2, 64), Call(options, batch=batch))
        assert (len(launch._plans), len(launch_backward._plans)) == (1, 1)


def test_a_window_that_hides_nothing_in_short_sequences_only() -> None:
    """Lengths up to 101 keys are causal attention, longer ones are not: by turns."""
    options = AttentionOptions(window_size=(100, 0))
    short, long = Batch(Side([101, 50]), Side([101, 60])), Batch(Side([300, 50]), Side([400, 60]))
    for batch in (short, long, short, long):
        check(ragged_inputs(batch, 4, 2, 64), Call(options, batch=batch))


def test_addresses_strides_and_grad_mode_by_turns() -> None:
    """One shape; what TMA cannot read, and what autograd records, are facts of a call."""
    shape = Shape(2, 200, 300, 4, 2, 64, 64)
    storage = [torch.randn(x.numel() + 1, device="cuda").to(BF16) for x in random_inputs(shape)]
    sizes = [x.shape for x in random_inputs(shape)]

    def at(offset: int) -> Any:
        return [x[offset : offset + size.numel()].view(size) for x, size in zip(storage, sizes, strict=True)]

    odd = [torch.randn(*size[:3], 65, device="cuda").to(BF16)[..., :64] for size in sizes]
    for inputs in (at(0), at(1), odd, at(1), at(0), odd):
        q, k, v = inputs
        result = flash_attn_func(q, k, v, causal=True, return_lse=True)
        compare((q, k, v), result, causal=True)
        assert not result[0].requires_grad
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        recorded = flash_attn_func(*leaves, causal=True, return_lse=True)
        assert_same_bits((recorded[0].detach(), recorded[1].detach()), result)
        ours = torch.autograd.grad(recorded[0].sum(), leaves)
        again = [x.requires_grad_() for x in dense((q, k, v))]
        theirs = torch.autograd.grad(flash_attn_func(*again, causal=True).sum(), again)
        for x, y in zip(ours[1:], theirs[1:], strict=True):  # dk and dv are the same bits in every run
            assert torch.equal(x, y)
        torch.testing.assert_close(ours[0], theirs[0], atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("accumulate", ["two_level", "fast"])
def test_fp8_calls_that_are_alike(accumulate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantising and attention are planned once; the numbers of each call are its own."""
    monkeypatch.setattr(fp8, "_known", {})
    for cache in (launch_fp8._rows_plan, launch_fp8._values_plan):
        cache.cache_clear()
    for step in range(3):
        q, k, v = (torch.randn(2, s, h, 128, device="cuda").to(BF16) for s, h in ((300, 4), (555, 2), (555, 2)))
        quantised = quantize_fp8(q, k, (v + step) * 2.0**step)
        out, lse = flash_attn_func(*quantised, causal=True, fp8_accumulate=accumulate, return_lse=True)
        ref, ref_lse = attention(*(x.dequantize() for x in quantised), softmax_scale=128**-0.5, causal=True)
        compare_fp8(out, lse, ref, ref_lse)
        assert len(fp8._known) == 1
        assert (launch_fp8._rows_plan.cache_info().misses, launch_fp8._values_plan.cache_info().misses) == (2, 1)
    with pytest.raises(ValueError, match="fp8_accumulate"):
        flash_attn_func(*quantised, causal=True, fp8_accumulate="slow")  # type: ignore[arg-type]
