"""What must hold after every event; a fold that would break it raises :class:`InvariantBroken` instead."""

from __future__ import annotations

from subnet.errors import IotaError
from subnet.run.audit_parts import AuditState
from subnet.run.state import (
    DONE,
    GATHERING,
    LIVE,
    OPEN,
    REDUCING,
    REVEALED,
    REVOKING,
    SEALED,
    Merge,
    RunState,
    StepWork,
    config,
    counted,
    group_shape,
    holders,
    num_microbatches,
    num_stages,
    partitions_of,
    update_delay,
)
from subnet.words import CALIBRATION_STEP, Commitment


class InvariantBroken(IotaError):
    """An event that can't follow this state: a bug of ours, or a leader that breaks the protocol."""

    code = "invariant_broken"


def require(ok: bool, what: str) -> None:
    """Raises :class:`InvariantBroken` unless ``ok``."""
    if not ok:
        raise InvariantBroken(what)


def check_entries(state: RunState, group: int, entries: tuple[Commitment, ...]) -> None:
    """One entry a member; at each stage of the group m-sets are disjoint and cover every counted microbatch."""
    require(len({entry.member for entry in entries}) == len(entries), "a member has two entries in a manifest")
    wanted = counted(state)
    for stage in group_shape(state, group).stages:
        covered = sorted(m for entry in entries if entry.stage == stage for m in entry.microbatches)
        require(covered == wanted, f"the manifest of stage {stage} covers {covered}, not {wanted}")
    for entry in entries:
        held = tuple(index for index, _ in entry.hashes)
        require(held == partitions_of(state, group, entry.stage), f"{entry.member} commits to partitions {held}")


def check(state: RunState) -> None:
    """All that can be said of a state by itself; used by tests after each event, and by whoever doubts a fold."""
    if state.run is None:
        require(state.work is None and not state.members, "work or members without a run")
        return
    for member, info in state.members.items():
        require(member.hotkey not in state.convicted, f"{member} is convicted and still a member")
        require(member.term == state.term, f"{member} is of another term than {state.term}")
        require(0 <= info.stage < num_stages(state), f"{member} serves no stage")
    _check_audits(state)
    hotkeys = [member.hotkey for member in state.members]
    require(len(hotkeys) == len(set(hotkeys)), "a hotkey has two live incarnations")
    require(
        sorted(state.sealed) == list(range(state.next_step - len(state.sealed), state.next_step)), "seals have gaps"
    )
    if state.work is not None:
        require(state.work.step == state.next_step, "the open step isn't the next one")
        for stage in range(num_stages(state)):
            _check_stage(state, state.work, stage)
        for group, merge in enumerate(state.work.merges):
            _check_merge(state, group, merge)
    if state.ahead is not None:
        require(update_delay(state) == 1 and state.work is not None, "a step is open ahead of none")
        require(state.ahead.step == state.next_step + 1, "the step ahead isn't the one behind the next")
        require(all(merge == Merge() for merge in state.ahead.merges), "the step ahead is being merged")
        for stage in range(num_stages(state)):
            _check_stage(state, state.ahead, stage)


def _check_audits(state: RunState) -> None:
    audits = state.audits
    if not config(state).audit.on:
        require(audits == AuditState(), "audits in a run without them")
        return
    open_cases = {case.hotkey: number for number, case in audits.cases.items() if case.is_open}
    require(open_cases == audits.quarantined, "quarantine isn't what the open cases say")
    require(not audits.quarantined.keys() & state.convicted, "somebody is convicted and in quarantine")
    numbers = sorted(audits.windows)
    require(numbers == list(range(audits.next_window - len(numbers), audits.next_window)), "closed windows have gaps")
    require(all(closed.last_step < state.next_step for closed in audits.windows.values()), "a window has open steps")
    require(audits.audited_to <= max(state.next_step, CALIBRATION_STEP), "steps are audited that aren't sealed")
    require(all(0 < number <= audits.num_opened for number in audits.open), "an audit is open that never was")
    for audit in audits.open.values():
        require(audit.step <= state.next_step, f"step {audit.step} is audited before it is there")
    for work in (state.work, state.ahead):
        for stage, m in work.stale if work is not None else ():
            require(
                work is not None and work.items[stage][m].status != OPEN,
                f"item {m} of stage {stage} is stale, and open",
            )


def _check_stage(state: RunState, work: StepWork, stage: int) -> None:
    items, first_evaluation = work.items[stage], num_microbatches(state)
    where = f"step {work.step} stage {stage}"
    by_status = {
        status: {m for m, it in items.items() if it.status == status} for status in (OPEN, LIVE, REVOKING, DONE)
    }
    require(work.undealt[stage] == by_status[OPEN] - work.skipped, f"{where}: index of undealt items is wrong")
    require(work.live[stage] == by_status[LIVE] | by_status[REVOKING], f"{where}: index of live items is wrong")
    require(not work.skipped & (set(items) - by_status[OPEN]), f"{where}: a skipped item has a lease")
    require(work.done[stage] == sum(m < first_evaluation for m in by_status[DONE]), f"{where}: count of done is wrong")
    require(
        work.evaluated[stage] == sum(m >= first_evaluation for m in by_status[DONE]), f"{where}: evaluated is wrong"
    )
    for member, held in work.held.items():
        info = state.members.get(member)
        if info is not None and info.stage == stage:
            require(all(items[m].member == member for m in held), f"{where}: {member} holds another's item")
    for m in work.live[stage]:
        holder = items[m].member
        require(holder in state.members, f"{where}: item {m} is leased to {holder}, who is gone")
        require(holder is not None and m in work.held.get(holder, ()), f"{where}: item {m} isn't among its holder's")


def _check_merge(state: RunState, group: int, merge: Merge) -> None:
    where = f"group {group}"
    require((merge.phase == SEALED) == (group in state.seals) or state.work is None, f"{where}: phase and seal differ")
    if merge.phase == GATHERING:
        require(not merge.commitments and not merge.entries and not merge.seed, f"{where}: leftovers of an ended merge")
    if merge.phase in (REDUCING, REVEALED):
        check_entries(state, group, merge.entries)
        require(holders(state, group) == {entry.member for entry in merge.entries}, f"{where}: a contributor is void")
    if merge.phase == REDUCING:
        require(not merge.seed and not merge.fingerprints and not merge.checks, f"{where}: revealed too early")
