"""A follower's own audits of one run, drawn by its own hotkey and redone here, and its replays of the leader's cases.

Nothing of the leader is believed: draws are of all that was sealed, what was audited before its seal included; a case counts
only if its bundle is what the journal says and the replay here finds it wrong. What the leader doesn't have opened is counted
against it, what nobody can open any more against nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from loguru import logger

from subnet.audit import build
from subnet.audit.case import Case, Findings
from subnet.audit.draw import Draw, drawn
from subnet.audit.ledger import PASSED
from subnet.errors import IotaError, NotFound
from subnet.protocol.audit_api import WitnessRequest
from subnet.protocol.follow_api import CaseVerdict, OwnAudit
from subnet.protocol.signing import Signer
from subnet.run.audits import OpenAudit
from subnet.timing import TIMEOUTS, Backoff, Clock, Deadline
from subnet.words import Member
from validator.audit_blocks import BlockBook
from validator.audit_evidence import GATHER_S, Bundle
from validator.audit_findings import is_wrong, why_not_comparable
from validator.audit_runner import AuditRunner
from validator.decision import AuditResult
from validator.follow_asking import AGAIN, Asked, Asking
from validator.follow_findings import Accusation, FindingsShelf
from validator.follow_leader import LeaderLine
from validator.follow_run import FollowedRun
from validator.follow_todo import DueCase, DueWindow

TRY_S = 300.0
"""For so long an audit that fails for reasons of our own is tried again."""
CASE_S = 600.0
MAX_ASKED = 4
"""Leaders, or lives of one, that are asked for the same evidence."""
EVIDENCE_S, EVIDENCE_OVER_S = 2 * TIMEOUTS.evidence_s, 5.0
"""From when the journal has it until the store has it; members may hear of it later than this validator. Once the run is over
nobody puts anything there any more."""
_Key = tuple[int, int, int, int]
"""(branch, window, step, stage)."""


class FollowAudits:
    """``blocks``: where hashes of :attr:`wanted_blocks` turn up. :meth:`look` now and then."""

    def __init__(
        self,
        run: FollowedRun,
        runner: AuditRunner,
        shelf: FindingsShelf,
        line: LeaderLine,
        signer: Signer,
        blocks: BlockBook,
        clock: Clock,
        permitted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._run, self._runner, self._shelf, self._line = run, runner, shelf, line
        self._signer, self._blocks, self._clock = signer, blocks, clock
        self._asking = Asking(run, line, signer.hotkey, self._block_hash, clock, permitted)
        self._draws: dict[tuple[int, int], tuple[Draw, ...]] = {}
        self._tasks: dict[_Key | int, asyncio.Task[None]] = {}
        self._keys = 0

    @property
    def wanted_blocks(self) -> set[int]:
        closed = [due.event.block for due in self._run.todo.windows]
        return {*closed, *(due.event.block for due in self._run.promises.due())}

    def _block_hash(self, number: int) -> str | None:
        return self._blocks.block_hashes.get(number)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._runner.close()

    @property
    def idle(self) -> bool:
        """Nothing is left to redo of what is in the journal so far."""
        todo, due = self._run.todo, self._run.promises.due()
        return not (todo.windows or todo.cases or due or self._tasks)

    def look(self) -> None:
        """Start what can be begun, end what is done. A task that fails is an error of ours and raised here."""
        for key in [key for key, task in self._tasks.items() if task.done()]:
            self._tasks.pop(key).result()
        if self._run.spoilt or not self._run.caught_up:
            return
        self._check_promises()
        for due in self._run.todo.windows:
            self._window(due)
        for due in self._run.todo.cases:
            if due.event.case not in self._tasks:
                self._start(due.event.case, self._case(due))

    def _check_promises(self) -> None:
        run = self._run
        for closed in run.promises.due():
            block_hash = self._block_hash(closed.event.block)
            if block_hash is not None:
                for found in run.promises.undrawn(run.state, run.watch.audits.ledger, closed, block_hash):
                    run.found_later(found)

    def _start(self, key: _Key | int, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[key] = asyncio.create_task(work, name=f"follow audit {key}")

    # --- windows -------------------------------------------------------------------------------------------------

    def _window(self, due: DueWindow) -> None:
        run, window = self._run, due.event.window
        block_hash = self._block_hash(due.event.block)
        if block_hash is None:
            return
        key = due.branch, window
        if key not in self._draws:
            ledger, hotkey = run.watch.audits.ledger, self._signer.hotkey
            self._draws[key] = drawn(run.state, ledger, due.event, block_hash, hotkey, skip_passed=False)
            count = sum(len(draw.members) for draw in self._draws[key])
            logger.info("run {}: window {} closed, {} partials drawn", run.name, window, count)
        done = {(audit.step, audit.stage) for audit in run.audits.items if (audit.branch, audit.window) == key}
        left = [draw for draw in self._draws[key] if (draw.step, draw.stage) not in done]
        for draw in left:
            task = (*key, draw.step, draw.stage)
            if task not in self._tasks:
                self._start(task, self._redo(due, draw))
        if not left:
            del self._draws[key]
            run.todo.window_done(due)

    async def _redo(self, due: DueWindow, draw: Draw) -> None:
        case = self._made(draw, draw.members)
        asked, blame = await self._asked(due, draw)
        if not asked.members or asked.refusal:
            self._note(due, draw, asked, None)
            return
        if case is None or asked.members != draw.members:
            case = self._made(draw, asked.members)
        result, why = await self._redone(draw, asked.members, case)
        if result is not None and not result.missing:
            blame = ""
        self._note(due, draw, Asked(asked.members, asked.accepted, blame, asked.why or why), result)

    async def _asked(self, due: DueWindow, draw: Draw) -> tuple[Asked, str]:
        """And what the leader is to be blamed for, where it accepted."""
        for _ in range(MAX_ASKED):
            asked = await self._asking.ask(due, draw)
            blame = await self._asking.until_opened(due, draw, asked.members) if asked.accepted else ""
            if blame != AGAIN:
                return asked, blame
        return Asked(draw.members, why="its leaders changed before it was opened"), ""

    def _made(self, draw: Draw, members: tuple[Member, ...]) -> Case | None:
        """The case, as long as the journal has what it is made of."""
        run = self._run
        try:
            return build.case_after_seal(run.state, run.watch.audits.ledger, draw.step, draw.stage, members)
        except NotFound:
            return None

    async def _redone(
        self, draw: Draw, members: tuple[Member, ...], case: Case | None
    ) -> tuple[AuditResult | None, str]:
        """What the replay gave, or why there was none."""
        opened = OpenAudit(step=draw.step, stage=draw.stage, number=0, members=members, by=self._signer.hotkey)
        self._keys -= 1
        key, why, deadline, pause = self._keys, "", Deadline.after(TRY_S, self._clock), Backoff(0.5, 10.0)
        while not deadline.expired:
            case = case or self._made(draw, members)
            if case is None and not self._asking.is_kept(draw):
                return None, "too late: the evidence isn't kept any more"
            evidence_s = EVIDENCE_OVER_S if self._run.finished else EVIDENCE_S
            self._runner.bind(self._run.watch, self._clock, evidence_s)
            try:
                result = await self._runner.redo(key, opened, self._run.state, case=case)
                if result is not None:
                    return result, ""
                why = "its inputs are being made again"
            except IotaError as error:
                why = str(error)
            await asyncio.sleep(pause.next_s())
        return None, why

    def _note(self, due: DueWindow, draw: Draw, asked: Asked, result: AuditResult | None) -> None:
        """The outcome, for good. Of whom the leader refused is what couldn't be redone and was never journaled to be opened."""
        run, hotkey = self._run, self._signer.hotkey
        findings = result.findings if result is not None else None
        redone = findings.partials if findings is not None else ()
        accused = result.accused if result is not None else ()
        convicted = run.state.convicted  # of those the runner accuses nobody again
        failed = {one.member for one in accused}
        failed |= {partial.member for partial in redone if partial.wrong and partial.member.hotkey in convicted}
        passed = {partial.member for partial in redone if not partial.wrong} - failed
        left = set(asked.members) - passed - failed
        refused = left - run.promises.was_opened(draw.step, draw.stage, hotkey) if asked.refusal else set[Member]()
        records = {r.member: r.outcome for r in run.watch.audits.ledger.partials(draw.step, draw.stage)}
        why = asked.refusal or asked.why
        if result is not None and not why:
            why = _why(result)
        audit = OwnAudit(
            run_id=run.run_id,
            branch=due.branch,
            window=due.event.window,
            step=draw.step,
            stage=draw.stage,
            number=run.number,
            time_ns=run.folded.last_ns,
            passed=tuple(sorted(passed)),
            failed=tuple(sorted(failed)),
            undecided=tuple(sorted(left - refused)),
            refused=tuple(sorted(refused)),
            why=why if left or not asked.members else "",
            bundles=tuple(one.bundle for one in accused),
            vouched=tuple(sorted(member for member in failed if records.get(member) == PASSED)),
            untrusted=result.untrusted if result is not None else "",
        )
        for one in accused:
            accusation = Accusation(
                run.run_id, draw.step, draw.stage, one.member, one.charge, one.bundle, one.digest, hotkey
            )
            path = self._shelf.accuse(accusation, self._signer)
            logger.warning("run {}: {} failed an audit of step {}: {}", run.name, one.member, draw.step, path)
        run.judge(audit)

    # --- cases ---------------------------------------------------------------------------------------------------

    async def _case(self, due: DueCase) -> None:
        """Replay the leader's bundle; say what it gave where the bundle is what the journal says."""
        run, event = self._run, due.event
        verdict = await self._verdict(due)
        run.todo.case_done(event.case)
        run.decide(verdict)
        logger.info("run {}: case {} of {}: {}", run.name, event.case, event.hotkey, verdict.why or "confirmed")
        if not verdict.digest:
            return
        try:
            await self._line.testify(run.state.leader, WitnessRequest(event.case, verdict.digest, run.run_id))
        except IotaError as error:
            logger.info("run {}: what case {} gave isn't taken by the leader: {}", run.name, event.case, error)

    async def _verdict(self, due: DueCase) -> CaseVerdict:
        """Of a bundle that isn't the journal's, or whose state isn't the agreed one, the replay says nothing of the accused."""
        event, pause, kept = due.event, Backoff(1.0, 15.0), list[str]()
        deadline = Deadline.after(CASE_S, self._clock)

        async def keep(case: Case, findings: Findings, files: Bundle) -> None:
            if not _useless(due, case, findings) and is_wrong(case, findings, event.member):
                kept.append(await self._keep(due, case, findings, files))

        while True:
            try:
                case, findings = await self._runner.replay_case(event.bundle, keep)
            except IotaError as error:
                if deadline.expired:
                    return self._said(due, why=str(error))
                await asyncio.sleep(pause.next_s())
                continue
            if useless := _useless(due, case, findings):
                return self._said(due, why=useless, foreign=due.is_known and bool(due.differs(case)))
            if not is_wrong(case, findings, event.member):
                return self._said(due, findings.digest, why="the replay finds the work to be right")
            return self._said(due, findings.digest, confirmed=True, bundle=kept[-1] if kept else "")

    async def _keep(self, due: DueCase, case: Case, findings: Findings, files: Bundle) -> str:
        """A copy of its own, whatever becomes of the leader's."""
        event, hotkey = due.event, self._signer.hotkey
        name = await self._shelf.keep(case, files, Deadline.after(GATHER_S))
        accusation = Accusation(
            self._run.run_id, event.step, event.stage, event.member, event.charge, name, findings.digest, hotkey
        )
        self._shelf.accuse(accusation, self._signer)
        return name

    def _said(
        self,
        due: DueCase,
        digest: str = "",
        *,
        confirmed: bool = False,
        why: str = "",
        bundle: str = "",
        foreign: bool = False,
    ) -> CaseVerdict:
        run, event = self._run, due.event
        number, time_ns = run.number, run.folded.last_ns
        return CaseVerdict(
            run.run_id, event.case, event.hotkey, digest, confirmed, number, time_ns, why, bundle, foreign
        )


def _useless(due: DueCase, case: Case, findings: Findings) -> str:
    """Why the replay says nothing of the accused; empty where it does."""
    wrong = (why for version, why in findings.wrong_roots if version <= case.state.version)
    return due.differs(case) or next(wrong, "")


def _why(result: AuditResult) -> str:
    """Some of it is neither right nor wrong."""
    if result.trouble or result.missing:
        return result.trouble or "evidence is lacking"
    other_class = why_not_comparable(result.findings) if result.findings is not None else ""
    return other_class or "two runs here differ"
