"""How an open audit ends: passed, failed with a case, undecided, or with word of who didn't open what it had receipted."""

from __future__ import annotations

from subnet.audit import build
from subnet.errors import NotFound
from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.audits import OpenAudit
from subnet.run.state import RunState
from subnet.words import Member, Want
from validator.decision import Accused, AuditResult, Decision, because
from validator.intake import replay_allowed
from validator.policy import Policy
from validator.watch import Watch


def close_audits(work_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """One at a time: each event may change what is to be said of the next."""
    for number, audit in au.open_audits(state):
        if audit.by != state.leader:
            decided = _followers(work_s, number, audit, watch, policy)
        elif audit.number and not _is_current(state, audit):
            decided = [_undecided(number, audit, "merge_began_anew")]
        else:
            decided = _judged(work_s, state, number, audit, watch, policy)
        if decided:
            return decided
    return []


def _followers(work_s: float, number: int, audit: OpenAudit, watch: Watch, policy: Policy) -> list[Decision]:
    """It is another validator's to judge: here it only means that the evidence had its time."""
    age_s = watch.audits.age(("audit", number, "follower"), work_s)
    return [_undecided(number, audit, "evidence_had_its_time")] if age_s >= policy.audit.follower_s else []


def _is_current(state: RunState, audit: OpenAudit) -> bool:
    """Whether the partials that it is of are still those that are being merged."""
    work = state.work
    if work is None or work.step != audit.step:
        return False
    merge = work.merges[st.group_of(state, audit.stage)]
    return merge.number == audit.number and merge.phase in (st.REDUCING, st.REVEALED)


def _undecided(number: int, audit: OpenAudit, code: str) -> Decision:
    return Decision(ev.AuditClosed(number, undecided=audit.members), because(code, step=audit.step, stage=audit.stage))


def _judged(
    work_s: float, state: RunState, number: int, audit: OpenAudit, watch: Watch, policy: Policy
) -> list[Decision]:
    known = watch.audits
    result = known.results.get(number)
    if result is None:
        return []
    if audit.number and not _is_of_this_version(state, audit, known.began.get(number)):
        return _again(number, watch)
    if result.missing and not result.accused:
        return _missing(work_s, state, number, audit, result, watch, policy)
    if result.findings is None:
        known.restart(("audit", number, "pause"), work_s)
        return _again(number, watch) if audit.number else [_undecided(number, audit, "given_up")]
    failed = tuple(a.member for a in result.accused if a.charge == au.PARTIAL and a.member in audit.members)
    passed = _passed(audit, result, failed)
    undecided = tuple(member for member in audit.members if member not in {*failed, *passed})
    if audit.number and not failed and not passed and not result.accused:  # our machine disagrees with itself
        known.restart(("audit", number, "pause"), work_s)
        return _again(number, watch)
    decided = _cases(state, audit, result, watch)
    reason = because("redone", passed=len(passed), failed=len(failed), undecided=len(undecided))
    return [*decided, Decision(ev.AuditClosed(number, passed, failed, undecided), reason)]


def _passed(audit: OpenAudit, result: AuditResult, failed: tuple[Member, ...]) -> tuple[Member, ...]:
    """Those in whose work nothing is wrong; nobody where a sum of theirs is, and two runs don't agree on that."""
    findings = result.findings
    if findings is None:
        return ()
    merges = any(a.charge == au.MERGE for a in result.accused)
    if findings.merge is not None and findings.merge.wrong and not merges and not failed:
        return ()
    right = {redone.member for redone in findings.partials if not redone.wrong}
    return tuple(member for member in audit.members if member in right and member not in failed)


def _is_of_this_version(state: RunState, audit: OpenAudit, began: tuple[int, int] | None) -> bool:
    """What was redone for one manifest says nothing of the fingerprints and sums of the next."""
    work = state.work
    assert work is not None
    merge = work.merges[st.group_of(state, audit.stage)]
    return began == (merge.number, merge.version) and merge.phase == st.REVEALED and not work.stale


def _again(number: int, watch: Watch) -> list[Decision]:
    """The result is dropped; the audit stays open and is run again."""
    del watch.audits.results[number]
    return []


# --- evidence that doesn't come -------------------------------------------------------------------------------------


def _missing(
    work_s: float, state: RunState, number: int, audit: OpenAudit, result: AuditResult, watch: Watch, policy: Policy
) -> list[Decision]:
    """Before the seal it is made again, by whoever can; after it, given up at last, and its maker may have to answer for it."""
    known = watch.audits
    if audit.number:
        for want in result.missing:
            key = (audit.step, want.microbatch, want.stage, want.backward)
            if replay_allowed(state, key):
                watch.missing[key] = None
        known.not_held -= {(number, want) for want in result.missing}
        known.restart(("audit", number, "pause"), work_s)
        return _again(number, watch)
    given_up = all((number, want) in known.not_held for want in result.missing)
    if known.missed(number, result.missing) < policy.audit.evidence_tries and not given_up:
        return _again(number, watch)
    passed = _passed(audit, result, ())
    undecided = tuple(member for member in audit.members if member not in passed)
    lost, unopened = _answering(state, number, audit, result.missing, watch)
    reason = because("evidence_missing", num_missing=len(result.missing), lost=len(lost), unopened=len(unopened))
    return [Decision(ev.AuditClosed(number, passed, (), undecided, unopened, lost), reason)]


def _answering(
    state: RunState, number: int, audit: OpenAudit, missing: tuple[Want, ...], watch: Watch
) -> tuple[tuple[Member, ...], tuple[Member, ...]]:
    """Makers that were there all the time, the same process since their receipt: who says that it is lost, and who is silent."""
    ledger, lost, silent = watch.audits.ledger, set[Member](), set[Member]()
    for want in missing:
        maker = ledger.maker(audit.step, want.stage, want.microbatch)
        sealed = ledger.sealed(audit.step, want.stage)
        if maker is None or sealed is None or maker not in state.members:
            continue
        item = sealed.items[want.microbatch]
        said = item.backward if want.backward else item.forward
        if said == want.hash:
            (lost if (number, want, maker.hotkey) in watch.audits.not_held_by else silent).add(maker)
    return tuple(sorted(lost - silent)), tuple(sorted(silent))


# --- accusations -------------------------------------------------------------------------------------------------


def _cases(state: RunState, audit: OpenAudit, result: AuditResult, watch: Watch) -> list[Decision]:
    """One open case a hotkey: what else it did is in the ledger."""
    decided: list[Decision] = []
    charged: set[str] = set()
    for accused in result.accused:
        hotkey = accused.member.hotkey
        if hotkey in charged or hotkey in state.convicted or hotkey in state.audits.quarantined:
            continue
        charged.add(hotkey)
        claimed = accused.claimed
        if accused.charge == au.PARTIAL and not claimed:
            claimed = _claimed(state, audit, accused, watch)
        event = ev.CaseOpened(
            case=state.audits.num_cases + len(charged),
            hotkey=hotkey,
            member=accused.member,
            step=audit.step,
            stage=audit.stage,
            charge=accused.charge,
            bundle=accused.bundle,
            digest=accused.digest,
            sealed=not audit.number,
            claimed=claimed,
        )
        decided.append(Decision(event, because("wrong_twice", step=audit.step, stage=audit.stage)))
    return decided


def _claimed(state: RunState, audit: OpenAudit, accused: Accused, watch: Watch) -> str:
    """The digest that the evidence would give if the accused were right; "" where that can't be told."""
    make = build.case_before_seal if audit.number else build.case_after_seal
    try:
        case = make(state, watch.audits.ledger, audit.step, audit.stage, (accused.member,))
    except NotFound:
        return ""
    return (build.claimed_digest(case, accused.member) or "") if case is not None else ""
