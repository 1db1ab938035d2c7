"""What was asked of the store for each run, by kind of request and by who counted it, and what that costs.

``own``: the owner's requests, counted as they are sent. ``granted``: URLs handed out and the bytes they allow: what was asked
for, moved or not. ``reported``: what miners say they sent and received, retries included; the last of each process counts, so
that a lost report costs nothing but time.
"""

from __future__ import annotations

import msgspec

from subnet.protocol.messages import StoreUse

MAX_REPORTERS = 65_536
"""Processes whose last word is kept apart; the oldest are added up."""


class RunUse(msgspec.Struct, frozen=True):
    """A run's use of the store."""

    own: StoreUse = StoreUse()
    granted: StoreUse = StoreUse()
    reported: StoreUse = StoreUse()


class RunCounts(msgspec.Struct):
    """Of one run; what is kept over a restart."""

    own: StoreUse = StoreUse()
    granted: StoreUse = StoreUse()
    settled: StoreUse = StoreUse()
    """Reports of processes that are no longer kept apart."""
    reports: dict[str, StoreUse] = {}
    """The last report of each process, oldest first."""


def run_of(name: str) -> str:
    """The run that a named key belongs to: ``runs/ID/...``; empty for others."""
    parts = name.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "runs" else ""


class StoreMeter:
    def __init__(self) -> None:
        self.runs: dict[str, RunCounts] = {}

    def own(self, run: str, kind: str = "", *, bytes_up: int = 0, bytes_down: int = 0) -> None:
        """A request of the owner's (``kind`` is a field of :class:`StoreUse`), or more bytes of one."""
        counts = self._of(run)
        counts.own = counts.own.plus(StoreUse(**({kind: 1} if kind else {}), bytes_up=bytes_up, bytes_down=bytes_down))

    def own_use(self, run: str, use: StoreUse) -> None:
        """What the owner has moved by grants of its own."""
        counts = self._of(run)
        counts.own = counts.own.plus(use)

    def granted(self, run: str, *, puts: int = 0, gets: int = 0, bytes_up: int = 0, bytes_down: int = 0) -> None:
        counts = self._of(run)
        counts.granted = counts.granted.plus(StoreUse(puts=puts, gets=gets, bytes_up=bytes_up, bytes_down=bytes_down))

    def reported(self, run: str, hotkey: str, process: str, total: StoreUse) -> None:
        """``total`` of this process for this run so far; one that says less than before isn't believed."""
        counts, key = self._of(run), f"{hotkey}/{process}"
        counts.reports[key] = total.at_least(counts.reports.pop(key, StoreUse()))
        if len(counts.reports) > MAX_REPORTERS:
            counts.settled = counts.settled.plus(counts.reports.pop(next(iter(counts.reports))))

    def use(self, run: str) -> RunUse:
        counts = self._of(run)
        total = counts.settled
        for use in counts.reports.values():
            total = total.plus(use)
        return RunUse(counts.own, counts.granted, total)

    def _of(self, run: str) -> RunCounts:
        return self.runs.setdefault(run, RunCounts())
