"""The state of a run: exactly the fold of its journal; equal folds have equal :func:`subnet.run.state_codec.state_bytes`.

A :class:`RunState` has one owner, who folds events into it in place (:mod:`subnet.run.apply`). Everything here is plain
data: the coordinator, members, followers and tools hold the same. Small indexes (open and live items, what a member
holds) are kept beside the items, so that an event costs the same whatever the size of the run.
"""

from __future__ import annotations

import msgspec

from subnet.run.audit_parts import AuditState
from subnet.run.config import RunConfig
from subnet.run.events import HardwareClassSet, RunFinished, RunPlanned
from subnet.run.parts import DONE, Item, Merge, Replay
from subnet.run.parts import FROZEN as FROZEN
from subnet.run.parts import GATHERING as GATHERING
from subnet.run.parts import LIVE as LIVE
from subnet.run.parts import OPEN as OPEN
from subnet.run.parts import REDUCING as REDUCING
from subnet.run.parts import REVEALED as REVEALED
from subnet.run.parts import REVOKING as REVOKING
from subnet.run.parts import SEALED as SEALED
from subnet.run.parts import Failure as Failure
from subnet.run.parts import GroupSeal as GroupSeal
from subnet.run.parts import MergedPartition as MergedPartition
from subnet.run.parts import Saying as Saying
from subnet.run.parts import StepLog as StepLog
from subnet.run.parts import StoredSnapshot as StoredSnapshot
from subnet.run.schedule import StepScalars, Terms
from subnet.words import CALIBRATION_STEP, GroupShape, Member


class MemberInfo(msgspec.Struct):
    """One live incarnation. ``version`` is the step its state is ready for, None before it has said so."""

    coldkey: str
    stage: int
    boot: str
    host: str
    port: int
    version: int | None = None
    root: str = ""
    reachable: bool = True
    """Whether others can connect to it."""


class StepWork(msgspec.Struct):
    """An open step: its items by stage, who holds what, and the merges of its groups."""

    step: int
    num_training: int
    num_evaluation: int
    scalars: StepScalars | None
    items: list[dict[int, Item]]
    undealt: list[set[int]]
    """By stage: items without a lease, skipped ones left out."""
    live: list[set[int]]
    """By stage: items whose lease is LIVE or REVOKING."""
    done: list[int]
    """By stage: training items done."""
    evaluated: list[int]
    """By stage: evaluation items done."""
    merges: list[Merge]
    held: dict[Member, set[int]] = {}
    """Items a member has a lease on, open or done; done evaluation items aren't held."""
    epochs: dict[Member, int] = {}
    silences: dict[Member, int] = {}
    skipped: set[int] = set()
    replays: dict[tuple[int, int, bool], Replay] = {}
    """By (stage, microbatch, backward)."""
    stale: set[tuple[int, int]] = set()
    """(stage, microbatch) of items that were computed from a boundary which was then made again, and differs."""
    fickle: set[str] = set()
    """Hotkeys that have contradicted themselves about an item more than once: with them the step comes to no end."""


class RunState(msgspec.Struct):
    """The fold. Query it with the functions below; change it only through events."""

    number: int = 0
    """Events folded so far = number of the next one."""
    run: RunPlanned | None = None
    hardware_class: HardwareClassSet | None = None
    finished: RunFinished | None = None
    term: int = 0
    leader: str = ""
    nonce: str = ""
    num_joined: int = 0
    members: dict[Member, MemberInfo] = {}
    boots: dict[str, dict[str, Member]] = {}
    """By hotkey and boot id: every incarnation of this term."""
    convicted: set[str] = set()
    absences: dict[str, int] = {}
    """By hotkey: how often it was gone silently; its back-off grows with it."""
    next_step: int = CALIBRATION_STEP
    """The version everybody should be at: -1 plus the number of StepSealed."""
    work: StepWork | None = None
    """The open step, ``next_step``: the only one that is merged and sealed."""
    ahead: StepWork | None = None
    """With ``update_delay`` 1 the step behind it, which may only be computed, from the state at ``next_step``."""
    seals: dict[int, GroupSeal] = {}
    """By group: sealed at the open step."""
    sealed: dict[int, StepLog] = {}
    """Seals that a joiner may need: those since the oldest of the stages' newest verified snapshots."""
    roots: dict[int, dict[str, list[str]]] = {}
    """By stage: state roots at ``next_step``, each with the coldkeys that reported it, first reported first."""
    orders: dict[int, Member] = {}
    """By stage: who is to store the snapshot of ``next_step``."""
    snapshots: dict[int, list[StoredSnapshot]] = {}
    """By stage, oldest first; those older than the newest verified one are dropped, unless audits or a rewind need them."""
    audits: AuditState = msgspec.field(default_factory=AuditState)
    paused: bool = False
    stops_at: int | None = None
    controlled_ns: int = 0
    """What its owner said last (:mod:`subnet.run.control`): no step begins; it ends after so many updates; when."""
    terms: list[Terms] = []
    """What its owner has changed, each from its ``first_step`` on, in that order."""
    rollback_to: int | None = None
    """Where its owner wants it back; None once it is there."""


def new_state() -> RunState:
    return RunState()


# --- what is frozen for the run ----------------------------------------------------------------------------------


def plan(state: RunState) -> RunPlanned:
    """The run; asking for it before ``RunPlanned`` is a mistake of ours."""
    if state.run is None:
        raise ValueError("no run is planned")
    return state.run


def config(state: RunState) -> RunConfig:
    return plan(state).config


def num_stages(state: RunState) -> int:
    return len(plan(state).cuts)


def num_microbatches(state: RunState) -> int:
    """Training items of a step: with lanes the lanes."""
    return config(state).num_items


def num_parts(state: RunState, microbatch: int) -> int:
    """Of how many parts the item's boundaries are: 0 where they are whole, as hold-out items and all without lanes are."""
    run = config(state)
    return run.parts_per_item if run.lanes.on and microbatch < run.num_items else 0


def group_of(state: RunState, stage: int) -> int:
    """The group that merges this stage's gradients."""
    for index, group in enumerate(plan(state).groups):
        if stage in group.stages:
            return index
    raise ValueError(f"stage {stage} is in no group")


def group_shape(state: RunState, group: int) -> GroupShape:
    return plan(state).groups[group]


def partitions_of(state: RunState, group: int, stage: int) -> tuple[int, ...]:
    """Partitions of the group that this stage holds, contributes to and may own."""
    return tuple(p for p, stages in enumerate(group_shape(state, group).partitions) if stage in stages)


def update_delay(state: RunState) -> int:
    return config(state).pipeline.update_delay


def end_step(state: RunState) -> int:
    """After how many updates the run ends: as its file or its owner says, or where its owner stopped it."""
    said = state.terms[-1].end if state.terms else 0
    return (said or config(state).run.steps) if state.stops_at is None else state.stops_at


def snapshot_due(state: RunState) -> bool:
    """Whether the state at ``next_step`` is to be stored before the run goes on."""
    version = state.next_step
    every, last = config(state).snapshot.every_steps, end_step(state)
    return version > 0 and (version % every == 0 or version == last)


# --- members -----------------------------------------------------------------------------------------------------


def agreed_root(state: RunState, stage: int) -> str | None:
    """The root most coldkeys report for this stage at ``next_step``; of equals, the first reported.

    With audits none is agreed on while live members differ about equals: the log says which it is.
    """
    reported = state.roots.get(stage)
    if not reported:
        return None
    most = max(map(len, reported.values()))
    equals = [root for root, coldkeys in reported.items() if len(coldkeys) == most]
    if len(equals) == 1 or not config(state).audit.on:
        return equals[0]
    members, version = state.members.values(), state.next_step
    live = {info.root for info in members if info.stage == stage and info.version == version}
    left = [root for root in equals if root in live]
    return left[0] if len(left) == 1 else None


def up_to_date(state: RunState, stage: int) -> list[Member]:
    """Members of the stage whose state is at ``next_step`` and agrees, in order."""
    root, version = agreed_root(state, stage), state.next_step
    members = state.members.items()
    return sorted(k for k, i in members if i.stage == stage and i.version == version and i.root == root)


def ready(state: RunState, stage: int) -> list[Member]:
    """Members that may get leases of the open steps at this stage, in order; none while no step is open.

    With ``update_delay`` 1 whoever has the state at ``next_step`` has made it from the one before (:func:`restore_point`),
    and keeps that one's weights until the step is sealed: so it can compute both steps.
    """
    if state.work is None or state.work.step != state.next_step:
        return []
    return up_to_date(state, stage)


def members_of(state: RunState, stage: int) -> list[Member]:
    return sorted(k for k, info in state.members.items() if info.stage == stage)


def member_of_boot(state: RunState, hotkey: str, boot: str) -> Member | None:
    """The incarnation this boot id was given in this term, whether it still lives or not."""
    return state.boots.get(hotkey, {}).get(boot)


# --- the open step -----------------------------------------------------------------------------------------------


def works(state: RunState) -> list[StepWork]:
    """The open steps, the older first: that is the one everybody waits for."""
    return [work for work in (state.work, state.ahead) if work is not None]


def work_at(state: RunState, step: int) -> StepWork | None:
    """The work of this step, if it is open."""
    return next((work for work in works(state) if work.step == step), None)


def may_open_ahead(state: RunState) -> bool:
    """Whether the step behind the open one may be planned: the state that it is computed from is there.

    Calibration has nothing behind it: the first step needs its scales. Nor is the last, evaluating step opened ahead.
    """
    work = state.work
    if work is None or state.ahead is not None or not update_delay(state):
        return False
    return 0 <= work.step < end_step(state) - 1


def item(state: RunState, step: int, microbatch: int, stage: int) -> Item | None:
    """The item, if it belongs to an open step."""
    work = work_at(state, step)
    if work is None or not 0 <= stage < len(work.items):
        return None
    return work.items[stage].get(microbatch)


def is_evaluation(state: RunState, microbatch: int) -> bool:
    return microbatch >= num_microbatches(state)


def epoch(state: RunState, member: Member, step: int | None = None) -> int:
    """How many of this member's partials of this open step (else the one that is merged) are void."""
    work = state.work if step is None else work_at(state, step)
    return work.epochs.get(member, 0) if work else 0


def merge_of(state: RunState, step: int, group: int) -> Merge | None:
    work = state.work
    if work is None or work.step != step or not 0 <= group < len(work.merges):
        return None
    return work.merges[group]


def is_sealed(state: RunState, stage: int, work: StepWork | None = None) -> bool:
    """Whether the open step's gradient of this stage is final; ``work``: of this one, the step ahead's never is."""
    return (work is None or work is state.work) and group_of(state, stage) in state.seals


def counted(state: RunState) -> list[int]:
    """Training microbatches of the open step that aren't skipped, in order."""
    work = state.work
    if work is None:
        return []
    return [m for m in range(work.num_training) if m not in work.skipped]


def num_counted(work: StepWork) -> int:
    return work.num_training - sum(m < work.num_training for m in work.skipped)


def done_set(state: RunState, member: Member) -> tuple[int, ...]:
    """Training microbatches of the open step this member has done leases on, in order: its m-set."""
    work = state.work
    info = state.members.get(member)
    if work is None or info is None:
        return ()
    items = work.items[info.stage]
    return tuple(m for m in sorted(work.held.get(member, ())) if m < work.num_training and items[m].status == DONE)


def holders(state: RunState, group: int) -> set[Member]:
    """Members with a lease, open or done, on a training item of the group at the open step."""
    work, stages = state.work, group_shape(state, group).stages
    if work is None:
        return set()
    held: set[Member] = set()
    for member, microbatches in work.held.items():
        info = state.members.get(member)
        if info is not None and info.stage in stages and any(m < work.num_training for m in microbatches):
            held.add(member)
    return held


def stage_settled(work: StepWork, stage: int) -> bool:
    """Every training microbatch is done or skipped at this stage."""
    return work.done[stage] == num_counted(work)


def evaluation_settled(state: RunState) -> bool:
    """Every evaluation item of the open step is done or skipped at the last stage."""
    work = state.work
    if work is None or not work.num_evaluation:
        return True
    first = num_microbatches(state)
    skipped = sum(m >= first for m in work.skipped)
    return work.evaluated[-1] == work.num_evaluation - skipped


def evaluation_losses(state: RunState) -> tuple[int, ...]:
    """fp32 bits of the hold-out losses of the open step, in item order."""
    work = state.work
    if work is None:
        return ()
    first, last = num_microbatches(state), work.items[-1]
    losses = (last[m].loss_bits for m in range(first, first + work.num_evaluation) if m not in work.skipped)
    return tuple(bits for bits in losses if bits is not None)


# --- snapshots and log -------------------------------------------------------------------------------------------


class RestorePoint(msgspec.Struct, frozen=True):
    """Where a joiner of a stage starts: the state ``version`` in blob ``manifest`` (``whole``: of the whole model)."""

    version: int
    manifest: str
    whole: bool


def oldest_needed(state: RunState) -> int:
    """The oldest state that an open step may still be computed from: with ``update_delay`` 1 the one before the newest."""
    return state.next_step - update_delay(state)


def restore_point(state: RunState, stage: int, coldkey: str = "") -> RestorePoint:
    """The newest snapshot a joiner may trust: verified, or stored by its own coldkey; else the run's first.

    None newer than what the open steps need: a joiner passes through that state on its way.
    """
    for snapshot in reversed(state.snapshots.get(stage, [])):
        if snapshot.step > oldest_needed(state):
            continue
        if snapshot.verified or (coldkey and snapshot.coldkey == coldkey):
            return RestorePoint(version=snapshot.step, manifest=snapshot.manifest, whole=False)
    return RestorePoint(version=CALIBRATION_STEP, manifest=plan(state).snapshot, whole=True)


def stored_snapshot(state: RunState, stage: int, version: int) -> StoredSnapshot | None:
    """The snapshot of this stage at this version, if it is stored."""
    for snapshot in reversed(state.snapshots.get(stage, [])):
        if snapshot.step == version:
            return snapshot
    return None
