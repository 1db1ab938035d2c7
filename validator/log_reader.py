"""A run's journal as the log store has it, trusted only as far as it can be checked: numbers, hash chain, signatures, the fold.

Each segment follows the one before without a gap, chains to the head that its leader signed, and was written by the leader
whose ``TermStarted`` is in force at its end; every record is folded by the code that everyone folds with. What doesn't fit
stops the reading with the segment's number and the way out.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec
from loguru import logger

from subnet.errors import Corrupt, InputError, NotFound
from subnet.protocol import wire
from subnet.protocol.signing import verify_statement
from subnet.run.apply import apply_record
from subnet.run.chain_hash import GENESIS_HEAD, fold_heads
from subnet.run.events import Record, RunFinished, TermStarted
from subnet.run.invariants import InvariantBroken, check
from subnet.run.state import RunState, new_state
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock, Deadline
from validator.log_publisher import LIMIT_SEGMENT_BYTES, SegmentFile, segment_key
from validator.run_archive import NamedStore, RunKeys

AHEAD = 8
"""Segments that are fetched at a time."""
SAY_EVERY_S = 2.0
_record_decoder = msgspec.msgpack.Decoder(Record)
Seen = Callable[[RunState, Record], None]
UNFIT = (msgspec.MsgspecError, InvariantBroken, LookupError, ValueError, ArithmeticError, struct.error)
"""What a record does to those who fold it that no leader would write: numbers out of range, stages that there aren't."""


class FoldedSegments:
    """The fold of a run's segments so far, each checked as it is taken; what was taken isn't kept.

    ``seen(state, record)`` is told each record before it is folded. A segment that doesn't fit leaves the fold unusable,
    unless :meth:`examine` has refused it.
    """

    others = "name the other runs to lead with --lead-run"
    """The way out besides restoring a segment."""

    def __init__(self, run_id: str, state: RunState | None = None) -> None:
        self.run_id = run_id
        self.state: RunState = state if state is not None else new_state()
        self.num_segments = 0
        self.head = GENESIS_HEAD
        self.leaders: list[str] = []
        """Hotkeys that have led, in order of their first term."""
        self.last_ns = 0
        """When the last record was stamped; 0 before the first."""

    @property
    def number(self) -> int:
        """Records folded, the number of the next one."""
        return self.state.number

    def take(self, segment: SegmentFile, seen: Seen | None = None) -> None:
        """Check the next segment and fold it."""
        head = self.examine(segment)
        for data in segment.records:
            self._fold(data, seen)
        try:
            check(self.state)
        except InvariantBroken as error:
            raise self.corrupt(f"after its last record the state is wrong: {error}") from error
        if segment.hotkey != self.state.leader:
            raise self.corrupt(f"{segment.hotkey} wrote it, while {self.state.leader or 'nobody'} led")
        self.head = head
        self.num_segments += 1

    def examine(self, segment: SegmentFile) -> str:
        """The head after it, if it is the next and signed by whom it says; nothing is folded."""
        number = self.num_segments
        if (segment.run_id, segment.number) != (self.run_id, number):
            raise self.corrupt(f"it says that it is segment {segment.number} of run {segment.run_id}")
        if segment.first != self.number or not segment.records:
            count = len(segment.records)
            raise self.corrupt(f"it has {count} records from {segment.first} on where {self.number} is due")
        head = fold_heads(self.head, segment.records)
        if head != segment.head:
            raise self.corrupt("its records don't fit the hash chain")
        if not is_signed(segment):
            raise self.corrupt(f"its signature isn't {segment.hotkey}'s")
        return head

    def _fold(self, data: bytes, seen: Seen | None) -> None:
        try:
            record = _record_decoder.decode(data)
            if seen is not None and record.number == self.number:
                seen(self.state, record)
            apply_record(self.state, record)
        except UNFIT as error:
            raise self.corrupt(f"record {self.number} can't follow: {error}") from error
        self.last_ns = record.time_ns
        if isinstance(record.event, TermStarted) and record.event.hotkey not in self.leaders:
            self.leaders.append(record.event.hotkey)

    def corrupt(self, what: str) -> Corrupt:
        """Of the segment that is due."""
        return corrupt_segment(self.run_id, self.num_segments, what, self.others)


class RunLog(FoldedSegments):
    """What the log store has of a run, checked and kept. ``segments``: (first, next) record numbers of each."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.records: list[bytes] = []
        self.segments: list[tuple[int, int]] = []

    def take(self, segment: SegmentFile, seen: Seen | None = None) -> None:
        super().take(segment, seen)
        self.records.extend(segment.records)
        self.segments.append((segment.first, len(self.records)))


def is_signed(segment: SegmentFile) -> bool:
    """Whether its head is signed by whom it says; what the head is of isn't looked at."""
    return verify_statement(segment.hotkey, "journal-head", segment.head.encode(), segment.signature)


def corrupt_segment(run_id: str, number: int, what: str, others: str = FoldedSegments.others) -> Corrupt:
    before = f"segments 0 to {number - 1} are good" if number else "it is the first"
    return Corrupt(
        f"segment {number} of run {run_id} in the log store: {what}",
        hint=f"{before}; restore {segment_key(run_id, number)} from a copy of the store, or {others}",
    )


async def is_finished(store: NamedStore, keys: RunKeys, clock: Clock = SYSTEM_CLOCK) -> bool:
    """Whether the run's last segment ends it: only departures and terms may come after ``RunFinished``."""
    if not keys.segments:
        return False
    segment = await _get(store, keys, len(keys.segments) - 1, clock)
    try:
        events = [_record_decoder.decode(data).event for data in segment.records]
    except msgspec.MsgspecError as error:
        raise corrupt_segment(keys.run_id, segment.number, f"a record does not decode: {error}") from error
    return any(isinstance(event, RunFinished) for event in events)


async def read_log(store: NamedStore, keys: RunKeys, clock: Clock = SYSTEM_CLOCK) -> RunLog:
    """All of the run's segments, checked and folded. :class:`Corrupt` names the first that doesn't fit."""
    log, count, said_s, size_bytes = RunLog(keys.run_id), len(keys.segments), clock.now_s(), 0
    async for segment in _segments(store, keys, clock):
        log.take(segment)
        size_bytes += sum(len(data) for data in segment.records)
        if clock.now_s() - said_s >= SAY_EVERY_S:
            said_s = clock.now_s()
            logger.info("{}: segment {} of {} read, {:.1f} MB", keys.run_id, segment.number, count, size_bytes / 1e6)
    logger.info(
        "{}: {} segments, {} records read and checked: term {}, step {}",
        keys.run_id,
        count,
        len(log.records),
        log.state.term,
        log.state.next_step,
    )
    return log


async def _segments(store: NamedStore, keys: RunKeys, clock: Clock) -> AsyncGenerator[SegmentFile]:
    for start in range(0, len(keys.segments), AHEAD):
        numbers = range(start, min(start + AHEAD, len(keys.segments)))
        reads = (_get(store, keys, number, clock) for number in numbers)
        for found in await asyncio.gather(*reads, return_exceptions=True):
            if isinstance(found, BaseException):
                raise found
            yield found


async def _get(store: NamedStore, keys: RunKeys, number: int, clock: Clock) -> SegmentFile:
    key = keys.segments[number]
    if key.name != segment_key(keys.run_id, number):
        raise corrupt_segment(keys.run_id, number, "it is missing")
    if key.size_bytes > LIMIT_SEGMENT_BYTES:
        raise corrupt_segment(keys.run_id, number, f"{key.size_bytes} bytes, more than {LIMIT_SEGMENT_BYTES}")
    segment = await get_segment(store, keys.run_id, number, clock)
    if segment is None:
        raise corrupt_segment(keys.run_id, number, "it is missing")
    return segment


async def get_segment(
    store: NamedStore, run_id: str, number: int, clock: Clock = SYSTEM_CLOCK, others: str = FoldedSegments.others
) -> SegmentFile | None:
    """None where the store has none of this number."""
    key = segment_key(run_id, number)
    try:
        data = await store.get_named(key, deadline=Deadline.after(TIMEOUTS.store_request_s, clock))
    except NotFound:
        return None
    try:
        return wire.decode(data, SegmentFile, limit_bytes=LIMIT_SEGMENT_BYTES, what=key)
    except InputError as error:
        raise corrupt_segment(run_id, number, f"it does not decode: {error.reason}", others) from error


def doubtful_leaders(log: FoldedSegments, permits: Mapping[str, bool]) -> Sequence[str]:
    """What is to be said of those who led: hotkeys that the chain doesn't know (now), or that hold no permit (now)."""
    warnings: list[str] = []
    for hotkey in log.leaders:
        if hotkey not in permits:
            warnings.append(f"{hotkey}, which led run {log.run_id}, isn't registered on this subnet now")
        elif not permits[hotkey]:
            warnings.append(f"{hotkey}, which led run {log.run_id}, holds no validator permit now")
    return warnings
