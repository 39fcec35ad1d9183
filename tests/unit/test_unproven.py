"""What no card has run is refused on CUDA tensors, unless the user asks for it."""

from __future__ import annotations

import pytest

from flashhopper.unproven import VARIABLE, refuse_unproven


def test_refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(NotImplementedError, match="not there yet on CUDA tensors: this and that"):
        refuse_unproven("this and that")
    monkeypatch.setenv(VARIABLE, "1")
    refuse_unproven("this and that")
