"""Copies the journal to the log store in write-once segments; a seal or a term takes effect only when its segment is in.

A segment that is already there is read back: a prefix of our own journal counts as acknowledged (we crashed after the PUT),
anything else means that someone else leads, and this process must stop.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from subnet.errors import Exists, IotaError
from subnet.protocol import wire
from subnet.protocol.signing import Signer, sign_statement
from subnet.timing import TIMEOUTS, Clock, Deadline
from validator.journal_core import JournalCore, SegmentDue
from validator.journal_core import Segment as Answer
from validator.journal_file import WAY_OUT
from validator.journal_store import JournalStore, first_bytes

LIMIT_SEGMENT_BYTES = 64 << 20
MAX_SEGMENT_RECORDS = 50_000
MAX_SEGMENT_BYTES = 32 << 20


class LeadershipLost(IotaError):
    """The log store holds a segment that isn't ours."""

    code = "leadership_lost"


class LogStore(Protocol):
    """Named write-once keys; see :mod:`subnet.store.base`."""

    async def put_named(self, name: str, data: bytes, *, deadline: Deadline) -> None: ...

    async def get_named(self, name: str, *, deadline: Deadline) -> bytes: ...


class SegmentFile(msgspec.Struct, frozen=True, array_like=True):
    """``records`` are the raw bytes as chained; ``head`` is the chain value after the last, signed by the leader."""

    run_id: str
    number: int
    first: int
    records: tuple[bytes, ...]
    head: str
    hotkey: str
    signature: bytes


def segment_key(run_id: str, number: int) -> str:
    return f"runs/{run_id}/journal/{number:010d}"


class LogPublisher:
    def __init__(self, run_id: str, journal: JournalStore, store: LogStore, signer: Signer, clock: Clock) -> None:
        self._run_id, self._journal, self._store, self._signer, self._clock = run_id, journal, store, signer, clock

    async def publish(self, due: SegmentDue, core: JournalCore) -> None:
        """Put the committed records of ``due`` and tell ``core``; raises :class:`LeadershipLost` if another leads."""
        journal = self._journal
        end = min(due.end, journal.committed, due.start + MAX_SEGMENT_RECORDS)
        records = tuple(first_bytes(journal.records_between(due.start, end), MAX_SEGMENT_BYTES))
        if not records:
            return
        head = journal.head_after(due.start + len(records))
        signature = sign_statement(self._signer, "journal-head", head.encode())
        segment = SegmentFile(self._run_id, due.index, due.start, records, head, self._signer.hotkey, signature)
        deadline = Deadline.after(TIMEOUTS.store_request_s, self._clock)
        key, there = segment_key(self._run_id, due.index), segment
        try:
            await self._store.put_named(key, wire.encode(segment), deadline=deadline)
        except Exists:
            there = await self._read_back(key, deadline)
            # A segment that starts elsewhere can't be ours; an empty tuple would pass for a prefix.
            records = there.records if there.first == due.start and there.records else (b"not ours",)
        own = journal.records_between(due.start, due.start + len(records))
        answer = core.answered(due.index, stored=there is segment, segment=records, own=own)
        if answer is Answer.DEPOSED:
            raise self._lost(there)
        if answer is Answer.ACKNOWLEDGED:
            journal.stage_segment(due.start, core.acknowledged)
            await journal.commit()

    async def _read_back(self, key: str, deadline: Deadline) -> SegmentFile:
        data = await self._store.get_named(key, deadline=deadline)
        return wire.decode(data, SegmentFile, limit_bytes=LIMIT_SEGMENT_BYTES, what=key)

    def _lost(self, there: SegmentFile) -> LeadershipLost:
        what = f"segment {there.number} of run {self._run_id} in the log store is not this journal's"
        if there.hotkey == self._signer.hotkey:
            hint = f"it is this hotkey's: this disk has lost records, or another process leads; {WAY_OUT}"
        else:
            hint = "another validator leads this run; stop this one, or start it with a new data directory"
        return LeadershipLost(what, hint=hint)
