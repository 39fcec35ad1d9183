"""What compute-sanitizer's racecheck found, but for what it cannot follow."""

from __future__ import annotations

import re

# Each lane of a consumer warp reads words of the item, and lane 0 gives the slot back: behind __syncwarp or, with
# items_by_shuffle, behind shuffles, which wait until every lane has the value it passes on. Nothing is read later than
# the slot is written again, but the tool follows an mbarrier's order for the lane that arrives at it alone, not for
# lanes that this one has waited for.
ITEMS = re.compile(r"items at (0x[0-9a-f]+) to (0x[0-9a-f]+)")
HAZARD = re.compile(r"Potential (\w+) hazard detected at __shared__ (0x[0-9a-f]+)")
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")


def unexplained_hazards(output: str) -> list[str]:
    """Lines of hazards of a run with ``--racecheck-report hazard``, but writes after reads of item words: the program
    prints where those lie before each launch. A hazard that was not displayed is an error."""
    found, count, items = [], 0, range(0)
    for line in output.splitlines():
        if place := ITEMS.search(line):
            items = range(*(int(address, 16) for address in place.groups()))
        if hazard := HAZARD.search(line):
            count += 1
            if hazard[1] != "WAR" or int(hazard[2], 16) not in items:
                found.append(line)
    summary = SUMMARY.search(output)
    if summary is None:
        raise ValueError("racecheck printed no summary")
    displayed, errors, warnings = map(int, summary.groups())
    if not count == displayed == errors + warnings:
        found.append(f"{count} hazards read of {summary[0]}")
    return found
