"""Claims that concern audits, and why a hotkey that stands accused isn't let in; the same rules as :mod:`validator.intake`."""

from __future__ import annotations

from dataclasses import dataclass

from subnet.errors import Refusal
from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.audit_parts import CONVICTED, OpenAudit
from subnet.run.state import Item, RunState
from subnet.words import Member, Want
from validator.audit_watch import Unusable
from validator.decision import RunAppeal
from validator.policy import Policy
from validator.watch import Watch

MIN_MISMATCHES = 4
OTHER_INPUT = "its input isn't what is receipted"
APPEAL_RETRY_S = 60.0
"""A convicted hotkey whose appeal runs may ask to join again after this time."""
_CHARGES = {
    "unopened": "evidence wasn't opened",
    "equivocation": "it signed two things about one boundary",
    "root": "the log leads to another state root than it reported",
    "unusable": "what it receipted is no numbers",
}


@dataclass(frozen=True)
class Ignored:
    """Why a claim made no event."""

    reason: str


Admitted = list[ev.AnyEvent] | Ignored


def lacks_forward(state: RunState, claim: msg.ForwardReceipt, *, evaluation: bool) -> str:
    """What is wrong with a forward's receipt, or "". What an evaluation comes from has to be what is receipted: no void
    opens it again, and nobody redoes it.
    """
    if not st.config(state).audit.on:
        return ""
    if claim.stage < st.num_stages(state) - 1 and not claim.output:
        return "the receipt names no output"
    if claim.stage == 0:
        return ""
    before = st.item(state, claim.step, claim.microbatch, claim.stage - 1)
    said = before.forward_hash if before is not None else ""
    other = claim.input != said if evaluation else _is_other(claim.input, said)
    return OTHER_INPUT if other or (evaluation and not said) else ""


def _is_other(used: str, said: str) -> bool:
    """Its maker may not have receipted it yet; what is receipted otherwise is found out by whoever has used it, and redone."""
    return bool(used and said and used != said)


def lacks_output(state: RunState, item: Item, claim: msg.BackwardReceipt) -> str:
    """With audits every output is named by its hash, so that it can be redone and compared; what is wrong, or ""."""
    if not st.config(state).audit.on:
        return ""
    last = claim.stage == st.num_stages(state) - 1
    if not last and not item.forward_hash and not claim.forward:
        return "the receipt doesn't name the forward's output"
    above = st.item(state, claim.step, claim.microbatch, claim.stage + 1)
    if above is not None and _is_other(claim.input, above.backward_hash):
        return OTHER_INPUT
    return "the receipt names no output" if claim.stage > 0 and not claim.output else ""


def mismatch(state: RunState, member: Member, claim: msg.MismatchClaim, watch: Watch) -> Admitted:
    """The member's sum has an item that was computed from something else than the fold names: it is void."""
    work, stage = st.work_at(state, claim.step), state.members[member].stage
    own = st.item(state, claim.step, claim.microbatch, claim.stage)
    maker_stage = claim.stage + 1 if claim.backward else claim.stage - 1
    made = st.item(state, claim.step, claim.microbatch, maker_stage)
    if work is None or own is None or made is None or claim.stage != stage or claim.microbatch >= work.num_training:
        return Ignored("no such item of my stage in an open step")
    if own.member != member or own.status == st.OPEN:
        return Ignored("not its item")
    if st.is_sealed(state, stage, work):
        return Ignored("its stage is sealed")
    now = made.backward_hash if claim.backward else made.forward_hash
    said = now or (made.said_backward if claim.backward else made.said_forward)  # what an auditor would take
    if not said or not claim.used or said == claim.used:
        return Ignored("no mismatch with what is receipted")
    if (
        now
        and made.member is not None
        and st.config(state).audit.on
        and watch.audits.proves(state, made, maker_stage, claim)
    ):
        watch.audits.equivocators.add(made.member.hotkey)
    if watch.audits.mismatched(member, claim.step) > max(MIN_MISMATCHES, work.num_training):
        return [ev.Gone(member, "silent")]  # nobody is lied to so often: it holds the step up
    return [ev.Voided(claim.step, stage, member, "inputs")]


def unusable(state: RunState, member: Member, claim: msg.UnusableClaim, watch: Watch) -> Admitted:
    """Noted, to be looked at: of a boundary into the member's own stage, as its maker has receipted it."""
    maker_stage = claim.stage + 1 if claim.backward else claim.stage - 1
    work, made = st.work_at(state, claim.step), st.item(state, claim.step, claim.microbatch, maker_stage)
    if work is None or made is None or not st.config(state).audit.on or claim.microbatch >= work.num_training:
        return Ignored("no such item in an open step")
    if claim.stage != state.members[member].stage or made.member is None or st.is_sealed(state, maker_stage, work):
        return Ignored("no input of its stage")
    if claim.hash != (made.backward_hash if claim.backward else made.forward_hash):
        return Ignored("not what is receipted")
    if claim.hash not in watch.blobs:
        return Ignored("the store doesn't have it yet")
    told = Unusable(claim.step, claim.microbatch, maker_stage, claim.backward, made.member, member)
    watch.audits.call_unusable(claim.hash, told)
    return Ignored("noted")


def not_held(state: RunState, member: Member, claim: msg.NotHeldClaim, watch: Watch) -> Admitted:
    """Noted as long as the audit is open; of its maker, and where that one is gone of anybody: else one that has never had it
    could end the wait for one that has."""
    opened = state.audits.open.get(claim.audit)
    if opened is None:
        return Ignored("the audit isn't open")
    for want in set(claim.wants) & set(opened.wants):
        maker = _maker(state, opened, want, watch)
        if maker == member:
            watch.audits.not_held_by.add((claim.audit, want, member.hotkey))
        if maker == member or maker not in state.members:
            watch.audits.not_held.add((claim.audit, want))
    return Ignored("noted")


def _maker(state: RunState, opened: OpenAudit, want: Want, watch: Watch) -> Member | None:
    if not opened.number:
        return watch.audits.ledger.maker(opened.step, want.stage, want.microbatch)
    item = st.item(state, opened.step, want.microbatch, want.stage)
    return item.member if item is not None else None


def witness(state: RunState, member: Member, claim: msg.WitnessClaim) -> Admitted:
    """Of an open case, from who was asked, once."""
    case = state.audits.cases.get(claim.case)
    if case is None or not case.is_open:
        return Ignored("no such open case")
    if member not in case.asked:
        return Ignored("wasn't asked")
    if member.hotkey in case.said:
        return Ignored("known")
    return [ev.WitnessSaid(claim.case, member.hotkey, claim.digest)]


def quarantine(state: RunState, hotkey: str, policy: Policy) -> Refusal:
    number = state.audits.quarantined[hotkey]
    case = state.audits.cases[number]
    what = _CHARGES.get(case.charge, "its work, done again, gave something else")
    return Refusal(
        "quarantined",
        f"case {number} is open: {what} (step {case.step}, stage {case.stage})",
        policy.audit.quarantine_retry_s,
        hint="wait: a third party is asked, then the case is closed; its bundle can be replayed with `iota audit replay`",
    )


def convicted(state: RunState, hotkey: str, watch: Watch) -> Refusal:
    """Out of the run; there is a time to ask again only while an appeal runs."""
    cases = sorted(
        number
        for number, case in state.audits.cases.items()
        if case.hotkey == hotkey and case.outcome == CONVICTED and case.upheld
    )
    if not cases:  # found out by a merge's trace
        return Refusal("convicted", "this hotkey is convicted of a lie in this run")
    number = cases[-1]
    case, appealed = state.audits.cases[number], set(cases) & set(watch.audits.appeals)
    runs = appealed or any(RunAppeal(one) in watch.started for one in cases)
    where = f"case {number} (step {case.step}, stage {case.stage})"
    hint = f"the evidence: `iota audit fetch {number} --out DIR`, `iota audit replay DIR`; "
    if runs:
        return Refusal("convicted", f"{where}: convicted; an appeal runs", APPEAL_RETRY_S, hint="wait for its outcome")
    return Refusal("convicted", f"{where}: convicted", hint=f"{hint}`iota audit appeal {number}` has it done again")
