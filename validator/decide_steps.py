"""When steps open and are sealed, which snapshots are stored by whom, and when the run is finished."""

from __future__ import annotations

import struct

from subnet.run import audits
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.config import RunConfig
from subnet.run.schedule import bits_fp32, norm_and_coefficient, step_scalars, terms_of
from subnet.run.state import RunState, StepWork
from subnet.words import CALIBRATION_STEP
from validator.decision import Decision, FinishRun, because
from validator.ownership import rendezvous
from validator.policy import Policy
from validator.watch import Watch


def decide_steps(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    return _plan(state, watch) or _snapshots(now_s, state, watch, policy) or _seal(state) or _finish(state, watch)


def _plan(state: RunState, watch: Watch) -> list[Decision]:
    """The step that is due; and the one behind it as soon as its state is there, unless members are to move first."""
    if state.paused or watch.held or (state.work is not None and (watch.drains or not st.may_open_ahead(state))):
        return []
    config, step = st.config(state), state.next_step + (state.work is not None)
    last = st.end_step(state)
    if not audits.may_plan(state, step):
        return []
    num_evaluation = config.num_evaluation_items if config.evaluates_at(step, last) else 0
    if step == last and not num_evaluation:
        return []
    event = ev.StepPlanned(
        step=step,
        num_training=config.num_items if step < last else 0,
        num_evaluation=num_evaluation,
        scalars=step_scalars(config, step, terms_of(state.terms, step)) if CALIBRATION_STEP < step < last else None,
    )
    return [Decision(event, because("step_is_due", step=step))]


def _snapshots(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """One replica a stage stores the state; another is asked when it is gone or late."""
    if not st.snapshot_due(state):
        return []
    decided: list[Decision] = []
    for stage in range(st.num_stages(state)):
        replicas = st.up_to_date(state, stage)
        if not replicas or st.stored_snapshot(state, stage, state.next_step) is not None:
            continue
        ordered = state.orders.get(stage)
        age_s = watch.age(("snapshot", stage, str(ordered)), now_s) if ordered else 0.0
        if ordered in replicas and (age_s < watch.waits.snapshot_s(state, policy, stage) or len(replicas) == 1):
            continue
        unasked = [k for k in replicas if not watch.is_timed(("snapshot", stage, str(k)))]
        if unasked:
            chosen = rendezvous("snapshot", state.next_step, stage, unasked)
        else:
            chosen = max(replicas, key=lambda k: (watch.age(("snapshot", stage, str(k)), now_s), k))
        watch.restart_clock(("snapshot", stage, str(chosen)), now_s)
        event = ev.SnapshotOrdered(state.next_step, stage, chosen)
        decided.append(Decision(event, because("snapshot_due" if ordered is None else "snapshot_late", age_s=age_s)))
    return decided


def snapshots_stored(state: RunState) -> bool:
    """Whether what is due of this step's state is in the store."""
    if not st.snapshot_due(state):
        return True
    stages = range(st.num_stages(state))
    return all(st.stored_snapshot(state, stage, state.next_step) is not None for stage in stages)


def _seal(state: RunState) -> list[Decision]:
    work = state.work
    if work is None or not work.num_training or len(state.seals) < len(st.plan(state).groups):
        return []
    settled = all(st.stage_settled(work, stage) for stage in range(st.num_stages(state)))
    if not settled or not st.evaluation_settled(state) or not snapshots_stored(state):
        return []
    return [Decision(step_sealed(state, work), because("all_groups_sealed", step=work.step))]


def step_sealed(state: RunState, work: StepWork) -> ev.StepSealed:
    """The seal of the open step: norm and coefficient from the groups' exact squares, loss in fp64 in m order."""
    config: RunConfig = st.config(state)
    num_counted = st.num_counted(work)
    norm, coefficient_bits = 0.0, 0
    if work.step != CALIBRATION_STEP:
        squares = sum(int(seal.squares, 16) for seal in state.seals.values())
        norm, coefficient_bits = norm_and_coefficient(squares, num_counted, config.merged_clip_norm)
    return ev.StepSealed(
        step=work.step,
        num_counted=num_counted,
        norm_bits=fp64_bits(norm),
        coefficient_bits=coefficient_bits,
        loss_bits=fp64_bits(mean_loss(state, work)),
        tokens=num_counted * config.tokens_per_item,
        evaluation=st.evaluation_losses(state),
    )


def mean_loss(state: RunState, work: StepWork) -> float:
    """fp64 sum of the fp32 losses in microbatch order, over the counted microbatches, divided by their number."""
    total = 0.0
    for m in st.counted(state):
        bits = work.items[-1][m].loss_bits
        total += bits_fp32(bits) if bits is not None else 0.0
    return total / st.num_counted(work)


def fp64_bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


def _finish(state: RunState, watch: Watch) -> list[Decision]:
    """After the last update, its evaluation and its snapshots: the shell computes the run root and says so."""
    end = st.end_step(state)
    if state.next_step != end or not snapshots_stored(state):
        return []
    if state.work is None and st.config(state).evaluates_at(end, end):
        return []
    if not st.evaluation_settled(state) or not audits.all_audited(state):
        return []
    stored = [st.stored_snapshot(state, stage, state.next_step) for stage in range(st.num_stages(state))]
    manifests = tuple(snapshot.manifest for snapshot in stored if snapshot is not None)
    action = FinishRun(state.next_step, manifests, st.evaluation_losses(state))
    if action in watch.started:
        return []
    watch.started.add(action)
    return [Decision(action, because("run_complete", step=state.next_step))]
