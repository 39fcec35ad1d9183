"""FP8 attention on CPU tensors, its gradients and errors, and the accuracy of the kernel by its emulator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tolerance import assert_lse_close, root_mean_square

from flashhopper import flash_attn_fp8_func, flash_attn_func, quantize_fp8
from flashhopper.config import KEYS_PER_SCALE, QUERIES_PER_SCALE, ForwardConfig
from flashhopper.reference import attention, visible_keys
from flashhopper.reference_fp8 import E4M3, E5M2, WHOLE_SEQUENCE, Operands, emulate_fp8_forward, transpose_values

BF16 = torch.bfloat16
TWO_LEVEL = ForwardConfig(128, 128, two_level_columns=128)
FAST = ForwardConfig(128, 128)
ROUNDING = {E4M3: 1.0, E5M2: 2.0}  # a bit less of mantissa
each_type = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def inputs(seqlen_q: int, seqlen_k: int, heads: int = 1, heads_k: int = 1, dim: int = 64, dim_v: int = 64) -> list[Any]:
    shapes = (1, seqlen_q, heads, dim), (1, seqlen_k, heads_k, dim), (1, seqlen_k, heads_k, dim_v)
    return [torch.randn(shape).to(BF16) for shape in shapes]


def operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **recipe: Any) -> Operands:
    q8, k8, v8 = quantize_fp8(q, k, v, **recipe)
    mean = torch.zeros_like(v8.scale) if v8.mean is None else v8.mean
    scales = q8.scale, k8.scale, v8.scale, mean
    return Operands(q8.data, k8.data, v8.data, *scales, QUERIES_PER_SCALE, KEYS_PER_SCALE, k.shape[1])


@each_type
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hadamard", [False, True])
def test_quantised_tensors_give_attention_on_what_they_stand_for(
    hadamard: bool, causal: bool, fp8: torch.dtype
) -> None:
    q, k, v = inputs(70, 200, 4, 2, 96, 48)
    recipe = {"hadamard": hadamard, "seed": 2, "dtype": fp8}
    quantised = quantize_fp8(q, k, v, **recipe)
    out, lse = flash_attn_func(*quantised, causal=causal, return_lse=True)
    ref, ref_lse = attention(*(x.dequantize() for x in quantised), softmax_scale=96**-0.5, causal=causal)
    assert (out.dtype, out.shape, lse.shape) == (BF16, (1, 70, 4, 48), (1, 4, 70))
    torch.testing.assert_close(out.float(), ref, atol=4e-3, rtol=2**-8)
    assert_lse_close(lse, ref_lse)
    exact = attention(q.double(), k.double(), v.double(), softmax_scale=96**-0.5, causal=causal)[0]
    assert root_mean_square(out - exact) < ROUNDING[fp8] * 0.04 * root_mean_square(exact) + 4e-3
    same = flash_attn_fp8_func(q, k, v, causal=causal, return_lse=True, **recipe)
    assert torch.equal(same[0], out)
    assert torch.equal(same[1], lse)


@each_type
@pytest.mark.parametrize("per_head", [False, True])
def test_raw_tensors_with_descales(per_head: bool, fp8: torch.dtype) -> None:
    q, k, v = (x.to(fp8) for x in inputs(33, 65, 4, 2))
    q, k, v = (x.expand(2, *x.shape[1:]) for x in (q, k, v))
    factors = [0.5 + torch.rand(2, 2) if per_head else 0.5 + torch.rand(1) for _ in range(3)]
    out = flash_attn_func(q, k, v, 1.0, q_descale=factors[0], k_descale=factors[1], v_descale=factors[2])
    by_head = [factor.expand(2, 2) if per_head else factor.expand(4).view(2, 2) for factor in factors]
    scaled = [
        x.float() * factor.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
        for x, factor in zip((q, k, v), by_head, strict=True)
    ]
    ref, _ = attention(*scaled, softmax_scale=1.0, causal=False)
    assert out.dtype == BF16
    torch.testing.assert_close(out.float(), ref, atol=1e-2, rtol=2**-7)
    ones = flash_attn_func(q, k, v)
    assert torch.equal(ones, flash_attn_func(q, k, v, q_descale=torch.ones(1), v_descale=torch.ones(2, 2)))
    assert not torch.equal(ones, flash_attn_func(q, k, v, k_descale=torch.full((1,), 2.0)))


def test_masks_and_sinks_work_on_cpu_tensors() -> None:
    q, k, v = quantize_fp8(*inputs(40, 40))
    plain = [x.dequantize() for x in (q, k, v)]
    sink = torch.randn(1)
    out = flash_attn_func(q, k, v, window_size=(5, 0), softcap=20.0, learnable_sink=sink)
    ref = flash_attn_func(*plain, window_size=(5, 0), softcap=20.0, learnable_sink=sink)
    torch.testing.assert_close(out.float(), ref, atol=4e-3, rtol=2**-8)


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 3)},
    "chunks": {"attention_chunk": 24, "causal": True},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
def test_the_one_call_form_takes_every_mask(masks: dict[str, Any]) -> None:
    q, k, v = inputs(70, 60, 4, 2)
    out, lse = flash_attn_fp8_func(q, k, v + 1, return_lse=True, **masks)
    same = flash_attn_func(*quantize_fp8(q, k, v + 1), return_lse=True, **masks)
    assert torch.equal(out, same[0])
    assert torch.equal(lse, same[1])
    exact, exact_lse = flash_attn_func(*(x.double() for x in (q, k, v + 1)), return_lse=True, **masks)
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    assert root_mean_square(out - exact) < 0.03 * root_mean_square(exact)


def gradients_by_formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: list[torch.Tensor], hidden: torch.Tensor
) -> list[torch.Tensor]:
    """In fp64, of 16-bit q, k and v with ``results``: out, LSE and their gradients. Key heads serve two query heads."""
    q, k, v, out, grad_out = (x.detach().double().transpose(1, 2) for x in (q, k, v, results[0], results[2]))
    lse, grad_lse = (x.detach().double()[..., None] for x in (results[1], results[3]))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    p = torch.exp(q @ k.mT * scale - lse).masked_fill(hidden, 0.0)
    delta = (out * grad_out).sum(-1, keepdim=True) - grad_lse
    ds = (p * (grad_out @ v.mT - delta)).masked_fill(hidden, 0.0) * scale
    dk, dv = ((x.mT @ y).unflatten(1, (-1, 2)).sum(2) for x, y in ((ds, q), (p, grad_out)))
    return [x.transpose(1, 2) for x in (ds @ k, dk, dv)]


@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
def test_gradients_are_those_of_16_bit_attention_with_out_and_lse_of_fp8(masks: dict[str, Any]) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(50, 80, 4, 2))
    grad_out, grad_lse = torch.randn(1, 50, 4, 64).to(BF16), torch.randn(1, 4, 50)
    found, results = [], []
    for function in (flash_attn_fp8_func, flash_attn_func):
        results.append(function(q, k, v, return_lse=True, **masks))
        found.append(torch.autograd.grad(results[-1], (q, k, v), (grad_out, grad_lse)))
    seen = visible_keys(50, 80, **masks)
    columns = torch.arange(80)
    hidden = (columns < seen.starts[:, None]) | (columns >= seen.ends[:, None])
    expected = gradients_by_formula(q, k, v, [*results[0], grad_out, grad_lse], hidden)
    for fp8, formula, sixteen in zip(found[0], expected, found[1], strict=True):
        torch.testing.assert_close(fp8.double(), formula, atol=1e-5, rtol=2**-8)
        # 2 % where rows see many keys; the error of a row that sees few does not average out.
        assert root_mean_square(fp8.float() - sixteen.float()) < 0.06 * root_mean_square(sixteen.float())


def test_gradients_of_one_output_and_of_some_inputs() -> None:
    q, k, v = inputs(10, 20, 2)
    q.requires_grad_()
    out, lse = flash_attn_fp8_func(q, k, v, return_lse=True)
    (of_lse,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
    hidden = torch.zeros(10, 20, dtype=torch.bool)
    results = [out, lse, torch.zeros_like(out), torch.ones_like(lse)]
    expected = gradients_by_formula(q, k, v, results, hidden)[0]
    torch.testing.assert_close(of_lse.double(), expected, atol=1e-5, rtol=2**-8)
    assert flash_attn_fp8_func(q.detach(), k, v).requires_grad is False


def test_rows_and_sequences_without_keys() -> None:
    q, k, v = inputs(10, 4)
    out, lse = flash_attn_fp8_func(q, k, v + 3, causal=True, return_lse=True)
    assert torch.equal(out[:, :6], torch.zeros_like(out[:, :6]))
    assert (lse[..., :6] == -math.inf).all()
    assert lse[..., 6:].isfinite().all()
    empty = flash_attn_fp8_func(q, k[:, :0], v[:, :0])
    assert torch.equal(empty, torch.zeros_like(q))


def test_values_that_are_not_finite_reach_the_rows_that_see_them() -> None:
    q, k, v = inputs(8, 8)
    k[0, 5, 0, 3] = math.inf
    out = flash_attn_fp8_func(q, k, v, causal=True)
    assert out[0, :5].isfinite().all()
    assert out[0, 5:].isnan().all()


def test_infinities_of_raw_e5m2_tensors_are_infinities() -> None:
    """A score of minus infinity hides its key, one of plus infinity leaves nothing to compare with."""
    q, k, v = (x.to(E5M2) for x in inputs(8, 8))
    k[0, 5, 0, 3] = torch.tensor(math.inf).to(E5M2)
    q[0, :, 0, 3] = torch.tensor([1.0, -1.0] * 4).to(E5M2)
    out = flash_attn_func(q, k, v)
    assert out[0, ::2].isnan().all()
    others = [torch.cat((x[:, :5], x[:, 6:]), 1) for x in (k.float(), v.float())]
    ref, _ = attention(q.float(), *others, softmax_scale=64**-0.5, causal=False)
    torch.testing.assert_close(out[0, 1::2].float(), ref[0, 1::2], atol=1e-2, rtol=2**-7)


def test_e5m2_has_twice_the_error_of_e4m3() -> None:
    q, k, v = inputs(200, 600, 4, 2)
    exact, _ = attention(q.double(), k.double(), v.double(), softmax_scale=0.125, causal=False)
    errors = [root_mean_square(flash_attn_fp8_func(q, k, v, dtype=dtype) - exact) for dtype in (E4M3, E5M2)]
    assert 1.6 * errors[0] < errors[1] < 2.4 * errors[0]


RAW = {name: torch.ones(1, 4, 2, 64).to(E4M3) for name in "qkv"}
QUANTISED = quantize_fp8(*(torch.ones(1, 4, 2, 64, dtype=BF16) for _ in range(3)))._asdict()


@pytest.mark.parametrize(
    "arguments, error, fragment",
    [
        (RAW | {"v": torch.ones(1, 4, 2, 64)}, TypeError, "v has dtype torch.float32; with another of q, k and v in"),
        (
            RAW | {"k": QUANTISED["k"]},
            TypeError,
            "must all come from quantize_fp8 or all be tensors of one dtype, got q torch",
        ),
        (RAW | {"k": RAW["k"].to(E5M2)}, TypeError, "k has dtype torch.float8_e5m2; with another of q, k and v in"),
        (RAW | {"q": RAW["q"].to(E5M2)}, TypeError, "k has dtype torch.float8_e4m3fn; with another of q, k and v in"),
        (
            QUANTISED | {"v": quantize_fp8(v=torch.ones(1, 4, 2, 64, dtype=BF16), dtype=E5M2).v},
            TypeError,
            "v was quantised to torch.float8_e5m2, q to torch.float8_e4m3fn: all must have the same dtype",
        ),
        (RAW | {"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
        (RAW | {"q_descale": 1.0}, TypeError, "q_descale must be a torch.Tensor or None, got float"),
        (RAW | {"q_descale": torch.ones(1, dtype=BF16)}, TypeError, "q_descale has dtype torch.bfloat16"),
        (RAW | {"v_descale": torch.ones(1, 3)}, ValueError, "v_descale has shape (1, 3); accepted are one element"),
        (RAW | {"k_descale": torch.ones(1, device="meta")}, ValueError, "k_descale is on meta, q on cpu"),
        ({name: x[..., :24] for name, x in RAW.items()}, ValueError, "q has head_dim 24; accepted with FP8 are"),
        (RAW | {"fp8_accumulate": "slow"}, ValueError, "fp8_accumulate is 'slow'; accepted are 'two_level' and 'fast'"),
        (RAW | {"causal": 1}, TypeError, "causal must be a bool, got int"),
        (QUANTISED | {"q_descale": torch.ones(1)}, ValueError, "quantised tensors carry their scales"),
        (QUANTISED | {"q": QUANTISED["k"]}, ValueError, "q was quantised as k"),
        (
            QUANTISED | {"q": quantize_fp8(torch.ones(1, 4, 2, 64, dtype=BF16), seed=1).q},
            ValueError,
            "q was transformed with seed 1, k with 0: they must be equal",
        ),
        (
            QUANTISED | {"q": quantize_fp8(torch.ones(1, 4, 2, 64, dtype=torch.float16)).q},
            TypeError,
            "k has dtype torch.bfloat16, q has torch.float16",
        ),
        (QUANTISED | {"q": quantize_fp8(torch.ones(1, 4, 3, 64, dtype=BF16)).q}, ValueError, "q has 3 heads, k has 2"),
        (
            dict.fromkeys("qkv", torch.ones(1, 4, 2, 64)) | {"v_descale": torch.ones(1)},
            ValueError,
            "v_descale is for torch.float8_e4m3fn and torch.float8_e5m2 tensors; q, k and v are not",
        ),
        (
            dict.fromkeys("qkv", torch.ones(1, 4, 2, 64)) | {"fp8_accumulate": "fast"},
            ValueError,
            "fp8_accumulate is 'fast', but q, k and v are not FP8",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], fragment: str) -> None:
    with pytest.raises(error) as raised:
        flash_attn_func(**arguments)
    assert fragment in str(raised.value)


def test_wrong_arguments_of_the_one_call_form() -> None:
    q, k, v = inputs(4, 4)
    with pytest.raises(TypeError, match=r"q has dtype torch\.float32; accepted are torch\.bfloat16"):
        flash_attn_fp8_func(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="fp8_accumulate is None"):
        flash_attn_fp8_func(q, k, v, fp8_accumulate=None)
    with pytest.raises(ValueError, match="k has head_dim 32, q has 64"):
        flash_attn_fp8_func(q, k[..., :32].contiguous(), v)


# The emulator of the kernel's arithmetic.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softmax", ["exact", "lazy"])
@pytest.mark.parametrize("levels", [{}, {"two_level_columns": 64}, {"flush_blocks": 2}])
@pytest.mark.parametrize("tile_n", [64, 128])
@each_type
def test_the_emulator_agrees_with_attention_on_quantised_tensors(
    tile_n: int, levels: dict[str, int], softmax: Any, causal: bool, fp8: torch.dtype
) -> None:
    given = operands(*inputs(200, 400, 2, 1), dtype=fp8)
    config = ForwardConfig(128, tile_n, softmax=softmax, **levels)
    out, lse = emulate_fp8_forward(given, softmax_scale=0.125, causal=causal, config=config)
    ref, ref_lse = attention(*given.dequantized(), softmax_scale=0.125, causal=causal)
    # P has a 3-bit mantissa: 2.6 % of each weight, which average out over the keys.
    assert root_mean_square(out - ref) < 0.03 * root_mean_square(ref)
    assert root_mean_square(out - ref) > 0.002 * root_mean_square(ref)
    assert_lse_close(lse, ref_lse, atol=2e-3)


def test_a_lazy_reference_moves_before_p_saturates() -> None:
    q, k, v = inputs(64, 512)
    k = (k + 4 * torch.linspace(1, 0, 512)[None, :, None, None]).to(BF16)
    given = operands((q.abs() + 1).to(BF16), k, v, hadamard=False)
    lazy = ForwardConfig(128, 128, two_level_columns=64)
    out, lse = emulate_fp8_forward(given, softmax_scale=0.125, causal=False, config=lazy)
    ref, ref_lse = attention(*given.dequantized(), softmax_scale=0.125, causal=False)
    assert (ref_lse.max() - ref_lse.min()) < 200
    assert root_mean_square(out - ref) < 0.05 * root_mean_square(ref)
    assert_lse_close(lse, ref_lse, atol=4e-3)


def outliers(shape: tuple[int, ...]) -> torch.Tensor:
    """N(0, 1) + N(0, 100) · Bernoulli(0.001)."""
    return (torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)).to(BF16)


def per_tensor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Operands:
    """One scale a tensor, amax / 448, nothing else."""
    scales = [x.float().abs().max() / 448 for x in (q, k, v)]
    q8, k8, v8 = ((x.float() / scale).to(E4M3) for x, scale in zip((q, k, v), scales, strict=True))
    dim = v.shape[3]
    q_scale, k_scale, v_scale = (scale.view(1, 1, 1) for scale in scales)
    heads = v.shape[2]
    q_scale, k_scale = (scale.expand(1, heads, 1) for scale in (q_scale, k_scale))
    v_scale = v_scale.expand(1, heads, dim)
    whole = WHOLE_SEQUENCE
    return Operands(
        q8, k8, transpose_values(v8), q_scale, k_scale, v_scale, torch.zeros(1, heads, dim), whole, whole, k.shape[1]
    )


def test_outliers_cost_less_than_with_one_scale_a_tensor() -> None:
    """4k keys at head_dim 128. Half the error is the bar, which tests/gpu holds: here the rows are so few that the rare
    outliers of q move the ratio by a tenth."""
    errors: dict[str, list[float]] = {"ours": [], "per tensor": []}
    for _ in range(8):
        q, k, v = outliers((1, 64, 8, 128)), outliers((1, 4096, 8, 128)), outliers((1, 4096, 8, 128))
        ref, _ = attention(q.double(), k.double(), v.double(), softmax_scale=128**-0.5, causal=False)
        for name, given in (("ours", operands(q, k, v)), ("per tensor", per_tensor(q, k, v))):
            out, _ = emulate_fp8_forward(given, softmax_scale=128**-0.5, causal=False, config=TWO_LEVEL)
            errors[name].append(root_mean_square(out - ref))
    ours, theirs = (sum(values) / len(values) for values in errors.values())
    print(f"RMSE {ours:.2e}, per tensor {theirs:.2e}")
    assert ours <= 0.7 * theirs


def test_long_contexts_lose_nothing() -> None:
    """Values with a mean of 1: the error at 32k keys is at most 1.5 times that at 4k, whose weights are larger."""
    errors = {}
    for keys in (4096, 32768):
        q, k, v = inputs(64, keys, dim=64)
        v = v + 1
        ref, _ = attention(q.double(), k.double(), v.double(), softmax_scale=0.125, causal=False)
        flushed = ForwardConfig(128, 128, flush_blocks=8)
        cases = {"two-level": (TWO_LEVEL, True), "flushed": (flushed, True), "not centred": (FAST, False)}
        cases["flushed, not centred"] = (flushed, False)
        cases["flushed every 2048 keys"] = (ForwardConfig(128, 64, flush_blocks=32), True)  # as at head_dim 256
        for name, (config, center) in cases.items():
            given = operands(q, k, v, center_v=center)
            out, _ = emulate_fp8_forward(given, softmax_scale=0.125, causal=False, config=config)
            errors[name, keys] = root_mean_square(out - ref)
    print(errors)
    assert errors["two-level", 32768] <= 1.5 * errors["two-level", 4096]
    for name in ("flushed", "flushed every 2048 keys"):
        assert errors[name, 32768] <= 1.5 * errors["two-level", 4096], name
    assert errors["flushed, not centred", 32768] < errors["not centred", 32768] / 4
    assert errors["not centred", 32768] > 20 * errors["two-level", 32768]  # what the accumulator of 14 bits drops
