"""What no card has run is refused on CUDA tensors, unless the user asks for it."""

from __future__ import annotations

import pytest
import torch
from posed_card import pose

from flashhopper import flash_attn_func
from flashhopper.unproven import VARIABLE, refuse_unproven


def test_refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(NotImplementedError, match="not there yet on CUDA tensors: this and that"):
        refuse_unproven("this and that")
    monkeypatch.setenv(VARIABLE, "1")
    refuse_unproven("this and that")


def test_mods_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 8, 2, 64, dtype=torch.bfloat16)
    expected = flash_attn_func(q, q, q, score_mod=lambda score, batch, head, q_idx, kv_idx, tensors: score + 1.0)
    assert expected.shape == q.shape  # CPU tensors are not refused
    card = pose(monkeypatch)
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(NotImplementedError, match="score_mod and mask_mod"):
        flash_attn_func(q, q, q, score_mod=lambda score, batch, head, q_idx, kv_idx, tensors: score + 1.0)
    assert not card.launches
