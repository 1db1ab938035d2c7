"""One run as a follower knows it: the checked fold of its segments and all that is derived from the same records, and a copy.

Everything follows from the records taken, in order; what this validator finds out by itself (audits, verdicts) is kept in
files of facts beside and enters the scores at the record where it was found out, so that a restart from the copy, or from
segment 0, gives the same scores. A copy is good only whole (its own hash), and only if the next segment goes on from its head.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
from blake3 import blake3
from loguru import logger

from subnet.errors import Corrupt
from subnet.protocol.follow_api import Breach, CaseVerdict, FollowedView, OwnAudit
from subnet.run.events import Record
from subnet.run.state import RunState
from subnet.run.state_codec import dump_state, load_state
from subnet.score.book import RunBook
from subnet.store.disk import atomic_write
from subnet.timing import Clock
from validator.follow_checks import WRONG, Found, breaches
from validator.follow_judging import Judging
from validator.follow_promises import Promises
from validator.follow_todo import Todo
from validator.history import History
from validator.lines import DurableLines
from validator.log_publisher import SegmentFile
from validator.log_reader import FoldedSegments
from validator.watch import Watch

VERSION = 2
MAX_LINES_A_CODE = 100
"""Breaches of one code and run that are written down; further ones are counted."""
AHEAD_S = 600.0
"""So far ahead of this machine's clock a record may be stamped: scores decay by these stamps."""
_DOMAIN = b"iota/follow/1\0"


class _Copy(msgspec.Struct, frozen=True, array_like=True):
    version: int
    run_id: str
    num_segments: int
    before: str
    """Head before ``last``."""
    last: SegmentFile
    """The last segment taken, whole: what another one of its number is held against."""
    leaders: tuple[str, ...]
    last_ns: int
    state: bytes
    history: bytes
    ledger: bytes
    promises: bytes
    book: bytes
    judging: bytes
    todo: bytes
    counted_to: int | None
    counts: dict[str, int]


_decoder = msgspec.msgpack.Decoder(_Copy)


class FollowedSegments(FoldedSegments):
    others = "follow the other runs with --follow.run"


class FollowedRun:
    """``directory`` is this run's alone; ``book`` is the run's in the score book."""

    def __init__(self, run_id: str, directory: Path, book: RunBook, clock: Clock) -> None:
        self.run_id, self.directory, self.book, self.clock = run_id, directory, book, clock
        self.folded = FollowedSegments(run_id)
        self.history, self.promises, self.watch = History(), Promises(), Watch()
        self.breaches = DurableLines(directory / "breaches.ndjson", Breach)
        self.audits = DurableLines(directory / "audits.ndjson", OwnAudit)
        self.verdicts = DurableLines(directory / "cases.ndjson", CaseVerdict)
        self._known = {(b.number, b.code, b.what) for b in self.breaches.items}
        self._known_later = {(b.code, b.what) for b in self.breaches.items}
        self._wrong_at = {b.number for b in self.breaches.items if b.wrong}
        self.counts: Counter[str] = Counter()
        self.judging, self.todo = Judging(book, self.audits.items, self.verdicts.items), Todo()
        self.before, self.last = self.folded.head, None
        self.counted_to: int | None = None
        """Record from which on nothing of this run counts."""
        self.trouble, self.trouble_code = "", ""
        """Why it doesn't go on, where it doesn't."""
        self.withheld = ""
        """What the leader tells others and doesn't put into the log store."""
        self.doubts: tuple[str, ...] = ()
        """Of those who led it, by the chain as it is now."""
        self.policy_doubt = ""
        """That its leader counts with another policy, where it does."""
        self.caught_up = False
        """The store had nothing more when it was last asked."""
        self.taken_s = clock.now_s()
        self._copied = 0
        self.spoilt = False
        """A segment broke off within: the fold is of no use in this process."""

    # --- records -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        return self.folded.state

    @property
    def number(self) -> int:
        return self.folded.number

    @property
    def finished(self) -> bool:
        return self.state.finished is not None

    @property
    def name(self) -> str:
        return self.state.run.config.run.name if self.state.run is not None else self.run_id

    @property
    def signed_head(self) -> tuple[int, str, str, bytes] | None:
        """(records, head, leader, its signature) of what is folded."""
        if self.last is None:
            return None
        return self.number, self.last.head, self.last.hotkey, self.last.signature

    def take(self, segment: SegmentFile) -> None:
        """The next segment. :class:`Corrupt` where it doesn't fit: nothing has changed if its chain or signature doesn't,
        else its leader has broken the protocol under its own signature, and the run can't be followed further."""
        self.folded.examine(segment)
        before = self.folded.head
        self.spoilt = True
        try:
            self.folded.take(segment, self._seen)
        except Corrupt as error:
            self._breach(self.folded.last_ns, Found("fold", error.reason))
            raise
        self.spoilt = False
        self.before, self.last = before, segment
        self.taken_s, self.withheld = self.clock.now_s(), ""
        self._reach()

    def _seen(self, state: RunState, record: Record) -> None:
        event = record.event
        self._reach()
        for found in (*breaches(state, event), *self.promises.look(state, event), *self._stamp(record)):
            self._breach(record.time_ns, found)
        if record.number in self._wrong_at and self.counted_to is None:
            self.counted_to = record.number  # what was seen by something that has passed, as a clock
        if self.counted_to is None:
            self.book.note(record)
        self.history.fold(record)
        self.judging.look(state, event)
        self.todo.look(state, self.watch.audits.ledger, event)
        self.watch.audits.ledger.note(state, event)

    def _reach(self) -> None:
        """What was found out here by this record enters the scores, and may be a breach of the leader's."""
        for found in self.judging.reach(self.number, self.folded.last_ns):
            self._breach(self.folded.last_ns, found)

    def _stamp(self, record: Record) -> list[Found]:
        if record.time_ns - self.clock.wall_ns() <= AHEAD_S * 1e9:
            return []
        return [Found("clock", f"the record is stamped {record.time_ns / 1e9:.0f} s, more than {AHEAD_S:g} s ahead")]

    def _breach(self, time_ns: int, found: Found) -> None:
        """Of the record that is due."""
        self.counts[found.code] += 1
        wrong = found.code in WRONG
        if wrong and self.counted_to is None:
            self.counted_to = self.number
        if (self.number, found.code, found.what) in self._known or self.counts[found.code] > MAX_LINES_A_CODE:
            return
        state, number = self.state, self.number
        breach = Breach(self.run_id, number, state.next_step, found.code, found.what, wrong, state.leader, time_ns)
        self._known.add((number, found.code, found.what))
        self._known_later.add((found.code, found.what))
        self.breaches.append(breach)
        logger.warning("run {} record {}: breach {}: {}", self.run_id, number, found.code, found.what)

    def found_later(self, found: Found) -> None:
        """A breach that could only be seen once something outside the journal was known: said once, whatever the number."""
        if (found.code, found.what) not in self._known_later:
            self._breach(self.folded.last_ns, found)

    # --- what was found out here ---------------------------------------------------------------------------------

    def judge(self, audit: OwnAudit) -> None:
        self.audits.append(audit)
        self._reach()

    def decide(self, verdict: CaseVerdict) -> None:
        self.verdicts.append(verdict)
        self._reach()

    # --- the copy ------------------------------------------------------------------------------------------------

    @property
    def uncopied(self) -> int:
        """Records taken since the last copy."""
        return self.number - self._copied

    def copy(self) -> bytes:
        """For :meth:`write_copy`, in any thread; empty before the first segment."""
        if self.last is None:
            return b""
        self._copied = self.number
        folded = self.folded
        return msgspec.msgpack.encode(
            _Copy(
                VERSION,
                self.run_id,
                folded.num_segments,
                self.before,
                self.last,
                tuple(folded.leaders),
                folded.last_ns,
                dump_state(self.state),
                self.history.dump(),
                self.watch.audits.ledger.dump(),
                self.promises.dump(),
                self.book.dump(),
                self.judging.dump(),
                self.todo.dump(),
                self.counted_to,
                dict(self.counts),
            )
        )

    def write_copy(self, data: bytes) -> None:
        if data:
            atomic_write(self.directory / "copy", blake3(_DOMAIN + data).digest() + data)

    def load_copy(self) -> None:
        """Go on from the copy, if there is a good one; else from segment 0."""
        path = self.directory / "copy"
        if not path.exists():
            return
        raw = path.read_bytes()
        parts = (self.watch.audits.ledger, self.promises, self.book, self.judging, self.todo)
        empty = [part.dump() for part in parts]
        try:
            if blake3(_DOMAIN + raw[32:]).digest() != raw[:32]:
                raise Corrupt("its hash doesn't fit")
            self._load(_decoder.decode(raw[32:]))
        except (msgspec.MsgspecError, Corrupt) as error:
            logger.warning("run {}: {} can't be used ({}): from segment 0", self.run_id, path, error)
            for part, data in zip(parts, empty, strict=True):
                part.load(data)

    def _load(self, copy: _Copy) -> None:
        if copy.version != VERSION or copy.run_id != self.run_id:
            raise Corrupt(f"it is of version {copy.version} and run {copy.run_id}")
        state, history, folded = load_state(copy.state), History.load(copy.history), FollowedSegments(self.run_id)
        folded.state, folded.num_segments, folded.head = state, copy.num_segments, copy.last.head
        folded.leaders, folded.last_ns = list(copy.leaders), copy.last_ns
        self.watch.audits.ledger.load(copy.ledger)
        self.promises.load(copy.promises)
        self.book.load(copy.book)
        self.judging.load(copy.judging)
        self.todo.load(copy.todo)
        self.folded, self.history, self.before, self.last = folded, history, copy.before, copy.last
        self.counted_to, self.counts, self._copied = copy.counted_to, Counter(copy.counts), self.number
        logger.info("run {}: from the copy at record {}, segment {}", self.run_id, self.number, copy.num_segments)

    # --- what people see -----------------------------------------------------------------------------------------

    def view(self) -> FollowedView:
        folded = self.folded
        return FollowedView(
            name=self.name,
            run_id=self.run_id,
            leader=self.state.leader,
            number=self.number,
            segments=folded.num_segments,
            head=folded.head,
            behind_s=0.0 if self.finished else self.clock.now_s() - self.taken_s,
            trouble=self.trouble or self.withheld,
            trouble_code=self.trouble_code or ("withheld" if self.withheld else ""),
            doubts=(*self.doubts, *filter(None, (self.policy_doubt,))),
            to_redo=len(self.todo.windows) + len(self.todo.cases),
            counted_to=self.counted_to,
        )
