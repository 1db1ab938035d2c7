"""The owner's word about a run: pause it, go on, end it early. Signed by the submitter, so that anybody can check whose it was.

While a run is paused no new step begins; open ones are finished and sealed. A stopped run ends after the steps that are open:
its last state is evaluated, stored and rooted as that of a run with so many steps would be. Neither changes a bit of a step.
"""

from __future__ import annotations

from subnet.run.control_event import ACTIONS, PAUSE, STOP, RunControlled
from subnet.run.invariants import require
from subnet.run.state import RunState, end_step


def apply_run_controlled(state: RunState, event: RunControlled) -> None:
    """Pausing a paused run and the like changes nothing; a run that has been stopped can't be paused any more."""
    require(event.action in ACTIONS, f"{event.action!r} is no word about a run")
    require(event.time_ns > state.controlled_ns, f"{event.action} of {event.time_ns} comes after {state.controlled_ns}")
    state.controlled_ns = event.time_ns
    if event.action == STOP:
        state.paused = False
        state.stops_at = min(end_step(state), max(1, state.next_step + _num_open(state)))
    elif state.stops_at is None:
        state.paused = event.action == PAUSE


def _num_open(state: RunState) -> int:
    """Open steps that train."""
    return sum(work is not None and work.num_training > 0 for work in (state.work, state.ahead))
