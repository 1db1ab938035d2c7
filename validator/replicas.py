"""Who serves which stage, by measured speed: where a joiner goes, and when a member moves to a stage that starves.

Members move between two steps, when they hold nothing, and only after the need for it has held for a stated time and number
of steps; or at once where a stage has had nobody for long. All of it through :mod:`validator.stage_plan`.
"""

from __future__ import annotations

from statistics import median

from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import RunState
from subnet.words import Member
from validator import stage_plan
from validator.decision import Decision, because
from validator.policy import Policy
from validator.stage_plan import Move, Placement, Replica
from validator.watch import Imbalance, Watch

MIN_COST = 1e-9


def stage_costs(state: RunState) -> list[float]:
    """Relative cost of a microbatch at each stage, from the units it has."""
    run = st.plan(state)
    return [max(cost, MIN_COST) for cost in stage_plan.stage_costs(run.unit_flops_per_token, run.cuts)]


def choose_stage(state: RunState, hotkey: str, watch: Watch) -> Placement:
    """Where a joiner goes; an older incarnation of its hotkey is about to end and doesn't count."""
    return stage_plan.place_joiner(replicas(state, watch, without=hotkey))


def replicas(state: RunState, watch: Watch, *, without: str = "") -> list[list[Replica]]:
    """The live members of each stage with their rates: measured, else as their stage's others, else by cost.

    The last member of a stage that has the run's state isn't free: the stage would stand still until another has it.
    """
    costs = stage_costs(state)
    members = [(member, info) for member, info in sorted(state.members.items()) if member.hotkey != without]
    known = {member: seconds for member, _ in members if (seconds := watch.item_s(member)) is not None}
    each_cost_s = median(known[k] / costs[info.stage] for k, info in members if k in known) if known else 1.0
    by_stage: list[list[Member]] = [[] for _ in costs]
    for member, info in members:
        by_stage[info.stage].append(member)
    found: list[list[Replica]] = []
    for here, cost in zip(by_stage, costs, strict=True):
        measured = [known[member] for member in here if member in known]
        usual_s = sum(measured) / len(measured) if measured else each_cost_s * cost
        num_settled = sum(_is_settled(state, member) for member in here)
        free = {member: num_settled > 1 or not _is_settled(state, member) for member in here}
        found.append([Replica(member, 1.0 / known.get(member, usual_s), free[member]) for member in here])
    return found


def _is_settled(state: RunState, member: Member) -> bool:
    """It has the run's state, or had it before the last seal and needs only that one."""
    version = state.members[member].version
    return version is not None and version >= state.next_step - 1


# --- moves -------------------------------------------------------------------------------------------------------


def decide_moves(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    return _empty_stage(now_s, state, watch, policy) or _starving_stage(now_s, state, watch, policy)


def _empty_stage(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """A stage with nobody for long gets a replica of a stage that keeps another one."""
    waits = False
    for stage in range(st.num_stages(state)):
        key = ("empty_stage", stage)
        here = st.members_of(state, stage) if watch.index is None else watch.index.sync(state).by_stage[stage]
        if here:
            watch.restart_clock(key, now_s)
        elif watch.age(key, now_s) >= policy.empty_stage_s:
            waits = True
    if not waits:
        return []
    move = stage_plan.move_for_empty(replicas(state, watch), stage_costs(state))
    if move is None:
        return []
    watch.restart_clock(("empty_stage", move.target), now_s)
    return _moved(now_s, state, watch, move)


def _starving_stage(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """Looked at once between two steps; a move that would help has to be one for long before it is made.

    Where steps overlap it is looked at with each seal, and before a move the open step ends alone: nothing is redone.
    """
    step = state.next_step
    between = state.work is None
    if watch.balanced_step == step or not (between or st.update_delay(state)):
        return []
    watch.balanced_step, watch.drains = step, False
    if step < 0 or step + policy.rebalance_steps >= st.end_step(state):
        return []
    move = stage_plan.move_for_balance(replicas(state, watch), stage_costs(state), policy.rebalance_factor)
    if move is None:
        watch.imbalance = None
        return []
    since = watch.imbalance
    if since is None or since.target != move.target:
        since = watch.imbalance = Imbalance(move.target, step, now_s)
    long_enough = now_s - since.since_s >= policy.rebalance_s and step - since.since_step >= policy.rebalance_steps
    if not long_enough or now_s - watch.moved_s < policy.rebalance_gap_s:
        return []
    if not between:
        watch.drains = True
        return []
    return _moved(now_s, state, watch, move)


def _moved(now_s: float, state: RunState, watch: Watch, move: Move) -> list[Decision]:
    """It leaves and joins anew, where :func:`choose_stage` puts it then; nothing is held against it."""
    watch.moved_s, watch.imbalance = now_s, None
    watch.excuse(move.member.hotkey, state.absences.get(move.member.hotkey, 0))
    reason = because(move.reason.code, from_stage=move.source, to_stage=move.target, **move.reason.numbers)
    return [Decision(ev.Gone(move.member, "replaced"), reason)]
