"""Recorded journals for the workshop: their records, each checked, and what they say of their members' machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec

from iota.score_recompute import SAVED, SQLITE, journal_in, saved_segments
from subnet.errors import ConfigError, Corrupt, InputError
from subnet.incentives.scenario import LEAST_BETWEEN_H, Hardware, Scenario
from subnet.run import events as ev
from subnet.score.book import RunBook
from subnet.score.policy import ScorePolicy
from subnet.score.score import Tally
from validator.log_reader import FoldedSegments
from validator.score_files import read_journal

HOUR_S = 3600.0
NO_FADING = ScorePolicy(half_life_s=1e8)
LEAST_PRESENT_S = 1.0
UNSEEN_OUTAGE_H = 0.5
"""Length of an outage where a member had none."""


class Source(msgspec.Struct, frozen=True):
    run_id: str
    num_records: int
    head: str


class _Tap(RunBook):
    """Stands where a reader of journals wants a book."""

    def __init__(self, seen: Callable[[ev.Record], None]) -> None:
        super().__init__()
        self._seen = seen

    def note(self, record: ev.Record) -> None:
        self._seen(record)

    def load(self, data: bytes) -> None:
        raise Corrupt(
            "this journal's first records are gone: what was earned in them was counted with the policy of their time",
            hint="take all of them from the log store: iota score recompute STORE_URL RUN --save FILE",
        )


def read_records(source: str, run: str, seen: Callable[[ev.Record], None]) -> Source:
    """Every record of a run, from the first, in order; each step and hash is checked.

    ``source``: a directory with a journal (a run's, or a validator's), a journal.db, or a file that ``iota score recompute --save``
    wrote. ``run``: its name, where there are several. :class:`ConfigError`, :class:`InputError`, :class:`Corrupt`.
    """
    path = Path(source).expanduser()
    if "://" in source:
        raise ConfigError(
            "a log store isn't read here", hint=f"save its journal first: iota score recompute {source} RUN --save FILE"
        )
    try:
        if path.is_dir():
            path = journal_in(path, run)
        with path.open("rb") as file:
            head = file.read(max(len(SAVED), len(SQLITE)))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint="check path and rights") from error
    if head.startswith(SQLITE):
        read = read_journal(path, _Tap(seen))
        return Source(read.run_id, read.number, read.head)
    if head.startswith(SAVED):
        return _from_saved(path, seen)
    if head.startswith(SAVED[:13]):
        version = head[13:].split(b"\n")[0].decode("ascii", "replace")
        raise InputError(
            f"{path} is a journal of version {version}, this iota reads version 1", hint="save it again with this iota"
        )
    raise InputError(f"{path} is no journal", hint="a journal.db, or what iota score recompute --save wrote")


def _from_saved(path: Path, seen: Callable[[ev.Record], None]) -> Source:
    folded = None
    for segment in saved_segments(path):
        folded = folded if folded is not None else FoldedSegments(segment.run_id)
        folded.take(segment, lambda state, record: seen(record))
    if folded is None:
        raise Corrupt(f"{path} has no segment", hint="save it again from the log store")
    return Source(folded.run_id, folded.number, folded.head)


# --- machines ------------------------------------------------------------------------------------------------------


class Measured(msgspec.Struct, frozen=True):
    """One member of a recorded run."""

    hotkey: str
    flops_per_s: float
    """Sealed work over the time that it was a member."""
    hours_between_outages: float
    """Without one: twice the time that it was seen."""
    outage_h: float
    late_share: float


def measure(source: str, run: str) -> tuple[Measured, ...]:
    """Who was a member and sealed something, by hotkey. :class:`InputError` where nobody did."""
    book, outages = RunBook(NO_FADING), Counter[str]()

    def seen(record: ev.Record) -> None:
        book.note(record)
        if isinstance(record.event, ev.Gone) and record.event.why in ("lost", "silent"):
            outages[record.event.member.hotkey] += 1

    read_records(source, run, seen)
    tallies = book.tallies(book.now_s)
    found = [_measured(t, outages[hotkey]) for hotkey, t in sorted(tallies.items()) if _worked(t)]
    if not found:
        raise InputError(f"in {source} nobody has sealed any work", hint="name a journal of a run that got further")
    return tuple(found)


def _worked(tally: Tally) -> bool:
    return tally.work > 0 and tally.present_s >= LEAST_PRESENT_S


def _measured(tally: Tally, outages: int) -> Measured:
    present_h = tally.present_s / HOUR_S
    return Measured(
        hotkey=tally.hotkey,
        flops_per_s=tally.work / tally.present_s,
        hours_between_outages=max(LEAST_BETWEEN_H, present_h / outages if outages else 2.0 * present_h),
        outage_h=min(1e4, tally.absent_s / HOUR_S / outages) if outages else UNSEEN_OUTAGE_H,
        late_share=min(1.0, (tally.late + tally.silent) / tally.done) if tally.done > 0 else 0.0,
    )


def with_measured(scenario: Scenario, members: tuple[Measured, ...]) -> Scenario:
    """Each machine is one of these members at random: its outages and its share of late leases as they were, its speed that of
    its hardware times the member's over the members' median."""
    middle = median(member.flops_per_s for member in members)

    def like(hardware: Hardware) -> Hardware:
        own = tuple(
            (
                hardware.flops_per_s * member.flops_per_s / middle,
                member.hours_between_outages,
                member.outage_h,
                member.late_share,
            )
            for member in members
        )
        return msgspec.structs.replace(hardware, measured=own)

    return msgspec.structs.replace(scenario, hardware={name: like(h) for name, h in scenario.hardware.items()})
