"""Journals of random schedules as a log store has them: cut into segments, signed by those who led, arriving one by one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import msgspec
from blake3 import blake3
from lead_cases import FIRST, SECOND, Keys
from schedule_sim import Sim

from subnet.audit.draw import drawn
from subnet.audit.ledger import WorkLedger
from subnet.protocol import wire
from subnet.protocol.signing import Signer, sign_statement
from subnet.run import audits
from subnet.run import events as ev
from subnet.run.apply import apply
from subnet.run.chain_hash import GENESIS_HEAD, fold_heads
from subnet.run.config import AuditSection
from subnet.run.state import config, new_state
from subnet.words import Member
from validator.log_publisher import SegmentFile, segment_key

SECOND_NS = 1_000_000_000
SIGNERS = (FIRST, SECOND)


@functools.cache
def journal_of(seed: int, **options: object) -> tuple[ev.Record, ...]:
    """All records of a schedule, stamped a second apart, led by real hotkeys in turn."""
    sim = Sim(seed, checks_all=False, **options)  # type: ignore[arg-type]
    sim.run()
    return stamped(record.event for record in sim.coordinator.journal)


def stamped(events: Iterable[ev.AnyEvent]) -> tuple[ev.Record, ...]:
    leaders: dict[str, str] = {}
    records: list[ev.Record] = []
    for number, event in enumerate(events):
        if isinstance(event, ev.TermStarted):
            hotkey = leaders.setdefault(event.hotkey, SIGNERS[len(leaders) % 2].hotkey)
            event = msgspec.structs.replace(event, hotkey=hotkey)
        elif isinstance(event, ev.AuditOpened):
            event = msgspec.structs.replace(event, by=leaders.get(event.by, event.by))
        elif isinstance(event, ev.RunPlanned) and event.run_id == "toy":
            event = msgspec.structs.replace(event, run_id="toy-00000001")
        records.append(ev.Record(number, (1_700_000_000 + number) * SECOND_NS, event))
    return tuple(records)


class Published:
    """A journal that arrives in ``keys``, a segment at each quorum event."""

    def __init__(self, keys: Keys, records: Sequence[ev.Record], run_id: str = "toy-00000001") -> None:
        self.keys, self.records, self.run_id = keys, records, run_id
        self.segments = [SegmentFile(run_id, n, *part) for n, part in enumerate(self._parts())]
        self.sent = 0

    def _parts(self) -> Iterable[tuple[int, tuple[bytes, ...], str, str, bytes]]:
        head, first, leader = GENESIS_HEAD, 0, FIRST
        for number, record in enumerate(self.records):
            if isinstance(record.event, ev.TermStarted):
                leader = next(signer for signer in SIGNERS if signer.hotkey == record.event.hotkey)
            last = number == len(self.records) - 1
            if (isinstance(record.event, ev.QUORUM_EVENTS) and number) or last:
                data = tuple(wire.encode(r) for r in self.records[first : number + 1])
                head = fold_heads(head, data)
                yield first, data, head, leader.hotkey, sign_head(leader, head)
                first = number + 1

    def send(self, count: int | None = None) -> None:
        """Put the next ``count`` segments, all that are left without it."""
        end = len(self.segments) if count is None else self.sent + count
        for segment in self.segments[self.sent : end]:
            self.keys.keys[segment_key(self.run_id, segment.number)] = wire.encode(segment)
        self.sent = min(end, len(self.segments))


def sign_head(signer: Signer, head: str) -> bytes:
    return sign_statement(signer, "journal-head", head.encode())


def with_records(segment: SegmentFile, before: str, records: Sequence[bytes], signer: Signer = FIRST) -> SegmentFile:
    """The segment with other records behind the same head, signed as if it had always been so."""
    head = fold_heads(before, records)
    return msgspec.structs.replace(
        segment, records=tuple(records), head=head, hotkey=signer.hotkey, signature=sign_head(signer, head)
    )


# --- journals with audits ------------------------------------------------------------------------------------------

AUDIT = AuditSection(rate=0.6, before_seal="probation", probation_items=4, window_steps=1, open_windows=2)
"""So that a schedule of some steps has both audits before the seal and windows."""


def block_hash(number: int) -> str:
    return blake3(str(number).encode()).hexdigest()


class Audited:
    """The journal of a schedule as a leader that keeps its promises would have written it in a run with audits.

    ``omit``: what this one leaves out: ``before`` (one audit before a seal), ``drawn`` (one partial that its draw names),
    ``window`` (the last window is never audited).
    """

    def __init__(self, seed: int, audit: AuditSection = AUDIT, *, omit: str = "", **options: object) -> None:
        self._audit, self._omit, self._omitted = audit, omit, False
        self.state, self.ledger = new_state(), WorkLedger()
        self.events: list[ev.AnyEvent] = []
        for record in journal_of(seed, **options):
            self._before(record.event)
            event = record.event
            if isinstance(event, ev.RunPlanned):
                event = msgspec.structs.replace(event, config=msgspec.structs.replace(event.config, audit=audit))
            self.say(event)
            if isinstance(event, ev.StepSealed):
                self._windows()

    @property
    def records(self) -> tuple[ev.Record, ...]:
        return stamped(self.events)

    def say(self, event: ev.AnyEvent) -> None:
        self.ledger.note(self.state, event)
        apply(self.state, event)
        self.events.append(event)

    def _leaves_out(self, what: str) -> bool:
        if self._omit != what or self._omitted:
            return False
        self._omitted = True
        return True

    def _before(self, event: ev.AnyEvent) -> None:
        """Before a seal: everybody whose word isn't taken yet."""
        if not isinstance(event, ev.StageSealed):
            return
        assert self.state.work is not None
        merge = self.state.work.merges[event.group]
        for entry in event.entries:
            if audits.must_audit(self.state, entry.member.hotkey) and not self._leaves_out("before"):
                self.open(event.step, entry.stage, [entry.member], number=merge.number)
                self.close(passed=(entry.member,))

    def open(self, step: int, stage: int, members: Sequence[Member], number: int = 0, by: str = "") -> None:
        entries = self.state.work.merges if self.state.work is not None and number else ()
        counts = {e.member: len(e.microbatches) for merge in entries for e in merge.entries if e.stage == stage}
        counts |= (
            {record.member: record.num_items for record in self.ledger.partials(step, stage)} if not number else {}
        )
        audit, num_items = self.state.audits.num_opened + 1, tuple(counts[k] for k in members)
        self.say(ev.AuditOpened(audit, step, stage, number, tuple(members), by or self.state.leader, (), num_items))

    def close(self, **judged: tuple[Member, ...]) -> None:
        self.say(ev.AuditClosed(self.state.audits.num_opened, **judged))

    def _windows(self) -> None:
        run, found = config(self.state), self.state.audits
        while found.next_window < audits.num_windows(run) and self.state.next_step > audits.last_of(
            run, found.next_window
        ):
            window = found.next_window
            first = max(audits.first_of(run, window), found.audited_to)
            closed = ev.WindowClosed(window, first, audits.last_of(run, window), 100 + window)
            self.say(closed)
            self._draws(closed)
            if window == audits.num_windows(run) - 1 and self._leaves_out("window"):
                return
            self.say(ev.WindowAudited(window))

    def _draws(self, closed: ev.WindowClosed) -> None:
        for draw in drawn(self.state, self.ledger, closed, block_hash(closed.block), self.state.leader):
            if not self._leaves_out("drawn"):
                self.open(draw.step, draw.stage, draw.members)
                self.close(passed=draw.members)
