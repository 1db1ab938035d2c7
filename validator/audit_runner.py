"""Carries audits out: evidence, bundle, replay in a worker process, and where something is wrong a second run and a case.

An :class:`~validator.decision.AuditResult` says only what two runs say, the second in a process that has run nothing before.
What fails for reasons of our own (the store is away, the worker died) accuses nobody and is tried again; what can't be had
any more is given up after ``MAX_TRIES``. Nothing here blocks the event loop, and every wait has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from loguru import logger

from subnet.audit import build
from subnet.audit.case import Case, Findings, RedonePartial, SignedClaim, digest
from subnet.errors import Corrupt, IotaError, NotFound
from subnet.run.audits import OpenAudit
from subnet.run.events import AnyEvent, Appealed
from subnet.run.state import RunState
from subnet.store.base import OwnerStore
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock, Deadline
from subnet.words import Member, Want
from validator.audit_cases import CaseShelf
from validator.audit_claims import signed_claims, steps_of_reports
from validator.audit_evidence import GATHER_S, Arrived, Bundle, BundleMaker, wait_for_evidence
from validator.audit_turns import Turns
from validator.audit_watch import AuditWatch
from validator.decision import Accused, AuditResult
from validator.store_clock import StoreClock
from validator.watch import Watch

MAX_TRIES = 3
URGENT, LATER, LAST = 0, 1, 2
"""Before a seal the run waits for the replay; after it only the window does; an appeal can wait for both."""
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


class Shelf(Protocol):
    """Where bundles of cases are kept: :class:`validator.audit_cases.CaseShelf`."""

    async def keep(self, case: Case, bundle: Bundle, deadline: Deadline) -> str: ...

    async def case(self, bundle: str, deadline: Deadline) -> Case: ...


class AuditedWatch(Protocol):
    """What is needed of :class:`validator.watch.Watch`."""

    @property
    def audits(self) -> AuditWatch: ...

    @property
    def store(self) -> StoreClock: ...


class Receipts(Protocol):
    """:meth:`validator.journal_store.JournalStore.receipts_between`."""

    def __call__(self, hotkey: str, first_step: int, end_step: int, /) -> list[bytes]: ...


Keep = Callable[[Case, Findings, Bundle], Awaitable[None]]
"""Told of a replay while its bundle's files are there."""


@dataclass
class AuditCounts:
    """What audits have cost so far, in this process."""

    done: int = 0
    repeated: int = 0
    troubled: int = 0
    compute_s: float = 0.0
    state_s: float = 0.0
    read_bytes: int = 0
    evidence_bytes: int = 0


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
        self._store, self._replayer, self._receipts = store, replayer, receipts
        self._maker = BundleMaker(store, directory, disk_bytes)
        self._shelf = shelf or CaseShelf(store, run_id)
        self._turns, self._slots = Turns(), asyncio.Semaphore(MAX_AT_ONCE)
        self._watch: AuditedWatch = Watch()
        self._evidence_s = TIMEOUTS.evidence_s
        self._clock: Clock = SYSTEM_CLOCK
        self._tries: dict[int, int] = {}
        self.counts = AuditCounts()

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
            self.counts.troubled += 1
            raise WorkerTrouble(f"the disk of audits: {error}") from error
        except IotaError as error:
            self.counts.troubled += 1
            if error.retryable and not isinstance(error, WorkerTrouble):
                raise
            tries = self._tries[audit] = self._tries.get(audit, 0) + 1
            if tries < MAX_TRIES:
                raise
            logger.error("audit {} is given up after {} tries: {}", audit, tries, error)
            result = AuditResult(audit, None, trouble=str(error))
        if result is not None:
            self._tries.pop(audit, None)
        return result

    async def _redo(
        self, audit: int, opened: OpenAudit, state: RunState, wanted: Callable[[], bool], case: Case | None
    ) -> AuditResult | None:
        case = case or self._case(opened, state)
        if case is None:
            return None
        arrived = await self._wait(audit, build.wants_of(case))
        self.counts.evidence_bytes += arrived.evidence_bytes
        rest = _without(case, arrived.missing)
        if rest is None:
            return AuditResult(audit, None, missing=arrived.missing)
        if not wanted():
            return None
        urgency = URGENT if opened.number else LATER
        async with self._bundle(rest, held=self._replayer.held.get(rest.stage)) as bundle:
            findings = await self._replay(bundle, urgency)
            if (reason := _distrust(rest, findings)) is not None:
                raise Corrupt(reason)
            repeated, accused = await self._accuse(rest, findings, urgency)
        self.counts.done += 1
        _log(audit, rest, findings, accused)
        return AuditResult(audit, findings, repeated=repeated, accused=accused, missing=arrived.missing)

    def _case(self, opened: OpenAudit, state: RunState) -> Case | None:
        ledger = self._watch.audits.ledger
        make = build.case_before_seal if opened.number else build.case_after_seal
        return make(state, ledger, opened.step, opened.stage, opened.members)

    async def _wait(self, audit: int, wants: Collection[Want]) -> Arrived:
        watch, clock = self._watch, self._clock
        began_s = watch.store.work_s(clock.now_s())
        return await wait_for_evidence(
            self._store,
            wants,
            given_up=lambda want: (audit, want) in watch.audits.not_held,
            waited_s=lambda: watch.store.work_s(clock.now_s()) - began_s,
            limit_s=self._evidence_s,
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

    # --- when something is wrong -----------------------------------------------------------------------------------

    async def _accuse(self, case: Case, findings: Findings, urgency: int) -> tuple[bool, tuple[Accused, ...]]:
        """Whether a second run says the same of all that is wrong, and the accused with their evidence."""
        wrong = [partial for partial in findings.partials if partial.wrong]
        if not wrong and (findings.merge is None or not findings.merge.wrong):
            return True, ()
        self.counts.repeated += 1
        if not wrong:  # of a lying sum its owner is innocent
            return await self._accuse_owners(case, findings, urgency)
        accused: list[Accused] = []
        for partial in wrong:
            found = await self._accuse_of_partial(case, partial, urgency)
            if found is not None:
                accused.append(found)
        return len(accused) == len(wrong), tuple(accused)

    async def _accuse_of_partial(self, case: Case, partial: RedonePartial, urgency: int) -> Accused | None:
        member = partial.member
        narrow = build.accusation(case, member)
        narrow = msgspec.structs.replace(narrow, claims=await self._claims(narrow, member))
        async with self._maker.bundle(narrow, Deadline.after(GATHER_S)) as bundle:
            again = await self._replay(bundle, urgency, fresh=True)
            same = again.digest == digest((partial,)) and any(redone.wrong for redone in again.partials)
            if not same:
                logger.error("two runs of {} at step {} differ: this machine is at fault", member, case.step)
                return None
            name = await self._shelf.keep(narrow, bundle, Deadline.after(GATHER_S))
        return Accused(member, "partial", name, again.digest, build.claimed_digest(narrow, member) or "")

    async def _accuse_owners(self, case: Case, findings: Findings, urgency: int) -> tuple[bool, tuple[Accused, ...]]:
        assert findings.merge is not None
        assert case.merge is not None
        lied = {partition for partition, _ in findings.merge.wrong}
        owners = sorted({part.owner for part in case.merge.merged if part.partition in lied and part.owner is not None})
        claims = [claim for owner in owners for claim in await self._claims(case, owner)]
        whole = msgspec.structs.replace(case, claims=tuple(claims))
        async with self._maker.bundle(whole, Deadline.after(GATHER_S)) as bundle:
            again = await self._replay(bundle, urgency, fresh=True)
            same = again.digest == findings.digest and again.merge == findings.merge
            if not same:
                logger.error("two runs of the merge of step {} differ: this machine is at fault", case.step)
                return False, ()
            name = await self._shelf.keep(whole, bundle, Deadline.after(GATHER_S))
        return True, tuple(Accused(owner, "merge", name, again.digest) for owner in owners)

    async def _claims(self, case: Case, member: Member) -> tuple[SignedClaim, ...]:
        first, end = steps_of_reports(case.step)
        reports = await asyncio.to_thread(self._receipts, member.hotkey, first, end)
        return await asyncio.to_thread(signed_claims, reports, case, member)

    # --- cases -----------------------------------------------------------------------------------------------------

    async def replay_case(self, bundle: str, keep: Keep | None = None) -> tuple[Case, Findings]:
        """A kept case once more, in a fresh process: for an appeal, or by a third party, which may ``keep`` the files."""
        case = await self._shelf.case(bundle, Deadline.after(TIMEOUTS.store_request_s))
        async with self._bundle(case) as files:
            findings = await self._replay(files, LAST, fresh=True)
            if keep is not None:
                await keep(case, findings, files)
            return case, findings

    async def appeal(self, number: int, state: RunState) -> Callable[[RunState], Iterable[AnyEvent]]:
        """Run a closed case's bundle again; what to journal, asked with the state as it is then."""
        kept = state.audits.cases.get(number)
        if kept is None or not kept.bundle:
            raise NotFound(f"case {number} has no bundle")
        case, findings = await self.replay_case(kept.bundle)
        if (reason := _distrust(case, findings)) is not None:
            raise Corrupt(reason)
        upheld = is_wrong(case, findings, kept.member)
        logger.info("appeal of case {}: {}", number, "upheld" if upheld else "the work was right")
        event = Appealed(number, upheld, findings.digest)
        return lambda later: (event,) if number in later.audits.cases else ()


class WorkerTrouble(IotaError):
    """The worker failed on this case: tried again a few times, then given up."""

    code = "audit_worker"
    retryable = True


def _without(case: Case, missing: Sequence[Want]) -> Case | None:
    """The case less the partials that an input is missing of; None if none is left."""
    lost = {want.hash for want in missing}
    if not lost:
        return case
    whole = [
        partial.member
        for partial in case.partials
        if not any(item.x in lost or item.gradient in lost for item in partial.items)
    ]
    return build.narrow(case, whole) if whole else None


def _distrust(case: Case, findings: Findings) -> str | None:
    """Why the replay says nothing of anybody: it began from a snapshot that isn't the state that was agreed on.

    Behind the snapshot the log leads to one state: whoever computed from another is wrong, however many agreed on it.
    """
    for step, why in findings.wrong_roots:
        if step <= case.state.version:
            return f"the snapshot of stage {case.stage} after {step} updates isn't the agreed state: {why}"
    return None


def is_wrong(case: Case, findings: Findings, member: Member) -> bool:
    """Whether the replay contradicts what the member claims, of its partial or of a partition that it merged."""
    if any(partial.wrong for partial in findings.partials if partial.member == member):
        return True
    if findings.merge is None or case.merge is None:
        return False
    lied = {partition for partition, _ in findings.merge.wrong}
    return any(part.partition in lied for part in case.merge.merged if part.owner == member)


def _log(audit: int, case: Case, findings: Findings, accused: Sequence[Accused]) -> None:
    for step, why in findings.wrong_roots:
        logger.warning("audit {}: the state of stage {} at step {}: {}", audit, case.stage, step, why)
    if accused:
        names = ", ".join(f"{one.member} ({one.charge})" for one in accused)
        words = "; ".join(line for partial in findings.partials for line in partial.wrong[:3])
        logger.warning("audit {} of step {} stage {}: wrong is {}: {}", audit, case.step, case.stage, names, words)
        return
    logger.debug(
        "audit {} of step {} stage {}: {} partials right, {:.2f} s of work, {:.2f} s of state",
        audit,
        case.step,
        case.stage,
        len(findings.partials),
        findings.compute_s,
        findings.state_s,
    )
