"""The event of an owner's word about a run, and what its signature is over; what it does: :mod:`subnet.run.control`."""

from __future__ import annotations

from subnet.run.event_base import Event

PAUSE, RESUME, STOP = "pause", "resume", "stop"
SET_LR, EXTEND, ROLLBACK = "set-lr", "extend", "rollback"
ACTIONS = (PAUSE, RESUME, STOP, SET_LR, EXTEND, ROLLBACK)
PURPOSE_CONTROL = "run-control/1"
LIMIT_ARGUMENT = 64
"""Characters of an argument."""


class RunControlled(Event, tag="RunControlled", frozen=True):
    """``signature``: by ``by``, the run's submitter, over :func:`control_statement` (purpose ``run-control/1``)."""

    action: str
    by: str
    time_ns: int
    """The submitter's clock; grows from one to the next, so that none can be journaled twice."""
    signature: bytes
    argument: str = ""
    """``set-lr``: ``factor X`` or ``value X``; ``extend``: ``N`` or ``N keep``; ``rollback``: ``N``."""


def control_statement(run_id: str, action: str, time_ns: int, argument: str = "") -> bytes:
    """What the submitter signs."""
    said = f"{run_id}\0{action}\0{time_ns}"
    return (f"{said}\0{argument}" if argument else said).encode()
