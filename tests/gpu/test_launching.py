"""How calls reach the card: repeats, streams, devices, graphs, synchronisation and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checks import (
    BF16,
    FP16,
    Result,
    Shape,
    Tensors,
    assert_same_bits,
    check,
    compare,
    count_differing_bits,
    poisoned_outputs,
    random_inputs,
    redone_tiles,
    run,
)

from flashhopper import flash_attn_func

ABOUT_A_SECOND = 2_000_000_000  # clock cycles
SMALL = Shape(1, 200, 300, 4, 2, 128, 128)
LARGE = Shape(4, 1000, 1000, 16, 4, 64, 64)


def attend(tensors: Tensors, causal: bool = True) -> Result:
    """The public call as it is, without the checks of ``run``."""
    result: Result = flash_attn_func(*tensors, causal=causal, return_lse=True)
    return result


def with_spikes(tensors: Tensors) -> Tensors:
    """Key 3 of every head far above the rest: the lazy softmax redoes the tiles that see it in an unmasked block."""
    q, k, v = tensors
    q[..., 5] = 32.0
    k[..., 5] = 0.0
    k[:, 3, :, 5] = 1e4
    return q, k, v


REPEATED = [
    (Shape(2, 1024, 1024, 8, 8, 64, 64), BF16, True),
    (Shape(2, 1500, 1500, 12, 2, 64, 64), BF16, False),
    (Shape(2, 1000, 1111, 8, 4, 128, 128), BF16, True),
    (Shape(2, 1000, 1111, 8, 4, 128, 128), FP16, False),
    (Shape(1, 900, 900, 16, 2, 96, 96), BF16, True),
    (Shape(2, 700, 700, 12, 2, 256, 256), BF16, True),
    (Shape(2, 700, 700, 12, 2, 192, 128), BF16, False),
]


@pytest.mark.parametrize("shape, dtype, causal", REPEATED)
def test_thousand_repeats_are_bitwise_equal(shape: Shape, dtype: torch.dtype, causal: bool) -> None:
    tensors = random_inputs(shape, dtype)
    expected = check(tensors, causal=causal)
    assert repeat(tensors, causal, expected) == [0, 0]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_thousand_repeats_with_redone_tiles_are_bitwise_equal(head_dim: int) -> None:
    tensors = with_spikes(random_inputs(Shape(2, 800, 800, 12, 4, head_dim, head_dim)))
    before = redone_tiles()
    expected = run(tensors, causal=True)
    redone = redone_tiles() - before
    assert redone > 0
    assert repeat(tensors, True, expected) == [0, 0]
    assert redone_tiles() - before == 1001 * redone


def repeat(tensors: Tensors, causal: bool, expected: Result) -> list[int]:
    """Differing elements of out and LSE over 1000 calls, 50 at a time without a look at them in between."""
    differing = torch.zeros(2, dtype=torch.int64, device="cuda")
    for _ in range(20):
        with poisoned_outputs(launches=50):
            results = [attend(tensors, causal) for _ in range(50)]
        for result in results:
            differing += count_differing_bits(result, expected)
    counts: list[int] = differing.tolist()
    return counts


def test_runs_on_the_current_stream() -> None:
    """A call on a busy side stream reads what that stream writes before it, and returns at once."""
    tensors, fresh = random_inputs(SMALL), random_inputs(SMALL)
    expected = check(fresh, causal=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(ABOUT_A_SECOND)
        for old, new in zip(tensors, fresh, strict=True):
            old.copy_(new)
        result = attend(tensors)
        done = stream.record_event()
    assert not done.query()
    stream.synchronize()
    assert_same_bits(result, expected)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_two_streams_at_once(shape: Shape) -> None:
    inputs = [with_spikes(random_inputs(shape)), random_inputs(shape)]
    expected = [run(tensors, causal=True) for tensors in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    results: list[list[Result]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, tensors, collected in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                collected.append(attend(tensors))
    torch.cuda.synchronize()
    for collected, wanted in zip(results, expected, strict=True):
        assert sum(count_differing_bits(result, wanted) for result in collected).tolist() == [0, 0]


def test_threads_with_streams_of_their_own() -> None:
    inputs = [random_inputs(SMALL._replace(seqlen_q=150 + 64 * i)) for i in range(4)]
    expected = [check(tensors, causal=True) for tensors in inputs]
    torch.cuda.synchronize()

    def work(index: int) -> list[int]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [attend(inputs[index]) for _ in range(100)]
            differing = sum(count_differing_bits(result, expected[index]) for result in results)
        counts: list[int] = differing.tolist()
        return counts

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[0, 0]] * 4


def test_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected_inputs = random_inputs(SMALL)
    expected = check(expected_inputs, causal=True)
    q, k, v = (x.to("cuda:1") for x in expected_inputs)
    assert torch.cuda.current_device() == 0
    out, lse = attend((q, k, v))
    assert torch.cuda.current_device() == 0
    assert (out.device.index, lse.device.index) == (1, 1)
    assert_same_bits((out.to("cuda:0"), lse.to("cuda:0")), expected)
    with torch.cuda.device(1):
        assert_same_bits(tuple(x.to("cuda:0") for x in attend((q, k, v))), expected)


def capture(call: Callable[[], Result], stream: torch.cuda.Stream | None = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph, result


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_graph_replays_with_changed_inputs(head_dim: int, causal: bool) -> None:
    """The first call of this problem is the captured one; some replays have tiles to redo, others none."""
    shape = Shape(2, 531, 777, 12, 4, head_dim, head_dim)
    tensors = random_inputs(shape)
    graph, result = capture(lambda: attend(tensors, causal))
    for i in range(20):
        fresh = random_inputs(shape)
        if i % 3 == 1:
            fresh = with_spikes(fresh)
        for static, new in zip(tensors, fresh, strict=True):
            static.copy_(new)
        for x in result:
            x.fill_(torch.nan)
        graph.replay()
        assert_same_bits(result, run(fresh, causal=causal))
        if i == 0:
            compare(fresh, result, causal=causal)


def test_graph_with_copies_of_misaligned_inputs() -> None:
    q, k, v = (torch.randn(2, 200, 4, 65, device="cuda").to(BF16)[..., :64] for _ in range(3))
    graph, result = capture(lambda: attend((q, k, v)))
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape, device="cuda"))
    graph.replay()
    assert_same_bits(result, check((q, k, v), causal=True))


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_two_graphs_of_one_stream_replayed_at_once(shape: Shape) -> None:
    """Captured on the same stream, replayed on two: their launches overlap and must not share a tile counter."""
    inputs = [with_spikes(random_inputs(shape)), random_inputs(shape)]
    expected = [run(tensors, causal=True) for tensors in inputs]
    origin = torch.cuda.Stream()
    captured = []
    for tensors in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=origin):
            results = [attend(tensors) for _ in range(8)]
        captured.append((graph, results))
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(25):
        for _, results in captured:
            for result in results:
                for x in result:
                    x.fill_(torch.nan)
        torch.cuda.synchronize()
        for (graph, _), stream in zip(captured, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for (_, results), wanted in zip(captured, expected, strict=True):
            assert sum(count_differing_bits(result, wanted) for result in results).tolist() == [0, 0]


CAPTURE_FIRST = """
import torch
from flashhopper import flash_attn_func

torch.manual_seed({seed})
q, k, v = (torch.randn(2, 300, 4, 64, device="cuda").bfloat16() for _ in range(3))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
graph.replay()
eager_out, eager_lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
print(out.float().abs().sum().item() > 0, torch.equal(out, eager_out), torch.equal(lse, eager_lse))
"""


def test_the_first_call_of_a_process_may_be_captured(seed: int) -> None:
    """The kernel is loaded while the stream is being captured."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CAPTURE_FIRST.format(seed=seed)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["True", "True", "True"]


@pytest.mark.usefixtures("no_synchronisation")
@pytest.mark.parametrize("misaligned", [False, True])
def test_no_host_synchronisation(misaligned: bool) -> None:
    """Neither in the first call of a problem nor later; the host is back while the card is still busy before it."""
    attend(random_inputs(SMALL._replace(head_dim=64, head_dim_v=64)))  # loading a kernel may wait
    columns = 65 if misaligned else 64
    q, k, v = (torch.randn(2, 211, 4, columns, device="cuda").to(BF16)[..., -64:] for _ in range(3))
    torch.cuda._sleep(ABOUT_A_SECOND)
    results = [attend((q, k, v)) for _ in range(3)]
    done = torch.cuda.current_stream().record_event()
    assert not done.query()
    torch.cuda.set_sync_debug_mode("default")
    for result in results:
        compare((q, k, v), result, causal=True)


def cuda(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


WRONG: list[tuple[str, type[Exception], tuple[str, ...]]] = [
    ("k on the CPU", ValueError, ("k is on cpu", "q on cuda:0", "same device")),
    ("q on the CPU", ValueError, ("k is on cuda:0", "q on cpu", "same device")),
    ("fp32", TypeError, ("q has dtype torch.float32", "accepted on cuda are torch.bfloat16, torch.float16")),
    ("fp64 v", TypeError, ("v has dtype torch.float64", "accepted on cuda are torch.bfloat16, torch.float16")),
    ("fp16 v", TypeError, ("v has dtype torch.float16", "q has torch.bfloat16")),
    ("head_dim 60", ValueError, ("q has head_dim 60", "multiples of 8 from 8 to 256")),
    ("columns first", ValueError, ("q has strides", "last dimension (head_dim) must be contiguous")),
]


def wrong_inputs(name: str) -> list[torch.Tensor]:
    q, k, v = cuda(1, 5, 4, 64), cuda(1, 7, 2, 64), cuda(1, 7, 2, 64)
    match name:
        case "k on the CPU":
            k = k.cpu()
        case "q on the CPU":
            q = q.cpu()
        case "fp32":
            q, k, v = q.float(), k.float(), v.float()
        case "fp64 v":
            v = v.double()
        case "fp16 v":
            v = v.half()
        case "head_dim 60":
            q, k, v = q[..., :60], k[..., :60], v[..., :60]
        case "columns first":
            q = cuda(1, 5, 64, 4).transpose(2, 3)
    return [q, k, v]


@pytest.mark.parametrize("name, error, fragments", WRONG, ids=[name for name, _, _ in WRONG])
def test_wrong_inputs(name: str, error: type[Exception], fragments: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        flash_attn_func(*wrong_inputs(name))
    for fragment in fragments:
        assert fragment in str(raised.value)


@pytest.mark.parametrize("beyond", [0, 1, 1000])
def test_sm_margin_must_leave_a_multiprocessor(beyond: int) -> None:
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    q, k, v = random_inputs(SMALL)
    margin = multiprocessors + beyond
    with pytest.raises(ValueError, match=f"sm_margin is {margin}; the card has {multiprocessors} SMs"):
        flash_attn_func(q, k, v, sm_margin=margin)
    check((q, k, v), sm_margin=multiprocessors - 1)
