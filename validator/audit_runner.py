"""Carries audits out: evidence, bundle, replay in a worker process, and where something is wrong a second run and a case.

An :class:`~validator.decision.AuditResult` says only what two runs say, the second in a process that has run nothing before.
What fails for reasons of our own (the store is away, the worker died) accuses nobody and is tried again; what can't be had
any more is given up after ``MAX_TRIES``. Nothing here blocks the event loop, and every wait has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from loguru import logger

from subnet.audit import build
from subnet.audit.case import Case, Findings, RedonePartial, SignedClaim, digest
from subnet.errors import IotaError, NotFound
from subnet.logs import ReasonLog
from subnet.run.audits import OpenAudit
from subnet.run.events import AnyEvent, Appealed
from subnet.run.state import RunState
from subnet.store.base import OwnerStore
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock, Deadline
from subnet.words import Member, Want, short
from validator.audit_cases import CaseShelf
from validator.audit_claims import signed_claims, steps_of_reports
from validator.audit_evidence import GATHER_S, Arrived, Bundle, BundleMaker, wait_for_evidence
from validator.audit_findings import (
    Untrusted,
    check_trusted,
    comparable,
    is_wrong,
    lacking,
    log_audit,
    says_all,
    too_far,
    why_not_comparable,
    without,
)
from validator.audit_turns import Turns
from validator.audit_watch import AuditWatch
from validator.decision import Accused, AuditResult
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
        self.doing: dict[int, str] = {}
        """By audit: what it is at, or why it failed, in words that follow "audit N"; until there is a result."""
        self._said = ReasonLog(level="WARNING", max_subjects=MAX_REMEMBERED)
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
        arrived = await self._wait(audit, wants)
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
            repeated, accused = await self._accuse(rest, findings, state, urgency)
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

    async def _accuse(
        self, case: Case, findings: Findings, state: RunState, urgency: int
    ) -> tuple[bool, tuple[Accused, ...]]:
        """Whether a second run says the same of all that is wrong, and the accused with their evidence.

        Who is convicted already isn't accused again: nothing more would come of it.
        """
        if far := too_far(findings):
            self.counts.repeated += 1
            found = [await self._doubt(case, member, urgency) for member in far]
            return all(found), tuple(accused for accused in found if accused is not None)
        wrong = [partial for partial in findings.partials if partial.wrong]
        if not wrong and (findings.merge is None or not findings.merge.wrong):
            return True, ()
        if wrong and not (wrong := [partial for partial in wrong if partial.member.hotkey not in state.convicted]):
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

    async def _doubt(self, case: Case, member: Member, urgency: int) -> Accused | None:
        """On a machine of another class: without a digest of its own, so that only machines of the class can convict."""
        if all(partial.member != member for partial in case.partials):
            return None  # an owner's sum can't be told from its contributors' without exact numbers
        narrow = build.accusation(case, member)
        narrow = msgspec.structs.replace(narrow, claims=await self._claims(narrow, member))
        async with self._maker.bundle(narrow, Deadline.after(GATHER_S)) as bundle:
            await self._maker.add_useful(bundle, Deadline.after(GATHER_S))
            if member not in too_far(await self._replay(bundle, urgency, fresh=True)):
                return None
            name = await self._shelf.keep(narrow, bundle, Deadline.after(GATHER_S))
        return Accused(member, "partial", name, "", build.claimed_digest(narrow, member) or "")

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
