"""What no card has run is refused on CUDA tensors, unless the user asks for it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from flashhopper import flash_attn_fp8_func, flash_attn_func, quantize_fp8
from flashhopper.unproven import VARIABLE, refuse_unproven


def test_refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(NotImplementedError, match="not there yet on CUDA tensors: this and that"):
        refuse_unproven("this and that")
    monkeypatch.setenv(VARIABLE, "1")
    refuse_unproven("this and that")


def test_e5m2_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    e5m2 = torch.float8_e5m2
    with FakeTensorMode():
        x = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
        raw = torch.empty(1, 8, 2, 64, dtype=e5m2, device="cuda")
        assert quantize_fp8(x).q.dtype == torch.float8_e4m3fn  # which is not refused
        for call in (
            lambda: quantize_fp8(v=x, dtype=e5m2),
            lambda: flash_attn_fp8_func(x, x, x, dtype=e5m2),
            lambda: flash_attn_func(raw, raw, raw),
        ):
            with pytest.raises(NotImplementedError, match="FP8 in e5m2"):
                call()
