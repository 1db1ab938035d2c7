"""From what a replay found wrong to the accused with their evidence: a second run in a fresh process has to say the same.

Each is accused with a bundle of its own work alone, which is kept in the store; where two runs differ this machine is at fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

import msgspec
from loguru import logger

from subnet.audit import build
from subnet.audit.case import Case, Findings, RedonePartial, SignedClaim, digest, root_digest
from subnet.run.audits import ROOT
from subnet.run.state import RunState
from subnet.timing import Deadline
from subnet.words import Member
from validator.audit_claims import signed_claims, steps_of_reports
from validator.audit_evidence import GATHER_S, Bundle, BundleMaker
from validator.audit_findings import too_far
from validator.decision import Accused


class Shelf(Protocol):
    """Where bundles of cases are kept: :class:`validator.audit_cases.CaseShelf`."""

    async def keep(self, case: Case, bundle: Bundle, deadline: Deadline) -> str: ...

    async def case(self, bundle: str, deadline: Deadline) -> Case: ...


class Receipts(Protocol):
    """:meth:`validator.journal_store.JournalStore.receipts_between`."""

    def __call__(self, hotkey: str, first_step: int, end_step: int, /) -> list[bytes]: ...


class Replay(Protocol):
    """Runs a bundle in its turn; ``fresh``: in a process that has done nothing before."""

    def __call__(self, bundle: Bundle, urgency: int, /, *, fresh: bool = False) -> Awaitable[Findings]: ...


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


class Accuser:
    """Of one run."""

    def __init__(
        self, maker: BundleMaker, shelf: Shelf, replay: Replay, receipts: Receipts, counts: AuditCounts
    ) -> None:
        self._maker, self._shelf, self._replay, self._receipts = maker, shelf, replay, receipts
        self.counts = counts

    async def accuse_of_roots(
        self, case: Case, findings: Findings, state: RunState, urgency: int
    ) -> tuple[Accused, ...]:
        """Whoever has reported another root than was found."""
        accused: list[Accused] = []
        for member, root in case.roots:
            if root == findings.root or member.hotkey in state.convicted:
                continue
            self.counts.repeated += 1
            narrow = msgspec.structs.replace(case, roots=((member, root),))
            async with self._maker.bundle(narrow, Deadline.after(GATHER_S)) as bundle:
                again = await self._replay(bundle, urgency, fresh=True)
                if again.root != findings.root:
                    logger.error(
                        "two runs of stage {} to step {} differ: this machine is at fault", case.stage, case.step
                    )
                    return ()
                name = await self._shelf.keep(narrow, bundle, Deadline.after(GATHER_S))
            accused.append(Accused(member, ROOT, name, again.digest, root_digest(root)))
        return tuple(accused)

    async def accuse(
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
