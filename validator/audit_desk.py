"""What the outside may ask about audits and cases, and say to them: every refusal has a code, a reason and a hint.

Reads are public: a conviction that nobody can re-run is worth nothing. An appeal is the convicted hotkey's; a witness's word and
a request to open evidence are those of holders of a validator permit, and the latter only of what their own seed draws.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from loguru import logger

from subnet.audit import draw
from subnet.chain.base import Metagraph
from subnet.errors import Busy, InputError, IotaError, NotFound
from subnet.protocol.audit_api import (
    MAX_HOTKEYS,
    Accepted,
    AppealRequest,
    AuditsRequest,
    CaseDetail,
    CaseView,
    WitnessRequest,
)
from subnet.protocol.messages import LIMIT_GRANTS
from subnet.protocol.wire import is_blob_hash
from subnet.run.audits import CaseState
from subnet.run.events import WindowClosed
from subnet.run.state import RunState
from subnet.store.base import Grant, OwnerStore
from subnet.timing import TIMEOUTS, Clock, Deadline
from subnet.words import BlobHash
from validator.audit_blocks import Blocks
from validator.audit_cases import CaseShelf
from validator.audit_watch import AuditRequest, AuditWatch

APPEAL_EVERY_S = 600.0
"""Between two appeals of one case; one runs at a time."""
MAX_APPEALS = 16
MAX_REQUESTS = 1024
"""Of other validators that wait until their evidence is asked for."""
BUNDLES_PER_S, BUNDLES_BURST = 2.0, 20.0
"""Of everybody together: URLs are cheap, and what they cost the store isn't."""


class NotForYou(IotaError):
    """The request is somebody else's to make."""

    code, http_status = "not_allowed", 403


class NotDrawn(IotaError):
    """The caller's seed doesn't draw what it asks for."""

    code, http_status = "not_drawn", 403


class WrongMoment(IotaError):
    """The case or the window is in no state for this."""

    code, http_status = "wrong_moment", 409


class AuditSession(Protocol):
    """What the desk needs of a run (:class:`validator.run_session.RunSession`, or of one that has finished
    :class:`validator.finished_runs.FinishedAudits`)."""

    @property
    def over(self) -> bool:
        """The run has ended and nothing more is journaled."""
        ...

    @property
    def audit_state(self) -> RunState: ...

    @property
    def audit_watch(self) -> AuditWatch: ...

    @property
    def shelf(self) -> CaseShelf: ...

    @property
    def closed_windows(self) -> dict[int, WindowClosed]: ...

    def wake(self) -> None:
        """There is something new in the watch."""
        ...


class AuditDesk:
    """``session(run)``: the run of this name or id, active or finished (empty: whichever is active), else :class:`NotFound`."""

    def __init__(
        self,
        session: Callable[[str], Awaitable[AuditSession]],
        metagraph: Callable[[], Metagraph | None],
        store: OwnerStore,
        chain: Blocks,
        clock: Clock,
        leader: str,
    ) -> None:
        self._session, self._metagraph, self._leader = session, metagraph, leader
        self._store, self._chain, self._clock = store, chain, clock
        self._appealed_s: dict[tuple[str, int], float] = {}
        self._bundles, self._bundles_s = BUNDLES_BURST, clock.now_s()

    # --- public ----------------------------------------------------------------------------------------------------

    async def cases(self, run: str) -> tuple[CaseView, ...]:
        state = (await self._session(run)).audit_state
        return tuple(case_view(number, case) for number, case in sorted(state.audits.cases.items()))

    async def case(self, run: str, number: int) -> CaseDetail:
        session = await self._session(run)
        state, kept = session.audit_state, self._case(session, number)
        blobs: tuple[tuple[str, int], ...] = ()
        if kept.bundle:
            blobs = (await session.shelf.index(kept.bundle, Deadline.after(TIMEOUTS.http_request_s / 2))).blobs
        assert state.run is not None
        return CaseDetail(state.run.run_id, case_view(number, kept), blobs)

    async def bundle(self, run: str, number: int, start: int) -> tuple[Grant, ...]:
        """URLs of the case (number 0) and of its blobs behind it, from ``start`` on, as many as one answer holds."""
        session = await self._session(run)
        kept = self._case(session, number)
        if not kept.bundle:
            raise NotFound(f"case {number} has no bundle", hint=f"it is about {kept.charge}")
        self._take_bundle()
        deadline = Deadline.after(TIMEOUTS.http_request_s / 2)
        index = await session.shelf.index(kept.bundle, deadline)
        refs = [(BlobHash(kept.bundle), index.case_bytes), *((BlobHash(blob), size) for blob, size in index.blobs)]
        if not 0 <= start < len(refs):
            raise InputError(f"start={start} of {len(refs)} blobs")
        return await self._store.grant_gets(refs[start : start + LIMIT_GRANTS], deadline=deadline)

    def _take_bundle(self) -> None:
        now_s = self._clock.now_s()
        self._bundles = min(BUNDLES_BURST, self._bundles + (now_s - self._bundles_s) * BUNDLES_PER_S)
        self._bundles_s = now_s
        if self._bundles < 1:
            raise Busy("too many bundles are asked for", retry_after_s=round((1 - self._bundles) / BUNDLES_PER_S, 2))
        self._bundles -= 1

    # --- signed ----------------------------------------------------------------------------------------------------

    async def appeal(self, hotkey: str, request: AppealRequest) -> Accepted:
        session = await self._session(request.run)
        kept = self._case(session, request.case)
        if kept.hotkey != hotkey:
            raise NotForYou(
                f"case {request.case} is about {kept.hotkey}", hint="sign with the hotkey that is convicted"
            )
        if not kept.outcome:
            raise WrongMoment(
                f"case {request.case} isn't closed yet",
                hint="its witnesses have been asked",
                retry_after_s=TIMEOUTS.witness_s,
            )
        if not kept.bundle:
            raise WrongMoment(
                f"case {request.case} ({kept.charge}) has no bundle to run again",
                hint="a quarantine for refused evidence ends by itself",
            )
        self._require_running(session)
        now_s, key = self._clock.now_s(), (kept.bundle, request.case)
        last_s = self._appealed_s.get(key)
        if last_s is not None and now_s - last_s < APPEAL_EVERY_S:
            raise Busy(
                f"case {request.case} was appealed {now_s - last_s:.0f} s ago",
                hint="its outcome is in the journal, and in GET /v1/cases/N",
                retry_after_s=APPEAL_EVERY_S - (now_s - last_s),
            )
        appeals = session.audit_watch.appeals
        if len(appeals) >= MAX_APPEALS:
            raise Busy("other appeals wait to be run", retry_after_s=60.0)
        appeals.append(request.case)
        session.wake()
        self._appealed_s[key] = now_s
        logger.info("{} appeals case {}", hotkey, request.case)
        return Accepted(f"case {request.case} is run again in a fresh process; see GET /v1/cases/{request.case}")

    async def witness(self, hotkey: str, request: WitnessRequest) -> Accepted:
        self._require_permit(hotkey)
        if hotkey == self._leader:
            raise NotForYou("the leader is no witness of its own case")
        if not is_blob_hash(request.digest):
            raise InputError("digest is not 64 hex digits")
        session = await self._session(request.run)
        kept, number = self._case(session, request.case), request.case
        if kept.outcome:
            raise WrongMoment(f"case {number} is closed ({kept.outcome})", hint="its hotkey may appeal")
        if not kept.bundle:
            raise WrongMoment(f"case {number} has no bundle: there is nothing to run")
        self._require_running(session)
        words, word = session.audit_watch.words, (number, hotkey, request.digest)
        if hotkey in kept.said or any((case, who) == (number, hotkey) for case, who, _ in words):
            raise WrongMoment(f"{hotkey} has had its word on case {number}")
        if len(words) >= MAX_REQUESTS:
            raise Busy("too many words of witnesses wait", retry_after_s=10.0)
        words.append(word)
        session.wake()
        return Accepted(f"your word on case {number} goes into the journal")

    async def request_audits(self, hotkey: str, request: AuditsRequest) -> Accepted:
        self._require_permit(hotkey)
        session = await self._session(request.run)
        hotkeys = frozenset(request.hotkeys)
        if not 0 < len(hotkeys) <= MAX_HOTKEYS:
            raise InputError(f"{len(hotkeys)} hotkeys are named", hint=f"1 to {MAX_HOTKEYS}")
        window = session.closed_windows.get(request.window)
        if window is None:
            known = ", ".join(map(str, sorted(session.closed_windows))) or "none"
            raise NotFound(f"window {request.window} isn't closed, or no longer known", hint=f"known: {known}")
        drawn = await self._drawn(session, window, hotkey, request)
        left = hotkeys - drawn
        if left:
            raise NotDrawn(
                f"your seed doesn't draw {min(left)} at step {request.step} stage {request.stage} of window {window.window}",
                hint=f"it draws there: {', '.join(sorted(drawn)) or 'nobody'}",
            )
        watch = session.audit_watch
        wanted = AuditRequest(hotkey, request.window, request.step, request.stage, tuple(sorted(hotkeys)))
        if wanted not in watch.requests:
            if len(watch.requests) >= MAX_REQUESTS:
                raise Busy("too many requests for evidence wait", retry_after_s=10.0)
            watch.requests.append(wanted)
            session.wake()
        return Accepted("the evidence is asked for: see AuditOpened in the journal")

    async def _drawn(
        self, session: AuditSession, window: WindowClosed, hotkey: str, request: AuditsRequest
    ) -> frozenset[str]:
        if not window.first_step <= request.step <= window.last_step:
            raise InputError(
                f"step {request.step} isn't in window {window.window}",
                hint=f"{window.first_step} to {window.last_step}",
            )
        block_hash = await self._chain.block_hash(window.block, timeout_s=TIMEOUTS.http_request_s / 2)
        state, ledger = session.audit_state, session.audit_watch.ledger
        if ledger.sealed(request.step, request.stage) is None:
            raise NotFound(
                f"evidence of step {request.step} stage {request.stage} isn't kept any more",
                hint="ask within a window after the leader's own audits",
            )
        found = draw.drawn(state, ledger, window, block_hash, hotkey, skip_passed=False)
        here = [one for one in found if (one.step, one.stage) == (request.step, request.stage)]
        return frozenset(member.hotkey for one in here for member in one.members)

    # --- how -------------------------------------------------------------------------------------------------------

    def _case(self, session: AuditSession, number: int) -> CaseState:
        kept = session.audit_state.audits.cases.get(number)
        if kept is None:
            count = len(session.audit_state.audits.cases)
            raise NotFound(f"there is no case {number}", hint=f"the run has {count}: see GET /v1/cases")
        return kept

    def _require_running(self, session: AuditSession) -> None:
        if session.over:
            raise WrongMoment(
                "the run is over, and nothing is added to its journal",
                hint="iota audit fetch and iota audit replay still work",
            )

    def _require_permit(self, hotkey: str) -> None:
        metagraph = self._metagraph()
        neuron = metagraph.neuron(hotkey) if metagraph is not None else None
        if neuron is None or not neuron.validator_permit:
            raise NotForYou(f"{hotkey} holds no validator permit", hint="this is for validators of the subnet")


def case_view(number: int, case: CaseState) -> CaseView:
    return CaseView(
        case=number,
        hotkey=case.hotkey,
        step=case.step,
        stage=case.stage,
        charge=case.charge,
        state=case.outcome or "open",
        bundle=case.bundle,
        digest=case.digest,
        sealed=case.sealed,
        witnesses=tuple(sorted(case.said.items())),
        appeal="" if case.upheld else "overturned",
    )
