"""The submitter's word about its run, checked before it is journaled: whose it is, that it is new, that it can still matter."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from subnet.errors import AuthFailed, InputError
from subnet.protocol.api import ControlRequest, RunSummary
from subnet.protocol.signing import verify_statement
from subnet.run.control import objection
from subnet.run.control_event import PURPOSE_CONTROL, RunControlled, control_statement
from subnet.run.state import RunState
from subnet.timing import TIMEOUTS, Deadline
from validator.run_registry import RunEntry

if TYPE_CHECKING:
    from validator.coordinator import Coordinator
    from validator.run_session import RunSession

_LOOK_S = 0.02


class RunOver(InputError):
    """The run is past what was asked of it."""

    code, http_status = "run_over", 409


def controlled(entry: RunEntry, state: RunState, hotkey: str, request: ControlRequest) -> RunControlled:
    """The event to journal; raises what the caller is refused with."""
    stored = entry.stored
    if hotkey != stored.submitter:
        raise AuthFailed(f"run {entry.name} was submitted by {stored.submitter}, not {hotkey}", hint="use its wallet")
    said = control_statement(stored.run_id, request.action, request.time_ns, request.argument)
    if not verify_statement(hotkey, PURPOSE_CONTROL, said, request.signature):
        raise AuthFailed(f"the signature of {request.action} doesn't fit run {entry.name}", hint="sign it anew")
    if request.time_ns <= state.controlled_ns:
        raise InputError(f"{request.action} is older than what was said of the run before", hint="sign it anew")
    against = objection(state, request.action, request.argument)
    if against is not None:
        kind = RunOver if against.over else InputError
        raise kind(f"run {entry.name}: {against.reason}", hint=against.hint)
    return RunControlled(request.action, hotkey, request.time_ns, request.signature, request.argument)


def _waits(state: RunState, time_ns: int) -> bool:
    said = state.controlled_ns >= time_ns and state.rollback_to is None
    return not said and state.finished is None


async def control_run(session: RunSession, hotkey: str, request: ControlRequest) -> RunSummary:
    """Have it journaled, and say how the run stands then."""
    coordinator, deadline = session.coordinator, Deadline.after(TIMEOUTS.http_request_s / 2)
    async with session.words:  # one after the other: each is held against what the one before has changed
        await _journaled(session, coordinator, hotkey, request, deadline)
    return session.summary()


async def _journaled(
    session: RunSession, coordinator: Coordinator, hotkey: str, request: ControlRequest, deadline: Deadline
) -> None:
    coordinator.tell(controlled(session.entry, coordinator.state, hotkey, request))
    while _waits(coordinator.state, request.time_ns):
        deadline.check(f"journaling the {request.action} of run {session.entry.name}")
        await asyncio.sleep(_LOOK_S)
