"""The event of an owner's word about a run, and what its signature is over; what it does: :mod:`subnet.run.control`."""

from __future__ import annotations

from subnet.run.event_base import Event

PAUSE, RESUME, STOP = "pause", "resume", "stop"
ACTIONS = (PAUSE, RESUME, STOP)
PURPOSE_CONTROL = "run-control/1"


class RunControlled(Event, tag="RunControlled", frozen=True):
    """``signature``: by ``by``, the run's submitter, over :func:`control_statement` (purpose ``run-control/1``)."""

    action: str
    by: str
    time_ns: int
    """The submitter's clock; grows from one to the next, so that none can be journaled twice."""
    signature: bytes


def control_statement(run_id: str, action: str, time_ns: int) -> bytes:
    """What the submitter signs."""
    return f"{run_id}\0{action}\0{time_ns}".encode()
