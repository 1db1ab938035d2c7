"""Which partials are done again, when, and how an audit ends: pure, from the fold, the ledger and what the auditor found.

Before the seal: the partials of whoever must be audited, as soon as the manifest names them; the step's seals wait. After it:
what a closed window's block draws. What is wrong twice becomes a case (:mod:`validator.decide_cases`); what can't be told
accuses nobody.
"""

from __future__ import annotations

from subnet.audit import build
from subnet.audit.case import Case
from subnet.audit.draw import Draw, drawn
from subnet.errors import NotFound
from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import Merge, RunState
from subnet.words import Member, Want
from validator.close_audits import close_audits
from validator.decide_cases import decide_cases
from validator.decision import Decision, RunAudit, because
from validator.policy import Policy
from validator.watch import Watch


def decide_audits(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """In order of urgency: who is out, what is known, what a window or a seal waits for."""
    if not st.config(state).audit.on:
        return []
    work_s = watch.store.work_s(now_s)
    watch.audits.keep(state.audits.open, state.audits.quarantined.values())
    return (
        decide_cases(work_s, state, watch, policy)
        or close_audits(work_s, state, watch, policy)
        or _before_seal(state, watch)
        or _windows(state, watch, policy)
        or _requests(state, watch, policy)
        or _runs(work_s, state, watch, policy)
    )


def decide_stale(state: RunState) -> list[Decision]:
    """Sums with items whose input has been made again, and differs, are void before anything else is said of them; who
    contradicts itself without end is gone, or there would be no end of that."""
    for work in st.works(state):
        for member in sorted(state.members) if work.fickle else ():
            if member.hotkey in work.fickle:
                return [Decision(ev.Gone(member, "contradicts"), because("contradicts_itself", step=work.step))]
        for stage, m in sorted(work.stale):
            member = work.items[stage][m].member
            if member is not None and member in state.members and not st.is_sealed(state, stage, work):
                reason = because("input_made_again", stage=stage, microbatch=m)
                return [Decision(ev.Voided(work.step, stage, member, "inputs"), reason)]
    return []


# --- before the seal ---------------------------------------------------------------------------------------------


def _before_seal(state: RunState, watch: Watch) -> list[Decision]:
    """One audit a stage, of all who must be audited there: where that is everybody, the merge is redone with them."""
    work = state.work
    if work is None or not work.num_training:
        return []
    for group, merge in enumerate(work.merges):
        if merge.phase not in (st.REDUCING, st.REVEALED):
            continue
        for stage in st.group_shape(state, group).stages:
            members = _awaited(state, merge, stage)
            if not members or _is_open(state, work.step, stage, merge.number):
                continue
            case = _case_before_seal(state, watch, work.step, stage, members)
            if case is None:
                continue  # an input is being made again
            counts = {entry.member: len(entry.microbatches) for entry in merge.entries}
            event = _opened(state, case, merge.number, members, state.leader, [counts[k] for k in members])
            return [Decision(event, because("before_seal", num_partials=len(members)))]
    return []


def _case_before_seal(state: RunState, watch: Watch, step: int, stage: int, members: tuple[Member, ...]) -> Case | None:
    """None also while no snapshot leads to the state: one that replicas disagree about may be settled yet."""
    try:
        return build.case_before_seal(state, watch.audits.ledger, step, stage, members)
    except NotFound:
        return None


def _awaited(state: RunState, merge: Merge, stage: int) -> tuple[Member, ...]:
    entries = [entry.member for entry in merge.entries if entry.stage == stage]
    members = tuple(member for member in entries if au.must_audit(state, member.hotkey))
    return () if all(member in merge.passed for member in members) else members


def _is_open(state: RunState, step: int, stage: int, number: int) -> bool:
    return any((a.step, a.stage, a.number) == (step, stage, number) for a in state.audits.open.values())


def _opened(
    state: RunState,
    case: Case | None,
    number: int,
    members: tuple[Member, ...],
    by: str,
    num_items: list[int],
    *,
    at: int = 0,
) -> ev.AuditOpened:
    assert case is not None
    wants = build.wants_of(case)
    audit = state.audits.num_opened + 1 + at
    return ev.AuditOpened(audit, case.step, case.stage, number, members, by, wants, tuple(num_items))


# --- after the seal ----------------------------------------------------------------------------------------------


def _windows(state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    run, audits, known = st.config(state), state.audits, watch.audits
    window = audits.next_window
    end = st.end_step(state)
    if window < au.num_windows(run, end) and state.next_step > au.last_of(run, window, end) and known.block is not None:
        first = max(au.first_of(run, window), audits.audited_to)
        event = ev.WindowClosed(window, first, au.last_of(run, window, end), known.block + policy.audit.block_margin)
        return [Decision(event, because("window_sealed", window=window))]
    if not audits.windows:
        return []
    room = policy.audit.at_once - sum(a.by == state.leader and not a.number for a in audits.open.values())
    for number in sorted(audits.windows):
        closed = audits.windows[number]
        draws = _draws(state, watch, closed)
        if draws is None:
            continue
        pending = [(draw, members) for draw in draws if (members := _pending(state, watch, draw))]
        if pending:
            decided = [
                Decision(_draw_opened(state, watch, draw, members, at), because("drawn", window=number))
                for at, (draw, members) in enumerate(pending[: max(0, room)])
            ]
            if decided:
                return decided
        elif number == min(audits.windows) and not _under_way(state, closed):
            return [Decision(ev.WindowAudited(number), because("window_audited", num_audits=len(draws)))]
    return []


def _draws(state: RunState, watch: Watch, closed: ev.WindowClosed) -> tuple[Draw, ...] | None:
    """None while the block isn't there."""
    if not st.config(state).audit.rate:
        return ()
    known, key = watch.audits, (state.audits.branch, closed.window)
    if key not in known.draws:
        if closed.block not in known.block_hashes:
            return None
        known.draws = {old: found for old, found in known.draws.items() if old[1] in state.audits.windows}
        known.draws[key] = drawn(state, known.ledger, closed, known.block_hashes[closed.block], state.leader)
    return known.draws[key]


def _pending(state: RunState, watch: Watch, draw: Draw) -> tuple[Member, ...]:
    """Those of a draw that nobody has looked at yet."""
    ledger = watch.audits.ledger
    busy = {
        member
        for a in state.audits.open.values()
        if (a.step, a.stage) == (draw.step, draw.stage) and a.by == state.leader and not a.number
        for member in a.members
    }
    return tuple(k for k in draw.members if k not in busy and not ledger.audited(draw.step, draw.stage, k))


def _under_way(state: RunState, closed: ev.WindowClosed) -> bool:
    return any(
        a.by == state.leader and not a.number and closed.first_step <= a.step <= closed.last_step
        for a in state.audits.open.values()
    )


def _draw_opened(state: RunState, watch: Watch, draw: Draw, members: tuple[Member, ...], at: int) -> ev.AuditOpened:
    counts = {record.member: record.num_items for record in watch.audits.ledger.partials(draw.step, draw.stage)}
    wants = _wants_after_seal(state, watch, draw.step, draw.stage, members) or ()
    audit, num_items = state.audits.num_opened + 1 + at, tuple(counts.get(k, 0) for k in members)
    return ev.AuditOpened(audit, draw.step, draw.stage, 0, members, state.leader, wants, num_items)


def _wants_after_seal(
    state: RunState, watch: Watch, step: int, stage: int, members: tuple[Member, ...]
) -> tuple[Want, ...] | None:
    """None where the evidence is no longer kept."""
    try:
        case = build.case_after_seal(state, watch.audits.ledger, step, stage, members)
    except NotFound:
        return None
    return build.wants_of(case) if case is not None else None


def _requests(state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """Other validators' audits of sealed work: they redo them, members only have to open what they hold."""
    known = watch.audits
    for request in list(known.requests):
        others = [a for a in state.audits.open.values() if a.by == request.by and not a.number]
        if len(others) >= policy.audit.follower_at_once:
            continue
        known.requests.remove(request)
        records = [r for r in known.ledger.partials(request.step, request.stage) if r.member.hotkey in request.hotkeys]
        members = tuple(record.member for record in records)
        busy = any((a.step, a.stage, a.members) == (request.step, request.stage, members) for a in others)
        if not members or busy or request.by == state.leader:
            continue
        wants = _wants_after_seal(state, watch, request.step, request.stage, members)
        if wants is None:
            continue
        audit, counts = state.audits.num_opened + 1, tuple(record.num_items for record in records)
        event = ev.AuditOpened(audit, request.step, request.stage, 0, members, request.by, wants, counts)
        return [Decision(event, because("asked_for", window=request.window))]
    return []


# --- to the auditor ----------------------------------------------------------------------------------------------


def _runs(work_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """What a seal waits for first; no more at a time than can be under way."""
    room = policy.audit.redo_at_once - sum(isinstance(action, RunAudit) for action in watch.started)
    decided: list[Decision] = []
    for number, audit in sorted(au.open_audits(state), key=lambda pair: (not pair[1].number, pair[0])):
        action = RunAudit(number)
        if len(decided) >= room or audit.by != state.leader:
            continue
        if action in watch.started or number in watch.audits.results or not _may_run(state, watch, number, audit):
            continue
        pause = ("audit", number, "pause")
        if watch.audits.is_timed(pause) and watch.audits.age(pause, work_s) < policy.audit.again_s:
            continue
        watch.started.add(action)
        decided.append(Decision(action, because("redo", step=audit.step, stage=audit.stage)))
    return decided


def _may_run(state: RunState, watch: Watch, number: int, audit: au.OpenAudit) -> bool:
    """Before the seal once everything that is compared was said."""
    if not audit.number:
        return True
    work = state.work
    if work is None or work.step != audit.step or work.stale:
        return False
    merge = work.merges[st.group_of(state, audit.stage)]
    if merge.phase != st.REVEALED or len(merge.fingerprints) < len(merge.entries):
        return False
    watch.audits.began[number] = (merge.number, merge.version)
    return True
