"""What FP8's kernels are called with, on a machine without a GPU: kernels that record their arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from posed_card import EMPTY_ON_CPU
from ragged import Batch, Side

from flashhopper import current, flash_attn_fp8_func, fp8, launch, launch_fp8, launch_schedule, quantize_fp8
from flashhopper.config import Features, KernelSpec, QuantizeRowsSpec, QuantizeValuesSpec, ScheduleSpec, ValueScalesSpec
from flashhopper.fp8 import Descales, checked_inputs
from flashhopper.kernels.features import FeatureArgs
from flashhopper.options import AttentionOptions
from flashhopper.problem import NO_SOFTMAX_TENSORS, RaggedTensors, SoftmaxTensors
from flashhopper.reference_fp8 import E4M3, E5M2, sign_bits
from flashhopper.reference_fp8_varlen import Sequences

BF16 = torch.bfloat16
Calls = list[tuple[Any, tuple[Any, ...]]]
Checks = list[tuple[Any, ...]]
BATCH = Batch(Side([70, 0, 40], [70, 0, 30], 3), Side([130, 20, 200]))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    found: Calls = []
    for module in (launch_schedule, launch_fp8):
        monkeypatch.setattr(module, "get_kernel", lambda spec: lambda *arguments: found.append((spec, arguments)))
    monkeypatch.setattr(launch_fp8, "hopper_multiprocessors", lambda device: 132)
    monkeypatch.setattr(current, "empty_strided", EMPTY_ON_CPU)
    monkeypatch.setattr(current, "device", lambda: None)
    monkeypatch.setattr(launch_fp8, "scheduler_workspace", lambda index: torch.zeros(4, dtype=torch.int32))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    caches = launch_fp8._plan, launch_fp8._rows_plan, launch_fp8._values_plan
    for cache in caches:
        cache.cache_clear()
    yield found
    for cache in caches:
        cache.cache_clear()


def shapes(arguments: tuple[Any, ...]) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in arguments if isinstance(x, torch.Tensor)]


def launched(tensors: Any, options: AttentionOptions, ragged: RaggedTensors | None = None) -> tuple[torch.Tensor, ...]:
    inputs = checked_inputs(tuple(tensors), options, Descales(), SoftmaxTensors(), ragged)
    inputs.problem.validate()
    return launch_fp8.forward(inputs.operands(), inputs.problem, False, ragged=ragged)


def test_sign_words_have_the_even_channels_in_the_lower_half() -> None:
    words, bits = launch_fp8._sign_words(3, 192), sign_bits(3, 192)
    for channel in range(256):
        place = channel % 32 // 2 + 16 * (channel % 2)
        assert words[channel // 32] >> place & 1 == bits >> channel & 1
    assert min(words) < 0
    assert max(map(abs, words)) <= 2**31
    assert launch_fp8._sign_words(None, 64) == (0,) * 8


def test_a_dense_call_with_a_window(calls: Calls) -> None:
    q, k, v = (torch.randn(2, s, h, 64).to(BF16) for s, h in ((100, 4), (150, 2), (150, 2)))
    out, lse = launched(quantize_fp8(q, k, v[..., :48]), AttentionOptions(window_size=(9, -1)))
    ((spec, arguments),) = calls
    assert isinstance(spec, KernelSpec)
    assert (spec.features, spec.causal, spec.config.prefetch_scores) == (Features(window=True), False, False)
    assert shapes(arguments) == [
        (2, 100, 4, 64),
        (2, 150, 2, 64),
        (2, 2, 48, 256),
        (2, 100, 4, 48),
        (2, 4, 100),
        (4,),
        (2, 4, 2),
        (2, 2, 2),
        (2, 2, 64),
        (2, 2, 64),
    ]
    assert arguments[-1] == FeatureArgs(window=(9, launch.UNBOUNDED, 1))
    assert arguments[-5:-3] == (6, 7)
    assert (out.shape, lse.shape) == ((2, 100, 4, 48), (2, 4, 100))


def test_a_ragged_call(calls: Calls) -> None:
    q, k, v = (torch.randn(rows, h, 64).to(BF16) for rows, h in ((113, 4), (350, 2), (350, 2)))
    ragged = RaggedTensors(**BATCH.arguments())
    quantised = quantize_fp8(q, k, v, **dict(zip(RaggedTensors._fields[2:], ragged[2:], strict=True)))
    out, lse = launched(quantised, AttentionOptions(causal=True), ragged)
    (schedule, of_schedule), (spec, arguments) = calls
    assert schedule == ScheduleSpec(True, False)
    assert of_schedule[6:] == (113, spec.config.tile_m, 4)
    assert (spec.features, spec.causal) == (Features(ragged=True), True)
    assert shapes(arguments) == [
        (1, 113, 4, 64),
        (1, 350, 2, 64),
        (1, 2, 64, (350 // 128 + 3) * 128),
        (1, 113, 4, 64),
        (1, 4, 113),
        (4,),
        (1, 4, 113 // 64 + 3),
        (1, 2, 350 // 128 + 3),
        (3, 2, 64),
        (3, 2, 64),
    ]
    features = FeatureArgs(*arguments[-1])
    assert len(arguments[-1]) == len(FeatureArgs._fields)
    assert features.sequences is not None
    assert features.sequences[0] is of_schedule[4]
    assert features == FeatureArgs(sequences=features.sequences)
    assert (out.shape, lse.shape) == ((113, 4, 64), (4, 113))
    assert arguments[3].data_ptr() == out.data_ptr()


def test_raw_tensors_of_a_ragged_batch_have_a_block_per_sequence(calls: Calls) -> None:
    q, k, v = (torch.randn(rows, h, 64).to(E4M3) for rows, h in ((113, 4), (350, 2), (350, 2)))
    launched((q, k, v), AttentionOptions(), RaggedTensors(**BATCH.arguments()))
    _, arguments = calls[-1]
    assert shapes(arguments)[6:] == [(1, 4, 3), (1, 2, 3), (3, 2, 64), (3, 2, 64)]
    assert arguments[-5:-3] == (30, 30)


@pytest.mark.parametrize("used", [None, torch.tensor([5, 0, 2], dtype=torch.int32)], ids=["all", "used"])
def test_the_quantisers(used: torch.Tensor | None, calls: Calls) -> None:
    x = torch.randn(350, 2, 64).to(BF16)
    sequences = Sequences("k", BATCH.k.cu_seqlens(), used)
    expected = torch.tensor([130, 20, 200], dtype=torch.int32) if used is None else used
    data, scale = launch_fp8.quantize_rows(x, 128, "amax", 3, sequences)
    values, value_scale, mean = launch_fp8.quantize_values(x, "amax", True, sequences)
    slots = launch_fp8.transpose_values(x.to(E4M3), sequences)
    assert (data.shape, scale.shape) == ((350, 2, 64), (2, 5))
    assert (values.shape, value_scale.shape, mean.shape, slots.shape) == (
        (2, 64, 640),
        (3, 2, 64),
        (3, 2, 64),
        (2, 64, 640),
    )
    assert [type(spec) for spec, _ in calls][::2] == [QuantizeRowsSpec, ValueScalesSpec, QuantizeValuesSpec]
    for spec, arguments in calls:
        assert spec.ragged
        cu_seqlens, lengths = arguments[-1]
        assert cu_seqlens is sequences.cu_seqlens
        assert torch.equal(lengths, expected)
    assert shapes(calls[1][1]) == [(1, 350, 2, 64), (1, 2, 350 // 512 + 3, 3, 64)]


def test_e5m2(calls: Calls) -> None:
    x = torch.randn(1, 200, 2, 64).to(BF16)
    launched(quantize_fp8(x, x, x, dtype=E5M2), AttentionOptions())
    ((spec, arguments),) = calls
    assert (spec.dtype, spec.out_dtype) == ("float8_e5m2", "bfloat16")
    assert [tensor.dtype for tensor in arguments[:4]] == [E5M2, E5M2, E5M2, BF16]
    launched(quantize_fp8(x, x, x), AttentionOptions())
    assert calls[-1][0] == replace(spec, dtype="float8_e4m3fn")
    calls.clear()
    data, _ = launch_fp8.quantize_rows(x, 64, "amax", None, dtype=E5M2)
    values, _, _ = launch_fp8.quantize_values(x, "amax", True, dtype=E5M2)
    assert data.dtype == values.dtype == E5M2
    assert [getattr(spec, "out_dtype", None) for spec, _ in calls] == [
        "float8_e5m2",
        None,  # statistics are those of 16-bit values
        "float8_e5m2",
        "float8_e5m2",
    ]
    assert (calls[0][1][1].dtype, calls[3][1][3].dtype) == (E5M2, E5M2)


def test_the_kernel_that_transposes_takes_the_bytes_of_either_type(calls: Calls) -> None:
    data = torch.randn(1, 200, 2, 64).to(E5M2)
    assert launch_fp8.transpose_values(data).dtype == E5M2
    ((spec, arguments),) = calls
    assert spec == QuantizeValuesSpec("float8_e4m3fn", 64)
    assert arguments[0].dtype == arguments[3].dtype == E4M3
    assert arguments[0].data_ptr() == data.data_ptr()


@pytest.mark.parametrize("shape, batch", [((0, 2, 64), 2), ((9, 2, 64), 0)])
def test_nothing_to_quantise(shape: tuple[int, ...], batch: int, calls: Calls) -> None:
    x, sequences = torch.randn(shape).to(BF16), Sequences("k", torch.zeros(batch + 1, dtype=torch.int32), None)
    _, scale = launch_fp8.quantize_rows(x, 64, "power_of_two", None, sequences)
    values, value_scale, mean = launch_fp8.quantize_values(x, "power_of_two", True, sequences)
    assert torch.equal(scale, torch.ones(2, batch))
    assert torch.equal(values.view(torch.uint8), torch.zeros(2, 64, 128 * batch, dtype=torch.uint8))
    assert torch.equal(value_scale, torch.ones(batch, 2, 64))
    assert torch.equal(mean, torch.zeros(batch, 2, 64))
    assert calls == []


@pytest.mark.parametrize("centered, keys", [(True, 2048), (False, 1024)])
@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_centred_values_are_flushed_less_often(calls: Calls, head_dim: int, centered: bool, keys: int) -> None:
    """And not at all where there are no more keys than a flush is for."""
    for more in (0, 1):
        x = torch.randn(1, keys + more, 1, head_dim).to(BF16)
        launched(quantize_fp8(x, x, x, center_v=centered), AttentionOptions())
        config = calls[-1][0].config
        assert config.flush_blocks * config.tile_n == keys * more


def test_raw_values_are_taken_as_not_centred(calls: Calls) -> None:
    x = torch.randn(1, 1025, 1, 256).to(E4M3)
    launched((x, x, x), AttentionOptions())
    assert calls[-1][0].config.flush_blocks == 16


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    """The arguments of every check. What was checked claims to be on a card."""
    found: Checks = []

    class OnCard(NamedTuple):
        problem: Any
        operands: Any

    def check(*arguments: Any) -> OnCard:
        found.append(arguments)
        inputs = checked_inputs(*arguments)
        facts = (x._replace(device=torch.device("cuda")) for x in inputs.problem[:3])
        return OnCard(inputs.problem._replace(**dict(zip("qkv", facts, strict=True))), inputs.operands)

    monkeypatch.setattr(fp8, "checked_inputs", check)
    monkeypatch.setattr(fp8, "_known", {})
    return found


def test_calls_that_are_alike_are_checked_once(calls: Calls, checks: Checks) -> None:
    def operands(seqlen: int = 150, center_v: bool = True, seed: int = 0) -> Any:
        q, k, v = (torch.randn(2, seqlen, 2, 64).to(BF16) for _ in "qkv")
        return quantize_fp8(q, k, v, center_v=center_v, seed=seed)

    def call(quantised: Any, options: AttentionOptions, accumulate: Any) -> None:
        fp8.attention(*quantised, options, fp8.NO_DESCALES, accumulate, NO_SOFTMAX_TENSORS)

    options, other = AttentionOptions(causal=True), AttentionOptions()
    for step, (quantised, chosen, accumulate, num_checks) in enumerate(
        [
            (operands(), options, "two_level", 1),
            (operands(), options, "two_level", 1),
            (operands(), options, "fast", 2),
            (operands(), other, "two_level", 3),
            (operands(seqlen=151), options, "two_level", 4),
            (operands(center_v=False), options, "two_level", 5),
            (operands(), options, "two_level", 5),
        ]
    ):
        call(quantised, chosen, accumulate)
        assert len(checks) == num_checks
        spec, arguments = calls[step]
        assert spec.causal == chosen.causal
        assert arguments[0].data_ptr() == quantised.q.data.data_ptr()
        assert [x.data_ptr() for x in arguments[6:9]] == [x.scale.data_ptr() for x in quantised]
    for wrong in ("slow", ["two_level"], None):
        with pytest.raises(ValueError, match="fp8_accumulate"):
            call(operands(), options, wrong)
    q, k, v = operands(seed=5).q, *operands()[1:]
    with pytest.raises(ValueError, match="seed 5"):
        call((q, k, v), options, "two_level")


def test_calls_from_16_bits_that_are_alike_are_checked_once(calls: Calls, checks: Checks) -> None:
    q, k, v = (torch.randn(2, 150, 2, 64).to(BF16) for _ in "qkv")
    for x in (q, q.clone().requires_grad_()):
        flash_attn_fp8_func(x, k, v, causal=True)
        assert len(checks) == 1
    flash_attn_fp8_func(q, k, v)
    assert len(checks) == 2
    assert [spec.causal for spec, _ in calls] == [True, True, False]


@pytest.mark.parametrize(
    "shape, strides, dtype, unit",
    [
        ((1, 1, 2, 64), (136, 128, 64, 1), E4M3, 16),
        ((1, 1, 1, 64), (132, 132, 64, 1), BF16, 8),
        ((1, 1, 2, 64), (128, 4, 64, 1), BF16, 8),
    ],
)
def test_strides_of_extents_of_1_become_what_tma_takes(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, unit: int
) -> None:
    x = torch.randn(1000).to(dtype).as_strided(shape, strides)
    assert x.is_contiguous()
    view = launch_fp8._loadable(x)
    assert all(stride % unit == 0 for stride in view.stride()[:-1])
    assert view.data_ptr() == x.data_ptr()
    assert torch.equal(view.float(), x.float())
