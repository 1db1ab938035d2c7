"""A follower's own audits of one run, drawn by its own hotkey and redone here, and its replays of the leader's cases.

Nothing of the leader is believed: draws are of all that was sealed, what was audited before its seal included; a case counts
only if its bundle is what the journal says and the replay here finds it wrong. What the leader doesn't have opened is counted
against it, what nobody can open any more against nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from loguru import logger

from subnet.audit.draw import Draw, drawn
from subnet.errors import IotaError, Refused
from subnet.protocol.audit_api import AuditsRequest, WitnessRequest
from subnet.protocol.follow_api import CaseVerdict, OwnAudit
from subnet.protocol.signing import Signer
from subnet.run.audits import OpenAudit
from subnet.timing import TIMEOUTS, Backoff, Clock, Deadline
from subnet.words import Member
from validator.audit_blocks import BlockBook
from validator.audit_runner import AuditRunner, is_wrong
from validator.decision import AuditResult
from validator.follow_findings import Accusation, FindingsShelf
from validator.follow_leader import LeaderLine
from validator.follow_run import FollowedRun
from validator.follow_todo import DueCase, DueWindow

LOOK_S = 0.5
ASK_S = 60.0
"""For so long a leader that can't be reached is asked again."""
OPENED_S = 300.0
"""For so long what it has accepted is looked for in the journal: it opens a few at a time, and the journal comes with the seals."""
TRY_S = 300.0
"""For so long an audit that fails for reasons of our own is tried again."""
CASE_S = 600.0
EVIDENCE_S = 2 * TIMEOUTS.evidence_s
"""From when the journal has it until the store has it; members may hear of it later than this validator."""
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
    ) -> None:
        self._run, self._runner, self._shelf, self._line = run, runner, shelf, line
        self._signer, self._blocks, self._clock = signer, blocks, clock
        self._draws: dict[tuple[int, int], tuple[Draw, ...]] = {}
        self._tasks: dict[_Key | int, asyncio.Task[None]] = {}
        self._keys = 0
        runner.bind(run.watch, clock, EVIDENCE_S)

    @property
    def wanted_blocks(self) -> set[int]:
        closed = [due.event.block for due in self._run.todo.windows]
        return {*closed, *(due.event.block for due in self._run.promises.due())}

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
            block_hash = self._blocks.block_hashes.get(closed.event.block)
            if block_hash is not None:
                for found in run.promises.undrawn(run.state, run.watch.audits.ledger, closed, block_hash):
                    run.found_later(found)

    def _start(self, key: _Key | int, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[key] = asyncio.create_task(work, name=f"follow audit {key}")

    # --- windows -------------------------------------------------------------------------------------------------

    def _window(self, due: DueWindow) -> None:
        run, window = self._run, due.event.window
        block_hash = self._blocks.block_hashes.get(due.event.block)
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
        run = self._run
        if run.watch.audits.ledger.sealed(draw.step, draw.stage) is None:
            self._note(due, draw, None, "too late: the evidence isn't kept any more")
            return
        try:
            accepted = await self._ask(due, draw)
        except Refused as refused:
            if not run.finished:
                self._note(due, draw, None, f"{refused.code}: {refused}", blame=True)
                return
            accepted = False
        if accepted:
            await self._until_opened(draw)
        opened = OpenAudit(step=draw.step, stage=draw.stage, number=0, members=draw.members, by=self._signer.hotkey)
        self._keys -= 1
        key, why, deadline, pause = self._keys, "", Deadline.after(TRY_S, self._clock), Backoff(0.5, 10.0)
        result: AuditResult | None = None
        while result is None and not deadline.expired:
            try:
                result = await self._runner.redo(key, opened, run.state)
                why = "its inputs are being made again"
            except IotaError as error:
                why = str(error)
            if result is None:
                await asyncio.sleep(pause.next_s())
        blame = accepted and result is not None and bool(result.missing) and not run.finished
        self._note(due, draw, result, why, blame=blame)

    async def _ask(self, due: DueWindow, draw: Draw) -> bool:
        """Whether the leader has said that it will have it opened; False where it can't be asked. :class:`Refused`: it won't."""
        hotkeys = tuple(member.hotkey for member in draw.members)
        request = AuditsRequest(due.event.window, draw.step, draw.stage, hotkeys, self._run.run_id)
        deadline, pause = Deadline.after(ASK_S, self._clock), Backoff(0.5, 10.0)
        while not deadline.expired:
            wait_s = pause.next_s()
            try:
                await self._line.ask_audit(self._run.state.leader, request)
                return True
            except Refused as refused:
                if not refused.retryable:
                    raise
                wait_s = refused.retry_after_s or wait_s
            except IotaError as error:
                logger.debug("asking for an audit: {}", error)
            await asyncio.sleep(min(wait_s, 30.0))
        return False

    async def _until_opened(self, draw: Draw) -> None:
        """Until the journal has it; at the end it is looked for in the store anyway."""
        run, deadline = self._run, Deadline.after(OPENED_S, self._clock)
        while not (run.finished or run.spoilt or deadline.expired):
            if set(draw.members) <= run.promises.was_opened(draw.step, draw.stage, self._signer.hotkey):
                return
            await asyncio.sleep(LOOK_S)

    def _note(self, due: DueWindow, draw: Draw, result: AuditResult | None, why: str, *, blame: bool = False) -> None:
        """The outcome, for good. ``blame``: what couldn't be redone and was never journaled to be opened was refused."""
        run, members = self._run, set(draw.members)
        found = result.findings.partials if result is not None and result.findings is not None else ()
        failed = {one.member for one in result.accused} if result is not None else set[Member]()
        passed = {partial.member for partial in found if not partial.wrong} - failed
        left = members - passed - failed
        opened = run.promises.was_opened(draw.step, draw.stage, self._signer.hotkey) if blame else left
        undecided, refused = left & opened, left - opened
        if result is not None:
            why = result.trouble or ("evidence is lacking" if result.missing else "")
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
            undecided=tuple(sorted(undecided)),
            refused=tuple(sorted(refused)),
            why=why if left else "",
            bundles=tuple(one.bundle for one in result.accused) if result is not None else (),
        )
        run.judge(audit)
        for one in result.accused if result is not None else ():
            accusation = Accusation(
                run.run_id, draw.step, draw.stage, one.member, one.charge, one.bundle, one.digest, self._signer.hotkey
            )
            path = self._shelf.accuse(accusation.signed(self._signer))
            logger.warning("run {}: {} failed an audit of step {}: {}", run.name, one.member, draw.step, path)

    # --- cases ---------------------------------------------------------------------------------------------------

    async def _case(self, due: DueCase) -> None:
        """Replay the leader's bundle; say what it gave where the bundle is what the journal says."""
        run, event, pause = self._run, due.event, Backoff(1.0, 15.0)
        deadline, differs = Deadline.after(CASE_S, self._clock), ""
        while True:
            try:
                case, findings = await self._runner.replay_case(event.bundle)
                differs, digest = due.differs(case), findings.digest
                confirmed = not differs and is_wrong(case, findings, event.member)
                why = differs or ("" if confirmed else "the replay finds the work to be right")
                break
            except IotaError as error:
                if deadline.expired:
                    confirmed, digest, why = False, "", str(error)
                    break
                await asyncio.sleep(pause.next_s())
        run.todo.case_done(event.case)
        run.decide(
            CaseVerdict(run.run_id, event.case, event.hotkey, digest, confirmed, run.number, run.folded.last_ns, why)
        )
        logger.info("run {}: case {} of {}: {}", run.name, event.case, event.hotkey, why or "confirmed")
        if not digest or differs:
            return
        try:
            await self._line.testify(run.state.leader, WitnessRequest(event.case, digest, run.run_id))
        except IotaError as error:
            logger.info("run {}: what case {} gave isn't taken by the leader: {}", run.name, event.case, error)
