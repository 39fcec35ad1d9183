"""PyTorch's own attention functions on our implementation: through the dispatcher, on CPU tensors."""

from __future__ import annotations

import functools
import inspect
import math
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashhopper.integrations import torch_sdpa
from flashhopper.reference import attention

aten = torch.ops.aten
_DENSE = "query key value dropout_p is_causal return_debug_mask * scale"
_SDPA_BACKWARD = (
    "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
    "philox_offset * scale"
)
_FORWARD = (
    "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask * scale window_size_left "
    "window_size_right seqused_k alibi_slopes"
)
_BACKWARD = (
    "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused * "
    "scale window_size_left window_size_right"
)
_COMMON = {
    "_scaled_dot_product_flash_attention": _DENSE,
    "_scaled_dot_product_flash_attention_backward": _SDPA_BACKWARD,
    "_flash_attention_backward": _BACKWARD,
}
# The arguments of the operators in the releases of PyTorch, from their native_functions.yaml.
SIGNATURES = {
    "2.9, 2.10, 2.11": _COMMON | {"_flash_attention_forward": _FORWARD},
    "2.12": _COMMON
    | {
        "_flash_attention_forward": f"{_FORWARD} block_table num_splits",
        "_flash_attention_forward_no_dropout_inplace": f"out {_FORWARD} block_table num_splits",
    },
}


def installed_signatures() -> dict[str, str]:
    signatures = {}
    for name in torch_sdpa.IMPLEMENTATIONS:
        if hasattr(aten, name):
            arguments = getattr(aten, name).default._schema.arguments
            positional = [x.name for x in arguments if not x.kwarg_only]
            signatures[name] = " ".join([*positional, "*", *(x.name for x in arguments if x.kwarg_only)])
    return signatures


@pytest.mark.parametrize("release", [*SIGNATURES, "installed"])
def test_every_operator_of_a_release_can_be_called(release: str) -> None:
    """By position and by name, as the dispatcher does."""
    signatures = installed_signatures() if release == "installed" else SIGNATURES[release]
    assert len(signatures) >= 4
    for name, signature in signatures.items():
        positional, keywords = (part.split() for part in signature.split("*"))
        implementation = inspect.signature(torch_sdpa.IMPLEMENTATIONS[name])
        bound = implementation.bind(*positional, **{x: x for x in keywords})
        taken = {**bound.arguments, **bound.arguments.get("others", {}), **bound.arguments.get("keywords", {})}
        named = {x for x, value in taken.items() if x == value}
        if name.endswith("inplace"):  # hands its arguments on to the forward
            named |= {*bound.arguments["arguments"]}
        assert {*positional, *keywords} <= named, name


def test_an_argument_of_a_later_release_is_refused_by_name() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="FLASHHOPPER forward unsupported: novelty must be None"):
        torch_sdpa.sdpa_forward(q, q, q, novelty=1)
    page_table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="block_table must be None"):
        torch_sdpa.flash_attention_forward(q, q, q, None, None, 2, 2, 0.0, False, False, block_table=page_table)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with torch_sdpa.on_cpu():
        yield


def inputs(seqlen_q: int = 9, seqlen_k: int = 9, heads_k: int = 4) -> list[torch.Tensor]:
    """``(b, h, s, d)``, views of ``(b, s, h, d)``."""
    sizes = ((seqlen_q, 4), (seqlen_k, heads_k), (seqlen_k, heads_k))
    return [torch.randn(2, *size, 16).requires_grad_() for size in sizes]


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True, "is_causal": True}])
def test_sdpa_forward_and_backward(options: dict[str, Any], contiguous: bool) -> None:
    leaves = inputs(heads_k=2 if "enable_gqa" in options else 4)
    results = []
    for ours in (True, False):
        tensors = [x.contiguous() if contiguous else x for x in heads_first(*leaves)]
        if ours:
            with torch_sdpa.on_cpu():
                out = F.scaled_dot_product_attention(*tensors, **options)
                assert out.grad_fn is not None
                assert out.grad_fn.name() == "ScaledDotProductFlashAttentionBackward0"
                assert out.stride() == torch.empty_like(tensors[0]).stride()
                results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        else:
            out = F.scaled_dot_product_attention(*tensors, **options)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-5)


@pytest.mark.usefixtures("on_cpu")
def test_results_have_the_shapes_that_fake_kernels_and_sharding_rules_expect() -> None:
    q, k, v = heads_first(*inputs(9, 12))
    out, lse, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, mask = aten._scaled_dot_product_flash_attention(q, k, v)
    expected = attention(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=0.25, causal=False)
    torch.testing.assert_close((out.transpose(1, 2), lse), expected)
    assert (cum_seq_q, cum_seq_k, max_q, max_k) == (None, None, 9, 12)
    assert (seed.shape, seed.dtype, offset.shape, offset.dtype) == ((2,), torch.uint64, (), torch.uint64)
    assert mask.numel() == 0


@pytest.mark.usefixtures("on_cpu")
def test_part_of_a_longer_row_gets_its_share_of_the_gradient() -> None:
    """Ring attention hands the backward out and LSE of all keys."""
    q, k, v = (x.detach() for x in heads_first(*inputs(9, 12)))
    grad_out = torch.randn_like(q)
    out, lse, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v)
    rest = (None, None, 9, 12, 0.0, False, seed, offset)
    backward = aten._scaled_dot_product_flash_attention_backward
    dq, dk, dv = backward(grad_out, q, k, v, out, lse, *rest)
    parts = [backward(grad_out, q, *part, out, lse, *rest) for part in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True)]
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], 2), dk)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], 2), dv)


@pytest.mark.usefixtures("on_cpu")
def test_multihead_attention() -> None:
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 9, 32)
    mine, _ = module(x, x, x, need_weights=False)
    expected, _ = module(x, x, x, need_weights=True)  # PyTorch's own path
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
    mine.sum().backward()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 2)])
def test_varlen_attn(window: tuple[int, int]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.10 and later")
    lengths = [4, 1, 7]
    cu_seqlens = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
    q, k, v = (torch.randn(12, 2, 16).requires_grad_() for _ in range(3))
    out = varlen.varlen_attn(q, k, v, cu_seqlens, cu_seqlens, 7, 7, window_size=window)
    mine = [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    options = {"softmax_scale": 0.25, "causal": False, "window_size": window}
    out = torch.cat([attention(*(x[None] for x in part), **options)[0][0] for part in parts])
    torch.testing.assert_close(mine, [out, *torch.autograd.grad(out.square().sum(), (q, k, v))], atol=1e-4, rtol=1e-5)


@pytest.mark.usefixtures("on_cpu")
def test_varlen_attn_out() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.10 and later")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("torch 2.12 and later")
    cu_seqlens = torch.tensor([0, 4, 12], dtype=torch.int32)
    q, k, v = (torch.randn(12, 2, 16) for _ in range(3))
    out = torch.full_like(q, math.nan)
    varlen.varlen_attn_out(out, q, k, v, cu_seqlens, cu_seqlens, 8, 8)
    assert torch.equal(out, varlen.varlen_attn(q, k, v, cu_seqlens, cu_seqlens, 8, 8))


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("contiguous", [True, False])
def test_compiled_graphs_find_the_layout_they_expect(contiguous: bool) -> None:
    """Inductor asserts sizes and strides of an operator's results."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
        return out * 2

    leaves = inputs()
    results = []
    for run in (torch.compile(attend, fullgraph=True), attend):
        out = run(*(x.contiguous() if contiguous else x for x in heads_first(*leaves)))
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-5)


@pytest.mark.usefixtures("on_cpu")
def test_deterministic_algorithms_and_carveout_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    forward = torch_sdpa.torch_library.forward
    monkeypatch.setattr(torch_sdpa.torch_library, "forward", lambda call: seen.append(call.options) or forward(call))
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: 8)
    q, k, v = heads_first(*inputs())
    torch.use_deterministic_algorithms(True)
    try:
        F.scaled_dot_product_attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (seen[0].deterministic, seen[0].sm_margin) == (True, 8)


@pytest.mark.usefixtures("on_cpu")
def test_what_is_not_there_is_an_error() -> None:
    q, k, v = heads_first(*inputs())
    with pytest.raises(RuntimeError, match=r"dropout_p must be 0, got 0\.1"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    with pytest.raises(RuntimeError, match="return_debug_mask must be False"):
        aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, True)
    with pytest.raises(RuntimeError, match="attn_mask must be None"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(9, 9, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="is_causal needs as many keys as queries"):
        F.scaled_dot_product_attention(q[:, :, 1:], k, v, is_causal=True)


def test_the_context_gives_everything_back() -> None:
    q, k, v = heads_first(*inputs())
    original = F.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="attn_mask"), torch_sdpa.on_cpu():
        F.scaled_dot_product_attention(q, k, v, q)
    assert F.scaled_dot_product_attention is original
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention"):
        aten._scaled_dot_product_flash_attention(q, k, v)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_activating_without_a_gpu_names_what_is_needed() -> None:
    with pytest.raises(RuntimeError, match="kernels need a Hopper GPU"):
        torch_sdpa.activate()
    torch_sdpa.restore()
    if torch_sdpa._registry is not None:
        assert torch_sdpa.NAME in torch.nn.attention.list_flash_attention_impls()
        assert torch.nn.attention.current_flash_attention_impl() is None


def test_activating_on_another_gpu_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        name, major, minor, multi_processor_count = "Some A100", 8, 0, 108

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card())
    with pytest.raises(RuntimeError, match=r"Some A100 on cuda:7 has compute capability 8\.0"):
        torch_sdpa.activate()
    torch_sdpa.hopper_multiprocessors.cache_clear()


def is_ours(q: torch.Tensor) -> bool:
    try:
        aten._scaled_dot_product_flash_attention(q, q, q)
    except NotImplementedError:
        return False
    return True


class OldRegistry:
    """That of torch 2.10, which can activate but not restore."""

    _FLASH_ATTENTION_ACTIVE: str | None = None

    @classmethod
    def activate_flash_attention_impl(cls, name: str) -> None:
        torch_sdpa._register()
        cls._FLASH_ATTENTION_ACTIVE = name


@pytest.mark.parametrize("registry", [None, OldRegistry, "installed"])
def test_activate_and_restore_with_every_registry(monkeypatch: pytest.MonkeyPatch, registry: Any) -> None:
    """None is torch 2.9."""

    def register() -> torch_sdpa.Handle:
        return torch_sdpa._make_active("CPU")

    if registry == "installed":
        if not hasattr(torch_sdpa._registry, "restore_flash_attention_impl"):
            pytest.skip("torch 2.11 and later")
        monkeypatch.setitem(torch_sdpa._registry._FLASH_ATTENTION_IMPLS, torch_sdpa.NAME, register)
    else:
        monkeypatch.setattr(torch_sdpa, "_registry", registry)
        monkeypatch.setattr(torch_sdpa, "_register", register)
    q = torch.randn(1, 2, 4, 16)
    for _ in range(2):
        torch_sdpa.activate()  # a second time replaces the first
        assert is_ours(q)
    for _ in range(2):
        torch_sdpa.restore()
        assert not is_ours(q)
    assert OldRegistry._FLASH_ATTENTION_ACTIVE is None


def test_pytorchs_own_restore_gives_back_what_ours_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("torch 2.11 and later")
    register = functools.partial(torch_sdpa._make_active, "CPU")
    monkeypatch.setitem(torch_sdpa._registry._FLASH_ATTENTION_IMPLS, torch_sdpa.NAME, register)
    q = torch.randn(1, 2, 4, 16)
    torch_sdpa.activate()
    assert torch.nn.attention.current_flash_attention_impl() == torch_sdpa.NAME
    torch.nn.attention.restore_flash_attention_impl()
    assert not is_ours(q)
    torch_sdpa.restore()
