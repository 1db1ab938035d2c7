"""The ledger keeps what was sealed as the journal says it, the same from record 0 and from a dump, as long as it may be asked."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_cases import SEEDS
from ledger_cases import ON, Receipts, apply_audited, events_of, folded

from subnet.audit.ledger import FAILED, PASSED, UNDECIDED, UNOPENED, WorkLedger
from subnet.run import events as ev
from subnet.run.config import NO_AUDITS
from subnet.run.state import RunState, new_state, num_stages, partitions_of
from subnet.words import Member


@pytest.mark.parametrize("seed", SEEDS)
def test_it_keeps_what_the_journal_said_when_the_stage_was_sealed(seed: int):
    receipts, ledger = Receipts(), WorkLedger()
    checked = 0

    def before(state: RunState, event: ev.AnyEvent) -> None:
        nonlocal checked
        receipts.note(event)
        if isinstance(event, ev.StageSealed):
            checked += _check_seal(state, ledger, receipts, event)

    state = folded(seed, ledger, before=before)
    assert checked
    for step in range(-1, state.next_step):
        for stage in range(num_stages(state)):
            if root := ledger.roots(step, stage):
                said = receipts.roots[step, stage]
                assert said[root] == max(said.values())


def _check_seal(state: RunState, ledger: WorkLedger, receipts: Receipts, event: ev.StageSealed) -> int:
    assert state.run is not None
    assert state.work is not None
    for stage in state.run.groups[event.group].stages:
        sealed = ledger.sealed(event.step, stage)
        assert sealed is not None
        assert sealed.entries == tuple(entry for entry in event.entries if entry.stage == stage)
        assert sealed.seed == state.work.merges[event.group].seed != ""
        items = [m for entry in sealed.entries for m in entry.microbatches]
        assert (
            sorted(items)
            == sorted(sealed.items)
            == [m for m in range(state.work.num_training) if m not in sealed.skipped]
        )
        assert sealed.total_items == len(items)
        assert {entry.member for entry in sealed.entries} == set(sealed.fingerprints)
        for m, item in sealed.items.items():
            assert item.forward == receipts.forward.get((event.step, m, stage), "")
            assert (item.backward, item.loss_bits) == receipts.backward[event.step, m, stage]
            assert item.x == (receipts.forward[event.step, m, stage - 1] if stage else "")
            last = stage == num_stages(state) - 1
            assert item.gradient == ("" if last else receipts.backward[event.step, m, stage + 1][0])
            assert ledger.maker(event.step, stage, m) == receipts.holder[event.step, m, stage]
        assert tuple(part.partition for part in sealed.merged) == partitions_of(state, event.group, stage)
        for part in sealed.merged:
            said = receipts.merged[event.step, event.group, event.version, part.partition]
            assert (part.hash, part.blob, part.size_bytes, part.squares) == (
                said.hash,
                said.blob,
                said.size_bytes,
                said.squares,
            )
        records = ledger.partials(event.step, stage)
        assert [(r.member, r.num_items) for r in records] == [(e.member, len(e.microbatches)) for e in sealed.entries]
        assert all(r.unchecked == (stage in event.unchecked_stages) and r.outcome == "" for r in records)
    return 1


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(SEEDS), st.data())
def test_a_loaded_ledger_goes_on_like_one_that_saw_everything(seed: int, data: st.DataObject):
    events = list(events_of(seed))
    cuts = data.draw(st.sets(st.integers(1, len(events) - 1), min_size=1, max_size=4))
    state, whole, loaded = new_state(), WorkLedger(), WorkLedger()
    for number, event in enumerate(events):
        if number in cuts:
            dump = loaded.dump()
            loaded = WorkLedger()
            loaded.load(dump)
        whole.note(state, event)
        loaded.note(state, event)
        apply_audited(state, event)
    assert loaded.dump() == whole.dump()


def test_nothing_is_kept_of_a_run_without_audits():
    ledger = WorkLedger()
    folded(SEEDS[0], ledger, NO_AUDITS)
    assert ledger.dump() == WorkLedger().dump()


def test_what_nobody_can_ask_for_any_more_is_dropped():
    """Evidence with its window, partials with the horizon, roots with the log."""
    ledger = WorkLedger()

    def before(state: RunState, event: ev.AnyEvent) -> None:
        if isinstance(event, ev.StepSealed):
            state.audits.audited_to = event.step + 2  # as if windows were audited at once

    state = folded(5, ledger, msgspec.structs.replace(ON, window_steps=1, horizon_steps=1), before)
    assert state.next_step == 2
    assert [step for step in range(-1, 2) if ledger.sealed(step, 0) is not None] == [1]
    assert [step for step in range(-1, 2) if ledger.partials(step)] == [0, 1]
    assert not ledger.roots(-1, 0) or -1 in state.sealed


# --- audits --------------------------------------------------------------------------------------------------------


class Case:
    """A ledger behind a folded journal, and what may come next."""

    def __init__(self, seed: int = 44) -> None:
        self.ledger = WorkLedger()
        self.state = folded(seed, self.ledger)
        self.audits = 0
        self.steps = sorted({t for t in range(-1, self.state.next_step) if self.ledger.partials(t)})
        record = self.ledger.partials(self.steps[0], 0)[0]
        self.step, self.member = record.step, record.member

    def note(self, *events: ev.AnyEvent) -> None:
        for event in events:
            self.ledger.note(self.state, event)

    def audit(self, step: int, stage: int = 0, by: str = "", number: int = 0, **outcome: tuple[Member, ...]) -> None:
        self.audits += 1
        members = tuple(member for found in outcome.values() for member in found)
        by = by or self.state.leader
        self.note(
            ev.AuditOpened(self.audits, step, stage, number, members, by, (), tuple(1 for _ in members)),
            ev.AuditClosed(self.audits, **outcome),
        )

    def outcome(self) -> str:
        return self.ledger.audited(self.step, 0, self.member)


def test_outcomes_of_audits_and_which_of_two_stands():
    case = Case()
    who = (case.member,)
    assert case.outcome() == ""
    case.audit(case.step, undecided=who)
    assert case.outcome() == UNDECIDED
    case.audit(case.step, unopened=who)
    assert case.outcome() == UNOPENED
    case.audit(case.step, by="another", failed=who)
    assert case.outcome() == UNOPENED
    case.audit(case.step, number=3, failed=who)
    assert case.outcome() == UNOPENED
    case.audit(case.step, passed=who)
    case.audit(case.step, undecided=who)
    assert case.outcome() == PASSED
    case.audit(case.step, failed=who)
    case.audit(case.step, passed=who)
    assert case.outcome() == FAILED
    case.note(
        ev.CaseOpened(1, who[0].hotkey, who[0], case.step, 0, "partial", "b", "d", True), ev.CaseClosed(1, "fault")
    )
    assert case.outcome() == FAILED
    case.note(ev.Appealed(1, True, "d"))
    assert case.outcome() == FAILED
    case.note(ev.Appealed(1, False, "d"))
    assert case.outcome() == PASSED


def test_a_cleared_case_means_that_the_work_was_right_unless_it_was_about_a_merge():
    for charge, outcome in (("partial", PASSED), ("merge", FAILED)):
        case = Case()
        case.audit(case.step, failed=(case.member,))
        opened = ev.CaseOpened(1, case.member.hotkey, case.member, case.step, 0, charge, "b", "d", True)
        case.note(opened, ev.CaseClosed(1, "cleared"))
        assert case.outcome() == outcome


def test_the_oldest_step_that_nobody_vouches_for():
    case = Case()
    hotkey = case.member.hotkey
    own = [
        (r.step, r.stage, r.member) for t in case.steps for r in case.ledger.partials(t) if r.member.hotkey == hotkey
    ]
    assert len(own) > 1
    for step, stage, member in own:
        assert case.ledger.unaudited(hotkey) == step or (step, stage) != own[0][:2]
        case.audit(step, stage, undecided=(member,))
        assert case.ledger.unaudited(hotkey) is not None
        case.audit(step, stage, passed=(member,))
    assert case.ledger.unaudited(hotkey) is None
    assert case.ledger.unaudited("nobody") is None


def test_work_behind_a_rewind_belongs_to_an_old_branch():
    case = Case()
    first, last = case.steps[0], case.steps[-1]
    assert first < last
    behind = [record for t in case.steps if t >= last for record in case.ledger.partials(t)]
    case.note(ev.WindowClosed(0, first, last - 1, 5), ev.WindowClosed(1, last, last, 6))
    case.note(ev.Rewound(last, 1, 1))
    assert case.ledger.partials(first)
    assert not case.ledger.partials(last)
    assert case.ledger.sealed(last, 0) is None
    assert list(case.ledger.old_partials()) == behind
    assert {record.branch for record in behind} == {0}
    assert case.ledger.branch == 1
    assert (case.ledger.branch_of(0), case.ledger.branch_of(1)) == (0, 1)
    case.audit(last, failed=(behind[0].member,))
    assert all(record.outcome == "" for record in case.ledger.old_partials())
    assert case.ledger.roots(last + 1, 0) == ""


def test_a_new_leader_ends_audits_before_a_seal_and_keeps_the_others():
    case = Case()
    who = (case.member,)
    case.note(ev.AuditOpened(7, case.step, 0, 0, who, case.state.leader, (), (1,)))
    case.note(ev.AuditOpened(8, case.step, 0, 2, who, case.state.leader, (), (1,)))
    case.note(ev.TermStarted(9, "next", "n"))
    case.note(ev.AuditClosed(8, failed=who))
    assert case.outcome() == ""
    case.note(ev.AuditClosed(7, passed=who))
    assert case.outcome() == PASSED
