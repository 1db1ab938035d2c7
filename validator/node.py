"""A validator that leads: what the HTTP interface asks of it, and one run after the other.

One run is active at a time; when it finishes the next in the queue becomes active (:mod:`validator.serve` is the process).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from loguru import logger

from subnet.chain.base import Chain, Metagraph
from subnet.errors import AuthFailed, Corrupt, InputError, IotaError, NotFound, Refusal
from subnet.model.own_code import check_code
from subnet.policy.policy import SubnetPolicy
from subnet.protocol.api import ControlRequest, ExportInfo, RunStatus, RunSubmission, RunSummary
from subnet.protocol.claims import check_claims
from subnet.protocol.messages import (
    LIMIT_GRANTS,
    GrantRequest,
    Heartbeat,
    Hello,
    JoinAnswer,
    JoinRequest,
    Report,
    ReportAnswer,
)
from subnet.protocol.reach import ReachAnswer, ReachRequest
from subnet.protocol.signing import Signer, verify_statement
from subnet.protocol.versions import refusal_of, require_version
from subnet.store.base import Grant, Hold, OwnerStore, check_blob
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Backoff, Clock, Deadline
from subnet.words import PROTOCOL_OLDEST, PROTOCOL_VERSION, Cursor
from validator.audit_cases import RETENTION as CASE_CLASS
from validator.audit_desk import AuditDesk, AuditSession
from validator.chain_side import ChainSide
from validator.directive_stream import DirectiveFeed
from validator.drain import Draining
from validator.finished_runs import FinishedRuns
from validator.journals import Journals
from validator.leadership import LeadershipWatch
from validator.policy_desk import desk_of_leader
from validator.policy_keeper import PolicyKeeper
from validator.reach import ReachDesk
from validator.refusals import Refusals
from validator.retention import hold_horizon
from validator.run_archive import put_run
from validator.run_control import control_run
from validator.run_export import export_info, finished_state
from validator.run_registry import RunEntry, RunRegistry
from validator.run_session import RunSession
from validator.score_api import ScoreDesk, registrations_of
from validator.score_files import keep_book, load_books
from validator.scoring import Score, ScoreBook
from validator.settings import ValidatorSettings
from validator.stakes import stake_refusal
from validator.store_choice import grant_puts

PURPOSE_RECEIPTS = "receipts/1"


class ValidatorNode:
    """Implements :class:`validator.http_api.Backend`."""

    def __init__(
        self,
        settings: ValidatorSettings,
        signer: Signer,
        chain: Chain,
        store: OwnerStore,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.settings, self.signer, self.chain, self.store, self.clock = settings, signer, chain, store, clock
        self.policies = PolicyKeeper(settings.directory.expanduser(), settings.policy, signer.hotkey, self._now_s)
        self.registry = RunRegistry(
            settings.directory.expanduser(),
            rules=lambda: self._policy().audit,
            audit_memory_bytes=settings.audit_memory_bytes,
            journals=Journals(settings.journal_url),
        )
        self.scores, self.refusals = ScoreBook(self.policies.timeline()), Refusals()
        load_books(self.registry, self.scores)
        self.score_desk = ScoreDesk(
            self.scores,
            lambda: self.session,
            self.refusals,
            clock,
            registrations=lambda: registrations_of(self.metagraph),
            policies=lambda: self.policy_desk.view(),
        )
        self.reach_desk, self.draining = ReachDesk(signer, clock=clock), Draining(signer.hotkey, clock)
        self.session: RunSession | None = None
        self.side = ChainSide(settings, signer, chain, self._scores_now, self._take_metagraph, policy=self._policy)
        self.policy_desk = desk_of_leader(self)
        self.finished_runs = FinishedRuns(self.registry, store, clock, settings.audit_keep_cases_s)
        self.audit_desk = AuditDesk(self._audits_of, lambda: self.side.metagraph, store, chain, clock, signer.hotkey)
        self._sessions_changed = asyncio.Event()
        self._allowed = {signer.hotkey, *settings.submitters}
        self._streams: dict[str, int] = {}

    # --- who may ask -------------------------------------------------------------------------------------------

    @property
    def metagraph(self) -> Metagraph | None:
        return self.side.metagraph

    def is_known(self, hotkey: str) -> bool:
        return self.side.is_known(hotkey) or hotkey in self._allowed or self.policy_desk.may_change(hotkey)

    def _take_metagraph(self, metagraph: Metagraph) -> None:
        if self.session is not None:
            self.session.take_metagraph(metagraph)

    def _scores_now(self) -> Mapping[str, Score]:
        return self.scores.scores(self._now_s)

    @property
    def _now_s(self) -> float:
        """Wall time."""
        return self.clock.wall_ns() / 1e9

    def _policy(self) -> SubnetPolicy:
        return self.policies.policy(self._now_s)

    # --- runs --------------------------------------------------------------------------------------------------

    async def drive_runs(self) -> None:
        """One active run after the other."""
        while True:
            entry = self.registry.active()
            if entry is None or self.draining.on:
                self._sessions_changed.clear()
                await self._sessions_changed.wait()
                continue
            await self._archive(entry)
            session = RunSession(entry, self)
            self.session = session
            self.draining.take(session)
            logger.info("run {} is active", entry.name)
            try:
                await self._lead(session)
            finally:
                await session.close()
            keep_book(entry.directory, session.book)
            await asyncio.to_thread(session.audits.clear)
            self.registry.finish(entry, session.summary())
            logger.info("run {} finished: root {}", entry.name, session.coordinator.history.root)

    async def _archive(self, entry: RunEntry) -> None:
        """Until the submission is in the log store: without it nobody else could lead the run."""
        backoff = Backoff(0.2, 5.0)
        while True:
            try:
                await put_run(self.store, entry.stored, deadline=Deadline.after(TIMEOUTS.store_request_s))
                return
            except Corrupt:
                raise
            except IotaError as error:
                logger.warning("run {} waits for the log store: {}", entry.name, error)
            await asyncio.sleep(backoff.next_s())

    async def _lead(self, session: RunSession) -> None:
        """The run to its end, unless another validator has taken it over."""
        watch = LeadershipWatch(session.entry.stored.run_id, session.journal, self.store, self.clock)
        run = asyncio.create_task(session.run(), name="run")
        rival = asyncio.create_task(watch.run(), name="leadership")
        try:
            await asyncio.wait({run, rival}, return_when=asyncio.FIRST_COMPLETED)
            for task in (run, rival):
                if task.done():
                    await task
        finally:
            for task in (run, rival):
                task.cancel()
            await asyncio.wait({run, rival})

    def _session(self, run: str) -> RunSession:
        if self.session is None or not self._leads(run):
            active = self.session.entry.name if self.session else "none"
            raise NotFound(f"run {run!r} is not active here", hint=f"active: {active}")
        return self.session

    async def _audits_of(self, run: str) -> AuditSession:
        """Of the active run, or of one that has finished."""
        if self.session is not None and self._leads(run):
            return self.session
        return await self.finished_runs.audits(run)

    # --- Backend -----------------------------------------------------------------------------------------------

    def hello(self) -> Hello:
        """``term`` is 0 until this validator leads: a term that isn't in the log store yet may never be."""
        entry = self.registry.active()
        session = self.session if self.session is not None and self.session.entry is entry else None
        leads = session is not None and session.coordinator.core.may_speak
        idle = "the log store, to keep the run's submission" if entry else "a run: submit one with iota run submit"
        return Hello(
            protocol_min=PROTOCOL_OLDEST,
            protocol_max=PROTOCOL_VERSION,
            time_ns=self.clock.wall_ns(),
            hotkey=self.signer.hotkey,
            term=session.coordinator.state.term if session is not None and leads else 0,
            head_number=len(session.journal) if session else 0,
            run=session.entry.name if session else None,
            waiting_for=session.waiting_for() if session else idle,
        )

    def status(self, run: str | None, num_steps: int) -> RunStatus:
        session = self._session(run or "")
        return session.status(
            num_steps, weights=self.side.weights_said, place=self.registry.place_of(session.entry.name)
        )

    def runs(self) -> tuple[RunSummary, ...]:
        return tuple(self._summary(entry) for entry in self.registry.entries.values())

    def _summary(self, entry: RunEntry) -> RunSummary:
        place = self.registry.place_of(entry.name)
        if self.session is not None and self.session.entry is entry:
            return self.session.summary(place)
        return entry.summary(place)

    async def export(self, run: str, step: int | None) -> ExportInfo:
        entry = self.registry.get(run)
        if self.session is not None and self.session.entry is entry:
            return export_info(entry, self.session.coordinator.state, step)
        return export_info(entry, await asyncio.to_thread(finished_state, entry), step)

    async def submit(self, hotkey: str, submission: RunSubmission) -> RunSummary:
        self._require_submitter(hotkey)
        check_code(submission.model_config)
        entry = self.registry.add(hotkey, submission)
        try:
            await put_run(self.store, entry.stored, deadline=Deadline.after(TIMEOUTS.http_request_s / 2))
        except Corrupt:
            raise
        except IotaError as error:
            logger.warning(
                "run {} is accepted, and put into the log store when it is there again: {}", entry.name, error
            )
        self._sessions_changed.set()
        return self._summary(entry)

    async def control(self, hotkey: str, run: str, request: ControlRequest) -> RunSummary:
        return await control_run(self._session(run), hotkey, request)

    def _require_submitter(self, hotkey: str) -> None:
        if hotkey not in self._allowed:
            raise AuthFailed(f"{hotkey} may not submit runs here", hint="ask the operator to add it to --submitters")

    async def join(self, hotkey: str, request: JoinRequest) -> JoinAnswer:
        answer = await self._join(hotkey, request)
        if answer.refusal is not None:
            self.refusals.note(hotkey, answer.refusal, self.clock.wall_ns() / 1e9)
        return answer

    async def _join(self, hotkey: str, request: JoinRequest) -> JoinAnswer:
        coldkey = self.side.coldkeys.get(hotkey)
        if coldkey is None:
            return JoinAnswer(False, Refusal("not_registered", f"{hotkey} isn't registered on this subnet", 12.0))
        if (refusal := refusal_of(request.version) or self.draining.refusal()) is not None:
            return JoinAnswer(False, refusal)
        if (refusal := stake_refusal(self.metagraph, hotkey, self._policy().admission)) is not None:
            return JoinAnswer(False, refusal)
        return await self._session(request.run).coordinator.join(hotkey, coldkey, request)

    def report(self, hotkey: str, report: Report) -> ReportAnswer:
        if report.member.hotkey != hotkey:
            raise InputError("a report is signed by another hotkey than the member it names")
        require_version(report.version)
        session = self._session(report.run)
        check_claims(report.claims)
        if report.receipts_root:
            signed = verify_statement(hotkey, PURPOSE_RECEIPTS, report.receipts_root, report.receipts_signature)
            if not signed or session.receipts_root(report) != report.receipts_root:
                raise InputError("the receipts' root or its signature doesn't fit the receipts")
        if report.used is not None and session.has_member(hotkey):
            self.store.meter.reported(session.entry.stored.run_id, hotkey, report.process[:64], report.used)
        session.require_room()
        known = session.coordinator.report(report.member, report.claims)
        if known and report.receipts_root:
            session.keep_receipts(hotkey, report)
        return ReportAnswer(known, len(session.journal))

    def heartbeat(self, hotkey: str, beat: Heartbeat) -> None:
        if self.session is None:
            return
        member = self.session.heard(hotkey, beat)
        if member is not None and beat.suspect:
            self.session.coordinator.suspect(member, last_words=True)

    async def reach(self, hotkey: str, source: str, request: ReachRequest) -> ReachAnswer:
        return await self.reach_desk.look(hotkey, source, request)

    async def grants(self, hotkey: str, request: GrantRequest) -> tuple[Grant, ...]:
        if not 0 < len(request.blobs) <= LIMIT_GRANTS:
            raise InputError(f"{len(request.blobs)} grants asked for, allowed are 1 to {LIMIT_GRANTS}")
        ours = hotkey in self._allowed
        takes_part = ours or (self._leads(request.run) and self._session(request.run).has_member(hotkey))
        run = (request.run or "upload") if takes_part else ""
        if request.used is not None and takes_part:
            self.store.meter.reported(run, hotkey, request.process[:64], request.used)
        deadline = Deadline.after(TIMEOUTS.http_request_s / 2)
        if not request.put:
            refs = [(check_blob(blob), size) for blob, size in request.blobs]
            if request.damaged and takes_part:
                await self.store.check_blobs([blob for blob, _ in refs], deadline=deadline)
            return await self.store.grant_gets(refs, run, deadline=deadline)
        if not takes_part:
            self._session(request.run)
            raise AuthFailed(f"{hotkey} is no member of run {request.run}", hint="join first")
        if request.retention == CASE_CLASS and not ours:
            raise AuthFailed(f"members don't hold blobs of class {CASE_CLASS}", hint="one of evidence, log, snapshot")
        horizon = hold_horizon(self.session.coordinator.state.next_step) if self.session else 0
        return await grant_puts(self.store, request, Hold(request.retention, run, horizon), hotkey, deadline)

    def _leads(self, run: str) -> bool:
        return self.session is not None and run in ("", self.session.entry.name, self.session.entry.stored.run_id)

    def follow(self, run: str, after: Cursor) -> tuple[DirectiveFeed, int]:
        coordinator = self._session(run).coordinator
        position = coordinator.core.resume(after)
        if position is None:
            raise InputError(f"you have seen term {after.term}, this validator leads {coordinator.core.term}")
        return coordinator.feed, position

    def stream_opened(self, hotkey: str) -> None:
        self._streams[hotkey] = self._streams.get(hotkey, 0) + 1

    def stream_lost(self, hotkey: str) -> None:
        self._streams[hotkey] -= 1
        if not self._streams[hotkey]:
            del self._streams[hotkey]
            if self.session is not None:
                self.session.suspect_hotkey(hotkey)
