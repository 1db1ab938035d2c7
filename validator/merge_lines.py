"""The last merges of a run for people: who gave, who owned, what was checked, how long it took. A fold of the journal, bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from subnet.run.events import (
    Checked,
    Frozen,
    OwnerFailed,
    PartitionMerged,
    Record,
    ReduceOrdered,
    StageSealed,
    StoreRouted,
    TraceStarted,
)

MAX_MERGES = 48


class MergeLine(msgspec.Struct):
    """One group's merge at one step, as far as it has come."""

    step: int
    group: int
    version: int = 0
    """Of the manifest: above 1 somebody's part had to be replaced. 0: commitments are still asked for."""
    contributors: int = 0
    owners: int = 0
    partitions: int = 0
    """Merged so far under this version."""
    num_partitions: int = 0
    merged_bytes: int = 0
    passed: int = 0
    """Replicas whose check of the sum against the fingerprints came out right."""
    failed: int = 0
    traced: bool = False
    routed: bool = False
    """Slices went through the store, since an owner was late."""
    owners_failed: int = 0
    unchecked_stages: tuple[int, ...] = ()
    """Stages whose replicas all belong to one coldkey: nobody else has checked them."""
    sealed: bool = False
    begun_s: float = 0.0
    """Wall time."""
    seconds: float = 0.0
    """From the first freeze to the last event."""


class MergeLines:
    """``note`` each record; the newest merge comes last in :meth:`lines`."""

    def __init__(self) -> None:
        self._lines: OrderedDict[tuple[int, int], MergeLine] = OrderedDict()
        self._on: dict[type, Callable[[MergeLine, Any], None]] = {
            Frozen: lambda line, event: None,
            ReduceOrdered: _ordered,
            PartitionMerged: _merged,
            Checked: _checked,
            TraceStarted: _traced,
            StoreRouted: _routed,
            OwnerFailed: _owner_failed,
            StageSealed: _sealed,
        }

    def lines(self) -> tuple[MergeLine, ...]:
        return tuple(self._lines.values())

    def note(self, record: Record) -> None:
        event: Any = record.event
        change = self._on.get(type(event))
        if change is None:
            return
        key, now_s = (event.step, event.group), record.time_ns / 1e9
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = MergeLine(event.step, event.group, begun_s=now_s)
            if len(self._lines) > MAX_MERGES:
                self._lines.popitem(last=False)
        change(line, event)
        line.seconds = round(max(0.0, now_s - line.begun_s), 3)


def _ordered(line: MergeLine, event: ReduceOrdered) -> None:
    line.version = event.version
    line.contributors, line.owners = len({entry.member for entry in event.entries}), len(set(event.owners))
    line.num_partitions = len(event.owners)
    line.partitions = line.merged_bytes = line.passed = line.failed = 0


def _merged(line: MergeLine, event: PartitionMerged) -> None:
    line.partitions += 1
    line.merged_bytes += event.size_bytes


def _checked(line: MergeLine, event: Checked) -> None:
    if event.ok:
        line.passed += 1
    else:
        line.failed += 1


def _traced(line: MergeLine, event: TraceStarted) -> None:
    line.traced = True


def _routed(line: MergeLine, event: StoreRouted) -> None:
    line.routed = True


def _owner_failed(line: MergeLine, event: OwnerFailed) -> None:
    line.owners_failed += 1


def _sealed(line: MergeLine, event: StageSealed) -> None:
    line.sealed, line.unchecked_stages = True, event.unchecked_stages
