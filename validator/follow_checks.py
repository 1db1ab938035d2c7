"""What a follower checks of each record beyond what the fold refuses: coverage, credit, checks, scalars, norm, loss, snapshots.

Pure: ``breaches(state, event)`` says, of an event that is about to be folded into ``state``, what a leader that keeps to the
run file would have written otherwise. The promises about audits are in :mod:`validator.follow_promises`.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from subnet.errors import InputError
from subnet.protocol.signing import verify_statement
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.control_event import PURPOSE_CONTROL, control_statement
from subnet.run.schedule import StepScalars, step_scalars, terms_of
from subnet.run.state import RunState, StepWork
from subnet.words import CALIBRATION_STEP, Commitment
from validator.decide_merges import stage_sealed
from validator.decide_steps import snapshots_stored, step_sealed

WRONG = frozenset(
    {
        "coverage",
        "scalars",
        "unchecked",
        "squares",
        "num_counted",
        "norm",
        "coefficient",
        "rewound",
        "fold",
        "clock",
        "control",
        "unverifiable",
    }
)
"""Breaches after which the run's result, or the time it took, isn't what its run file says, or can't be checked; the others are
about evidence, reports and pay."""
_SEALED_FIELDS = (
    ("num_counted", "num_counted"),
    ("norm", "norm_bits"),
    ("coefficient", "coefficient_bits"),
    ("loss", "loss_bits"),
    ("tokens", "tokens"),
    ("evaluation", "evaluation"),
)


class Found(NamedTuple):
    """A breach of one record: its code and what it is, in words."""

    code: str
    what: str


def breaches(state: RunState, event: ev.AnyEvent) -> list[Found]:
    """Empty for nearly all records. ``state`` is the fold of all records before ``event``."""
    match event:
        case ev.StepPlanned() if state.run is not None:
            return _planned(state, event)
        case ev.StageSealed() if state.work is not None and state.work.step == event.step:
            return _stage_sealed(state, state.work, event)
        case ev.StepSealed() if state.work is not None and state.work.step == event.step:
            return _step_sealed(state, state.work, event)
        case ev.RunFinished() if state.run is not None:
            return _finished(state, event)
        case ev.RunControlled() if state.run is not None:
            return _controlled(state.run, event)
        case _:
            return []


# --- steps -------------------------------------------------------------------------------------------------------


def _planned(state: RunState, event: ev.StepPlanned) -> list[Found]:
    config, found = st.config(state), list[Found]()
    end = st.end_step(state)
    due = CALIBRATION_STEP < event.step < end
    wanted = step_scalars(config, event.step, terms_of(state.terms, event.step)) if due else None
    if event.scalars != wanted:
        differs = [
            f"{name} {getattr(event.scalars, name, None)}, not {getattr(wanted, name, None)}"
            for name in StepScalars.__struct_fields__
            if getattr(event.scalars, name, None) != getattr(wanted, name, None)
        ]
        found.append(Found("scalars", f"step {event.step} is planned with {'; '.join(differs)}"))
    items = config.num_evaluation_items if config.evaluates_at(event.step, end) else 0
    if event.num_evaluation != items:
        found.append(Found("evaluation", f"step {event.step} evaluates {event.num_evaluation} items, not {items}"))
    return found


def _step_sealed(state: RunState, work: StepWork, event: ev.StepSealed) -> list[Found]:
    found: list[Found] = []
    if not snapshots_stored(state):
        found.append(Found("snapshots", f"step {event.step} is sealed before the snapshots that are due"))
    try:
        wanted = step_sealed(state, work)
    except (InputError, ValueError, ZeroDivisionError) as error:
        return [*found, Found("norm", f"step {event.step} has no norm: {error}")]
    for code, field in _SEALED_FIELDS:
        said, right = getattr(event, field), getattr(wanted, field)
        if said != right:
            found.append(Found(code, f"step {event.step} is sealed with {field} {said}, it is {right}"))
    return found


def _finished(state: RunState, event: ev.RunFinished) -> list[Found]:
    found: list[Found] = []
    if not snapshots_stored(state):
        found.append(Found("snapshots", "the run ends before its last snapshots are stored"))
    losses = st.evaluation_losses(state)
    if event.evaluation != losses:
        found.append(Found("evaluation", f"the run ends with hold-out losses {event.evaluation}, they are {losses}"))
    return found


def _controlled(run: ev.RunPlanned, event: ev.RunControlled) -> list[Found]:
    """Only who submitted a run may say anything of it."""
    said = control_statement(run.run_id, event.action, event.time_ns, event.argument)
    if event.by == run.submitter and verify_statement(event.by, PURPOSE_CONTROL, said, event.signature):
        return []
    return [Found("control", f"{event.action} isn't signed by {run.submitter}, who submitted the run")]


# --- merges ------------------------------------------------------------------------------------------------------


def _stage_sealed(state: RunState, work: StepWork, event: ev.StageSealed) -> list[Found]:
    if not 0 <= event.group < len(work.merges):
        return []  # the fold refuses it
    merge, where = work.merges[event.group], f"step {event.step} group {event.group}"
    found = [
        *_coverage(state, event, where),
        *_credit(work, event.entries, where),
        *_checked(state, event.group, merge, where),
    ]
    if set(merge.merged) != set(range(len(merge.owners))):
        return found  # the fold refuses it
    try:
        wanted = stage_sealed(state, work, event.group, merge)
    except ValueError:
        return [*found, Found("squares", f"{where}: the square-sums aren't numbers")]
    if event.squares != wanted.squares:
        found.append(Found("squares", f"{where} is sealed with squares {event.squares}, their sum is {wanted.squares}"))
    if event.unchecked_stages != wanted.unchecked_stages:
        said, right = event.unchecked_stages, wanted.unchecked_stages
        found.append(Found("unchecked_stages", f"{where}: stages {said} are called unchecked, it is {right}"))
    return found


def _coverage(state: RunState, event: ev.StageSealed, where: str) -> list[Found]:
    """Every counted microbatch once at each stage of the group, one entry a member, none of another stage."""
    found: list[Found] = []
    stages, counted = st.group_shape(state, event.group).stages, set(st.counted(state))
    for stage in stages:
        times = Counter(m for entry in event.entries if entry.stage == stage for m in entry.microbatches)
        wrong = [
            f"{words} {microbatches}"
            for words, microbatches in (
                ("lacks", sorted(counted - set(times))),
                ("has twice", sorted(m for m, count in times.items() if count > 1)),
                ("has without reason", sorted(set(times) - counted)),
            )
            if microbatches
        ]
        if wrong:
            found.append(Found("coverage", f"{where}: the sum of stage {stage} {', '.join(wrong)}"))
    if len({entry.member for entry in event.entries}) < len(event.entries):
        found.append(Found("coverage", f"{where}: a member has two entries"))
    if any(entry.stage not in stages for entry in event.entries):
        found.append(Found("coverage", f"{where}: an entry is of a stage outside the group"))
    return found


def _credit(work: StepWork, entries: tuple[Commitment, ...], where: str) -> list[Found]:
    """Each microbatch is in the sum of the member that has done its lease: it is paid for it."""
    found: list[Found] = []
    for entry in entries:
        items = work.items[entry.stage] if 0 <= entry.stage < len(work.items) else {}
        others = [m for m in entry.microbatches if m not in items or items[m].member != entry.member]
        if others:
            found.append(Found("credit", f"{where}: {entry.member} is credited with {others} of others"))
    return found


def _checked(state: RunState, group: int, merge: st.Merge, where: str) -> list[Found]:
    """Every replica that has the step's state has said that the sum is right, and there is one at each stage."""
    found: list[Found] = []
    refused = sorted(str(member) for member, ok in merge.checks.items() if not ok)
    if refused:
        found.append(Found("unchecked", f"{where} is sealed though {', '.join(refused)} said that it is wrong"))
    for stage in st.group_shape(state, group).stages:
        missing = [str(member) for member in st.ready(state, stage) if member not in merge.checks]
        if missing:
            found.append(Found("unchecked", f"{where} is sealed before {', '.join(missing)} checked it"))
        checkers = [k for k in merge.checks if k in state.members and state.members[k].stage == stage]
        if not checkers:
            found.append(Found("unchecked", f"{where} is sealed though nobody checked it at stage {stage}"))
    return found
