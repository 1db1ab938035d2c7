"""The shell of a run: decode, append, apply, decide, append, apply, commit, then act and answer; one task does all of it.

Decisions are pure (:mod:`validator.intake`, :mod:`validator.decide`); what is effective may leave (:mod:`validator.journal_core`).
Everything here can be killed at any point: the journal is replayed and the run goes on.

Shut-down order: stop taking claims, finish the turn, commit, close the feed, stop the publisher, close the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from loguru import logger

from subnet.errors import IotaError, Refusal
from subnet.protocol.messages import AnyClaim, BackwardReceipt, ForwardReceipt, JoinAnswer, JoinRequest
from subnet.protocol.signing import Signer
from subnet.run.apply import apply
from subnet.run.control import still_follows
from subnet.run.events import (
    AnyEvent,
    Appealed,
    CaseClosed,
    CaseOpened,
    HardwareClassSet,
    Record,
    Rewound,
    RunControlled,
    RunFinished,
    RunPlanned,
    TermStarted,
)
from subnet.run.state import RunState, member_of_boot, new_state, update_delay
from subnet.timing import TIMEOUTS, Backoff, Clock
from subnet.words import Member
from validator.copier import Copier, CopyPolicy
from validator.copies import Beside, Copy
from validator.decide import Policy, decide
from validator.directive_stream import DirectiveFeed
from validator.history import History, describe
from validator.inbox import Inbox, Join, Projection
from validator.index import RunIndex
from validator.intake import Ignored, admit, admit_join, blobs_to_confirm, boundary_to_confirm
from validator.journal_core import JournalCore, term_started
from validator.journal_store import JournalStore
from validator.leadership import others_term
from validator.log_publisher import LeadershipLost, LogPublisher
from validator.probing import probe
from validator.store_health import StoreHealth
from validator.tasks import Completion, RunTasks
from validator.watch import Probe, Watch

TICK_S = 0.1
TURN_GAP_MAX_S = 0.02
TURN_GAP_MEMBER_S = 20e-6
"""Between two turns so much rest for each member: what comes meanwhile shares one round of decisions and one fsync."""
MAX_ROUNDS = 10_000
MAX_DECIDED = 256
"""After so many events by decision in one turn, the next turn goes on."""


class Coordinator:
    """One run. ``run`` until it returns; ``report``, ``join`` and the feed are called by the HTTP interface."""

    def __init__(
        self,
        *,
        journal: JournalStore,
        publisher: LogPublisher,
        tasks: RunTasks,
        signer: Signer,
        clock: Clock,
        policy: Policy | None = None,
        on_record: Callable[[Record], None] | None = None,
        projection: Projection | None = None,
        copies: CopyPolicy | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        self._journal, self._publisher, self._tasks = journal, publisher, tasks
        self._signer, self._clock = signer, clock
        self.policy = policy or Policy()
        self._rng: random.Random = random.SystemRandom()
        self._on_record, self._projection = on_record, projection
        self._inbox = inbox or Inbox()
        self._background: set[asyncio.Task[None]] = set()
        self._publish_wanted = asyncio.Event()
        self.state: RunState = new_state()
        self.watch, self._index = Watch(), RunIndex()
        self.watch.index = self._index
        self.history = History()
        self.feed = DirectiveFeed(journal, signer)
        self.finished = asyncio.Event()
        self.receipted_s = 0.0
        """Compute time that members have reported to this process."""
        self.core = self._replay()
        self._copier = Copier(journal, copies)
        self._store_health = StoreHealth(
            tasks, self.watch.store, clock, lambda: self.core.first_unacknowledged, self._inbox.wake.set
        )
        tasks.bind(self.complete)

    # --- start -------------------------------------------------------------------------------------------------

    def _replay(self) -> JournalCore:
        """The newest copy of the fold, and the records behind it."""
        journal, events = self._journal, list[AnyEvent]()
        first, terms = 0, tuple[tuple[int, int], ...]()
        if journal.copy is not None:
            first, terms = journal.copy.number, self._load_copy(journal.copy)
        for record in journal.replay():
            events.append(record.event)
            self._fold(record)
        if len(journal):
            logger.info(
                "journal replayed: {} records behind the copy of the state at {}, step {}",
                len(events),
                first,
                self.state.next_step,
            )
        term, acknowledged = self.state.term, journal.acknowledged
        return JournalCore.of(term, events, acknowledged, journal.num_segments, first=first, terms=terms)

    def _load_copy(self, copy: Copy) -> tuple[tuple[int, int], ...]:
        beside = copy.load_beside()
        self.state, self.history = copy.load(), History.load(beside.history)
        if beside.ledger:
            self.watch.audits.ledger.load(beside.ledger)
        self.feed.term = self.state.term
        self.feed.begin_from(self.state)
        if self._projection is not None:
            self._projection.load(beside.projection)
        if self.state.finished is not None:
            self.finished.set()
        return beside.terms

    def _beside(self) -> Beside:
        projection = self._projection.dump() if self._projection is not None else b""
        ledger = self.watch.audits.ledger.dump()
        return Beside(tuple(self.core.terms), self.history.dump(), projection, ledger)

    def begin(self, planned: RunPlanned, hardware_class: tuple[str, ...] | None) -> None:
        """Open a new journal, or go on with the one that is there: in the same term, unless members may have seen more."""
        if self.state.run is None:
            self._emit(planned)
        if update_delay(self.state):
            self.watch.index = None  # it keeps track of one open step
        seen_more = self._journal.num_dropped > 0 or self.state.term <= others_term(self._journal.path)
        if seen_more or self.state.leader != self._signer.hotkey:
            self.core.term = self.state.term + 1
            self._emit(term_started(self.core.term, self._signer.hotkey, secrets.token_hex(8)))
        if self.state.hardware_class is None and hardware_class is not None:
            self._emit(HardwareClassSet(hardware_class, "operator"))
        if self.state.finished is not None:
            self.finished.set()
        self._inbox.wake.set()

    def _fold(self, record: Record) -> None:
        self.watch.audits.ledger.note(self.state, record.event)
        apply(self.state, record.event)
        self._index.note(self.state, record.event)
        self.feed.note(record.event)
        self.history.fold(record)
        if isinstance(record.event, TermStarted):
            self.feed.term = record.event.number
        if isinstance(record.event, RunFinished):
            self.finished.set()
        if self._on_record is not None:
            self._on_record(record)

    def _emit(self, event: AnyEvent) -> None:
        record = self._journal.stage(event, self._clock.wall_ns())
        self.core.appended(event)
        self._fold(record)
        if isinstance(event, CaseOpened | CaseClosed | Appealed | Rewound):
            logger.warning("{}", describe(record))
        self._copier.consider(event, self.state, self._beside)

    # --- called by the HTTP interface -------------------------------------------------------------------------

    def report(self, member: Member, claims: tuple[AnyClaim, ...]) -> bool:
        """Queue a member's claims; False if this incarnation is void."""
        if member not in self.state.members:
            return False
        now = self._clock.now_s()
        self.watch.heard(member, now)
        for claim in claims:
            named = (*blobs_to_confirm(claim), *boundary_to_confirm(self.state, member, claim))
            blobs = tuple(blob for blob in named if blob not in self.watch.blobs)
            if blobs:
                self._spawn(self._confirm_then_queue(member, claim, blobs), "confirm blobs")
            else:
                self._inbox.claims.append((member, claim))
        self._inbox.wake.set()
        return True

    async def join(self, hotkey: str, coldkey: str, request: JoinRequest) -> JoinAnswer:
        future: asyncio.Future[JoinAnswer] = asyncio.get_running_loop().create_future()
        self._inbox.joins.append(Join(request, hotkey, coldkey, future))
        self._inbox.wake.set()
        return await future

    def heard(self, hotkey: str, boot: str, ticks: int) -> Member | None:
        """A heartbeat with the main process's tick counter; returns the live member it belongs to."""
        member = member_of_boot(self.state, hotkey, boot)
        if member is None or member not in self.state.members:
            return None
        self.watch.beat(member, ticks, self._clock.now_s())
        return member

    def suspect(self, member: Member, *, last_words: bool = False) -> None:
        """Its connection was reset or its heartbeat process says that it is dead: probe it at once.

        Where nobody can connect to it a probe says nothing: its own last words count, or silence.
        """
        info = self.state.members.get(member)
        if info is None:
            return
        if not info.reachable:
            if last_words:
                self.watch.probe_answered(member, Probe.REFUSED, self._clock.now_s())
                self._inbox.wake.set()
            return
        self.watch.reset(member, self._clock.now_s())
        self._spawn(self._probe(member, info.host, info.port), "probe")

    def complete(self, completion: Completion) -> None:
        """A background task has a result: its events are journaled by the main task."""
        self._inbox.completions.append(completion)
        self._inbox.wake.set()

    def tell(self, event: AnyEvent) -> None:
        """Something from outside the run that its journal is to have; not once the run has finished."""
        self._inbox.told.append(event)
        self._inbox.wake.set()

    def wake(self) -> None:
        """Something that decisions look at has changed."""
        self._inbox.wake.set()

    # --- the main task ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Forever, until cancelled; a lost leadership or a journal that can't be written ends it with its error."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publish_forever(), name="log publisher")
            group.create_task(self._turn_forever(), name="coordinator")
            group.create_task(self._store_health.run(), name="store health")

    async def _turn_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._inbox.wake.wait()
            self._inbox.wake.clear()
            await self.turn()
            gap_s = min(TURN_GAP_MAX_S, TURN_GAP_MEMBER_S * len(self.state.members))
            if gap_s >= 0.001:
                await asyncio.sleep(gap_s)

    async def turn(self) -> None:
        """One round: everything that waits in the inbox, then decisions until there are none, then one commit."""
        inbox, answers = self._inbox, list[tuple[asyncio.Future[JoinAnswer], JoinAnswer]]()
        while inbox.told:
            event = inbox.told.popleft()
            late = isinstance(event, RunControlled) and not still_follows(self.state, event)
            if self.state.finished is None and not late:
                self._emit(event)
        while inbox.completions:
            self._finish(inbox.completions.popleft())
        while inbox.claims:
            member, claim = inbox.claims.popleft()
            result = admit(self.state, member, claim, self.watch)
            if isinstance(result, Ignored):
                logger.trace("{}: {} ignored: {}", member, type(claim).__name__, result.reason)
                continue
            if isinstance(claim, ForwardReceipt | BackwardReceipt):
                self.watch.progressed(member, self._clock.now_s())
                self.receipted_s += claim.compute_s if 0 < claim.compute_s < 1e6 else 0.0
            for event in result:
                self._emit(event)
        while inbox.joins:
            join = inbox.joins.popleft()
            answers.append((join.answer, self._admit_join(join)))
        if self.core.may_speak:
            self._decide()
        await self._journal.commit()
        self._after_commit()
        for future, answer in answers:
            if not future.done():
                future.set_result(answer)

    def _decide(self) -> None:
        """Until there is nothing to decide, or so much that others should be heard first."""
        end = len(self._journal) + MAX_DECIDED
        for _ in range(MAX_ROUNDS):
            if len(self._journal) >= end:
                self._inbox.wake.set()
                return
            decisions = decide(self._clock.now_s(), self.state, self.watch, self.policy, self._rng)
            progressed = False
            for decision in decisions:
                logger.trace("{}: {}", type(decision.what).__name__, decision.reason)
                if isinstance(decision.what, AnyEvent):
                    self._emit(decision.what)
                    progressed = True
                else:
                    self._spawn(self._tasks.perform(decision.what, self.state), type(decision.what).__name__)
            if not progressed:
                return
        raise RuntimeError("decisions don't come to an end")

    def _finish(self, completion: Completion) -> None:
        self.watch.audits.take(completion.action, completion.found)
        if completion.failed:
            self.watch.failed(completion.action)
        else:
            self.watch.done(completion.action)
        for blob in completion.confirmed:
            self.watch.blob_confirmed(blob)
        for event in completion.events(self.state):
            self._emit(event)

    def _admit_join(self, join: Join) -> JoinAnswer:
        now = self._clock.now_s()
        result = admit_join(self.state, join.request, join.hotkey, join.coldkey, now, self.watch, self.policy)
        if isinstance(result, Refusal):
            return JoinAnswer(False, result)
        self._emit(result)
        self.watch.heard(result.member, now)
        return JoinAnswer(True)

    def _after_commit(self) -> None:
        self.feed.advance(self.core.effective_end if self.core.may_speak else 0)
        if self.core.segment_due() is not None:
            self._publish_wanted.set()

    # --- beside the main task ---------------------------------------------------------------------------------

    async def _publish_forever(self) -> None:
        backoff = Backoff(0.05, 2.0)
        while True:
            await self._publish_wanted.wait()
            self._publish_wanted.clear()
            segment = self.core.segment_due()
            if segment is None:
                continue
            acknowledged = self.core.acknowledged
            try:
                await self._publisher.publish(segment, self.core)
                backoff.reset()
            except LeadershipLost:
                raise
            except IotaError as error:
                logger.warning("log store: {}", error)
                await asyncio.sleep(backoff.next_s())
                self._publish_wanted.set()
                continue
            if self.core.acknowledged == acknowledged:
                continue  # nothing of it is on this disk yet: the commit that changes that asks again
            self._copier.settle(self.core.acknowledged)
            self._after_commit()
            self._inbox.wake.set()

    async def _confirm_then_queue(self, member: Member, claim: AnyClaim, blobs: tuple[str, ...]) -> None:
        for blob in (stored := await self._tasks.stored(claim, blobs)):
            self.watch.blob_confirmed(blob)
        for blob in set(blobs).difference(stored):
            self.watch.not_confirmed(blob, member, self._clock.now_s())
        self._inbox.claims.append((member, claim))
        self._inbox.wake.set()

    async def _probe(self, member: Member, host: str, port: int) -> None:
        found = await probe(host, port)
        if found is not Probe.ANSWERED:
            logger.info("{}: the probe of {}:{} is {}", member, host, port, found.value)
        self.watch.probe_answered(member, found, self._clock.now_s())
        self._inbox.wake.set()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._spawned_done)

    def _spawned_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("{}: {!r}", task.get_name(), error)

    async def close(self) -> None:
        self.feed.close()
        for task in list(self._background):
            task.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=TIMEOUTS.shutdown_grace_s)
        self._journal.close()
