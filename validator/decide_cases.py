"""What becomes of who stands accused: out at once, a third party is asked, the case is closed; a sealed lie is undone.

Nobody is convicted on one machine's word: the auditor's two runs need a third party's that gives the same, and no more coldkeys
that back the accused (:func:`subnet.run.audits.verdict`). Who has refused evidence, or signed two things about one boundary, is at
fault until it happens again.
"""

from __future__ import annotations

from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.audits import CaseState
from subnet.run.control import rollback_target
from subnet.run.state import RunState
from subnet.words import Member
from validator.decision import Decision, RunAppeal, because
from validator.ownership import rendezvous
from validator.policy import Policy
from validator.watch import Watch


def decide_cases(work_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    return (
        _out(state)
        or _words(state, watch)
        or _unopened(state, policy)
        or _equivocations(state, watch)
        or _cases(work_s, state, watch, policy)
        or decide_appeals(state, watch)
    )


def _out(state: RunState) -> list[Decision]:
    """Who is in quarantine isn't a member."""
    if not state.audits.quarantined:
        return []
    return [
        Decision(ev.Gone(member, "accused"), because("case_open", case=state.audits.quarantined[member.hotkey]))
        for member in sorted(state.members)
        if member.hotkey in state.audits.quarantined
    ]


# --- cases -------------------------------------------------------------------------------------------------------


def _cases(work_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    for number, case in au.open_cases(state):
        decided = _case(work_s, state, number, case, watch, policy)
        if decided:
            return decided
    return []


def _case(work_s: float, state: RunState, number: int, case: CaseState, watch: Watch, policy: Policy) -> list[Decision]:
    if case.charge == au.UNOPENED:
        outcome = au.CONVICTED if state.audits.unopened.get(case.hotkey, 0) > policy.audit.unopened_max else au.FAULT
        return _closed(number, outcome, "evidence_refused")
    if case.charge in (au.EQUIVOCATION, au.UNUSABLE):
        return _closed(
            number, _again(state, case), "signed_two_things" if case.charge == au.EQUIVOCATION else "no_numbers"
        )
    verdict = au.verdict(case)
    if verdict == au.CONVICTED:
        outcome = _again(state, case) if case.charge == au.ROOT else _guilty(state, case, policy)
        return _closed(number, outcome, "third_party_agrees")
    if verdict == au.CLEARED:
        return _closed(number, au.CLEARED, "third_parties_clear")
    if case.asked:
        last = case.asked[-1]
        answered = last.hotkey in case.said or last not in state.members
        if not answered and watch.audits.age(("case", number, last), work_s) < policy.audit.witness_s:
            return []
    if len(case.asked) >= policy.audit.witnesses_max:
        return _closed(number, au.UNCONFIRMED, "no_third_party")
    witness = _witness(state, number, case)
    if witness is not None:
        watch.audits.forget(("case", number, "nobody"))
        return [Decision(ev.WitnessAsked(number, witness), because("third_party", asked=len(case.asked)))]
    if watch.audits.age(("case", number, "nobody"), work_s) < policy.audit.witness_s:
        return []
    return _closed(number, au.UNCONFIRMED, "no_third_party")


def _guilty(state: RunState, case: CaseState, policy: Policy) -> str:
    """One isolated mismatch in a long clean record is a fault."""
    audits = state.audits
    before = [
        other
        for other in audits.cases.values()
        if other.hotkey == case.hotkey and other is not case and other.upheld and other.outcome != au.CLEARED
    ]
    clean = audits.clean.get(case.hotkey, 0)
    return au.FAULT if not before and clean >= policy.audit.fault_after_items else au.CONVICTED


def _again(state: RunState, case: CaseState) -> str:
    """A fault the first time: nothing wrong was sealed by it."""
    cases = state.audits.cases.values()
    again = any(c.hotkey == case.hotkey and c.charge == case.charge and not c.is_open and c.upheld for c in cases)
    return au.CONVICTED if again else au.FAULT


def _closed(number: int, outcome: str, code: str) -> list[Decision]:
    return [Decision(ev.CaseClosed(number, outcome), because(code, case=number))]


def _witness(state: RunState, number: int, case: CaseState) -> Member | None:
    """A live member of another coldkey than the accused's and those asked: of the same stage first, then whose own word is
    taken."""
    asked = {case.coldkey, *case.coldkeys.values()}
    able = [
        (member, info)
        for member, info in sorted(state.members.items())
        if member.hotkey != case.hotkey
        and member.hotkey not in case.said
        and info.coldkey not in asked
        and member.hotkey not in state.audits.quarantined
    ]
    if not able:
        return None

    def rank(entry: tuple[Member, st.MemberInfo]) -> tuple[bool, bool]:
        member, info = entry
        return info.stage != case.stage, au.in_probation(state, member.hotkey)

    best = min(map(rank, able))
    return rendezvous("witness", number, case.stage, [entry[0] for entry in able if rank(entry) == best])


def _words(state: RunState, watch: Watch) -> list[Decision]:
    """Another validator's run of a bundle."""
    words = watch.audits.words
    while words:
        number, hotkey, digest = words.popleft()
        case = state.audits.cases.get(number)
        if case is not None and case.is_open and hotkey != case.hotkey and hotkey not in case.said:
            return [Decision(ev.WitnessSaid(number, hotkey, digest), because("validator_says", case=number))]
    return []


def decide_appeals(state: RunState, watch: Watch) -> list[Decision]:
    """Closed cases that are to be run again; also after the run."""
    appeals = watch.audits.appeals
    while appeals:
        number = appeals.popleft()
        case, action = state.audits.cases.get(number), RunAppeal(number)
        if case is not None and not case.is_open and case.bundle and action not in watch.started:
            watch.started.add(action)
            return [Decision(action, because("appealed", case=number))]
    return []


# --- refusals ----------------------------------------------------------------------------------------------------


def _unopened(state: RunState, policy: Policy) -> list[Decision]:
    """Once may be anything; then it is a fault, and then a crime. What is said to be lost is never more than a fault."""
    audits, most = state.audits, policy.audit
    for hotkey in sorted(audits.unopened.keys() | audits.lost.keys()):
        refused, lost = audits.unopened.get(hotkey, 0), audits.lost.get(hotkey, 0)
        due = max(0, refused - most.unopened_max + 1) + lost // most.lost_max
        if not due or hotkey in state.convicted or hotkey in audits.quarantined:
            continue
        answered = sum(case.hotkey == hotkey and case.charge == au.UNOPENED for case in audits.cases.values())
        if answered < due:
            return [_refusal(state, hotkey, "unopened", refused + lost)]
    return []


def _equivocations(state: RunState, watch: Watch) -> list[Decision]:
    """Its own signature shows that it sent something else than it receipted."""
    known = watch.audits.equivocators
    while known:
        hotkey = min(known)
        known.discard(hotkey)
        if hotkey not in state.convicted and hotkey not in state.audits.quarantined:
            return [_refusal(state, hotkey, "signed_two_things", 1, au.EQUIVOCATION)]
    return []


def _refusal(state: RunState, hotkey: str, code: str, count: int, charge: str = au.UNOPENED) -> Decision:
    member = next((k for k in sorted(state.members) if k.hotkey == hotkey), Member(hotkey, state.term, 0))
    info = state.members.get(member)
    event = ev.CaseOpened(
        case=state.audits.num_cases + 1,
        hotkey=hotkey,
        member=member,
        step=state.next_step,
        stage=info.stage if info is not None else 0,
        charge=charge,
        bundle="",
        digest="",
        sealed=False,
    )
    return Decision(event, because(code, count=count))


# --- rewind ------------------------------------------------------------------------------------------------------


def decide_rewind(state: RunState, watch: Watch) -> list[Decision]:
    """Back to where the run's owner wants it, or before the first sealed partial of a convicted hotkey that wasn't found to
    be right.

    Asked before any step begins or the run ends.
    """
    wanted = rollback_target(state)
    if wanted is not None:
        event = ev.Rewound(wanted, state.audits.branch + 1, 0, owner=True)
        return [Decision(event, because("owner_rolls_back", step=wanted))]
    guilty = state.convicted - state.audits.settled
    if not guilty or not st.config(state).audit.rewind:
        return []
    known, branch = watch.audits, state.audits.branch
    found: list[tuple[int, str]] = []
    for hotkey in sorted(guilty):
        if (branch, hotkey) in known.nothing_due:
            continue
        first = _first_lie(state, watch, hotkey)
        if first is None:
            known.nothing_due.add((branch, hotkey))
        else:
            found.append((first, hotkey))
    if not found:
        return []
    first, hotkey = min(found)
    step = max(first, au.oldest_restorable(state))
    if step > state.next_step:
        return []
    numbers = [n for n, case in state.audits.cases.items() if case.hotkey == hotkey and case.outcome == au.CONVICTED]
    event = ev.Rewound(step, branch + 1, max(numbers, default=0))
    return [Decision(event, because("lie_sealed", first=first, oldest=step))]


def _first_lie(state: RunState, watch: Watch, hotkey: str) -> int | None:
    """The step to go back to: its oldest unverified sealed partial, or the sum it merged wrongly."""
    steps = [
        case.step
        for case in state.audits.cases.values()
        if case.hotkey == hotkey and case.sealed and case.outcome == au.CONVICTED and case.branch == state.audits.branch
    ]
    oldest = watch.audits.ledger.unaudited(hotkey)
    return min(steps if oldest is None else [oldest, *steps], default=None)
