"""Ragged batches, forward and backward: lengths of every kind, what lies between the sequences, launches."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from backward_checks import Incoming
from checks import BF16, FP16, Tensors
from feature_checks import (
    Call,
    Outcome,
    assert_same,
    attend,
    check,
    compare,
    count_differing,
    incoming_of,
    pull,
    ragged_inputs,
    run,
    take,
)
from ragged import BATCHES, Batch, Side

from flashhopper import flash_attn_func, flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func
from flashhopper.options import AttentionOptions

ABOUT_A_SECOND = 2_000_000_000  # clock cycles
CAUSAL = {"causal": True}
WINDOW = {"window_size": (100, 37)}
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "window": WINDOW,
    "causal window": {"window_size": (64, 0), "causal": True},
    "chunks": {"attention_chunk": 96, "causal": True},
    "softcap": {"softcap": 8.0, "causal": True},
}

EMPTY: dict[str, Batch] = {
    "no sequence": Batch(Side([]), Side([])),
    "total 0": Batch(Side([0, 0]), Side([0, 0])),
    "no queries": Batch(Side([0, 0]), Side([5, 300])),
    "rows of no sequence": Batch(Side([], outside=130), Side([], outside=70)),
    "rows outside an empty sequence": Batch(Side([0], outside=130), Side([0], outside=70)),
}
UNUSED = Batch(
    Side([300, 200, 64, 40, 0], used=[130, 0, 64, 1, 0], outside=70),
    Side([400, 90, 270, 128, 33], used=[129, 90, 0, 64, 20], outside=200),
)

HEADS_OF_A_SINK = 24  # so many that the largest of plain PyTorch's errors in dsink, the measure, is more than luck


def call_of(batch: Batch, features: dict[str, Any], sink: torch.Tensor | None = None) -> Call:
    return Call(AttentionOptions(**features), sink, batch)


@pytest.mark.parametrize("features", FEATURES.values(), ids=list(FEATURES))
@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
def test_batches(batch: Batch, features: dict[str, Any]) -> None:
    check(ragged_inputs(batch, 6, 1, 128), call_of(batch, features))


@pytest.mark.parametrize("features", [{}, CAUSAL, WINDOW], ids=["full", "causal", "window"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
def test_batches_with_sinks_in_deterministic_mode(batch: Batch, features: dict[str, Any]) -> None:
    sink = torch.randn(HEADS_OF_A_SINK, device="cuda")
    tensors = ragged_inputs(batch, HEADS_OF_A_SINK, HEADS_OF_A_SINK // 6, 64)
    check(tensors, call_of(batch, features | {"deterministic": True}, sink))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256, 72])
def test_head_dims_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    batch = Batch(Side([100, 0, 333, 5], outside=9), Side([130, 20, 290, 500]))
    for features in ({}, CAUSAL, WINDOW):
        check(ragged_inputs(batch, 4, 2, head_dim, dtype), call_of(batch, features))
    long = Batch(Side([100, 300]), Side([130, 4200]))  # more keys than the table's rows for short sequences serve
    check(ragged_inputs(long, 2, 1, head_dim, dtype), call_of(long, CAUSAL))


@pytest.mark.parametrize("heads, heads_k", [(3, 3), (6, 1), (12, 2), (5, 1), (16, 2)])
def test_grouped_heads(heads: int, heads_k: int) -> None:
    batch = Batch(Side([100, 0, 333, 5]), Side([130, 20, 290, 500]))
    for features in ({}, CAUSAL):
        check(ragged_inputs(batch, heads, heads_k, 128), call_of(batch, features))


@pytest.mark.parametrize("index", range(24))
def test_random_batches(index: int) -> None:
    """Fresh lengths in every run: anything, with some of them 0 or around a tile."""

    def side(sequences: int) -> Side:
        owned = [
            random.choice((0, random.randint(1, 600), 64 * random.randint(1, 6) + random.randint(-1, 1)))
            for _ in range(sequences)
        ]
        used = [random.randint(0, rows) for rows in owned] if random.random() < 0.3 else None
        return Side(owned, used, outside=random.choice((0, random.randint(1, 200))))

    sequences = random.randint(1, 12)
    batch = Batch(side(sequences), side(sequences), slack=random.choice((0, 100)))
    features = list(FEATURES.values())[index % len(FEATURES)]
    check(ragged_inputs(batch, 4, 2, (64, 128)[index // 12]), call_of(batch, features))


@pytest.mark.parametrize("features", [{}, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("batch", EMPTY.values(), ids=list(EMPTY))
def test_empty(batch: Batch, features: dict[str, Any]) -> None:
    tensors = ragged_inputs(batch, 6, 2, 64)
    outcome = check(tensors, call_of(batch, features))
    assert outcome.out.count_nonzero() == 0
    assert (outcome.lse == -math.inf).all()
    for gradient, x in zip(outcome[2:5], tensors, strict=True):
        assert gradient is not None
        assert gradient.shape == x.shape
        assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("features", FEATURES.values(), ids=list(FEATURES))
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_unused_rows_are_never_read_into_a_result(poison: float, features: dict[str, Any]) -> None:
    """Of q, k, v, and of the incoming gradients too: the same bits whatever lies there."""
    tensors = ragged_inputs(UNUSED, 6, 2, 128)
    incoming = incoming_of(tensors)
    call = call_of(UNUSED, features | {"deterministic": True})
    outcome = check(tensors, call, incoming)
    q, k, v = (x.clone() for x in tensors)
    grad_out, grad_lse = (x.clone() for x in incoming if x is not None)
    idle_q, idle_k = (side.unused.to("cuda") for side in (UNUSED.q, UNUSED.k))
    assert min(int(idle_q.sum()), int(idle_k.sum())) > 400
    q[idle_q], k[idle_k], v[idle_k] = poison, poison, poison
    grad_out[idle_q], grad_lse[:, idle_q] = poison, poison
    assert_same(run((q, k, v), call, Incoming(grad_out, grad_lse)), outcome)


def test_unused_rows_of_head_dims_and_sinks() -> None:
    for head_dim, dtype in ((64, BF16), (96, FP16), (192, BF16), (256, BF16)):
        tensors = ragged_inputs(UNUSED, HEADS_OF_A_SINK, HEADS_OF_A_SINK // 2, head_dim, dtype)
        incoming = incoming_of(tensors)
        call = call_of(UNUSED, {"causal": True, "deterministic": True}, torch.randn(HEADS_OF_A_SINK, device="cuda"))
        outcome = check(tensors, call, incoming)
        q, k, v = (x.clone() for x in tensors)
        idle_q, idle_k = (side.unused.to("cuda") for side in (UNUSED.q, UNUSED.k))
        q[idle_q], k[idle_k], v[idle_k] = math.nan, math.inf, math.nan
        assert_same(run((q, k, v), call, incoming), outcome)


@pytest.mark.parametrize("features", [{}, CAUSAL, WINDOW], ids=["full", "causal", "window"])
def test_neighbours_change_no_bit(features: dict[str, Any]) -> None:
    """The middle sequence keeps its results when all others become NaN."""
    batch = Batch(Side([100, 333, 70]), Side([50, 290, 130]))
    tensors = ragged_inputs(batch, 4, 2, 128)
    incoming = incoming_of(tensors)
    call = call_of(batch, features | {"deterministic": True})
    outcome = check(tensors, call, incoming)
    q, k, v = (x.clone() for x in tensors)
    q_rows, k_rows = batch.q.slices[1], batch.k.slices[1]
    for x, rows in ((q, q_rows), (k, k_rows), (v, k_rows)):
        x[: rows.start], x[rows.stop :] = math.nan, math.nan
    other = run((q, k, v), call, incoming)
    assert torch.equal(other.out[q_rows], outcome.out[q_rows])
    assert torch.equal(other.lse[:, q_rows], outcome.lse[:, q_rows])
    assert torch.equal(other.dq[q_rows], outcome.dq[q_rows])
    for mine, theirs in ((other.dk, outcome.dk), (other.dv, outcome.dv)):
        assert torch.equal(mine[k_rows], theirs[k_rows])


@pytest.mark.parametrize("features", [{}, CAUSAL], ids=["full", "causal"])
def test_equal_lengths_are_a_dense_batch(features: dict[str, Any]) -> None:
    """The ragged call is held to the reference of the dense one."""
    q, k, v = (torch.randn(3, n, h, 128, device="cuda").to(BF16) for n, h in ((333, 4), (410, 2), (410, 2)))
    incoming = incoming_of((q, k, v))
    assert incoming.grad_out is not None
    assert incoming.grad_lse is not None
    batch = Batch(Side([333] * 3), Side([410] * 3))
    flat = Incoming(incoming.grad_out.flatten(0, 1), incoming.grad_lse.transpose(0, 1).flatten(1))
    ragged = run((q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)), call_of(batch, features), flat)
    dense = Outcome(
        ragged.out.unflatten(0, (3, 333)),
        ragged.lse.unflatten(1, (3, 333)).transpose(0, 1),
        *(x.unflatten(0, (3, -1)) for x in ragged[2:5] if x is not None),
    )
    compare((q, k, v), Call(AttentionOptions(**features)), incoming, dense)


def packed(total: int, heads: int, heads_k: int, head_dim: int) -> Tensors:
    """q, k and v out of one projection."""
    q, k, v = (
        torch.randn(total, heads + 2 * heads_k, head_dim, device="cuda").to(BF16).split([heads, heads_k, heads_k], 1)
    )
    return q, k, v


def heads_first(total: int, heads: int, heads_k: int, head_dim: int) -> Tensors:
    q, k, v = (
        torch.randn(n, total, head_dim, device="cuda").to(BF16).transpose(0, 1) for n in (heads, heads_k, heads_k)
    )
    return q, k, v


def odd_rows(total: int, heads: int, heads_k: int, head_dim: int) -> Tensors:
    """What TMA cannot read: a stride that is no multiple of 16 bytes."""
    q, k, v = (
        torch.randn(total, n, head_dim + 1, device="cuda").to(BF16)[..., :head_dim] for n in (heads, heads_k, heads_k)
    )
    return q, k, v


def expanded_heads(total: int, heads: int, heads_k: int, head_dim: int) -> Tensors:
    q, k, v = (
        torch.randn(total, 1, head_dim, device="cuda").to(BF16).expand(-1, n, -1) for n in (heads, heads_k, heads_k)
    )
    return q, k, v


@pytest.mark.parametrize("cut", [packed, heads_first, odd_rows, expanded_heads], ids=lambda cut: cut.__name__)
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_strides(head_dim: int, cut: Any) -> None:
    """Inputs and incoming gradients of any strides: the bits of contiguous copies."""
    side = Side([100, 0, 257, 64], used=[90, 0, 257, 3], outside=20)
    batch = Batch(side, side)
    tensors: Tensors = cut(side.total, 4, 2, head_dim)
    grad_out = cut(side.total, 4, 4, head_dim)[0]
    call = call_of(batch, {"causal": True, "deterministic": True})
    q, k, v = (x.contiguous() for x in tensors)
    outcome = check((q, k, v), call, Incoming(grad_out.contiguous()))
    assert_same(run(tensors, call, Incoming(grad_out)), outcome)


@pytest.mark.parametrize("num_heads_q", [None, 6])
def test_packed(num_heads_q: int | None) -> None:
    """flash_attn_varlen_qkvpacked_func reads q, k and v where they are: the same bits as from three tensors."""
    side = Side([100, 0, 257, 64], used=[90, 0, 257, 3], outside=20)
    shape = (side.total, 3, 4, 128) if num_heads_q is None else (side.total, num_heads_q + 2 * 2, 128)
    qkv = torch.randn(shape, device="cuda").to(BF16).requires_grad_()
    parts = qkv.unbind(1) if num_heads_q is None else qkv.split([num_heads_q, 2, 2], dim=1)
    lengths = side.cu_seqlens("cuda"), side.longest
    options: dict[str, Any] = {"causal": True, "deterministic": True, "return_lse": True}
    out, lse = flash_attn_varlen_qkvpacked_func(
        qkv, *lengths, seqused=side.seqused("cuda"), num_heads_q=num_heads_q, **options
    )
    wanted, wanted_lse = flash_attn_varlen_func(
        *(x.contiguous() for x in parts), **Batch(side, side).arguments("cuda"), **options
    )
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)
    grad_out = torch.randn(out.shape, device="cuda").to(BF16)
    (mine,) = torch.autograd.grad(out, qkv, grad_out)
    (other,) = torch.autograd.grad(wanted, qkv, grad_out)
    assert torch.equal(mine, other)
    used = ~side.unused.to("cuda")
    assert mine[used].count_nonzero() > 0.9 * mine[used].numel()


def test_many_sequences_and_more_tiles_than_multiprocessors() -> None:
    lengths = [random.randint(1, 30) for _ in range(400)]
    for batch in (Batch(Side(lengths), Side(lengths)), Batch(Side([900, 20, 4000, 1500]), Side([900, 20, 4000, 1500]))):
        for features in ({}, CAUSAL):
            check(ragged_inputs(batch, 8, 2, 128), call_of(batch, features))


@pytest.mark.parametrize("features", [CAUSAL, {"causal": True, "window_size": (64, 0), "softcap": 10.0}], ids=str)
def test_fp16_of_inputs_times_three(features: dict[str, Any]) -> None:
    batch = Batch(Side([512, 1, 300]), Side([512, 1, 300]))
    q, k, v = (3 * x for x in ragged_inputs(batch, 4, 4, 64, FP16))
    outcome = check((q, k, v), call_of(batch, features))
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert getattr(outcome, name).isfinite().all(), name


@pytest.mark.parametrize("features", [CAUSAL, WINDOW], ids=["causal", "window"])
def test_thousand_repeats_are_bitwise_equal(features: dict[str, Any]) -> None:
    """Forward and backward, without a look at them in between."""
    batch = Batch(Side([100, 0, 333, 5, 64], used=[90, 0, 333, 5, 7]), Side([130, 20, 290, 500, 64]))
    tensors = ragged_inputs(batch, 6, 1, 64)
    incoming = incoming_of(tensors)
    call = call_of(batch, features | {"deterministic": True})
    first = check(tensors, call, incoming)
    differing = torch.zeros(5, dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differing += count_differing(take(tensors, call, incoming), first)
    assert differing.tolist() == [0] * 5


def test_the_other_mode_gives_the_same_forward_and_keys() -> None:
    """Without ``deterministic`` only dq may differ from run to run."""
    batch = BATCHES["around tiles"]
    tensors = ragged_inputs(batch, 6, 1, 128)
    incoming = incoming_of(tensors)
    first = check(tensors, call_of(batch, CAUSAL), incoming)
    again = [run(tensors, call_of(batch, CAUSAL), incoming) for _ in range(20)]
    for outcome in again:
        assert_same(outcome._replace(dq=first.dq), first)


class Static:
    """A call whose lengths are tensors that the test keeps, so that it can change what is in them."""

    def __init__(self, batch: Batch, features: dict[str, Any], head_dim: int):
        self.tensors = ragged_inputs(batch, 6, 2, head_dim)
        self.incoming = incoming_of(self.tensors)
        self.lengths = batch.arguments("cuda")
        self.options = AttentionOptions(**features)._asdict() | {"return_lse": True}

    def __call__(self) -> Outcome:
        q, k, v = (x.detach().requires_grad_() for x in self.tensors)
        result = flash_attn_varlen_func(q, k, v, **self.lengths, **self.options)
        return Outcome(*result, *pull(result, (q, k, v), None, self.incoming))

    def refill(self, batch: Batch) -> None:
        """Fresh values, and the lengths of a batch with as many sequences and rows."""
        tensors = ragged_inputs(batch, 6, 2, self.tensors[0].shape[-1])
        for static, new in zip((*self.tensors, *self.incoming), (*tensors, *incoming_of(tensors)), strict=True):
            assert static is not None
            assert new is not None
            static.copy_(new)
        for name, new in batch.arguments("cuda").items():
            static = self.lengths[name]
            if isinstance(static, torch.Tensor) and isinstance(new, torch.Tensor):
                static.copy_(new)


def resized(total: int, sequences: int) -> Side:
    """Random lengths with some of the rows used and some outside."""
    cuts = sorted(random.randint(0, total - 30) for _ in range(sequences - 1))
    owned = [stop - start for start, stop in zip([0, *cuts], [*cuts, total - 30], strict=True)]
    return Side(owned, [random.randint(0, rows) for rows in owned], outside=30)


@pytest.mark.parametrize("features", [CAUSAL, WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_graph_replays_with_other_lengths(head_dim: int, features: dict[str, Any]) -> None:
    """Forward and backward in one graph, whose schedule is made on the card: lengths are data."""
    batch = Batch(resized(700, 5), resized(900, 5), slack=1000)
    static = Static(batch, features | {"deterministic": True}, head_dim)
    static()  # kernels are loaded, autograd starts its thread
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outcome = static()
    for _ in range(6):
        fresh = Batch(resized(700, 5), resized(900, 5))
        static.refill(fresh)
        for x in outcome[:5]:
            assert x is not None
            x.fill_(math.nan)
        graph.replay()
        compare(static.tensors, call_of(fresh, features), static.incoming, outcome)


@pytest.mark.usefixtures("no_synchronisation")
@pytest.mark.parametrize("features", [{}, CAUSAL, WINDOW], ids=["full", "causal", "window"])
def test_no_host_synchronisation(features: dict[str, Any]) -> None:
    """Also in the first call of a problem; the host is back while the card is still busy before it."""
    torch.cuda.set_sync_debug_mode("default")
    warm, batch = (Batch(Side([100, 0, n]), Side([130, 20, n])) for n in (50, 211))
    take(ragged_inputs(warm, 4, 2, 64), call_of(warm, features), incoming_of(ragged_inputs(warm, 4, 2, 64)))
    static = Static(batch, features, 64)
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda._sleep(ABOUT_A_SECOND)
    outcomes = [static() for _ in range(3)]
    done = torch.cuda.current_stream().record_event()
    assert not done.query()
    torch.cuda.set_sync_debug_mode("default")
    for outcome in outcomes:
        compare(static.tensors, call_of(batch, features), static.incoming, outcome)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
def test_lengths_changed_after_the_forward_are_noticed(name: str) -> None:
    batch = Batch(Side([100, 64]), Side([130, 64], used=[130, 3]))
    arguments = batch.arguments("cuda")
    q, k, v = (x.requires_grad_() for x in ragged_inputs(batch, 4, 2, 64))
    out = flash_attn_varlen_func(q, k, v, **arguments)
    changed = arguments[name]
    assert isinstance(changed, torch.Tensor)
    changed.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.slow
@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("long", ["q", "k"])
def test_offsets_past_2_to_31(long: str) -> None:
    """q and out, or k and v, have more than 2**31 elements, and so have their gradients; the last sequence is right."""
    rows, heads, head_dim = 2**18 + 77, 64, 128
    assert rows * heads * head_dim > 2**31
    many, few = Side([rows - 1000, 0, 300, 700]), Side([60, 40, 200, 330])
    batch = Batch(many, few) if long == "q" else Batch(few, many)
    group = 8 if long == "q" else 1
    q, k, v = ragged_inputs(batch, heads, heads // group, head_dim)
    grad_out = torch.empty(q.shape, dtype=BF16, device="cuda").normal_()
    outcome = take((q, k, v), call_of(batch, CAUSAL), Incoming(grad_out))
    last = Batch(Side([batch.q.owned[-1]]), Side([batch.k.owned[-1]]))
    q_rows, k_rows = batch.q.slices[-1], batch.k.slices[-1]
    part = Outcome(
        outcome.out[q_rows], outcome.lse[:, q_rows], outcome.dq[q_rows], outcome.dk[k_rows], outcome.dv[k_rows]
    )
    compare((q[q_rows], k[k_rows], v[k_rows]), call_of(last, CAUSAL), Incoming(grad_out[q_rows]), part)


@pytest.mark.slow
@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("strides", [(2**24 + 8, 64, 1), (64, 2**31 + 8, 1)], ids=["rows", "heads"])
def test_strides_past_2_to_31(strides: tuple[int, ...]) -> None:
    """q, k, v and dout lie in one buffer of NaN, their rows or heads far apart: the bits of contiguous copies."""
    side = Side([60, 0, 70])
    extents = (side.total, 2, 64)
    last = sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))
    assert last > 2**31
    room = 2**18
    buffer = torch.full((last + 4 * room,), math.nan, dtype=BF16, device="cuda")
    q, k, v, grad_out = (
        buffer.as_strided(extents, strides, i * room).copy_(torch.randn(extents, device="cuda")) for i in range(4)
    )
    call = call_of(Batch(side, side), {"causal": True, "deterministic": True})
    outcome = check((q.contiguous(), k.contiguous(), v.contiguous()), call, Incoming(grad_out.contiguous()))
    assert_same(run((q, k, v), call, Incoming(grad_out)), outcome)


def test_a_ragged_call_costs_what_its_rows_cost() -> None:
    """Memory: nothing is padded to max_seqlen. 64 sequences of 8 rows under a bound of 2**16."""
    side = Side([8] * 64)
    batch = Batch(side, side, slack=2**16)
    tensors = ragged_inputs(batch, 8, 8, 128)
    incoming = incoming_of(tensors)
    call = call_of(batch, CAUSAL)
    take(tensors, call, incoming)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    take(tensors, call, incoming)
    torch.cuda.synchronize()
    inputs = sum(x.numel() * x.element_size() for x in tensors)
    # dq in fp32 may be padded to 128 rows a sequence: 16 times the rows, of twice the size. To max_seqlen: 64 GiB.
    assert torch.cuda.max_memory_allocated() - before < 20 * inputs


def test_the_dense_function_still_refuses_three_dimensions() -> None:
    q = torch.randn(10, 2, 64, device="cuda").to(BF16)
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        flash_attn_func(q, q, q)
    with pytest.raises(ValueError, match="q must have 3 dimensions"):
        attend((q[None], q[None], q[None]), call_of(Batch(Side([10]), Side([10])), {}))
