"""What the launcher decides on the host: the card, and which tensors TMA can read as they are."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from flashhopper import device, launch, tma_view
from flashhopper.heuristics import TILE_TABLE
from flashhopper.options import AttentionOptions
from flashhopper.problem import AttentionProblem, TensorFacts

BF16 = torch.bfloat16
CARD = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def _no_card_is_remembered() -> Iterator[None]:
    device.hopper_multiprocessors.cache_clear()
    yield
    device.hopper_multiprocessors.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, major: int, minor: int) -> None:
    card = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)


def plan_on_card(sm_margin: int = 0, batch: int = 1, heads: int = 2) -> object:
    one = torch.empty(1, 1, 1, 64, dtype=BF16)
    facts = TensorFacts.of(one.expand(batch, 5, heads, 64))._replace(device=CARD)
    options = AttentionOptions(sm_margin=sm_margin)
    return launch.make_plan(AttentionProblem(facts, facts, facts, options))


@pytest.mark.parametrize(
    "name, major, minor", [("NVIDIA A100", 8, 0), ("NVIDIA L4", 8, 9), ("NVIDIA B200", 10, 0), ("NVIDIA RTX", 12, 0)]
)
def test_a_card_that_is_not_hopper_is_named(monkeypatch: pytest.MonkeyPatch, name: str, major: int, minor: int) -> None:
    pretend(monkeypatch, name, major, minor)
    with pytest.raises(RuntimeError) as raised:
        plan_on_card()
    for fragment in (name, "cuda:0", f"compute capability {major}.{minor}", "Hopper GPU (9.0"):
        assert fragment in str(raised.value)


def test_sm_margin_must_leave_a_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA H100", 9, 0)
    with pytest.raises(ValueError, match="sm_margin is 108; the card has 108 SMs, at least 1 must be left"):
        plan_on_card(sm_margin=108)


def test_tiles_are_counted_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA H200", 9, 0)
    rows = TILE_TABLE[0].config.tile_m  # of head_dim 64
    with pytest.raises(ValueError, match=f"{2**31} tiles of {rows} rows; at most {2**31 - 2**16} are accepted"):
        plan_on_card(batch=2**15, heads=2**16)


STORAGE = torch.arange(2**16).to(BF16)


@pytest.mark.parametrize(
    "shape, stride, copies",
    [
        ((2, 5, 3, 64), (960, 192, 64, 1), False),
        ((2, 5, 3, 64), (0, 192, 0, 1), False),  # expanded
        ((2, 5, 3, 64), (8, 16, 24, 1), False),  # overlapping
        ((2, 5, 3, 64), (1000, 193, 64, 1), True),
        ((2, 5, 3, 64), (961, 192, 64, 1), True),
        ((1, 5, 3, 64), (961, 192, 64, 1), False),  # the stride of an extent of 1 does not matter
        ((1, 1, 1, 64), (7, 3, 1, 1), False),
        ((1, 5, 1, 64), (2**45 + 1, 64, 2**45, 1), False),
    ],
)
def test_only_strides_that_tma_cannot_read_are_copied(
    shape: tuple[int, ...], stride: tuple[int, ...], copies: bool
) -> None:
    tensor = STORAGE.as_strided(shape, stride)
    view = tma_view.TmaView(TensorFacts.of(tensor))
    seen = view(tensor) if view.changes else tensor
    assert view.copies is copies
    assert (seen.data_ptr() != tensor.data_ptr()) is copies
    assert torch.equal(seen, tensor)
    assert [s * seen.element_size() % launch.TMA_ALIGNMENT for s in seen.stride()[:3]] == [0, 0, 0]
    assert all(s * seen.element_size() < 2**40 for s in seen.stride())
