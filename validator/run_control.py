"""The submitter's word about its run, checked before it is journaled: whose it is, that it is new, that it can still matter."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from subnet.errors import AuthFailed, InputError
from subnet.protocol.api import ControlRequest, RunSummary
from subnet.protocol.signing import verify_statement
from subnet.run.control_event import ACTIONS, PURPOSE_CONTROL, STOP, RunControlled, control_statement
from subnet.run.state import RunState
from subnet.timing import TIMEOUTS, Deadline
from validator.run_registry import RunEntry

if TYPE_CHECKING:
    from validator.run_session import RunSession

_LOOK_S = 0.02


class RunOver(InputError):
    """The run is past what was asked of it."""

    code, http_status = "run_over", 409


def controlled(entry: RunEntry, state: RunState, hotkey: str, request: ControlRequest) -> RunControlled:
    """The event to journal; raises what the caller is refused with."""
    stored = entry.stored
    if request.action not in ACTIONS:
        raise InputError(f"{request.action[:40]!r} is no word about a run", hint=f"one of {', '.join(ACTIONS)}")
    if hotkey != stored.submitter:
        raise AuthFailed(f"run {entry.name} was submitted by {stored.submitter}, not {hotkey}", hint="use its wallet")
    said = control_statement(stored.run_id, request.action, request.time_ns)
    if not verify_statement(hotkey, PURPOSE_CONTROL, said, request.signature):
        raise AuthFailed(f"the signature of {request.action} doesn't fit run {entry.name}", hint="sign it anew")
    if request.time_ns <= state.controlled_ns:
        raise InputError(f"{request.action} is older than what was said of the run before", hint="sign it anew")
    if state.finished is not None:
        raise RunOver(f"run {entry.name} has finished", hint="submit another run")
    if state.stops_at is not None and request.action != STOP:
        raise RunOver(
            f"run {entry.name} was stopped: it ends after {state.stops_at} updates", hint="submit another run"
        )
    return RunControlled(request.action, hotkey, request.time_ns, request.signature)


async def control_run(session: RunSession, hotkey: str, request: ControlRequest) -> RunSummary:
    """Have it journaled, and say how the run stands then."""
    coordinator, deadline = session.coordinator, Deadline.after(TIMEOUTS.http_request_s / 2)
    coordinator.tell(controlled(session.entry, coordinator.state, hotkey, request))
    while coordinator.state.controlled_ns < request.time_ns and coordinator.state.finished is None:
        deadline.check(f"journaling the {request.action} of run {session.entry.name}")
        await asyncio.sleep(_LOOK_S)
    return session.summary()
