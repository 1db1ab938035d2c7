"""Cases name what the journal agreed on: inputs that neighbours receipted, claims of the member, a state that can be had."""

from __future__ import annotations

import functools

import msgspec
import pytest
from journal_cases import SEEDS
from ledger_cases import Receipts, apply_audited, folded, with_audits
from schedule_sim import Sim

from subnet.audit import build
from subnet.audit.case import Case, Findings, RedoneItem, RedonePartial, digest
from subnet.audit.ledger import WorkLedger
from subnet.errors import NotFound
from subnet.run import events as ev
from subnet.run.config import AuditSection
from subnet.run.state import RunState, StoredSnapshot, group_of, new_state, num_stages, partitions_of
from subnet.words import Member, Want

KEEP = AuditSection(rate=0.1, before_seal="probation", window_steps=8, open_windows=8)
"""One window, never audited: everything is kept."""


@functools.cache
def delayed_events() -> tuple[ev.AnyEvent, ...]:
    sim = Sim(3, checks_all=False, delay=1)
    sim.run()
    return tuple(record.event for record in sim.coordinator.journal)


class Run:
    """A folded journal with its ledger, its receipts, and the cases before the seal of each stage that was sealed."""

    def __init__(self, seed: int) -> None:
        self.ledger, self.receipts = WorkLedger(), Receipts()
        self.early: dict[tuple[int, int], Case | None] = {}
        self.state = folded(seed, self.ledger, KEEP, self._before)

    def _before(self, state: RunState, event: ev.AnyEvent) -> None:
        self.receipts.note(event)
        if isinstance(event, ev.StageSealed):
            for stage in {entry.stage for entry in event.entries}:
                members = [entry.member for entry in event.entries if entry.stage == stage]
                self.early[event.step, stage] = build.case_before_seal(state, self.ledger, event.step, stage, members)

    def stages(self) -> list[tuple[int, int]]:
        steps = range(-1, self.state.next_step)
        return [(t, s) for t in steps for s in range(num_stages(self.state)) if self.ledger.sealed(t, s)]

    def members(self, step: int, stage: int) -> list[Member]:
        return [record.member for record in self.ledger.partials(step, stage)]

    def case(self, step: int, stage: int) -> Case:
        case = build.case_after_seal(self.state, self.ledger, step, stage, self.members(step, stage))
        assert case is not None
        return case


run = functools.cache(Run)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_case_after_the_seal(seed: int):
    found = run(seed)
    last = num_stages(found.state) - 1
    assert found.stages()
    for step, stage in found.stages():
        case = found.case(step, stage)
        assert (case.step, case.stage, case.planned) == (step, stage, found.state.run)
        group = group_of(found.state, stage)
        seal = found.receipts.seals[step, group]
        assert [p.commitment for p in case.partials] == [e for e in seal.entries if e.stage == stage]
        for partial in case.partials:
            assert tuple(item.microbatch for item in partial.items) == partial.commitment.microbatches
            assert {p for p, _ in partial.fingerprints} == set(partitions_of(found.state, group, stage))
            for item in partial.items:
                m = item.microbatch
                assert item.x == (found.receipts.forward[step, m, stage - 1] if stage else "")
                assert item.gradient == (found.receipts.backward[step, m, stage + 1][0] if stage < last else "")
                assert (item.backward, item.loss_bits) == found.receipts.backward[step, m, stage]
        merge = case.merge
        assert merge is not None
        assert merge.whole
        assert merge.total_items == sum(len(p.items) for p in case.partials)
        assert tuple(part.hash for part in merge.merged) == tuple(seal.hashes[part.partition] for part in merge.merged)
        assert (merge.group, merge.version) == (group, seal.version)
        _check_state(found, case)


def _check_state(found: Run, case: Case) -> None:
    """From a stored snapshot that was agreed on, or the run's first, without a gap to the state of the step's gradients."""
    state = case.state
    assert [log.step for log in state.log] == list(range(state.version, case.step))
    if state.whole:
        assert (state.version, state.manifest, state.root) == (-1, "snapshot0", "")
    else:
        said = found.receipts.roots[state.version, case.stage]
        assert said[state.root] == max(said.values())
    own = partitions_of(found.state, group_of(found.state, case.stage), case.stage)
    assert case.update is not None
    for log in (*state.log, case.update):
        seal = found.receipts.seals[log.step, group_of(found.state, case.stage)]
        assert log.partitions == tuple((p, seal.hashes[p], *seal.blobs[p]) for p in own)
        if log.root:
            said = found.receipts.roots[log.step + 1, case.stage]
            assert said[log.root] == max(said.values())
        assert (log.scalars is None) == (log.step == -1)


@pytest.mark.parametrize("seed", SEEDS)
def test_before_the_seal_the_same_is_to_be_redone(seed: int):
    found = run(seed)
    for step, stage in found.stages():
        early, late = found.early[step, stage], found.case(step, stage)
        assert early is not None
        assert early.update is None
        assert sorted(early.partials, key=lambda p: p.member) == sorted(late.partials, key=lambda p: p.member)
        assert early.merge == late.merge
        assert early.skipped == late.skipped


def test_before_the_seal_everything_must_have_been_said():
    """At each event of a merge: a case, or None as long as somebody hasn't committed or an input isn't said."""
    ledger, outcomes = WorkLedger(), set[bool]()

    def before(state: RunState, event: ev.AnyEvent) -> None:
        if not isinstance(event, ev.Frozen | ev.Committed | ev.ReduceOrdered | ev.SeedRevealed):
            return
        stage = 0
        holders = [member for member, info in state.members.items() if info.stage == stage]
        done = [m for m in holders if state.work is not None and m in state.work.held]
        merge = state.work.merges[group_of(state, stage)] if state.work is not None else None
        if merge is None or merge.phase == "sealed" or not done:
            return
        case = build.case_before_seal(state, ledger, event.step, stage, done)
        outcomes.add(case is not None)
        if case is not None:
            assert (case.merge is None) == (not merge.entries)
            assert all(
                item.microbatch in partial.commitment.microbatches
                for partial in case.partials
                for item in partial.items
            )

    folded(34, ledger, KEEP, before)
    assert outcomes == {True, False}
    state = run(34).state
    with pytest.raises(NotFound):
        build.case_before_seal(state, ledger, 99, 0, [Member("a", 1, 1)])


def test_some_members_make_no_whole_case():
    found, checked = run(36), 0
    for step, stage in found.stages():
        members = found.members(step, stage)
        for member in members[:1] if len(members) > 1 else []:
            case = build.case_after_seal(found.state, found.ledger, step, stage, [member])
            assert case is not None
            assert case == build.narrow(found.case(step, stage), [member])
            assert (case.merge is not None, case.update) == (True, None)
            assert not (case.merge and case.merge.whole)
            checked += 1
    assert checked
    with pytest.raises(NotFound, match="no part"):
        build.case_after_seal(found.state, found.ledger, found.stages()[0][0], 0, [Member("stranger", 1, 1)])
    with pytest.raises(NotFound, match="any more"):
        build.case_after_seal(found.state, found.ledger, 99, 0, [Member("stranger", 1, 1)])


def test_a_case_of_a_delayed_step_starts_one_update_earlier():
    ledger, state = WorkLedger(), new_state()
    for event in delayed_events():
        event = with_audits(event, KEEP) if isinstance(event, ev.RunPlanned) else event
        ledger.note(state, event)
        apply_audited(state, event)
    seen: set[int] = set()
    for step in range(-1, state.next_step):
        if ledger.sealed(step, 0):
            members = [record.member for record in ledger.partials(step, 0)]
            case = build.case_after_seal(state, ledger, step, 0, members)
            assert case is not None
            needed = max(0, step - 1) if step > 0 else step
            assert case.state.version + len(case.state.log) == needed
            assert (case.update is not None) == (needed == step)
            seen.add(step - needed)
    assert seen == {0, 1}


# --- the state -----------------------------------------------------------------------------------------------------


def test_the_newest_snapshot_that_two_coldkeys_agree_on():
    found = run(5)
    step = found.state.next_step
    agreed = found.ledger.roots(step - 1, 0)
    assert agreed

    def ref(*snapshots: StoredSnapshot, version: int = step, ledger: WorkLedger = found.ledger, short: bool = False):
        sealed = {t: log for t, log in found.state.sealed.items() if t >= step - 1} if short else found.state.sealed
        state = msgspec.structs.replace(found.state, snapshots={0: list(snapshots)}, sealed=sealed)
        return build.state_ref(state, ledger, 0, version)

    first = ref()
    assert (first.whole, first.version, len(first.log)) == (True, -1, step + 1)
    good = StoredSnapshot(step - 1, "good", agreed, "h", "c", verified=True)
    assert (ref(good).manifest, ref(good).root, [log.step for log in ref(good).log]) == ("good", agreed, [step - 1])
    assert ref(good, version=step - 2).whole
    assert ref(msgspec.structs.replace(good, root="f" * 64)).whole  # its replicas say otherwise
    assert not ref(good, ledger=WorkLedger()).whole  # nothing is known of what they said
    alone = msgspec.structs.replace(good, manifest="alone", verified=False)
    assert ref(alone).whole  # the log leads past it
    assert ref(alone, short=True).manifest == "alone"  # unless there is nothing else
    older = msgspec.structs.replace(good, step=step - 2, manifest="older", root=found.ledger.roots(step - 2, 0))
    assert (ref(older, alone).manifest, len(ref(older, alone).log)) == ("older", 2)
    with pytest.raises(NotFound):
        ref(msgspec.structs.replace(alone, root="f" * 64), short=True)


def test_a_state_that_cant_be_had_any_more_is_said_to_be_so():
    found = run(5)
    gone = {step: log for step, log in found.state.sealed.items() if step > 0}
    state = msgspec.structs.replace(found.state, snapshots={}, sealed=gone)
    with pytest.raises(NotFound, match="can't be brought"):
        build.state_ref(state, found.ledger, 0, found.state.next_step)


# --- what a case asks for and says ---------------------------------------------------------------------------------


def inner(seed: int = 5) -> Case:
    """A case of a stage between two others."""
    found = run(seed)
    assert num_stages(found.state) == 3
    return found.case(0, 1)


def test_wants_are_the_inputs_once_each():
    case = inner()
    wants = build.wants_of(case)
    items = [item for partial in case.partials for item in partial.items]
    assert set(wants) == {Want(0, i.microbatch, False, i.x) for i in items} | {
        Want(2, i.microbatch, True, i.gradient) for i in items
    }
    assert len(wants) == len(set(wants)) == 2 * len(items)
    present = {items[0].x}
    assert set(wants) - set(build.wants_of(case, present)) == {w for w in wants if w.hash in present}
    assert build.wants_of(case, {want.hash for want in wants}) == ()
    blobs = build.blobs_of(case)
    assert {want.hash for want in wants} | {case.planned.data, case.state.manifest} <= set(blobs)
    assert case.update is not None
    assert {blob for *_, blob, _ in case.update.partitions} <= set(blobs)


def test_the_claims_digest_is_what_a_run_would_give_if_they_were_true():
    case = inner()
    member = case.partials[0].member
    partial = case.partials[0]
    items = tuple(RedoneItem(i.microbatch, i.forward, i.backward, i.loss_bits) for i in partial.items)
    true = RedonePartial(member, items, partial.commitment.hashes, ((0, (1, 2)),), ("whatever is said of it",))
    findings = Findings(digest((true,)), (true,), None, (), 1.0, 2.0, 3)
    claimed = build.claimed_digest(case, member)
    assert claimed == findings.digest == build.claimed_digest(build.accusation(case, member), member)
    for change in (
        {"forward": "0" * 64},
        {"backward": "0" * 64},
    ):
        lie = msgspec.structs.replace(partial.items[0], **change)
        other = msgspec.structs.replace(partial, items=(lie, *partial.items[1:]))
        assert build.claimed_digest(msgspec.structs.replace(case, partials=(other,)), member) != claimed
    commitment = msgspec.structs.replace(
        partial.commitment, hashes=tuple((p, "0" * 64) for p, _ in partial.commitment.hashes)
    )
    other = msgspec.structs.replace(partial, commitment=commitment)
    assert build.claimed_digest(msgspec.structs.replace(case, partials=(other,)), member) != claimed
    unsaid = msgspec.structs.replace(
        partial, items=(msgspec.structs.replace(partial.items[0], forward=""), *partial.items[1:])
    )
    assert build.claimed_digest(msgspec.structs.replace(case, partials=(unsaid,)), member) is None
    assert build.claimed_digest(case, Member("stranger", 1, 1)) is None


def test_the_last_stage_says_no_forward():
    case = run(5).case(0, 2)
    assert all(not item.forward and item.loss_bits is not None for partial in case.partials for item in partial.items)
    assert build.claimed_digest(case, case.partials[0].member) is not None


def test_an_accusation_is_about_one_member_alone():
    found = run(36)
    step, stage = next((t, s) for t, s in found.stages() if len(found.members(t, s)) > 1)
    case = found.case(step, stage)
    for partial in case.partials:
        alone = build.accusation(case, partial.member)
        assert alone.partials == (partial,)
        assert alone.update is None
        assert alone.merge is not None
        assert not alone.merge.whole
    assert build.narrow(case, [p.member for p in case.partials]) == case
