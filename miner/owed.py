"""``owed(state, me, local)``: what a member has to do next, derived from the fold and its own data; pure.

Level-triggered: call it after every change and start what isn't started. Nothing is remembered of having said
something: a claim is owed until the fold shows its event. What the stream carries is effective or precedes what is, so
a seal that the fold shows may be acted on.
"""

from __future__ import annotations

from miner.local_view import BoundaryKey, LocalView
from miner.owed_boundaries import is_part, may_receipt, owed_given, owed_wanted, sources_of
from miner.owed_evidence import owed_evidence
from miner.owed_lanes import Lanes, lanes_at_work, owed_lane, owed_parts_given, owed_progress, owed_rooms
from miner.owed_merges import owed_merges
from miner.owed_mismatch import is_computing, owed_mismatch, wrong_input
from miner.owes import ApplySeal, Compute, Drop, MakeSnapshot, Owe, Refuse, Report, Restore, urgency
from miner.ways import receipted_hash
from subnet.protocol import messages as msg
from subnet.run import state as st
from subnet.run.state import Item, RunState, StepWork
from subnet.words import Member


def owed(state: RunState, me: Member | None, local: LocalView) -> list[Owe]:
    """Everything that isn't done or under way, most urgent first."""
    if me is None or state.run is None or state.finished is not None:
        return []
    info = state.members.get(me)
    if info is None:
        return []
    owes: list[Owe] = []
    owed_evidence(state, me, local, owes)
    owed_state(state, me, local, owes)
    if local.restored_stage == info.stage:
        version_of = st.config(state).version_of
        for work in st.works(state):
            if local.computes(version_of(work.step) if work.num_training else work.step):
                owed_work(state, work, me, info.stage, local, owes)
        if local.version == state.next_step:
            if state.work is not None:
                owed_merges(state, state.work, me, info.stage, local, owes)
            owed_snapshot(state, me, info.stage, local, owes)
    fresh = [owe for owe in owes if owe not in local.jobs]
    return sorted(fresh, key=urgency)


# --- state -------------------------------------------------------------------------------------------------------


def owed_state(state: RunState, me: Member, local: LocalView, owes: list[Owe]) -> None:
    """Restore a snapshot, apply the log, say where one is."""
    info = state.members[me]
    behind = local.version is None or (local.version != state.next_step and local.version not in state.sealed)
    if behind or local.restored_stage != info.stage:
        point = st.restore_point(state, info.stage, info.coldkey)
        owes.append(Restore(info.stage, point.version, point.manifest, point.whole))
    elif local.version is not None and local.version in state.sealed:
        owes.append(ApplySeal(local.version))
    elif local.version is not None and local.version == state.next_step and info.version != local.version:
        owes.append(Report(msg.UpdatedClaim(local.version, local.root)))


def owed_snapshot(state: RunState, me: Member, stage: int, local: LocalView, owes: list[Owe]) -> None:
    """The state is still that of ``next_step``: the next seal waits for its snapshot."""
    if state.orders.get(stage) != me:
        return
    stored = local.snapshots.get(state.next_step)
    if stored is None or stored.root != local.root:  # of the stage it served before
        owes.append(MakeSnapshot(state.next_step, stage))
    else:
        owes.append(Report(msg.SnapshotClaim(state.next_step, stage, stored.manifest, stored.root)))


# --- work --------------------------------------------------------------------------------------------------------


def owed_work(state: RunState, work: StepWork, me: Member, stage: int, local: LocalView, owes: list[Owe]) -> None:
    """Of one open step, the state that it is computed from being there; hold-out items are of the state it updates."""
    items = work.items[stage]
    lanes = lanes_at_work(state, work, me, stage, local)
    owed_rooms(work, stage, lanes, local, owes)
    for m in sorted(work.held.get(me, ())):
        found = items[m]
        sealed = m < work.num_training and st.is_sealed(state, stage, work)
        if not sealed and owed_mismatch(state, work, stage, m, found, local, owes):
            continue
        if m >= work.num_training:
            if local.computes(work.step):
                _owed_evaluation(state, work, me, stage, m, found, local, owes)
        elif not sealed:
            _owed_lease(state, work, me, stage, m, found, local, owes, lanes)
    for (at, m, backward), replay in sorted(work.replays.items()):
        if at == stage and replay.member == me and (m < work.num_training or local.computes(work.step)):
            _owed_replay(state, work, me, stage, m, backward, local, owes, lanes)
    owed_given(state, work, me, stage, local, owes)
    if st.num_parts(state, 0):
        owed_parts_given(state, work, me, stage, local, owes)


def _owed_lease(
    state: RunState,
    work: StepWork,
    me: Member,
    stage: int,
    m: int,
    found: Item,
    local: LocalView,
    owes: list[Owe],
    lanes: Lanes,
) -> None:
    """A training lease of mine: compute, add once, say so; or hand it back and never touch it again."""
    step, generation = work.step, found.generation
    if found.status == st.DONE:
        return
    if local.added.get((step, m, st.epoch(state, me, step))) == generation:
        outputs = [BoundaryKey(step, m, stage, backward) for backward in (False, True)]
        if all(may_receipt(state, work, me, output, local) for output in outputs):
            owes.append(Report(_backward_receipt(work, stage, m, found, local)))
    elif found.status == st.REVOKING:
        refused = (step, m, generation) in local.refused
        owes.append(
            Report(msg.NotAccumulatedClaim(step, m, stage, generation)) if refused else Refuse(step, m, generation)
        )
    elif stays_refused(local, step, m, generation):
        return
    elif (step, m, generation) in local.failures:
        failure, reason = local.failures[step, m, generation]
        owes.append(Report(msg.FailedClaim(step, m, stage, generation, failure, reason)))
    elif st.num_parts(state, m):
        if m in lanes:
            owed_lane(state, work, me, stage, m, generation, local, owes)
            owed_progress(work, stage, m, generation, local, owes)
    else:
        _owed_passes(state, work, me, stage, m, found, local, owes)


def _backward_receipt(work: StepWork, stage: int, m: int, found: Item, local: LocalView) -> msg.BackwardReceipt:
    """With the forward's output where that wasn't said by itself: whoever has to fetch it knows it by that."""
    output, forward = BoundaryKey(work.step, m, stage, True), BoundaryKey(work.step, m, stage, False)
    return msg.BackwardReceipt(
        step=work.step,
        microbatch=m,
        stage=stage,
        generation=found.generation,
        input=_made_from(output, BoundaryKey(work.step, m, stage + 1, True), local),
        output=local.boundaries.get(output, ""),
        compute_s=local.compute_s.get(output, 0.0),
        loss_bits=local.losses.get((work.step, m)) if stage == len(work.items) - 1 else None,
        forward="" if found.forwarded else local.boundaries.get(forward, ""),
    )


def _made_from(output: BoundaryKey, entry: BoundaryKey, local: LocalView) -> str:
    """The input that the output was made from, which may have been had anew since; "" at an end of the pipeline."""
    made = local.made_from.get(output)
    if made is None:
        return local.boundaries.get(entry, "")
    return made.gradient if output.backward else made.x


def stays_refused(local: LocalView, step: int, m: int, generation: int) -> bool:
    """Whether this lease was handed back: nothing is added under it ever, for somebody else may have added the item."""
    return (step, m, generation) in local.refused


def _owed_passes(
    state: RunState, work: StepWork, me: Member, stage: int, m: int, found: Item, local: LocalView, owes: list[Owe]
) -> None:
    """Forward as soon as the input is there, backward as soon as the gradient is; the last stage does both at once."""
    step, last = work.step, stage == len(work.items) - 1
    entry = BoundaryKey(step, m, stage - 1, False)
    forward, gradient = BoundaryKey(step, m, stage, False), BoundaryKey(step, m, stage + 1, True)
    if stage and entry not in local.boundaries:
        owed_wanted(state, work, me, entry, local, owes)
        return
    if not last:
        if forward not in local.boundaries:
            owes.append(Compute(step, m, stage, backward=False, generation=found.generation))
            return
        if not found.forwarded and may_receipt(state, work, me, forward, local):
            owes.append(Report(_forward_receipt(work, stage, m, found, local)))
        if gradient not in local.boundaries:
            owed_wanted(state, work, me, gradient, local, owes)
            return
    epoch = st.epoch(state, me, step)
    owes.append(Compute(step, m, stage, backward=True, generation=found.generation, epoch=epoch))


def _forward_receipt(
    work: StepWork, stage: int, m: int, found: Item, local: LocalView, loss_bits: int | None = None
) -> msg.ForwardReceipt:
    output = BoundaryKey(work.step, m, stage, False)
    return msg.ForwardReceipt(
        step=work.step,
        microbatch=m,
        stage=stage,
        generation=found.generation,
        input=_made_from(output, BoundaryKey(work.step, m, stage - 1, False), local),
        output=local.boundaries.get(output, ""),
        compute_s=local.compute_s.get(output, 0.0),
        loss_bits=loss_bits,
    )


def _owed_evaluation(
    state: RunState, work: StepWork, me: Member, stage: int, m: int, found: Item, local: LocalView, owes: list[Owe]
) -> None:
    """Forward only; a revoked one may still be finished: whoever is first counts."""
    step, last = work.step, stage == len(work.items) - 1
    if (step, m, found.generation) in local.failures:
        failure, reason = local.failures[step, m, found.generation]
        owes.append(Report(msg.FailedClaim(step, m, stage, found.generation, failure, reason)))
        return
    output = BoundaryKey(step, m, stage, False)
    computed = (step, m) in local.evaluated if last else output in local.boundaries
    if computed:
        loss = local.losses.get((step, m)) if last else None
        if may_receipt(state, work, me, output, local):
            owes.append(Report(_forward_receipt(work, stage, m, found, local, loss)))
        return
    entry = BoundaryKey(step, m, stage - 1, False)
    if stage and entry not in local.boundaries:
        owed_wanted(state, work, me, entry, local, owes)
    else:
        compute = Compute(step, m, stage, backward=False, generation=found.generation, evaluation=True)
        owes.append(compute)


def _owed_replay(
    state: RunState,
    work: StepWork,
    me: Member,
    stage: int,
    m: int,
    backward: bool,
    local: LocalView,
    owes: list[Owe],
    lanes: Lanes,
) -> None:
    """The boundary again, for whoever lacks it; nothing is added."""
    step = work.step
    if m not in work.held.get(me, ()) and not st.is_sealed(state, stage, work):
        wrong = wrong_input(state, work, stage, m, local)
        if wrong is not None:
            if not is_computing(local, step, m):
                owes.append(Drop(wrong, stage))
            return
    if BoundaryKey(step, m, stage, backward) in local.boundaries:
        return
    if st.num_parts(state, m):
        if lanes.get(m, 0) is None:
            owed_lane(state, work, me, stage, m, None, local, owes)
        return
    entry, gradient = BoundaryKey(step, m, stage - 1, False), BoundaryKey(step, m, stage + 1, True)
    last = stage == len(work.items) - 1
    lacking = [
        key
        for key, needed in ((entry, stage > 0), (gradient, backward and not last))
        if needed and key not in local.boundaries
    ]
    for key in lacking:
        owed_wanted(state, work, me, key, local, owes)
    if not lacking:
        evaluation = st.is_evaluation(state, m)
        owes.append(Compute(step, m, stage, backward=backward, generation=None, evaluation=evaluation))


# --- questions the node asks on the way --------------------------------------------------------------------------


def may_add(state: RunState, me: Member, local: LocalView, owe: Compute) -> bool:
    """Asked right before a finished gradient is added, with nothing in between: is it still mine to add?"""
    if owe.generation is None or owe.evaluation or me not in state.members:
        return False
    found = st.item(state, owe.step, owe.microbatch, owe.stage)
    if found is None or found.member != me or found.generation != owe.generation or found.status == st.OPEN:
        return False
    if owe.epoch != st.epoch(state, me, owe.step) or stays_refused(local, owe.step, owe.microbatch, owe.generation):
        return False
    return (owe.step, owe.microbatch, owe.epoch) not in local.added


def accepts_boundary(state: RunState, me: Member, frame: msg.BoundaryFrame) -> bool:
    """A boundary is taken of an open step, for my stage, from who makes it, and with its receipted hash."""
    work, info = st.work_at(state, frame.step), state.members.get(me)
    if work is None or info is None:
        return False
    wanted = info.stage + 1 if frame.backward else info.stage - 1
    found = work.items[info.stage].get(frame.microbatch)
    if frame.stage != wanted or not 0 <= wanted < len(work.items) or found is None:
        return False
    if not is_part(state, frame.microbatch, frame.part):
        return False
    key = BoundaryKey(frame.step, frame.microbatch, frame.stage, frame.backward, frame.part)
    return frame.sender in sources_of(work, key) and receipted_hash(work, key) in ("", frame.hash)


def still_needs(state: RunState, me: Member, key: BoundaryKey, value: str) -> bool:
    """Of a boundary that was fetched from the store: is it still of the open step, and what its maker has said?"""
    work, info = state.work, state.members.get(me)
    if work is None or info is None or work.step != key.step or abs(key.stage - info.stage) != 1:
        return False
    return receipted_hash(work, key) in ("", value)


def incarnation(state: RunState, hotkey: str, boot: str) -> tuple[Member | None, bool]:
    """My member, if this boot id has a live one; and whether the boot id is used up, so that it takes a new one."""
    member = st.member_of_boot(state, hotkey, boot)
    if member is not None and member in state.members:
        return member, False
    return None, member is not None
