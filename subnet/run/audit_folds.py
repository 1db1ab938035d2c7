"""What events about audits do to the state: audits, windows, cases, and the run's return to a step before a lie."""

from __future__ import annotations

import msgspec

from subnet.run.audit_events import (
    Appealed,
    AuditClosed,
    AuditOpened,
    CaseClosed,
    CaseOpened,
    Rewound,
    WindowAudited,
    WindowClosed,
    WitnessAsked,
    WitnessSaid,
)
from subnet.run.audit_parts import (
    CHARGES,
    CLEARED,
    CONVICTED,
    FAULT,
    SHOWN,
    UNCONFIRMED,
    CaseState,
    OpenAudit,
)
from subnet.run.audits import first_of, last_of, num_windows, oldest_restorable, verdict, window_of
from subnet.run.control import forget_terms_after, rollback_target
from subnet.run.invariants import require
from subnet.run.members import drop_replaced
from subnet.run.state import REDUCING, REVEALED, RunState, config, end_step, group_of, num_stages
from subnet.words import CALIBRATION_STEP, Member

MAX_CLOSED_CASES = 1000
"""So many are kept."""
MOST_UNPROVEN = 3
"""Audits in a row of which evidence was kept back; a friend that does that hides nothing for long."""

# --- audits ------------------------------------------------------------------------------------------------------


def apply_audit_opened(state: RunState, event: AuditOpened) -> None:
    """Before the seal: of the freeze that is being merged, and of contributors to it; after it, of a sealed step."""
    if event.number:
        work = state.work
        require(
            work is not None and work.step == event.step, f"audit {event.audit} of step {event.step} before its seal"
        )
        assert work is not None
        merge = work.merges[group_of(state, event.stage)]
        require(merge.phase in (REDUCING, REVEALED), f"audit {event.audit} of a group that is {merge.phase}")
        require(merge.number == event.number, f"audit {event.audit} is of freeze {event.number}, not {merge.number}")
        entries = {e.member: len(e.microbatches) for e in merge.entries if e.stage == event.stage}
        found = tuple(entries.get(member, -1) for member in event.members)
        require(found == event.num_items, f"audit {event.audit} names others than the contributors")
    note_audit_opened(state, event)


def note_audit_opened(state: RunState, event: AuditOpened) -> None:
    """As far as it can be told without the group's merge (:mod:`subnet.run.views`)."""
    audits = state.audits
    require(config(state).audit.on, "an audit in a run without audits")
    require(event.audit == audits.num_opened + 1, f"audit {event.audit} follows {audits.num_opened}")
    require(0 <= event.stage < num_stages(state), f"audit {event.audit} of stage {event.stage}")
    require(event.number > 0 or CALIBRATION_STEP <= event.step <= state.next_step, f"audit of step {event.step}")
    require(0 < len(set(event.members)) == len(event.members), f"audit {event.audit} names a member twice, or nobody")
    require(len(event.num_items) == len(event.members), f"audit {event.audit} counts items of others")
    audits.num_opened = event.audit
    audits.open[event.audit] = OpenAudit(
        event.step, event.stage, event.number, event.members, event.by, event.wants, event.num_items
    )


def apply_audit_closed(state: RunState, event: AuditClosed) -> None:
    """What passed counts for its hotkey, and before the seal for the seal; what another validator redoes is its own affair."""
    audits = state.audits
    opened = audits.open.pop(event.audit, None)
    require(opened is not None, f"audit {event.audit} isn't open")
    assert opened is not None
    judged = [*event.passed, *event.failed, *event.undecided]
    require(
        sorted(judged) == sorted(opened.members), f"audit {event.audit} is closed for others than it was opened for"
    )
    if opened.by == state.leader:
        _note_outcomes(state, opened, event)
    for counts, members in ((audits.unopened, event.unopened), (audits.lost, event.lost)):
        for hotkey in sorted({member.hotkey for member in members}):
            counts[hotkey] = counts.get(hotkey, 0) + 1
    work = state.work
    if opened.number and work is not None and work.step == opened.step:
        merge = work.merges[group_of(state, opened.stage)]
        if merge.number == opened.number and merge.phase in (REDUCING, REVEALED):
            merge.passed |= set(event.passed)


def _note_outcomes(state: RunState, opened: OpenAudit, event: AuditClosed) -> None:
    """Whose evidence is kept back again and again is on probation: before a seal what is lost is made again."""
    audits, kept_back = state.audits, bool(event.unopened or event.lost)
    for member, num_items in zip(opened.members, opened.num_items, strict=True):
        hotkey = member.hotkey
        if member in event.passed:
            audits.clean[hotkey] = audits.clean.get(hotkey, 0) + num_items
            audits.unproven.pop(hotkey, None)
        elif member in event.undecided and kept_back:
            audits.unproven[hotkey] = audits.unproven.get(hotkey, 0) + 1
            if audits.unproven[hotkey] >= MOST_UNPROVEN:
                audits.clean.pop(hotkey, None)
                audits.unproven.pop(hotkey, None)


def end_audits_before_seal(state: RunState, leader: str) -> None:
    """A new term: what was to be sealed is void, and so are its audits. Those of sealed work are the new leader's."""
    audits, before = state.audits, state.leader
    audits.open = {
        number: msgspec.structs.replace(audit, by=leader) if audit.by == before else audit
        for number, audit in audits.open.items()
        if not audit.number
    }


# --- windows -----------------------------------------------------------------------------------------------------


def apply_window_closed(state: RunState, event: WindowClosed) -> None:
    run, audits = config(state), state.audits
    require(run.audit.on, "a window in a run without audits")
    require(event.window == audits.next_window, f"window {event.window} is closed where {audits.next_window} is due")
    end = end_step(state)
    require(event.window < num_windows(run, end), f"window {event.window} is beyond the run")
    first, last = max(first_of(run, event.window), audits.audited_to), last_of(run, event.window, end)
    steps = (event.first_step, event.last_step)
    require(steps == (first, last), f"window {event.window} has steps {steps}, not {(first, last)}")
    require(state.next_step > last, f"window {event.window} is closed before its last step is sealed")
    require(event.block >= 0, f"window {event.window} waits for block {event.block}")
    audits.windows[event.window] = event
    audits.next_window += 1


def apply_window_audited(state: RunState, event: WindowAudited) -> None:
    """Windows are done with in order; what was kept for this one may go."""
    audits = state.audits
    require(
        bool(audits.windows) and event.window == min(audits.windows), f"window {event.window} isn't the next to end"
    )
    closed = audits.windows.pop(event.window)
    still = [
        number
        for number, audit in audits.open.items()
        if audit.by == state.leader and not audit.number and closed.first_step <= audit.step <= closed.last_step
    ]
    require(not still, f"window {event.window} ends while audits {still} of it are open")
    audits.audited_to = closed.last_step + 1
    drop_replaced(state)


# --- cases -------------------------------------------------------------------------------------------------------


def apply_case_opened(state: RunState, event: CaseOpened) -> None:
    """From here on the hotkey can't join."""
    audits, hotkey = state.audits, event.hotkey
    require(config(state).audit.on, "a case in a run without audits")
    require(event.case == audits.num_cases + 1, f"case {event.case} follows {audits.num_cases}")
    require(event.member.hotkey == hotkey, f"case {event.case} is of {event.member}, but against {hotkey}")
    require(event.charge in CHARGES, f"case {event.case} is about {event.charge}")
    require(hotkey not in audits.quarantined, f"{hotkey} stands accused already")
    require(hotkey not in state.convicted, f"{hotkey} is convicted already")
    require(0 <= event.stage < num_stages(state), f"case {event.case} is of stage {event.stage}")
    audits.num_cases = event.case
    audits.quarantined[hotkey] = event.case
    audits.cases[event.case] = CaseState(
        hotkey=hotkey,
        member=event.member,
        coldkey=audits.coldkeys.get(hotkey, ""),
        step=event.step,
        stage=event.stage,
        charge=event.charge,
        bundle=event.bundle,
        digest=event.digest,
        sealed=event.sealed,
        branch=audits.branch,
        claimed=event.claimed,
    )


def _open_case(state: RunState, case: int) -> CaseState:
    found = state.audits.cases.get(case)
    require(found is not None and found.is_open, f"case {case} isn't open")
    assert found is not None
    return found


def apply_witness_asked(state: RunState, event: WitnessAsked) -> None:
    case = _open_case(state, event.case)
    info = state.members.get(event.member)
    require(info is not None, f"{event.member} is asked without being there")
    assert info is not None
    require(event.member.hotkey != case.hotkey, f"{event.member} is asked about itself")
    require(info.coldkey != case.coldkey, f"{event.member} is asked about one of its own coldkey")
    require(info.coldkey not in case.coldkeys.values(), f"{event.member} is asked, whose coldkey was asked before")
    case.asked = (*case.asked, event.member)
    case.coldkeys[event.member.hotkey] = info.coldkey


def apply_witness_said(state: RunState, event: WitnessSaid) -> None:
    case = _open_case(state, event.case)
    require(event.hotkey != case.hotkey, f"{event.hotkey} speaks for itself")
    require(event.hotkey not in case.said, f"{event.hotkey} speaks twice")
    case.said[event.hotkey] = event.digest


def apply_case_closed(state: RunState, event: CaseClosed) -> None:
    """The quarantine ends, or is for good. Whoever wasn't convicted is looked at more closely, for ever; so is, where the
    accused is guilty, who said of its work that it was right."""
    case, audits = _open_case(state, event.case), state.audits
    hotkey = case.hotkey
    require(event.outcome in (CONVICTED, FAULT, CLEARED, UNCONFIRMED), f"case {event.case} ends {event.outcome}")
    proven = event.outcome != CONVICTED or case.charge in SHOWN or verdict(case) == CONVICTED
    require(proven, f"case {event.case} ends in a conviction that no third party confirms")
    case.outcome = event.outcome
    del audits.quarantined[hotkey]
    if event.outcome == CONVICTED:
        require(all(member.hotkey != hotkey for member in state.members), f"{hotkey} is convicted and still a member")
        state.convicted.add(hotkey)
    else:
        audits.marks[hotkey] = audits.marks.get(hotkey, 0) + 1
    if event.outcome in (FAULT, UNCONFIRMED):
        audits.clean.pop(hotkey, None)
    if event.outcome in (CONVICTED, FAULT) and verdict(case) == CONVICTED:
        for friend in sorted(other for other, digest in case.said.items() if digest and digest == case.claimed):
            audits.marks[friend] = audits.marks.get(friend, 0) + 1
            audits.clean.pop(friend, None)
    closed = sorted(number for number, other in audits.cases.items() if not other.is_open)
    for number in closed[: max(0, len(closed) - MAX_CLOSED_CASES)]:
        del audits.cases[number]


def apply_appealed(state: RunState, event: Appealed) -> None:
    """Where the work was right after all, the penalty ends."""
    case = state.audits.cases.get(event.case)
    require(case is not None and not case.is_open, f"case {event.case} isn't closed")
    assert case is not None
    if event.upheld or not case.upheld:
        return
    case.upheld = False
    marks = state.audits.marks
    if case.outcome == CONVICTED:
        state.convicted.discard(case.hotkey)
        state.audits.settled.discard(case.hotkey)
    elif marks.get(case.hotkey, 0) > 1:
        marks[case.hotkey] -= 1
    else:
        marks.pop(case.hotkey, None)


# --- rewind ------------------------------------------------------------------------------------------------------


def apply_rewound(state: RunState, event: Rewound) -> None:
    """Every incarnation ends, as by a new term; sealed steps from ``step`` on never were; who was convicted stays it."""
    audits, run = state.audits, config(state)
    require(run.audit.rewind or event.owner, "a run without rewinds is rewound")
    wanted = rollback_target(state)
    require(not event.owner or event.step == wanted, f"the owner wants the run at {wanted}, not at {event.step}")
    require(event.branch == audits.branch + 1, f"branch {event.branch} follows {audits.branch}")
    case = audits.cases.get(event.case)
    require(event.case == 0 or (case is not None and case.outcome == CONVICTED), f"case {event.case} is no conviction")
    oldest = oldest_restorable(state)
    require(oldest <= event.step <= state.next_step, f"step {event.step} can't be gone back to: {oldest} is the oldest")
    state.members, state.boots, state.orders, state.roots, state.seals = {}, {}, {}, {}, {}
    state.work = state.ahead = None
    state.next_step = event.step
    state.sealed = {step: log for step, log in state.sealed.items() if step < event.step}
    for stored in state.snapshots.values():
        stored[:] = [s for s in stored if s.step <= event.step and (s.verified or s.hotkey not in state.convicted)]
    audits.branch = event.branch
    audits.settled = set(state.convicted)
    audits.open = {n: audit for n, audit in audits.open.items() if not audit.number and audit.step < event.step}
    audits.windows = {n: closed for n, closed in audits.windows.items() if closed.last_step < event.step}
    audits.next_window = min(audits.next_window, window_of(run, event.step))
    audits.audited_to = min(audits.audited_to, event.step)
    if event.owner:
        forget_terms_after(state, event.step)


def live_of(state: RunState, hotkey: str) -> Member | None:
    """The live incarnation of a hotkey."""
    return next((member for member in sorted(state.members) if member.hotkey == hotkey), None)
