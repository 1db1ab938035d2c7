"""Who leads a run: a term that must be new, and a leader that notices in time that another has taken over.

The write-once segments decide: whose ``TermStarted`` is in the log store leads, the other finds a segment there that isn't
its own. A leader would notice at its next seal; one whose miners have gone to the other never seals again, so it looks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

from loguru import logger

from subnet.errors import Corrupt, IotaError, NotFound
from subnet.protocol import wire
from subnet.store.disk import atomic_write
from subnet.timing import TIMEOUTS, Clock, Deadline
from validator.journal_core import is_own_prefix
from validator.journal_store import JournalStore
from validator.log_publisher import LIMIT_SEGMENT_BYTES, LeadershipLost, LogStore, SegmentFile, segment_key

_FLOOR_NAME = "led-by-others"


def others_term(journal_path: Path) -> int:
    """The last term that isn't this disk's: whoever leads from this journal needs a later one. 0: there is none.

    It stays on the disk for good: once a later ``TermStarted`` is in the journal it asks for nothing more, and that
    term speaks to nobody before the log store has it.
    """
    path = journal_path.with_name(_FLOOR_NAME)
    try:
        return int(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise Corrupt(
            f"{path} cannot be read: {error}", hint="move the run's directory away and start with --lead-from again"
        ) from error


def was_imported(journal_path: Path) -> bool:
    """Whether this journal was taken over from the log store, not begun on this disk."""
    return journal_path.with_name(_FLOOR_NAME).exists()


def demand_new_term(journal_path: Path, above: int) -> None:
    """Whoever leads from this journal starts a term later than ``above``, even with the same hotkey.

    Records behind what the log store had may have been said by the lost leader, and are taken back only by a new term.
    """
    atomic_write(journal_path.with_name(_FLOOR_NAME), str(above).encode("ascii"))


class LeadershipWatch:
    """Looks for a rival's segment where this leader's next one belongs."""

    def __init__(self, run_id: str, journal: JournalStore, store: LogStore, clock: Clock) -> None:
        self._run_id, self._journal, self._store, self._clock = run_id, journal, store, clock

    async def run(self, every_s: float = TIMEOUTS.leadership_check_s) -> NoReturn:
        """Until another leads: :class:`LeadershipLost`. An unreachable store says nothing about that."""
        while True:
            try:
                await self.check()
            except LeadershipLost:
                raise
            except IotaError as error:
                logger.debug("leadership: {}", error)
            await asyncio.sleep(every_s)

    async def check(self) -> None:
        number, first = self._journal.num_segments, self._journal.acknowledged
        key = segment_key(self._run_id, number)
        try:
            data = await self._store.get_named(key, deadline=Deadline.after(TIMEOUTS.store_request_s, self._clock))
        except NotFound:
            return
        there = wire.decode(data, SegmentFile, limit_bytes=LIMIT_SEGMENT_BYTES, what=key)
        if self._journal.num_segments != number:
            return  # it was this leader's own, just put
        own = self._journal.records_between(first, first + len(there.records))
        if there.first == first and there.records and is_own_prefix(there.records, own):
            return
        raise LeadershipLost(
            f"segment {number} of run {self._run_id} in the log store is {there.hotkey}'s, not this journal's",
            hint="another validator leads this run; --lead-from STORE would take it back",
        )
