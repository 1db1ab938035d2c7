"""The owner's word about a run, signed by the submitter, so that anybody can check whose it was.

- ``pause``, ``resume``: while a run is paused no new step begins; open ones are finished and sealed.
- ``stop``: the run ends after the steps that are open; its last state is evaluated, stored and rooted as that of a run with so
  many steps would be.
- ``set-lr``, ``extend``: *terms* (:class:`subnet.run.schedule.Terms`) in force from the first step that isn't planned yet.
- ``rollback``: the run goes back to the state after N updates, on a new branch, with the terms that were in force then, and is
  paused there.

So a state is a function of (run file, data, these words), each word at its place in the journal.
"""

from __future__ import annotations

import math
import re

import msgspec

from subnet.run.audits import oldest_restorable
from subnet.run.config import MAX_STEPS
from subnet.run.control_event import (
    ACTIONS,
    EXTEND,
    LIMIT_ARGUMENT,
    PAUSE,
    RESUME,
    ROLLBACK,
    SET_LR,
    STOP,
    RunControlled,
)
from subnet.run.invariants import require
from subnet.run.optimization import MAX_LEARNING_RATE
from subnet.run.schedule import newest_terms
from subnet.run.state import RunState, config, end_step, works

_NUMBER = re.compile(r"\d{1,8}")
_DECIMAL = re.compile(r"\d{1,9}(\.\d{1,40})?([eE][+-]?\d{1,3})?")
MAX_TERMS = 10_000


class Objection(msgspec.Struct, frozen=True):
    """Why a word can't be followed now. ``over``: the run is past it."""

    reason: str
    hint: str
    over: bool = False


def objection(state: RunState, action: str, argument: str) -> Objection | None:
    """What speaks against a word at this moment; None: it can be journaled. Whose it is isn't asked here."""
    if action not in ACTIONS:
        return Objection(f"{action[:40]!r} is no word about a run", f"one of {', '.join(ACTIONS)}")
    if len(argument) > LIMIT_ARGUMENT:
        return Objection(f"{action} has an argument of {len(argument)} characters", f"at most {LIMIT_ARGUMENT}")
    if state.run is None or state.finished is not None:
        return Objection("the run has finished", "submit another run, or fork this one", over=True)
    if state.stops_at is not None and action != STOP:
        reason = f"the run was stopped: it ends after {state.stops_at} updates"
        return Objection(reason, "submit another run, or fork this one", over=True)
    if state.rollback_to is not None and action not in (PAUSE, RESUME):
        return Objection(f"the run is going back to step {state.rollback_to}", "say it again in a moment")
    if action == SET_LR:
        return _about_rate(state, argument)
    if action == EXTEND:
        return _about_length(state, argument)
    if action == ROLLBACK:
        return _about_rollback(state, argument)
    return Objection(f"{action} takes no argument", "leave it out") if argument else None


def _about_rate(state: RunState, argument: str) -> Objection | None:
    kind, _, text = argument.partition(" ")
    value = decimal(text)
    if kind not in ("factor", "value") or value is None:
        hint = "'factor X' times the run file's schedule, or 'value X' instead of it, X a number above 0"
        return Objection(f"set-lr {argument[:40]!r} is no learning rate", hint)
    top = config(state).optimizer.learning_rate if kind == "factor" else 1.0
    if not 0 < value * top <= MAX_LEARNING_RATE:
        return Objection(f"set-lr makes a learning rate of {value * top:g}", f"above 0, at most {MAX_LEARNING_RATE:g}")
    return _about_terms(state)


def _about_terms(state: RunState) -> Objection | None:
    if state.next_step >= end_step(state):
        return Objection("all steps of the run are sealed", "fork it to go on", over=True)
    if len(state.terms) >= MAX_TERMS:
        return Objection(f"the run has had {MAX_TERMS} such words", "fork it to go on")
    return None


def _about_length(state: RunState, argument: str) -> Objection | None:
    steps, keep = _length(argument)
    if steps is None or keep is None:
        hint = "the number of steps in all, for example 2000; '2000 keep' leaves the schedule as long as it is"
        return Objection(f"extend {argument[:40]!r} is no number of steps", hint)
    first = max(1, next_unplanned(state))
    if not first <= steps <= MAX_STEPS:
        return Objection(f"the run can't end after {steps} updates", f"allowed now: {first} to {MAX_STEPS:,}")
    return _about_terms(state)


def _about_rollback(state: RunState, argument: str) -> Objection | None:
    if not _NUMBER.fullmatch(argument):
        return Objection(
            f"rollback {argument[:40]!r} is no step", "the number of updates to go back to, for example 400"
        )
    if state.next_step < 0:
        return Objection("the run has made no step yet", "there is nothing to go back to")
    step, oldest = int(argument), max(0, oldest_restorable(state))
    if step > state.next_step:
        return Objection(f"the run has made {state.next_step} updates, not {step}", "go back, not forward")
    if step < oldest:
        reason = f"what is kept leads back to step {oldest}, not to {step}"
        return Objection(reason, "snapshot.keep_steps in the run file says how far back a run can go")
    return None


def _length(argument: str) -> tuple[int | None, bool | None]:
    number, _, rest = argument.partition(" ")
    keep = {"": False, "keep": True}.get(rest)
    return (int(number) if _NUMBER.fullmatch(number) else None), keep


def still_follows(state: RunState, event: RunControlled) -> bool:
    """Whether a word that could be journaled when it came still can."""
    return objection(state, event.action, event.argument) is None and event.time_ns > state.controlled_ns


def decimal(text: str) -> float | None:
    """A plain decimal number above 0, or None."""
    value = float(text) if _DECIMAL.fullmatch(text) else 0.0
    return value if 0 < value < math.inf else None


def next_unplanned(state: RunState) -> int:
    """The first step whose scalars aren't journaled yet."""
    return max(0, state.next_step + len(works(state)))


def apply_run_controlled(state: RunState, event: RunControlled) -> None:
    """Pausing a paused run and the like changes nothing; of a run that has been stopped only that can be said again."""
    require(event.time_ns > state.controlled_ns, f"{event.action} of {event.time_ns} comes after {state.controlled_ns}")
    late = state.stops_at is not None and event.action in (PAUSE, RESUME)
    against = None if late else objection(state, event.action, event.argument)
    require(against is None, against.reason if against is not None else "")
    state.controlled_ns = event.time_ns
    if event.action == STOP:
        state.paused = False
        state.stops_at = min(end_step(state), max(1, state.next_step + _num_open(state)))
    elif event.action == SET_LR:
        kind, _, text = event.argument.partition(" ")
        value = float(text)
        given = {"lr_factor": value, "lr_value": 0.0} if kind == "factor" else {"lr_value": value}
        _say(state, given)
    elif event.action == EXTEND:
        steps, keep = _length(event.argument)
        assert steps is not None
        _say(state, {"end": steps, "steps": newest_terms(state.terms).steps if keep else steps})
    elif event.action == ROLLBACK:
        state.rollback_to, state.paused = int(event.argument), True
    elif state.stops_at is None:
        state.paused = event.action == PAUSE


def _say(state: RunState, changes: dict[str, int | float]) -> None:
    first, before = next_unplanned(state), newest_terms(state.terms)
    kept = [terms for terms in state.terms if terms.first_step < first]
    state.terms = [*kept, msgspec.structs.replace(before, first_step=first, **changes)]


def forget_terms_after(state: RunState, step: int) -> None:
    """The run is back at ``step`` by its owner's will: what was said of later steps isn't said any more."""
    state.terms = [terms for terms in state.terms if terms.first_step <= step]
    state.rollback_to = None


def rollback_target(state: RunState) -> int | None:
    """The step that the owner wants the run back at, as far back as what is kept leads; None: nothing is asked."""
    if state.rollback_to is None:
        return None
    return min(max(state.rollback_to, 0, oldest_restorable(state)), max(0, state.next_step))


def _num_open(state: RunState) -> int:
    """Open steps that train."""
    return sum(work is not None and work.num_training > 0 for work in (state.work, state.ahead))
