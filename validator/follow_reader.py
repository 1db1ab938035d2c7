"""Follows the journals in a log store: segment after segment as they come, each checked; waits out the store's absence.

A segment that doesn't fit stops its run, not the others, and says which one it is; where the store shows another segment than
the one that was taken, both under one signature, that is a proof (:mod:`validator.follow_proofs`): it is kept, and nothing of
that leader is taken any more. Everything is asked of the store alone; nobody's word about a run is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from loguru import logger

from subnet.errors import Corrupt, IotaError
from subnet.logs import ReasonLog
from subnet.run.events import Record, RunPlanned
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Backoff, Clock, Deadline
from validator.follow_proofs import TwoHeads, proven, write_proof
from validator.follow_run import FollowedRun, FollowedSegments
from validator.log_publisher import SegmentFile, segment_key
from validator.log_reader import doubtful_leaders, get_segment
from validator.run_archive import PREFIX, NamedStore, RunKeys, group_keys
from validator.scoring import ScoreBook

POLL_S = 1.0
"""Between two looks for the next segment."""
LIST_S, LIST_BUSY_S = 5.0, 60.0
"""Between two looks for new runs: while no run is going on, and while one is."""
RECHECK_S = 30.0
"""Between two looks whether the last segment taken is still what it was."""
COPY_RECORDS, COPY_S = 20_000, 60.0
AT_A_TIME = 64
"""Segments of one run before the others have their turn."""
_record_decoder = msgspec.msgpack.Decoder(Record)


class FollowReader:
    """``directory`` is this follower's; ``only``: names or ids of the runs to follow, all where it is empty."""

    def __init__(
        self,
        store: NamedStore,
        directory: Path,
        scores: ScoreBook,
        *,
        only: Sequence[str] = (),
        clock: Clock = SYSTEM_CLOCK,
        permits: Callable[[], Mapping[str, bool]] = dict[str, bool],
        on_run: Callable[[FollowedRun], None] = lambda run: None,
    ) -> None:
        self._store, self.directory, self._scores, self._only, self._clock = store, directory, scores, only, clock
        self._permits, self._on_run = permits, on_run
        self.runs: dict[str, FollowedRun] = {}
        self.distrusted = proven(directory)
        """By hotkey: run and record at which a proof shows two heads of its own."""
        self._ignored: set[str] = set()
        self._listed_s: float | None = None
        self._rechecked_s: dict[str, float] = {}
        self._copied_s: dict[str, float] = {}
        self._reasons = ReasonLog(level="WARNING")
        self.away = ""
        """Why the store can't be read, while it can't."""

    async def run(self, poll_s: float = POLL_S) -> NoReturn:
        """Forever."""
        backoff = Backoff(poll_s, 15.0)
        while True:
            try:
                more = await self.look()
            except IotaError as error:
                if not error.retryable:
                    raise
                self.away = str(error)
                for run in self.runs.values():
                    run.watch.store.failed(self.away, self._clock.now_s())
                self._reasons.note("log store", error.code, f"{error}; waiting for it")
                await asyncio.sleep(backoff.next_s())
                continue
            if self.away:
                self.away = ""
                self._reasons.note("log store", "answers again")
            for run in self.runs.values():
                run.watch.store.answered(self._clock.now_s())
            backoff.reset()
            if not more:
                await asyncio.sleep(poll_s)

    async def look(self) -> bool:
        """Take what is there, of each run at most ``AT_A_TIME`` segments; whether there may be more."""
        listed = await self._find_runs()
        full = False
        for run in list(self.runs.values()):
            if run.finished and run.caught_up and not listed:
                continue  # departures, terms and appeals may still come
            full |= await self._advance(run)
            await self._copy(run)
        return full

    async def close(self) -> None:
        """Write down where each run is."""
        for run in self.runs.values():
            if run.uncopied and not run.spoilt:
                await asyncio.to_thread(run.write_copy, run.copy())

    # --- runs ----------------------------------------------------------------------------------------------------

    @property
    def current(self) -> FollowedRun | None:
        """The run that is going on: of several the one with the newest record; else the last that ended."""
        going = [run for run in self.runs.values() if not run.finished] or list(self.runs.values())
        return max(going, key=lambda run: run.folded.last_ns, default=None)

    async def _find_runs(self) -> bool:
        """Whether it looked."""
        now_s = self._clock.now_s()
        busy = any(not run.finished and not run.trouble for run in self.runs.values())
        if self._listed_s is not None and now_s - self._listed_s < (LIST_BUSY_S if busy else LIST_S):
            return False
        keys = await self._store.list_named(PREFIX, deadline=Deadline.after(TIMEOUTS.store_request_s, self._clock))
        self._listed_s = now_s
        for run_id, found in group_keys(keys).items():
            run = self.runs.get(run_id)
            if run is not None:
                await self._hole(run, found)
            elif found.segments and run_id not in self._ignored:
                await self._begin(run_id)
        return True

    async def _hole(self, run: FollowedRun, found: RunKeys) -> None:
        """Where the store has later segments and not the next one, records are withheld or lost."""
        number = run.folded.num_segments
        if not found.segments or run.trouble or found.segments[-1].name <= segment_key(run.run_id, number):
            return
        if not run.spoilt and not await self._is_there(run.run_id, number):
            self._trouble(run, "missing", f"segment {number} isn't in the log store, though later ones are")

    async def _begin(self, run_id: str) -> None:
        if self._only and run_id not in self._only and await self._name_of(run_id) not in self._only:
            self._ignored.add(run_id)
            return
        directory = self.directory / run_id
        run = await asyncio.to_thread(FollowedRun, run_id, directory, self._scores.run(run_id), self._clock)
        await asyncio.to_thread(run.load_copy)
        self.runs[run_id] = run
        logger.info("following run {} from record {}", run_id, run.number)
        self._on_run(run)

    async def _name_of(self, run_id: str) -> str:
        """As its first record has it."""
        try:
            segment = await self._get(run_id, 0)
            event = _record_decoder.decode(segment.records[0]).event if segment is not None else None
        except (Corrupt, msgspec.MsgspecError, IndexError) as error:
            logger.warning("run {} is not followed, its first segment can't be read: {}", run_id, error)
            return ""
        return event.config.run.name if isinstance(event, RunPlanned) else ""

    # --- segments ------------------------------------------------------------------------------------------------

    async def _get(self, run_id: str, number: int) -> SegmentFile | None:
        return await get_segment(self._store, run_id, number, self._clock, FollowedSegments.others)

    async def _is_there(self, run_id: str, number: int) -> bool:
        try:
            return await self._get(run_id, number) is not None
        except Corrupt:
            return True  # it is looked at when its turn comes

    async def _advance(self, run: FollowedRun) -> bool:
        """Whether it took all that it may at a time."""
        if run.spoilt:
            return False
        for _ in range(AT_A_TIME):
            try:
                segment = await self._get(run.run_id, run.folded.num_segments)
                run.caught_up = segment is None
                if segment is None:
                    await self._recheck(run)
                    return False
                if not await self._take(run, segment):
                    return False
            except Corrupt as error:
                await self._stopped(run, error)
                return False
            await asyncio.sleep(0)
        return True

    async def _take(self, run: FollowedRun, segment: SegmentFile) -> bool:
        if segment.hotkey in self.distrusted:
            where, number = self.distrusted[segment.hotkey]
            what = (
                f"segment {segment.number} is of {segment.hotkey}, who told two journals at record {number} of {where}"
            )
            self._trouble(run, "distrusted", what)
            return False
        if run.last is None or run.run_id not in self._rechecked_s:
            await self._recheck(run)
        num_leaders = len(run.folded.leaders)
        run.take(segment)
        if run.trouble:
            run.trouble, run.trouble_code = "", ""
            self._reasons.note(run.run_id, "goes on", f"from segment {segment.number}")
        if len(run.folded.leaders) > num_leaders:
            run.doubts = tuple(doubtful_leaders(run.folded, self._permits()))
            for warning in run.doubts:
                logger.warning(warning)
        return True

    async def _stopped(self, run: FollowedRun, error: Corrupt) -> None:
        """A segment doesn't fit: nothing was folded of it, or the fold is spoilt until the next start, which has the copy."""
        self._trouble(run, "corrupt", str(error))
        await self._recheck(run, now=True)

    def _trouble(self, run: FollowedRun, code: str, what: str) -> None:
        run.trouble, run.trouble_code = what, code
        self._reasons.note(run.run_id, code, what)

    async def _recheck(self, run: FollowedRun, *, now: bool = False) -> None:
        """Is the last segment taken still what the store shows?"""
        last_s, now_s = self._rechecked_s.get(run.run_id), self._clock.now_s()
        if run.last is None or (last_s is not None and now_s - last_s < RECHECK_S and not now):
            return
        self._rechecked_s[run.run_id] = now_s
        try:
            there = await self._get(run.run_id, run.last.number)
        except Corrupt as error:
            self._trouble(run, "changed", f"segment {run.last.number}, good when it was taken, is damaged: {error}")
            return
        if there == run.last:
            return
        if there is None:
            self._trouble(run, "missing", f"segment {run.last.number}, taken before, is gone from the log store")
            return
        proof = TwoHeads(run.before, run.last, there)
        if why := proof.refuted():
            self._trouble(
                run, "changed", f"segment {there.number} isn't the one taken before, and proves nothing: {why}"
            )
            return
        path = await asyncio.to_thread(write_proof, self.directory, proof)
        self.distrusted.setdefault(proof.hotkey, (run.run_id, proof.number))
        what = f"{proof.hotkey} signed two journals that differ at record {proof.number}: proof in {path}"
        self._trouble(run, "two_heads", what)

    async def _copy(self, run: FollowedRun) -> None:
        now_s = self._clock.now_s()
        late = now_s - self._copied_s.setdefault(run.run_id, now_s) >= COPY_S
        if not run.uncopied or run.spoilt:
            return
        if run.uncopied >= COPY_RECORDS or late or run.finished:
            self._copied_s[run.run_id] = now_s
            await asyncio.to_thread(run.write_copy, run.copy())
