"""Carries audits out: evidence, bundle, replay in a worker process, and where something is wrong a second run and a case.

An :class:`~validator.decision.AuditResult` says only what two runs say, the second in a process that has run nothing before.
What fails for reasons of our own (the store is away, the worker died) accuses nobody and is tried again; what can't be had
any more is given up after ``MAX_TRIES``. Nothing here blocks the event loop, and every wait has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from loguru import logger

from subnet.audit import build
from subnet.audit.case import Case, Findings
from subnet.errors import IotaError, NotFound
from subnet.logs import ReasonLog
from subnet.run.audits import OpenAudit
from subnet.run.events import AnyEvent, Appealed
from subnet.run.state import RunState
from subnet.store.base import OwnerStore
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock, Deadline
from subnet.words import Want, short
from validator.audit_accuser import Accuser, AuditCounts, Receipts, Shelf
from validator.audit_cases import CaseShelf
from validator.audit_evidence import GATHER_S, Arrived, Bundle, BundleMaker, wait_for_evidence
from validator.audit_findings import (
    Untrusted,
    check_trusted,
    comparable,
    is_wrong,
    lacking,
    log_audit,
    says_all,
    why_not_comparable,
    without,
)
from validator.audit_turns import Turns
from validator.audit_watch import AuditWatch
from validator.decision import AuditResult, RootResult, RunRoots
from validator.store_clock import StoreClock
from validator.watch import Watch

MAX_TRIES = 3
URGENT, LATER, LAST = 0, 1, 2
"""Before a seal the run waits for the replay; after it only the window does; an appeal can wait for both."""
MAX_REMEMBERED = 256
"""Audits whose troubles are remembered."""
MAX_AT_ONCE = 4
"""Bundles at a time, so that their bytes on disk are bounded; the worker takes one of them."""


class Replayer(Protocol):
    """:class:`subnet.audit.process.AuditProcess`."""

    @property
    def held(self) -> Mapping[int, int]:
        """By stage, the version of the state that it keeps."""
        ...

    async def run(self, directory: Path, deadline: Deadline, *, fresh: bool = False) -> Findings: ...

    async def close(self) -> None: ...


class AuditedWatch(Protocol):
    """What is needed of :class:`validator.watch.Watch`."""

    @property
    def audits(self) -> AuditWatch: ...

    @property
    def store(self) -> StoreClock: ...


Keep = Callable[[Case, Findings, Bundle], Awaitable[None]]
"""Told of a replay while its bundle's files are there."""


class AuditRunner:
    """The audits of one run; :meth:`bind` before the first. ``shelf``: without one, the run's store."""

    def __init__(
        self,
        run_id: str,
        store: OwnerStore,
        directory: Path,
        replayer: Replayer,
        receipts: Receipts,
        *,
        disk_bytes: int,
        shelf: Shelf | None = None,
    ) -> None:
        self._store, self._replayer = store, replayer
        self._maker = BundleMaker(store, directory, disk_bytes)
        self._shelf = shelf or CaseShelf(store, run_id)
        self._turns, self._slots = Turns(), asyncio.Semaphore(MAX_AT_ONCE)
        self._watch: AuditedWatch = Watch()
        self._evidence_s = TIMEOUTS.evidence_s
        self._clock: Clock = SYSTEM_CLOCK
        self._tries: dict[int, int] = {}
        self._root_tries = 0
        self.doing: dict[int, str] = {}
        """By audit: what it is at, or why it failed, in words that follow "audit N"; until there is a result."""
        self._said = ReasonLog(level="WARNING", max_subjects=MAX_REMEMBERED)
        self.counts = AuditCounts()
        self._accuser = Accuser(self._maker, self._shelf, self._replay, receipts, self.counts)

    def bind(self, watch: AuditedWatch, clock: Clock, evidence_s: float = TIMEOUTS.evidence_s) -> None:
        self._watch, self._clock, self._evidence_s = watch, clock, evidence_s

    async def close(self) -> None:
        await self._replayer.close()

    # --- an audit --------------------------------------------------------------------------------------------------

    async def run(self, audit: int, state: RunState) -> AuditResult | None:
        """An open audit of the fold. None where nothing can be said yet, or any more (it is closed). Errors: try again later."""
        opened = state.audits.open.get(audit)
        if opened is None:
            return None
        return await self.redo(audit, opened, state, wanted=lambda: audit in state.audits.open)

    async def redo(
        self,
        audit: int,
        opened: OpenAudit,
        state: RunState,
        *,
        wanted: Callable[[], bool] = lambda: True,
        case: Case | None = None,
    ) -> AuditResult | None:
        """The same of an audit that need not be in the fold; once it isn't ``wanted`` any more, nothing comes of it.

        ``case``: as it was made before, where the ledger may have forgotten it by now.
        """
        try:
            result = await self._redo(audit, opened, state, wanted, case)
        except OSError as error:
            trouble = WorkerTrouble(f"the disk of audits: {error}")
            self._failed(audit, trouble)
            raise trouble from error
        except IotaError as error:
            self._failed(audit, error)
            if error.retryable and not isinstance(error, WorkerTrouble):
                raise
            tries = self._tries[audit] = self._tries.get(audit, 0) + 1
            if tries < MAX_TRIES:
                raise
            self._tries.pop(audit)
            untrusted = error.reason if isinstance(error, Untrusted) else ""
            return AuditResult(audit, None, trouble=str(error), untrusted=untrusted)
        if result is not None:
            self._tries.pop(audit, None)
        if result is None or says_all(result):
            self.doing.pop(audit, None)
        return result

    def _failed(self, audit: int, error: IotaError) -> None:
        """Noted for whoever asks what the run waits for, and said once a reason."""
        self.counts.troubled += 1
        self._note(audit, f"can't be done here, tried again: {error}")
        self._said.note(f"audit {audit}", error.code, str(error))

    def _note(self, audit: int, words: str) -> None:
        self.doing[audit] = words
        for known in (self.doing, self._tries):  # what a rewind has closed is never heard of again
            while len(known) > MAX_REMEMBERED:
                del known[next(iter(known))]

    async def _redo(
        self, audit: int, opened: OpenAudit, state: RunState, wanted: Callable[[], bool], case: Case | None
    ) -> AuditResult | None:
        case = case or self._case(opened, state)
        if case is None:
            return None
        wants = build.wants_of(case)
        self._note(audit, f"waits for {len(wants)} inputs to be put into the store")
        arrived = await self._wait(audit, wants, case)
        self.counts.evidence_bytes += arrived.evidence_bytes
        if arrived.missing:
            self._note(audit, f"lacks {len(arrived.missing)} inputs: {lacking(arrived.missing[0])}")
        rest = without(case, arrived.missing)
        if rest is None:
            return AuditResult(audit, None, missing=arrived.missing)
        if not wanted():
            return None
        urgency = URGENT if opened.number else LATER
        async with self._bundle(rest, held=self._replayer.held.get(rest.stage)) as bundle:
            self._note(audit, "has its inputs, and is done again or waits for its turn")
            findings = await self._replay(bundle, urgency)
            if findings.other_class is not None and findings.other_class.not_compared:
                await self._maker.add_useful(bundle, Deadline.after(GATHER_S))
                findings = await self._replay(bundle, urgency)
            check_trusted(rest, findings)
            if not wanted():
                return None
            repeated, accused = await self._accuser.accuse(rest, findings, state, urgency)
        self.counts.done += 1
        log_audit(audit, rest, findings, accused)
        if words := why_not_comparable(findings):
            self._note(audit, f"says nothing: {words}")
        findings = comparable(findings)
        return AuditResult(audit, findings, repeated=repeated, accused=accused, missing=arrived.missing)

    def _case(self, opened: OpenAudit, state: RunState) -> Case | None:
        ledger = self._watch.audits.ledger
        make = build.case_before_seal if opened.number else build.case_after_seal
        return make(state, ledger, opened.step, opened.stage, opened.members)

    async def _wait(self, audit: int, wants: Collection[Want], case: Case) -> Arrived:
        watch, clock, config = self._watch, self._clock, case.planned.config
        began_s = watch.store.work_s(clock.now_s())
        return await wait_for_evidence(
            self._store,
            wants,
            given_up=lambda want: (audit, want) in watch.audits.not_held,
            waited_s=lambda: watch.store.work_s(clock.now_s()) - began_s,
            limit_s=self._evidence_s,
            parts=lambda want: config.parts_per_item if config.lanes.on else 0,
        )

    @asynccontextmanager
    async def _bundle(self, case: Case, *, held: int | None = None) -> AsyncGenerator[Bundle]:
        async with self._slots, self._maker.bundle(case, Deadline.after(GATHER_S), held=held) as bundle:
            try:
                yield bundle
            finally:
                self.counts.read_bytes += bundle.read_bytes

    async def _replay(self, bundle: Bundle, urgency: int, *, fresh: bool = False) -> Findings:
        async with self._turns.take(urgency):
            try:
                findings = await self._try(bundle, fresh=fresh)
            except NotFound:  # the worker no longer has the state that the bundle was to go on from
                await self._maker.fill(bundle, Deadline.after(GATHER_S))
                findings = await self._try(bundle, fresh=fresh)
        self.counts.compute_s += findings.compute_s
        self.counts.state_s += findings.state_s
        return findings

    async def _try(self, bundle: Bundle, *, fresh: bool) -> Findings:
        deadline = Deadline.after(TIMEOUTS.audit_run_s)
        try:
            return await self._replayer.run(bundle.directory, deadline, fresh=fresh)
        except NotFound:
            raise
        except IotaError as error:
            raise WorkerTrouble(f"the audit worker: {error.reason}", hint=error.hint) from error

    # --- roots -----------------------------------------------------------------------------------------------------

    async def roots(self, action: RunRoots, state: RunState) -> RootResult:
        """To which root snapshot and log lead, and who has reported another one. Errors: try again later."""
        name = f"the root of stage {action.stage} at step {action.version}"
        try:
            case = build.root_case(state, self._watch.audits.ledger, action.stage)
            async with self._bundle(case, held=self._replayer.held.get(case.stage)) as bundle:
                findings = await self._replay(bundle, URGENT)
            check_trusted(case, findings)
            accused = await self._accuser.accuse_of_roots(case, findings, state, URGENT)
        except (IotaError, OSError) as error:
            trouble = error if isinstance(error, IotaError) else WorkerTrouble(f"the disk of audits: {error}")
            self._said.note(name, trouble.code, str(trouble))
            tries = self._root_tries = self._root_tries + 1
            if tries < MAX_TRIES or (trouble.retryable and not isinstance(trouble, WorkerTrouble)):
                raise trouble from error
            accused, findings = (), None
        self._root_tries = 0
        if findings is None:
            return RootResult(action.version, action.stage, "", trouble=f"{name} can't be told here")
        logger.warning("{} is {}: {}", name, short(findings.root), ", ".join(str(one.member) for one in accused) or "-")
        return RootResult(action.version, action.stage, findings.root, accused)

    # --- cases -----------------------------------------------------------------------------------------------------

    async def replay_case(self, bundle: str, keep: Keep | None = None) -> tuple[Case, Findings]:
        """A kept case once more, in a fresh process: for an appeal, or by a third party, which may ``keep`` the files."""
        case = await self._shelf.case(bundle, Deadline.after(TIMEOUTS.store_request_s))
        async with self._bundle(case) as files:
            findings = await self._replay(files, LAST, fresh=True)
            if (other := findings.other_class) is not None:
                raise WorkerTrouble(
                    f"this machine's hardware class is {short(other.ours)}, the run's is {short(other.theirs)}",
                    hint="a case is decided on machines of the run's class",
                )
            if keep is not None:
                await keep(case, findings, files)
            return case, findings

    async def appeal(self, number: int, state: RunState) -> Callable[[RunState], Iterable[AnyEvent]]:
        """Run a closed case's bundle again; what to journal, asked with the state as it is then."""
        kept = state.audits.cases.get(number)
        if kept is None or not kept.bundle:
            raise NotFound(f"case {number} has no bundle")
        case, findings = await self.replay_case(kept.bundle)
        check_trusted(case, findings)
        upheld = is_wrong(case, findings, kept.member)
        logger.info("appeal of case {}: {}", number, "upheld" if upheld else "the work was right")
        event = Appealed(number, upheld, findings.digest)
        return lambda later: (event,) if number in later.audits.cases else ()


class WorkerTrouble(IotaError):
    """The worker failed on this case: tried again a few times, then given up."""

    code = "audit_worker"
    retryable = True
