"""The reading of racecheck's reports, of which these lines are."""

from __future__ import annotations

import pytest
from racecheck import unexplained_hazards

ITEMS = "fwd_bfloat16_d64x64_full_192x128: items at 0x4a0 to 0x4c0\n"
HAZARD = """\
========= Error: Potential {} hazard detected at __shared__ {} in block (3,0,0) :
=========     Read Thread (408,0,0) at kernel+0x2510
=========     Write Thread (0,0,0) at kernel+0x1fc0
=========     Current Value : 1, Incoming Value : 255
"""
RIGHT = "fwd_bfloat16_d64x64_full_192x128 200 x 300 spike=False: right\n"


def summary(displayed: int, errors: int, warnings: int = 0) -> str:
    return f"========= RACECHECK SUMMARY: {displayed} hazards displayed ({errors} errors, {warnings} warnings)\n"


def test_writes_after_reads_of_items_are_explained() -> None:
    text = ITEMS + HAZARD.format("WAR", "0x4a0") + HAZARD.format("WAR", "0x4bf") + RIGHT
    assert unexplained_hazards(text + summary(2, 2)) == []
    assert unexplained_hazards(ITEMS + RIGHT + summary(0, 0)) == []


@pytest.mark.parametrize("kind, address", [("RAW", "0x4a0"), ("WAW", "0x4a4"), ("WAR", "0x49f"), ("WAR", "0x4c0")])
def test_any_other_hazard_is_not(kind: str, address: str) -> None:
    (line,) = unexplained_hazards(ITEMS + HAZARD.format(kind, address) + RIGHT + summary(1, 1))
    assert f"{kind} hazard detected at __shared__ {address}" in line


def test_the_place_is_that_of_the_launch_at_hand() -> None:
    first, second = HAZARD.format("WAR", "0x4a0"), "other: items at 0x520 to 0x540\n" + HAZARD.format("WAR", "0x4a0")
    assert len(unexplained_hazards(ITEMS + first + second + summary(2, 2))) == 1
    assert len(unexplained_hazards(HAZARD.format("WAR", "0x4a0") + summary(1, 1))) == 1


@pytest.mark.parametrize("displayed, errors, warnings", [(1, 3, 0), (2, 2, 0), (1, 1, 1)])
def test_hazards_that_are_not_displayed_count(displayed: int, errors: int, warnings: int) -> None:
    text = ITEMS + HAZARD.format("WAR", "0x4a0") + RIGHT + summary(displayed, errors, warnings)
    assert len(unexplained_hazards(text)) == 1


def test_no_summary_is_an_error() -> None:
    with pytest.raises(ValueError, match="no summary"):
        unexplained_hazards(ITEMS + RIGHT)
