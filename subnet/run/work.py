"""What events about work items do to the state: leases, receipts, voids, skips.

The one rule of it: a partial counts for what the fold says its member has done, and a void partial's items are open again.
"""

from __future__ import annotations

from subnet.run.events import (
    Backwarded,
    Forwarded,
    ItemFailed,
    Leased,
    MicrobatchSkipped,
    NotAccumulated,
    PartsMade,
    ReplayLeased,
    Revoking,
    Voided,
)
from subnet.run.invariants import require
from subnet.run.state import (
    DONE,
    GATHERING,
    LIVE,
    OPEN,
    REVOKING,
    SEALED,
    Failure,
    Item,
    Merge,
    Replay,
    RunState,
    Saying,
    StepWork,
    config,
    group_of,
    is_evaluation,
    is_sealed,
    num_counted,
    num_parts,
    work_at,
)
from subnet.words import Member

MOST_CONTRADICTIONS = 3


def open_work(state: RunState, step: int) -> StepWork:
    """The work of ``step``, which must be open."""
    work = work_at(state, step)
    require(work is not None, f"step {step} isn't open")
    assert work is not None
    return work


def _item(state: RunState, step: int, microbatch: int, stage: int) -> tuple[StepWork, Item]:
    work = open_work(state, step)
    require(0 <= stage < len(work.items) and microbatch in work.items[stage], f"no item t{step}/m{microbatch}/s{stage}")
    return work, work.items[stage][microbatch]


def _leased_item(state: RunState, event: Revoking | NotAccumulated | Forwarded | Backwarded | ItemFailed) -> Item:
    """The item of an event, whose present lease must be of the event's generation."""
    _, found = _item(state, event.step, event.microbatch, event.stage)
    name = f"t{event.step}/m{event.microbatch}/s{event.stage} generation {event.generation}"
    require(found.status in (LIVE, REVOKING) and found.generation == event.generation, f"{name} has no such lease")
    return found


def apply_leased(state: RunState, event: Leased) -> None:
    work, found = _item(state, event.step, event.microbatch, event.stage)
    name = f"t{event.step}/m{event.microbatch}/s{event.stage}"
    evaluation = is_evaluation(state, event.microbatch)
    doubted = evaluation and found.status == DONE and may_evaluate_again(state, work, event.stage, event.microbatch)
    free = found.status == OPEN or (evaluation and found.status == REVOKING) or doubted
    require(free, f"{name} is leased, but its lease is {found.status}")
    require(event.microbatch not in work.skipped, f"{name} is leased, but skipped")
    require(evaluation or not is_sealed(state, event.stage, work), f"{name} is leased, but sealed")
    require(not evaluation or work is state.work, f"{name} evaluates a state that isn't there yet")
    require(event.generation == found.generation + 1, f"{name} jumps to generation {event.generation}")
    info = state.members.get(event.member)
    require(info is not None and info.stage == event.stage, f"{name} is leased to {event.member}, not of that stage")
    if doubted:
        reopen(work, event.stage, event.microbatch)
    elif found.status != OPEN:
        _let_go(work, found, event.microbatch)
    found.status, found.member, found.generation, found.again = LIVE, event.member, event.generation, False
    _forget_results(found)
    work.undealt[event.stage].discard(event.microbatch)
    work.live[event.stage].add(event.microbatch)
    work.held.setdefault(event.member, set()).add(event.microbatch)


def may_evaluate_again(state: RunState, work: StepWork, stage: int, microbatch: int) -> bool:
    """With audits, a hold-out item whose output nobody finds may be done again, as long as nobody has computed from it."""
    after = stage + 1
    return config(state).audit.on and after < len(work.items) and not work.items[after][microbatch].forwarded


def apply_replay_leased(state: RunState, event: ReplayLeased) -> None:
    work, _ = _item(state, event.step, event.microbatch, event.stage)
    info = state.members.get(event.member)
    require(info is not None and info.stage == event.stage, f"a replay for {event.member}, not of stage {event.stage}")
    key = (event.stage, event.microbatch, event.backward)
    old = work.replays.get(key)
    require(event.generation == (old.generation if old else 0) + 1, f"replay {key} jumps to {event.generation}")
    work.replays[key] = Replay(event.member, event.generation)


def apply_revoking(state: RunState, event: Revoking) -> None:
    found = _leased_item(state, event)
    require(found.status == LIVE, "a lease is revoked twice")
    found.status = REVOKING


def apply_not_accumulated(state: RunState, event: NotAccumulated) -> None:
    found = _leased_item(state, event)
    require(found.status == REVOKING, "a lease is handed back that wasn't revoked")
    reopen(open_work(state, event.step), event.stage, event.microbatch)


def apply_forwarded(state: RunState, event: Forwarded) -> None:
    found = _leased_item(state, event)
    require(not found.forwarded, "an item is forwarded twice")
    found.forwarded, found.forward_hash = True, event.output
    _note_said(state, event.step, event.microbatch, event.stage)
    if is_evaluation(state, event.microbatch):
        work = open_work(state, event.step)
        found.loss_bits = event.loss_bits
        found.status = DONE
        work.live[event.stage].discard(event.microbatch)
        _let_go(work, found, event.microbatch)
        work.evaluated[event.stage] += 1


def apply_backwarded(state: RunState, event: Backwarded) -> None:
    found = _leased_item(state, event)
    require(not is_evaluation(state, event.microbatch), "an evaluation item has a backward")
    work = open_work(state, event.step)
    if not found.forwarded:
        found.forward_hash = event.forward
    found.status, found.forwarded = DONE, True
    found.backward_hash, found.loss_bits = event.output, event.loss_bits
    _note_said(state, event.step, event.microbatch, event.stage)
    work.live[event.stage].discard(event.microbatch)
    work.done[event.stage] += 1


def apply_parts_made(state: RunState, event: PartsMade) -> None:
    """Also of a lane that is receipted: whoever has it now may not be reached otherwise."""
    _, found = _item(state, event.step, event.microbatch, event.stage)
    name = f"t{event.step}/m{event.microbatch}/s{event.stage}"
    require(found.status != OPEN and found.generation == event.generation, f"parts of {name}, which has no such lease")
    held = found.backward_parts if event.backward else found.forward_parts
    last = event.first + len(event.hashes) - 1
    require(
        event.first == len(held) + 1 and last <= num_parts(state, event.microbatch), f"parts of {name} out of order"
    )
    if event.backward:
        found.backward_parts = (*held, *event.hashes)
    else:
        found.forward_parts = (*held, *event.hashes)


def _note_said(state: RunState, step: int, microbatch: int, stage: int) -> None:
    """Outputs of an item were receipted. Where they differ from what was said before, whoever computed from that must again.

    The same work gives the same bits, so this happens only where somebody lied.
    """
    if not config(state).audit.on or is_evaluation(state, microbatch):
        return
    work, found = _item(state, step, microbatch, stage)
    by_forward, by_backward = _sayings(work, stage, microbatch, found)
    if found.forward_hash:
        if found.said_forward and found.said_forward != found.forward_hash:
            _mark_stale(state, work, stage + 1, microbatch, backward=False)
            _contradicted(work, found, found.forward_by, by_forward)
        found.said_forward, found.forward_by = found.forward_hash, by_forward
    if found.backward_hash:
        if found.said_backward and found.said_backward != found.backward_hash:
            _mark_stale(state, work, stage - 1, microbatch, backward=True)
            _contradicted(work, found, found.backward_by, by_backward)
        found.said_backward, found.backward_by = found.backward_hash, by_backward


def _sayings(work: StepWork, stage: int, microbatch: int, found: Item) -> tuple[Saying | None, Saying | None]:
    """Who says what it says now of which inputs; None where it can't be told which: they aren't receipted, or stale."""
    below = work.items[stage - 1][microbatch].forward_hash if stage > 0 else ""
    above = work.items[stage + 1][microbatch].backward_hash if stage + 1 < len(work.items) else ""
    if found.member is None or (stage, microbatch) in work.stale or (stage > 0 and not below):
        return None, None
    forward = Saying(found.member.hotkey, below)
    return forward, Saying(forward.hotkey, below, above) if above or stage + 1 == len(work.items) else None


def _contradicted(work: StepWork, found: Item, before: Saying | None, by: Saying | None) -> None:
    """Who is honest says one thing of the inputs that are receipted: a receipt of others is refused."""
    if by is not None and before == by:
        found.contradictions += 1
        if found.contradictions >= MOST_CONTRADICTIONS:
            work.fickle.add(by.hotkey)


def _mark_stale(state: RunState, work: StepWork, stage: int, microbatch: int, *, backward: bool) -> None:
    if not 0 <= stage < len(work.items) or is_sealed(state, stage, work):
        return
    found = work.items[stage][microbatch]
    if found.status == DONE or (found.status in (LIVE, REVOKING) and found.forwarded and not backward):
        work.stale.add((stage, microbatch))


def apply_voided(state: RunState, event: Voided) -> None:
    work = open_work(state, event.step)
    info = state.members.get(event.member)
    require(info is not None and info.stage == event.stage, f"{event.member} is void at stage {event.stage}")
    require(not is_sealed(state, event.stage, work), f"{event.member} is void at stage {event.stage}, which is sealed")
    void_partial(state, work, event.member, again=event.why == "inputs")
    if event.why == "silent":
        work.silences[event.member] = work.silences.get(event.member, 0) + 1


def apply_item_failed(state: RunState, event: ItemFailed) -> None:
    found = _leased_item(state, event)
    assert found.member is not None
    failure = Failure(found.member.hotkey, event.generation, event.failure)
    found.failures = (*found.failures, failure)
    reopen(open_work(state, event.step), event.stage, event.microbatch)


def apply_microbatch_skipped(state: RunState, event: MicrobatchSkipped) -> None:
    """No lease on it again anywhere; partials whose members hold or held a current lease on it are void."""
    work, _ = _item(state, event.step, event.microbatch, event.stage)
    m = event.microbatch
    require(m not in work.skipped, f"microbatch {m} is skipped twice")
    evaluation = is_evaluation(state, m)
    sealed = work is state.work and state.seals
    require(evaluation or not sealed, f"microbatch {m} is skipped after a seal of its step")
    require(evaluation or num_counted(work) > 1, f"microbatch {m} is skipped, the last one of its step")
    for stage, items in enumerate(work.items):
        found = items[m]
        if found.status != OPEN:
            if not evaluation:
                void_skipped(state, work, found)
            if found.status != OPEN:
                reopen(work, stage, m)
        work.undealt[stage].discard(m)
    work.skipped.add(m)
    for key in [key for key in work.replays if key[1] == m]:
        del work.replays[key]
    if not evaluation:
        for merge in work.merges:
            reset_merge(merge)


def void_skipped(state: RunState, work: StepWork, found: Item) -> None:
    """Voids the partial of the holder of a skipped microbatch: it may have been added already."""
    if found.member is not None:
        void_partial(state, work, found.member)


def void_partial(state: RunState, work: StepWork, member: Member, *, again: bool = False) -> None:
    """Unless its stage is sealed: the member's leases, open or done, are open again, its epoch is one higher.

    ``again``: it is blameless, and does them again.

    Evaluation items it hasn't done are open again in any case: nothing of them is in a partial.
    """
    info = state.members[member]
    held = work.held.get(member, set())
    sealed = is_sealed(state, info.stage, work)
    training = {m for m in held if m < work.num_training}
    for m in sorted(held):
        if m not in training or not sealed:
            reopen(work, info.stage, m)
            work.items[info.stage][m].again = again
    if training and not sealed:
        work.epochs[member] = work.epochs.get(member, 0) + 1
        reset_merge(work.merges[group_of(state, info.stage)])


def drop_work(work: StepWork, member: Member) -> None:
    """Forgets what only matters of a present member; items of sealed stages stay done."""
    work.held.pop(member, None)
    work.epochs.pop(member, None)
    work.silences.pop(member, None)
    for key in [key for key, replay in work.replays.items() if replay.member == member]:
        del work.replays[key]


def reopen(work: StepWork, stage: int, microbatch: int) -> None:
    """The item has no lease any more; its holder is remembered as the last one."""
    found = work.items[stage][microbatch]
    if found.status == DONE:
        if microbatch < work.num_training:
            work.done[stage] -= 1
        else:
            work.evaluated[stage] -= 1
    _let_go(work, found, microbatch)
    found.status = OPEN
    _forget_results(found)
    work.stale.discard((stage, microbatch))
    work.live[stage].discard(microbatch)
    if microbatch not in work.skipped:
        work.undealt[stage].add(microbatch)


def _let_go(work: StepWork, found: Item, microbatch: int) -> None:
    if found.member is not None and found.member in work.held:
        work.held[found.member].discard(microbatch)
        if not work.held[found.member]:
            del work.held[found.member]


def _forget_results(found: Item) -> None:
    found.forwarded, found.forward_hash, found.backward_hash, found.loss_bits = False, "", "", None
    found.forward_parts, found.backward_parts = (), ()


def reset_merge(merge: Merge) -> None:
    """Ends a freeze, a reduce and a reveal; number, version and failed owners stay."""
    if merge.phase == SEALED:
        return
    merge.phase = GATHERING
    merge.commitments = {}
    clear_reduce(merge)


def clear_reduce(merge: Merge) -> None:
    """What belongs to one version alone; the seed with it: a known seed checks nothing."""
    merge.entries, merge.owners, merge.seconds = (), (), ()
    merge.merged, merge.fingerprints, merge.checks = {}, {}, {}
    merge.passed = set()
    merge.seed, merge.routed, merge.tracing = "", False, False
