"""The kernel before those of a ragged batch: the specialisation it is built for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleSpec:
    """The kernel that lists a ragged batch's sequences, longest first, for the tile schedulers."""

    has_used_rows: bool
    """Whether ``seqused`` says how many rows of the side that is cut into tiles are used …"""
    has_used_others: bool
    """… and of the other side."""

    @property
    def name(self) -> str:
        return f"schedule{'_used_rows' if self.has_used_rows else ''}{'_used_others' if self.has_used_others else ''}"
