"""A plan that is known serves the calls it fits and no others, and is known after the first of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from posed_card import PosedCard, pose

from flashhopper import flash_attn_func, flash_attn_varlen_func, launch, launch_backward, launch_schedule, plan_key
from flashhopper.config import BackwardSpec, KernelSpec, PostprocessSpec, PreprocessSpec, ScheduleSpec
from flashhopper.heuristics import BACKWARD_TABLE, TILE_TABLE
from flashhopper.launch import TMA_ALIGNMENT
from flashhopper.reference import attention

BF16, I32 = torch.bfloat16, torch.int32


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> PosedCard:
    return pose(monkeypatch)


def dense(seqlen: int = 6, heads: int = 4, head_dim: int = 16, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(2, seqlen, heads, head_dim).to(dtype)


def cu(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=I32)


# Three tensors: calls with one tensor twice are not recognised, but looked up each time.
GOOD, GOOD_K, GOOD_V = dense(), dense(), dense()
BAD_SECOND_CALLS: list[tuple[str, type[Exception], Callable[[], Any]]] = [
    ("causal must be a bool, got int", TypeError, lambda: flash_attn_func(GOOD, GOOD_K, GOOD_V, 0.25, 1)),  # type: ignore[arg-type]
    ("softmax_scale must be a float", TypeError, lambda: flash_attn_func(GOOD, GOOD_K, GOOD_V, True, True)),
    ("softmax_scale is nan", ValueError, lambda: flash_attn_func(GOOD, GOOD_K, GOOD_V, float("nan"), True)),
    ("sm_margin must be an int", TypeError, lambda: good(sm_margin=False)),
    ("sm_margin is -1", ValueError, lambda: good(sm_margin=-1)),
    ("deterministic must be a bool", TypeError, lambda: good(deterministic=0)),
    ("num_splits must be int, got bool", TypeError, lambda: good(num_splits=True)),
    ("softcap must be float or int", TypeError, lambda: good(softcap=False)),
    ("attention_chunk must be int", TypeError, lambda: good(attention_chunk=0.0)),
    ("window_size must be tuple", TypeError, lambda: good(window_size=[-1, -1])),
    ("window_size must be two ints", TypeError, lambda: good(window_size=(-1.0, -1))),
    ("qv is not there yet", NotImplementedError, lambda: good(qv=GOOD)),
    ("q_descale is for", ValueError, lambda: good(q_descale=torch.ones(1))),
    ("fp8_accumulate is 'fast'", ValueError, lambda: good(fp8_accumulate="fast")),
    ("k has dtype torch.float16", TypeError, lambda: good(k=GOOD.half())),
    ("v has dtype torch.float32", TypeError, lambda: good(v=GOOD.float())),
    ("q has dtype torch.int16", TypeError, lambda: good(q=GOOD.to(torch.int16))),
    ("q must be a torch.Tensor, got list", TypeError, lambda: good(q=GOOD.tolist())),
    ("v must be a torch.Tensor, got ndarray", TypeError, lambda: good(v=GOOD.float().numpy())),
    ("v has seqlen 5, k has 6", ValueError, lambda: good(v=GOOD[:, :5])),
    ("k has batch size 1", ValueError, lambda: good(k=GOOD[:1])),
    ("q's must be a multiple of k's", ValueError, lambda: good(k=GOOD[:, :, :3], v=GOOD[:, :, :3])),
    ("k has head_dim 8", ValueError, lambda: good(k=GOOD[..., :8])),
    ("v has strides", ValueError, lambda: good(v=dense().transpose(2, 3).contiguous().transpose(2, 3))),
    ("k is on device meta", ValueError, lambda: good(k=GOOD.to("meta"))),
    ("learnable_sink has shape", ValueError, lambda: good(learnable_sink=torch.zeros(3))),
    ("learnable_sink has dtype torch.int32", TypeError, lambda: good(learnable_sink=torch.zeros(4, dtype=I32))),
    ("learnable_sink is on meta", ValueError, lambda: good(learnable_sink=torch.zeros(4, device="meta"))),
]


def good(q: Any = GOOD, k: Any = GOOD_K, v: Any = GOOD_V, **options: Any) -> torch.Tensor:
    out: torch.Tensor = flash_attn_func(q, k, v, **{"softmax_scale": 0.25, "causal": True, **options})
    return out


@pytest.mark.parametrize("message, error, call", BAD_SECOND_CALLS, ids=[name for name, _, _ in BAD_SECOND_CALLS])
@pytest.mark.parametrize("posed", [False, True])
def test_a_bad_call_is_refused_after_a_good_one(
    message: str, error: type[Exception], call: Callable[[], Any], posed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: what was refused is not known the second time either."""
    card = pose(monkeypatch) if posed else None
    for _ in range(4):  # planned, looked up twice, recognised
        good()
    good(learnable_sink=torch.zeros(4))
    launches = len(card.launches) if card is not None else 0
    for _ in range(2):
        with pytest.raises(error, match=message):
            call()
    good()
    if card is not None:
        assert len(card.launches) == launches + 1


def test_the_gradient_of_slopes_is_refused_after_a_call_without() -> None:
    q, slopes = dense(), torch.rand(4)
    with torch.no_grad():
        flash_attn_func(q, q, q, alibi_slopes=slopes)
        flash_attn_func(q, q, q, alibi_slopes=slopes.requires_grad_())
    with pytest.raises(NotImplementedError, match="alibi_slopes requires a gradient"):
        flash_attn_func(q, q, q, alibi_slopes=slopes)


def test_the_second_call_has_its_own_tensors(card: PosedCard) -> None:
    plans = []
    for _ in range(3):
        q, k, v = dense(7), dense(5), dense(5)
        out, lse = flash_attn_func(q, k, v, return_lse=True)
        spec, (*inputs, given_out, given_lse, _, _, _, features) = card.launches[-1]
        assert isinstance(spec, KernelSpec)
        assert all(x is y for x, y in zip((*inputs, given_out, given_lse), (q, k, v, out, lse), strict=True))
        assert (out.shape, lse.shape, lse.dtype, features) == (q.shape, (2, 4, 7), torch.float32, None)
        plans.append(dict(launch._plans))
    assert len(plans[0]) == 1
    assert plans[0] == plans[2]
    assert len(card.specs) == 1


def test_an_address_is_looked_at_in_every_call(card: PosedCard) -> None:
    storage = torch.randn(2 * 6 * 4 * 16 + 1).to(BF16)
    for offset in (0, 0, 0, 0, 1, 0):
        q = storage[offset : offset + 768].view(2, 6, 4, 16)
        flash_attn_func(q, GOOD_K, GOOD_V)
        sent = card.launches[-1][1][0]
        assert sent.data_ptr() % TMA_ALIGNMENT == 0
        assert torch.equal(sent, q)
        assert (sent is q) == (offset == 0)
    assert len(card.specs) == 1


def test_strides_are_looked_at_in_every_call(card: PosedCard) -> None:
    odd = torch.randn(2, 6, 4, 17).to(BF16)[..., :16]
    for q in (GOOD, GOOD, GOOD, GOOD, odd, GOOD, odd, odd, odd, odd):
        flash_attn_func(q, GOOD_K, GOOD_V)
        sent = card.launches[-1][1][0]
        assert [stride % 8 for stride in sent.stride()[:3]] == [0, 0, 0]
        assert torch.equal(sent, q)
    assert len(launch._plans) == 2


def test_the_current_device_is_looked_at_in_every_call(card: PosedCard) -> None:
    for _ in range(4):
        good()
    card.current = 3
    good()
    assert card.switches == [None]
    assert card.current == 3
    assert len(card.launches) == 5


def test_gradients_are_asked_for_call_by_call(card: PosedCard) -> None:
    """Grad mode, and requires_grad of each input, are no facts of a plan."""
    sink = torch.zeros(4)
    needed = dense().requires_grad_()
    for _ in range(2):
        for q, k, v, s in ((needed, GOOD_K, GOOD_V, None), (GOOD, needed, GOOD_V, sink), (GOOD, GOOD_K, needed, None)):
            for _ in range(4):
                assert good(q, k, v, learnable_sink=s).requires_grad
            with torch.no_grad():
                assert not good(q, k, v, learnable_sink=s).requires_grad
            with torch.inference_mode():
                assert not good(q, k, v, learnable_sink=s).requires_grad
        assert not good().requires_grad
        assert good(learnable_sink=torch.zeros(4).requires_grad_()).requires_grad
        assert not good(learnable_sink=sink).requires_grad
    assert len(launch._plans) == 2


def test_options_change_what_the_kernel_gets(card: PosedCard) -> None:
    seen = []
    for options in ({}, {"sm_margin": 2}, {"softmax_scale": 0.5}, {"softmax_scale": 1}, {"window_size": (2, 0)}, {}):
        good(**options)
        _, arguments = card.launches[-1]
        seen.append(arguments[-3:])
    log2_e = launch.LOG2_E
    assert [ctas for _, ctas, _ in seen] == [132, 130, 132, 132, 132, 132]
    assert [scale for scale, _, _ in seen] == [x * log2_e for x in (0.25, 0.25, 0.5, 1.0, 0.25, 0.25)]
    assert [features is None for _, _, features in seen] == [True, True, True, True, False, True]


def packed(total: int, heads: int = 4) -> torch.Tensor:
    return torch.randn(total, heads, 16).to(BF16)


def test_new_lengths_are_no_new_plan(card: PosedCard) -> None:
    """Neither totals, nor the number of sequences, nor bounds within a class of lengths."""
    sizes = [(9, (0, 4, 9), 5), (700, (0, 100, 300, 700), 400), (4096, (0, 500, 4096), 512), (10, (0, 1, 2, 3, 10), 7)]
    for total, ends, longest in sizes:
        q, k, lengths = packed(total), packed(total + 3, 2), cu(*ends)
        out, lse = flash_attn_varlen_func(q, k, k, lengths, lengths, longest, longest, causal=True, return_lse=True)
        (before, schedule), (spec, arguments) = card.launches[-2:]
        assert isinstance(before, ScheduleSpec)
        assert isinstance(spec, KernelSpec)
        assert (out.shape, lse.shape) == ((total, 4, 16), (4, total))
        assert (out.is_contiguous(), lse.is_contiguous()) == (True, True)
        assert schedule[0] is lengths
        assert schedule[-3] == total
        batch = len(ends) - 1
        records, first_tiles = arguments[-1][4]
        assert (records.shape, first_tiles.shape) == ((2 * batch * launch_schedule.RECORD_WORDS,), (2 * batch + 1,))
        assert arguments[0].shape == (1, *q.shape)
        assert arguments[3].data_ptr() == out.data_ptr()
    assert len(launch._plans) == 1
    assert len(card.specs) == 2


def test_lengths_between_which_something_differs_are_another_plan(card: PosedCard) -> None:
    q, lengths = packed(9), cu(0, 4, 9)
    of_keys = {row.max_seqlen_k for row in TILE_TABLE if row.max_seqlen_k is not None}
    of_queries = {row.max_seqlen_q for row in BACKWARD_TABLE if row.max_seqlen_q is not None}
    limits = sorted(of_keys | of_queries)
    assert len(limits) > 1
    for longest in (5, *limits, *(limit + 1 for limit in limits), 10**6):
        flash_attn_varlen_func(q, q, q, lengths, lengths, longest, longest)
    assert len(launch._plans) == len(limits) + 1
    with pytest.raises(ValueError, match="max_seqlen_k is -1"):
        flash_attn_varlen_func(q, q, q, lengths, lengths, 5, -1)
    with pytest.raises(TypeError, match="max_seqlen_q must be an int, got bool"):
        flash_attn_varlen_func(q, q, q, lengths, lengths, True, 5)
    with pytest.raises(ValueError, match="v has total length 8, k has 9"):
        flash_attn_varlen_func(q, q, q[:8], lengths, lengths, 5, 5)
    with pytest.raises(ValueError, match=r"cu_seqlens_k has shape \(4,\)"):
        flash_attn_varlen_func(q, q, q, lengths, cu(0, 4, 5, 9), 5, 5)
    with pytest.raises(TypeError, match=r"cu_seqlens_q has dtype torch.int64"):
        flash_attn_varlen_func(q, q, q, lengths.long(), lengths, 5, 5)
    with pytest.raises(ValueError, match="seqused_q has strides"):
        flash_attn_varlen_func(q, q, q, lengths, lengths, 5, 5, seqused_q=cu(1, 2, 3, 4)[::2])


def test_a_window_that_hides_nothing_depends_on_the_lengths(card: PosedCard) -> None:
    """The kernel without windows for short sequences must not serve long ones."""
    q, lengths = packed(900), cu(0, 450, 900)
    found = []
    for longest in (128, 129, 128, 450):
        flash_attn_varlen_func(q, q, q, lengths, lengths, longest, longest, window_size=(127, 0))
        spec, arguments = card.launches[-1]
        assert isinstance(spec, KernelSpec)
        found.append((spec.features.window, spec.causal, arguments[-1][0]))
    without, window = (False, True, None), (True, False, (127, 0, 1))
    assert found == [without, window, without, window]


def gradients_of(inputs: list[torch.Tensor], out: torch.Tensor, card: PosedCard) -> list[tuple[Any, tuple[Any, ...]]]:
    del card.launches[:]
    dout = torch.randn(out.shape).to(BF16)
    gradients = torch.autograd.grad(out, inputs, dout)
    for x, gradient in zip(inputs, gradients, strict=True):
        assert (gradient.shape, gradient.dtype, gradient.is_contiguous()) == (x.shape, x.dtype, True)
    return card.launches


def test_the_backward_of_new_lengths_is_no_new_plan(card: PosedCard) -> None:
    for total, ends in ((9, (0, 4, 9)), (700, (0, 100, 300, 700)), (10, (0, 10))):
        q, k = packed(total).requires_grad_(), packed(total + 1, 2).requires_grad_()
        v, lengths = packed(total + 1, 2).requires_grad_(), cu(*ends)
        out = flash_attn_varlen_func(q, k, v, lengths, lengths, 500, 500, causal=True)
        by_keys, by_queries, before, main, after = gradients_of([q, k, v], out, card)
        assert [type(x[0]) for x in (before, main, after)] == [PreprocessSpec, BackwardSpec, PostprocessSpec]
        assert (by_keys[1][-3], by_queries[1][-3]) == (total + 1, total)
        rows = launch_backward.ragged_rows(total, len(ends) - 1)
        (inputs, lse_log2, delta, accumulator, outputs, counter, *_) = main[1]
        assert lse_log2.shape == delta.shape == (1, 4, rows)
        assert accumulator.shape[:2] == (4, rows // 64)
        assert [x.shape for x in (*inputs, *outputs)] == [(1, *x.shape) for x in (q, k, v, out, k, v)]
        assert counter.sum() == 0
    assert len(launch_backward._plans) == 2  # of one sequence, the stride of seqused does not matter
    assert len(launch._plans) == 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_second_backward_has_its_own_tensors(card: PosedCard, deterministic: bool) -> None:
    for _ in range(2):
        q, k, v = (dense().requires_grad_() for _ in range(3))
        before, main, after = gradients_of([q, k, v], good(q, k, v, deterministic=deterministic), card)
        inputs, _, _, accumulator, _, counter, semaphores, *_ = main[1]
        assert [x.data_ptr() for x in inputs[:3]] == [x.data_ptr() for x in (q, k, v)]
        workspace = before[1][-3]
        assert counter is workspace
        assert before[1][-4].data_ptr() == accumulator.data_ptr() == after[1][0].data_ptr()
        assert (semaphores is None) != deterministic
        if deterministic:
            assert workspace.numel() == 1 + semaphores.numel()
            assert semaphores.data_ptr() == workspace.data_ptr() + 4
            assert semaphores.is_contiguous()
    assert len(launch_backward._plans) == 1


def test_what_autograd_sends_back_is_looked_at_in_every_backward(card: PosedCard) -> None:
    q, k, v = (dense().requires_grad_() for _ in range(3))
    out, lse = good(q, k, v, return_lse=True)
    saved = [x.detach() for x in (q, k, v, out, lse)]
    options = launch_backward.AttentionOptions(0.25, True)
    odd = torch.randn(2, 6, 4, 17).to(BF16)[..., :16]
    for dout in (torch.ones_like(out), odd, torch.ones(1).to(BF16).expand(out.shape), torch.ones_like(out)):
        launch_backward.backward(dout, *saved, options)
        sent = card.launches[-2][1][0][3]
        assert torch.equal(sent, dout)
        assert [stride % 8 for stride in sent.stride()] == [0, 0, 0, 1]
    for bad in (torch.ones(2, 6, 4, 8).to(BF16), torch.ones(2, 5, 4, 16).to(BF16), torch.ones_like(out).half()):
        for _ in range(2):
            with pytest.raises(ValueError, match="dout is"):
                launch_backward.backward(bad, *saved, options)
    launch_backward.backward(torch.ones_like(out), *saved, options, torch.ones_like(lse))
    assert card.launches[-3][1][3] is not None


def test_plans_are_forgotten_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_key, "MAX_PLANS", 3)
    monkeypatch.setattr(launch, "_plans", {})
    for _ in range(2):
        for seqlen in range(1, 8):
            x = torch.randn(1, seqlen, 2, 8)
            expected, _ = attention(x, x, x, softmax_scale=8**-0.5, causal=False)
            assert torch.equal(flash_attn_func(x, x, x), expected)
            assert 0 < len(launch._plans) <= 3
