"""Has the leader open the evidence of a follower's draws, and tells its refusals from what is nobody's fault.

The leader is asked again for a while where its refusal may be a matter of moments: it hasn't read the chain as far, or not yet
journaled what the follower has seen. What it refuses then is its word. Where this validator isn't entitled to ask (it holds no
permit), or the evidence is past its time, nobody is blamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from loguru import logger

from subnet.audit.draw import Draw, rate_of, seed, unit
from subnet.errors import IotaError, Refused
from subnet.protocol.audit_api import AuditsRequest
from subnet.run import audits
from subnet.run import state as st
from subnet.timing import Backoff, Clock, Deadline
from subnet.words import Member
from validator.follow_run import FollowedRun
from validator.follow_todo import DueWindow
from validator.policy import AuditPolicy

LOOK_S = 0.5
ASK_S = 60.0
"""For so long a leader that can't be reached, or doesn't know yet what is asked about, is asked again."""
OPENED_S = 300.0
"""For so long at least what it has accepted is looked for in the journal: it opens a few at a time, and the journal comes with
the seals. A run that stands still has all the time."""
AT_ONCE = AuditPolicy().follower_at_once
"""Audits of this validator that a leader opens at a time."""
MOVED_STEPS = 3
"""Steps after which what was accepted must be in the journal: it comes with the seals."""
MOMENTARY = frozenset({"not_found", "not_allowed", "wrong_moment"})
"""Refusals that the leader may take back: it knows the window, or this validator's permit, a moment later."""
AGAIN = "again"
NO_PERMIT = "this validator holds no permit on the chain, so it may not ask for evidence"


@dataclass(frozen=True)
class Asked:
    """``members``: of whom evidence was asked for in the end. ``refusal``: the leader's, empty where it didn't refuse."""

    members: tuple[Member, ...]
    accepted: bool = False
    refusal: str = ""
    why: str = ""
    """Why it couldn't be asked."""


class Line(Protocol):
    """:class:`validator.follow_leader.LeaderLine`."""

    async def ask_audit(self, leader: str, request: AuditsRequest) -> None: ...


class Asking:
    """``permitted``: whether this validator holds a permit, by the chain as it is now; ``block_hash``: of a known block."""

    def __init__(
        self,
        run: FollowedRun,
        line: Line,
        hotkey: str,
        block_hash: Callable[[int], str | None],
        clock: Clock,
        permitted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._run, self._line, self._hotkey, self._block_hash = run, line, hotkey, block_hash
        self._clock, self._permitted = clock, permitted

    def is_kept(self, draw: Draw) -> bool:
        """Whether the journal still asks members to keep its evidence, and hasn't undone it."""
        sealed = self._run.watch.audits.ledger.sealed(draw.step, draw.stage)
        return sealed is not None and {entry.member for entry in sealed.entries} >= set(draw.members)

    async def ask(self, due: DueWindow, draw: Draw) -> Asked:
        members, run = draw.members, self._run
        deadline, pause = Deadline.after(ASK_S, self._clock), Backoff(0.5, 10.0)
        refusal, why = "", "the leader can't be asked"
        while not (deadline.expired or run.finished):
            if not self.is_kept(draw):
                return Asked(members, why="too late: the evidence isn't kept any more")
            wait_s = pause.next_s()
            try:
                if not self._permitted():
                    refusal, why = "", NO_PERMIT
                else:
                    hotkeys = tuple(member.hotkey for member in members)
                    request = AuditsRequest(due.event.window, draw.step, draw.stage, hotkeys, run.run_id)
                    await self._line.ask_audit(run.state.leader, request)
                    return Asked(members, accepted=True)
            except Refused as refused:
                refusal, why = f"{refused.code}: {refused}", ""
                if refused.code == "not_drawn":
                    certain = self._certain(due, draw)
                    if certain == members:
                        break
                    if not certain:
                        return Asked((), why="drawn only for marks that its members no longer have")
                    members = certain
                elif refused.retryable:
                    refusal, why = "", str(refused)
                    wait_s = min(refused.retry_after_s or wait_s, 30.0)
                elif refused.code not in MOMENTARY:
                    break
            except IotaError as error:
                refusal, why = "", str(error)
                logger.debug("asking for an audit: {}", error)
            await asyncio.sleep(wait_s)
        if run.finished:
            return Asked(members, why="the run is over: nothing is opened any more")
        return Asked(members, refusal=refusal, why=why)

    def _certain(self, due: DueWindow, draw: Draw) -> tuple[Member, ...]:
        """Those whom the seed draws whatever the marks in their record: these change, and not everywhere at one moment."""
        run, block_hash = self._run, self._block_hash(due.event.block)
        if block_hash is None:
            return draw.members
        plan = st.plan(run.state)
        found = seed(plan.run_id, due.branch, due.event.window, block_hash, self._hotkey)
        unchecked = {r.member: r.unchecked for r in run.watch.audits.ledger.partials(draw.step, draw.stage)}
        return tuple(
            member
            for member in draw.members
            if unit(found, draw.step, draw.stage, member.hotkey)
            < rate_of(plan.config.audit, unchecked=unchecked.get(member, False))
        )

    async def until_opened(self, due: DueWindow, draw: Draw, members: tuple[Member, ...]) -> str:
        """Until the journal has it; else why the leader is to blame that it hasn't, empty where it isn't. :data:`AGAIN`: a new
        term has begun, whose leader, or whose process, knows nothing of the request.

        Where the run is over, rewound, or moves on so fast that the evidence is past its time, the leader is excused if it had
        as many other audits of this validator open as it takes at a time.
        """
        run, began, full, term = self._run, self._run.state.next_step, False, self._run.state.term
        window_steps = st.config(run.state).audit.window_steps
        deadline = Deadline.after(OPENED_S, self._clock)
        while not (run.finished or run.spoilt or audits.branch(run.state) != due.branch):
            if set(members) <= run.promises.was_opened(draw.step, draw.stage, self._hotkey):
                return ""
            if run.state.term != term:
                return AGAIN
            full = full or self._num_open() >= AT_ONCE
            moved = run.state.next_step - began
            if (deadline.expired and moved >= window_steps) or (not self.is_kept(draw) and moved >= MOVED_STEPS):
                return "" if full else "accepted, and never opened"
            await asyncio.sleep(LOOK_S)
        return ""

    def _num_open(self) -> int:
        return sum(audit.by == self._hotkey and not audit.number for _, audit in audits.open_audits(self._run.state))
