"""Boundaries that their receivers call unusable: the bytes are in the store under the receipted hash, so one look decides.

Whoever finds other bytes under that hash has broken the hash: what isn't numbers there is its maker's, whoever shows it. And
where the bytes are a boundary, the receiver has said what isn't so.
"""

from __future__ import annotations

from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import RunState
from validator.audit_watch import Unusable
from validator.decide_members import silent_outcome
from validator.decision import Decision, JudgeBoundary, because
from validator.watch import Watch


def decide_unusable(state: RunState, watch: Watch) -> list[Decision]:
    """One look for each hash, one case for each hotkey; once the step is sealed what nobody has looked at is forgotten."""
    known = watch.audits
    for hash_, told in list(known.unusable.items()):
        unusable = known.judged.pop(hash_, None)
        if unusable is None and st.work_at(state, told.step) is not None:
            action = JudgeBoundary(hash_)
            if action in watch.started:
                continue
            watch.started.add(action)
            return [Decision(action, because("called_unusable", stage=told.stage, microbatch=told.microbatch))]
        del known.unusable[hash_]
        decided = _accused(state, hash_, told) if unusable else _false_alarm(state, told) if unusable is False else []
        if decided:
            return decided
    return []


def _accused(state: RunState, hash_: str, told: Unusable) -> list[Decision]:
    maker = told.maker
    if maker.hotkey in state.convicted or maker.hotkey in state.audits.quarantined:
        return []
    event = ev.CaseOpened(
        case=state.audits.num_cases + 1,
        hotkey=maker.hotkey,
        member=maker,
        step=told.step,
        stage=told.stage,
        charge=au.UNUSABLE,
        bundle="",
        digest=hash_,
        sealed=False,
    )
    return [Decision(event, because("no_numbers", stage=told.stage, microbatch=told.microbatch))]


def _false_alarm(state: RunState, told: Unusable) -> list[Decision]:
    work, stage = st.work_at(state, told.step), told.stage - 1 if told.backward else told.stage + 1
    info = state.members.get(told.reporter)
    if work is None or info is None or info.stage != stage or st.is_sealed(state, stage, work):
        return []
    return [silent_outcome(state, stage, told.reporter, "false_alarm", 0.0, told.step)]
