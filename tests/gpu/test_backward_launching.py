"""How the backward reaches the card: streams, devices, graphs, synchronisation, and what autograd does around it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from backward_checks import (
    CAUSAL,
    FULL,
    REPEATABLE,
    Gradients,
    Incoming,
    assert_same_gradients,
    attend,
    check_gradients,
    compare_gradients,
    count_differing_gradients,
    leaves,
    plain_attention,
    pull,
    random_incoming,
    run_gradients,
    take_gradients,
)
from checks import BF16, FP16, Shape, Tensors, assert_same_bits, random_inputs
from tolerance import assert_close_to_reference
from torch.utils.checkpoint import checkpoint

from flashhopper import flash_attn_func, launch, launch_backward
from flashhopper.options import AttentionOptions
from flashhopper.reference import attention

ABOUT_A_SECOND = 2_000_000_000  # clock cycles
SMALL = Shape(1, 200, 300, 4, 2, 128, 128)
LARGE = Shape(4, 700, 700, 16, 4, 64, 64)


def test_runs_on_the_stream_of_the_forward() -> None:
    """On a busy side stream: it reads what that stream writes before it, and the host is back at once."""
    tensors, incoming = random_inputs(SMALL), random_incoming(SMALL)
    fresh, fresh_incoming = random_inputs(SMALL), random_incoming(SMALL)
    expected = check_gradients(fresh, fresh_incoming, REPEATABLE)
    assert incoming.grad_out is not None
    assert fresh_incoming.grad_out is not None
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(ABOUT_A_SECOND)
        for old, new in zip(tensors, fresh, strict=True):
            old.copy_(new)
        incoming.grad_out.copy_(fresh_incoming.grad_out)
        gradients = take_gradients(tensors, incoming, REPEATABLE)
        done = stream.record_event()
    assert not done.query()
    stream.synchronize()
    assert_same_gradients(gradients, expected)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_two_streams_at_once(shape: Shape) -> None:
    """Their accumulators and semaphores are their own."""
    work = [(random_inputs(shape), random_incoming(shape)) for _ in range(2)]
    expected = [check_gradients(*each, REPEATABLE) for each in work]
    streams = [torch.cuda.Stream() for _ in work]
    results: list[list[Gradients]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(30):
        for stream, each, collected in zip(streams, work, results, strict=True):
            with torch.cuda.stream(stream):
                collected.append(take_gradients(*each, REPEATABLE))
    torch.cuda.synchronize()
    for collected, wanted in zip(results, expected, strict=True):
        assert sum(count_differing_gradients(gradients, wanted) for gradients in collected).tolist() == [0, 0, 0]


def test_threads_with_streams_of_their_own() -> None:
    shapes = [SMALL._replace(seqlen_q=150 + 64 * i) for i in range(4)]
    work = [(random_inputs(shape), random_incoming(shape)) for shape in shapes]
    expected = [check_gradients(*each, REPEATABLE) for each in work]
    torch.cuda.synchronize()

    def run(index: int) -> list[int]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [take_gradients(*work[index], REPEATABLE) for _ in range(50)]
            differing = sum(count_differing_gradients(gradients, expected[index]) for gradients in results)
            counts: list[int] = differing.tolist()
        return counts

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == [[0, 0, 0]] * 4


def test_second_device() -> None:
    """While device 0 is current, by autograd and by the lower level."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors, incoming = random_inputs(SMALL), random_incoming(SMALL)
    expected = check_gradients(tensors, incoming, REPEATABLE)
    q, k, v = (x.to("cuda:1") for x in tensors)
    assert incoming.grad_out is not None
    moved = Incoming(incoming.grad_out.to("cuda:1"))
    by_autograd = take_gradients((q, k, v), moved, REPEATABLE)
    *direct, _ = launch_backward.backward(moved.grad_out, q, k, v, *launch.forward(q, k, v, REPEATABLE), REPEATABLE)
    assert torch.cuda.current_device() == 0
    for dq, dk, dv in (by_autograd, direct):
        assert {x.device.index for x in (dq, dk, dv)} == {1}
        assert_same_gradients((dq.to("cuda:0"), dk.to("cuda:0"), dv.to("cuda:0")), expected)


def capture(call: Callable[[], Gradients]) -> tuple[torch.cuda.CUDAGraph, Gradients]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_graph_replays_with_changed_inputs(head_dim: int, causal: bool, deterministic: bool) -> None:
    """Forward and backward in one graph: accumulators and semaphores start from zero in every replay."""
    options = AttentionOptions(causal=causal, deterministic=deterministic)
    shape = Shape(2, 331, 477, 6, 2, head_dim, head_dim)
    warm = shape._replace(seqlen_q=100)
    take_gradients(random_inputs(warm), random_incoming(warm), options)  # autograd starts its thread
    tensors, incoming = random_inputs(shape), random_incoming(shape, lse=True)
    graph, gradients = capture(lambda: take_gradients(tensors, incoming, options))
    for _ in range(6):
        fresh, fresh_incoming = random_inputs(shape), random_incoming(shape, lse=True)
        for static, new in zip((*tensors, *incoming), (*fresh, *fresh_incoming), strict=True):
            assert static is not None
            assert new is not None
            static.copy_(new)
        for x in gradients:
            x.fill_(torch.nan)
        graph.replay()
        if deterministic:
            assert_same_gradients(gradients, run_gradients(fresh, fresh_incoming, options))
        compare_gradients(fresh, fresh_incoming, gradients, options)


def test_two_graphs_replayed_at_once() -> None:
    """Captured one after the other, replayed on two streams: they must not share accumulators or semaphores."""
    work = [(random_inputs(LARGE), random_incoming(LARGE)) for _ in range(2)]
    expected = [check_gradients(*each, REPEATABLE) for each in work]
    captured = [capture(lambda each=each: take_gradients(*each, REPEATABLE)) for each in work]
    streams = [torch.cuda.Stream() for _ in work]
    for _ in range(20):
        for _, gradients in captured:
            for x in gradients:
                x.fill_(torch.nan)
        torch.cuda.synchronize()
        for (graph, _), stream in zip(captured, streams, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(4):
                    graph.replay()
        torch.cuda.synchronize()
        for (_, gradients), wanted in zip(captured, expected, strict=True):
            assert_same_gradients(gradients, wanted)


CAPTURE_FIRST = """
import torch
from flashhopper import flash_attn_func

torch.manual_seed({seed})
q, k, v = (torch.randn(2, 300, 4, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
grad_out = torch.randn(2, 300, 4, 64, device="cuda").bfloat16()
torch.autograd.grad((q * 1).sum(), q)
torch.cuda.synchronize()

def step():
    out = flash_attn_func(q, k, v, causal=True, deterministic=True)
    return torch.autograd.grad(out, (q, k, v), grad_out)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = step()
graph.replay()
eager = step()
print(*(x.float().abs().sum().item() > 0 and torch.equal(x, y) for x, y in zip(captured, eager)))
"""


def test_the_first_backward_of_a_process_may_be_captured(seed: int) -> None:
    """The kernels are loaded while the stream is being captured."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CAPTURE_FIRST.format(seed=seed)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["True", "True", "True"]


@pytest.mark.usefixtures("no_synchronisation")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("misaligned", [False, True])
def test_no_host_synchronisation(misaligned: bool, deterministic: bool) -> None:
    """Neither in the first backward of a problem nor later; the host is back while the card is still busy before it."""
    options = CAUSAL._replace(deterministic=deterministic)
    warm = Shape(2, 100, 100, 4, 4, 64, 64)
    take_gradients(random_inputs(warm), random_incoming(warm), options)  # loading a kernel may wait
    columns = 65 if misaligned else 64
    q, k, v, grad_out = (torch.randn(2, 211, 4, columns, device="cuda").to(BF16)[..., -64:] for _ in range(4))
    incoming = Incoming(grad_out, torch.randn(2, 4, 211, device="cuda"))
    torch.cuda._sleep(ABOUT_A_SECOND)
    results = [take_gradients((q, k, v), incoming, options) for _ in range(3)]
    done = torch.cuda.current_stream().record_event()
    assert not done.query()
    torch.cuda.set_sync_debug_mode("default")
    for gradients in results:
        compare_gradients((q, k, v), incoming, gradients, options)


@pytest.mark.parametrize("return_lse", [False, True])
def test_saved_tensors(return_lse: bool) -> None:
    """q, k, v, out and LSE themselves, nothing else and no copies."""
    saved: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    tensors, incoming = random_inputs(SMALL), random_incoming(SMALL)
    inputs = leaves(tensors)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = flash_attn_func(*inputs, causal=True, return_lse=return_lse)
    out, *lse = result if return_lse else (result,)
    known = [*tensors, out, *lse]
    addresses = [x.data_ptr() for x in saved]
    assert len(addresses) == len(set(addresses)) == 5
    assert {x.data_ptr() for x in known} <= set(addresses)
    b, sq, _, h, _, _, _ = SMALL
    rest = [x for x in saved if x.data_ptr() not in {y.data_ptr() for y in known}]
    assert [(tuple(x.shape), x.dtype) for x in rest] == ([] if return_lse else [((b, h, sq), torch.float32)])
    dq, dk, dv = torch.autograd.grad(out, inputs, incoming.grad_out)
    compare_gradients(tensors, incoming, (dq, dk, dv), CAUSAL)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("options", [FULL, CAUSAL], ids=["full", "causal"])
def test_the_forward_is_the_same_with_and_without_autograd(options: AttentionOptions, dtype: torch.dtype) -> None:
    tensors = random_inputs(SMALL, dtype)
    expected = attend(tensors, options)
    assert not expected[0].requires_grad
    recorded = attend(leaves(tensors), options)
    assert recorded[0].requires_grad
    assert recorded[1].requires_grad
    assert_same_bits((recorded[0].detach(), recorded[1].detach()), expected)
    with torch.no_grad():
        unrecorded = attend(leaves(tensors), options)
    assert not unrecorded[0].requires_grad
    assert_same_bits(unrecorded, expected)


@pytest.mark.parametrize("constant", [False, True])
def test_double_backward_raises(constant: bool) -> None:
    """A penalty on the gradients must not be silently left out, even where what arrives is a constant."""
    inputs, incoming = leaves(random_inputs(SMALL)), random_incoming(SMALL)
    assert incoming.grad_out is not None
    grad_out = incoming.grad_out.requires_grad_(not constant)
    out, _ = attend(inputs)
    gradients = torch.autograd.grad(out, inputs, grad_out, create_graph=True)
    penalty = sum(x.float().square().sum() for x in gradients)
    with pytest.raises(RuntimeError):
        (out.float().sum() + penalty).backward()


def test_an_input_changed_after_the_forward_is_noticed() -> None:
    for index in range(3):
        tensors = random_inputs(SMALL)
        inputs = leaves(tensors)
        out, _ = attend(inputs)
        with torch.no_grad():
            inputs[index].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        assert all(x.grad is None for x in inputs)


def test_a_second_backward_needs_the_graph_kept() -> None:
    tensors, incoming = random_inputs(SMALL), random_incoming(SMALL)
    inputs = leaves(tensors)
    result = attend(inputs, REPEATABLE)
    first = pull(result, inputs, incoming, retain_graph=True)
    assert_same_gradients(pull(result, inputs, incoming), first)
    with pytest.raises(RuntimeError, match="second time"):
        pull(result, inputs, incoming)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    """Recomputed in the backward, the same bits."""
    tensors, incoming = random_inputs(LARGE), random_incoming(LARGE)
    expected = check_gradients(tensors, incoming, REPEATABLE)
    inputs = leaves(tensors)
    out = checkpoint(lambda *qkv: attend(qkv, REPEATABLE)[0], *inputs, use_reentrant=use_reentrant)
    out.backward(incoming.grad_out)
    q, k, v = inputs
    assert_same_gradients((q.grad, k.grad, v.grad), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_gives_the_same_gradients(backend: str) -> None:
    """The graph breaks around the call."""

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attn_func(q * 2, k + 1, v, causal=True, deterministic=True)
        return out * 4

    torch._dynamo.reset()
    tensors, incoming = random_inputs(SMALL), random_incoming(SMALL)
    inputs, others = leaves(tensors), leaves(tensors)
    compiled = torch.autograd.grad(torch.compile(model, backend=backend)(*inputs), inputs, incoming.grad_out)
    eager = torch.autograd.grad(model(*others), others, incoming.grad_out)
    assert_same_gradients(compiled, eager)
    q, k, v = tensors
    assert incoming.grad_out is not None
    seen = check_gradients((q * 2, k + 1, v), Incoming(incoming.grad_out * 4), REPEATABLE)
    assert_same_gradients(compiled, (seen[0] * 2, seen[1], seen[2]))


def projected(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> Tensors:
    """q, k and v as a layer makes them: one matrix product, then slices of it."""
    packed = torch.nn.functional.linear(x, weight).unflatten(-1, (shape.heads + 2 * shape.heads_k, shape.head_dim))
    q, k, v = packed.split((shape.heads, shape.heads_k, shape.heads_k), dim=2)
    return q, k, v


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_autocast(dtype: torch.dtype) -> None:
    """fp32 weights get fp32 gradients through a bf16 or fp16 call; attention itself casts nothing."""
    shape, width = Shape(2, 300, 300, 4, 2, 64, 64), 96
    x = torch.randn(2, 300, width, device="cuda")
    weight = (torch.randn((4 + 2 + 2) * 64, width, device="cuda") / width**0.5).requires_grad_()
    grad_out = torch.randn(2, 300, 4, 64, device="cuda")

    def gradient(attend_: Callable[[Tensors], torch.Tensor], enabled: bool) -> torch.Tensor:
        with torch.autocast("cuda", dtype=dtype, enabled=enabled):
            out = attend_(projected(x, weight, shape))
        loss = (out.float() * grad_out).sum()
        (result,) = torch.autograd.grad(loss, weight)
        return result

    ours = gradient(lambda qkv: flash_attn_func(*qkv, causal=True), True)
    ref = gradient(lambda qkv: attention(*qkv, softmax_scale=0.125, causal=True)[0], False)
    low = gradient(lambda qkv: plain_attention(*qkv, softmax_scale=0.125, causal=True)[0], True)
    assert ours.dtype == torch.float32
    assert_close_to_reference(ours.to(dtype), ref, low.to(dtype))
    q, k, v = (t.detach().float() for t in projected(x, weight, shape))
    with torch.autocast("cuda", dtype=dtype), pytest.raises(TypeError, match=r"q has dtype torch\.float32"):
        flash_attn_func(q, k, v)


def test_backward_under_autocast_changes_nothing() -> None:
    tensors, incoming = random_inputs(SMALL), random_incoming(SMALL, lse=True)
    expected = check_gradients(tensors, incoming, REPEATABLE)
    with torch.autocast("cuda", dtype=FP16):
        gradients = take_gradients(tensors, incoming, REPEATABLE)
    assert_same_gradients(gradients, expected)


def test_training_lowers_the_loss() -> None:
    """A regression through attention, by plain gradient descent: as fp32 PyTorch does it."""
    shape = Shape(2, 200, 200, 4, 2, 64, 64)
    start, target = random_inputs(shape), torch.randn(2, 200, 4, 64, device="cuda") * 0.1

    def losses(attend_: Callable[[Tensors], torch.Tensor]) -> list[float]:
        masters = leaves(tuple(x.float() for x in start))
        seen = []
        for _ in range(10):
            loss = (attend_(masters).float() - target).square().sum()
            seen.append(loss.item())
            with torch.no_grad():
                for x, gradient in zip(masters, torch.autograd.grad(loss, masters), strict=True):
                    x -= 0.1 * gradient
        return seen

    ours = losses(lambda qkv: flash_attn_func(*(x.to(BF16) for x in qkv), causal=True))
    ref = losses(lambda qkv: attention(*qkv, softmax_scale=0.125, causal=True)[0])
    assert ours[-1] < 0.8 * ours[0]
    for mine, wanted in zip(ours, ref, strict=True):
        assert abs(mine - wanted) <= 0.01 * wanted
