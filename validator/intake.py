"""Turns what members say into events: a claim becomes its event if, and only if, the event may follow the state.

Pure and idempotent: what the fold shows already, what is late, and what its sender has no right to say is ignored with
a reason. A claim is repeated until its event is seen, so ignoring loses nothing.
"""

from __future__ import annotations

from subnet.errors import Refusal
from subnet.numerics.owners import owners_of
from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import Item, Merge, RunState
from subnet.words import CALIBRATION_STEP, Commitment, Member
from validator import intake_audits
from validator.intake_audits import Admitted as Admitted
from validator.intake_audits import Ignored as Ignored
from validator.lane_clocks import note_lane, parts_made
from validator.policy import Policy
from validator.replicas import choose_stage
from validator.suspects import note_lost
from validator.watch import Watch

MAX_SQUARES_DIGITS = 256


def blobs_to_confirm(claim: msg.AnyClaim) -> tuple[str, ...]:
    """Store addresses that must be seen in the store before the claim is admitted (``Watch.blob_confirmed``).

    Maxima have no linear fingerprint: at calibration every replica checks by merging the stored slices again.
    """
    match claim:
        case msg.MergedClaim():
            return (claim.blob,)
        case msg.SnapshotClaim():
            return (claim.manifest,)
        case msg.UnusableClaim():
            return (claim.hash,)
        case msg.CommitClaim() if claim.step == CALIBRATION_STEP:
            return tuple(value for _, value in claim.commitment.hashes)
        case _:
            return ()


def boundary_to_confirm(state: RunState, member: Member, claim: msg.AnyClaim) -> tuple[str, ...]:
    """The output of an evaluation item that goes through the store: no void can open such an item again."""
    if not isinstance(claim, msg.ForwardReceipt) or state.run is None or member not in state.members:
        return ()
    by_store = st.config(state).pipeline.boundaries == "store" or not state.members[member].reachable
    return (claim.output,) if claim.output and by_store and st.is_evaluation(state, claim.microbatch) else ()


def admit(state: RunState, member: Member, claim: msg.AnyClaim, watch: Watch) -> Admitted:
    """The events that the claim makes now; apply them before the next claim is admitted."""
    if member not in state.members:
        return Ignored("this incarnation isn't a member")
    if isinstance(claim, msg.LeavingClaim):
        return [ev.Gone(member, "left")]
    if state.finished is not None:
        return Ignored("the run is finished")
    match claim:
        case msg.UpdatedClaim():
            return _updated(state, member, claim)
        case msg.ForwardReceipt():
            return _forwarded(state, member, claim, watch)
        case msg.BackwardReceipt():
            return _backwarded(state, member, claim, watch)
        case msg.NotAccumulatedClaim():
            return _not_accumulated(state, member, claim)
        case msg.FailedClaim():
            return _failed(state, member, claim)
        case msg.MissingClaim():
            return _missing(state, member, claim, watch)
        case msg.CommitClaim():
            return _commit(state, member, claim, watch)
        case msg.MergedClaim():
            return _merged(state, member, claim, watch)
        case msg.FingerprintClaim():
            return _fingerprint(state, member, claim)
        case msg.CheckClaim():
            return _checked(state, member, claim)
        case msg.SnapshotClaim():
            return _snapshot(state, member, claim, watch)
        case msg.MismatchClaim():
            return intake_audits.mismatch(state, member, claim, watch)
        case msg.NotHeldClaim():
            return intake_audits.not_held(state, member, claim, watch)
        case msg.WitnessClaim():
            return intake_audits.witness(state, member, claim)
        case msg.UnusableClaim():
            return intake_audits.unusable(state, member, claim, watch)
        case msg.LaneClaim():
            return note_lane(state, member, claim, watch)
        case msg.PartsClaim():
            return parts_made(state, member, claim)


# --- members -----------------------------------------------------------------------------------------------------


def admit_join(
    state: RunState, request: msg.JoinRequest, hotkey: str, coldkey: str, now_s: float, watch: Watch, policy: Policy
) -> ev.Joined | Refusal:
    """The incarnation that a hello gets, or why not and when to come again."""
    run = state.run
    if run is None or request.run != run.run_id:
        name = run.run_id if run else "none"
        return Refusal("run_mismatch", f"the active run is {name}, not {request.run}", 5.0 if run is None else None)
    if state.finished is not None:
        return Refusal("run_finished", "the run is finished")
    if hotkey in state.convicted:
        return intake_audits.convicted(state, hotkey, watch)
    if hotkey in state.audits.quarantined:
        return intake_audits.quarantine(state, hotkey, policy)
    if boot_seen(state, hotkey, request.boot):
        return Refusal("boot_seen", "this boot id was given an incarnation already", hint="take a new boot id")
    wait_s = back_off_left(state, hotkey, now_s, watch, policy)
    if wait_s > 0:
        return Refusal("back_off", f"gone silently {state.absences[hotkey]} times", wait_s)
    refusal = _class_refusal(state, request.hardware_class, coldkey, watch)
    if refusal is not None:
        return refusal
    for older in [member for member in state.members if member.hotkey == hotkey]:
        note_lost(now_s, state, watch, older)
    return ev.Joined(
        member=next_member(state, hotkey),
        coldkey=coldkey,
        stage=choose_stage(state, hotkey, watch).stage,
        boot=request.boot,
        host=request.host,
        port=request.port,
        reachable=request.reachable,
        registered_at_block=watch.audits.registered.get(hotkey, 0),
    )


def boot_seen(state: RunState, hotkey: str, boot: str) -> bool:
    """A late or doubled hello of a process that was joined must not end its successor."""
    return st.member_of_boot(state, hotkey, boot) is not None


def next_member(state: RunState, hotkey: str) -> Member:
    """An incarnation that no other term can have given: what a lost journal gave is never given again."""
    return Member(hotkey, state.term, state.num_joined + 1)


def back_off_left(state: RunState, hotkey: str, now_s: float, watch: Watch, policy: Policy) -> float:
    """Seconds until a hotkey that was gone silently may join again: twice as long each time."""
    absences = state.absences.get(hotkey, 0)
    if not absences:
        return 0.0
    due = min(policy.back_off_max_s, policy.back_off_s * 2 ** (absences - 1))
    return due - watch.absent_for(hotkey, absences, now_s)


def _class_refusal(state: RunState, reported: tuple[str, ...], coldkey: str, watch: Watch) -> Refusal | None:
    if state.hardware_class is None:
        watch.class_votes.setdefault(reported, set()).add(coldkey)
        return Refusal("class_open", "the run's hardware class isn't settled yet", 1.0)
    wanted = state.hardware_class.hashes
    if reported == wanted:
        return None
    differing = [i for i, (a, b) in enumerate(zip(reported, wanted, strict=False)) if a != b]
    where = differing[0] if differing else min(len(reported), len(wanted))
    theirs = reported[where] if where < len(reported) else "none"
    ours = wanted[where] if where < len(wanted) else "none"
    return Refusal(
        "hardware_class",
        f"golden task {where} gives {theirs}, this run's class has {ours}",
        hint="a pinned run takes one class of hardware, software and thread count",
    )


def _updated(state: RunState, member: Member, claim: msg.UpdatedClaim) -> Admitted:
    info = state.members[member]
    if claim.step != state.next_step:
        return Ignored(f"the run is at step {state.next_step}, not {claim.step}")
    if info.version == claim.step:
        return Ignored("known")
    return [ev.Updated(member, claim.step, claim.root)]


# --- work --------------------------------------------------------------------------------------------------------


def _own_lease(state: RunState, member: Member, step: int, m: int, stage: int, generation: int) -> Item | Ignored:
    """The item, if this member has its present lease under this generation and hasn't finished it."""
    item = st.item(state, step, m, stage)
    if item is None:
        return Ignored("no such item in the open step")
    if item.member != member or item.generation != generation or item.status not in (st.LIVE, st.REVOKING):
        return Ignored("not the present lease")
    return item


def _forwarded(state: RunState, member: Member, claim: msg.ForwardReceipt, watch: Watch) -> Admitted:
    item = _own_lease(state, member, claim.step, claim.microbatch, claim.stage, claim.generation)
    if isinstance(item, Ignored):
        return item
    if item.forwarded:
        return Ignored("known")
    last = claim.stage == st.num_stages(state) - 1
    evaluation = st.is_evaluation(state, claim.microbatch)
    if last and evaluation and not _is_fp32(claim.loss_bits):
        return Ignored("the receipt lacks the loss")
    if lacks := intake_audits.lacks_forward(state, claim, evaluation=evaluation):
        return Ignored(lacks)
    if any(blob not in watch.blobs for blob in boundary_to_confirm(state, member, claim)):
        return Ignored("the store doesn't have the boundary yet")
    watch.computed(member, claim.compute_s, backward=False)
    loss = claim.loss_bits if last and evaluation else None
    return [ev.Forwarded(claim.step, claim.microbatch, claim.stage, claim.generation, claim.output, loss)]


def _backwarded(state: RunState, member: Member, claim: msg.BackwardReceipt, watch: Watch) -> Admitted:
    item = _own_lease(state, member, claim.step, claim.microbatch, claim.stage, claim.generation)
    if isinstance(item, Ignored):
        return item
    if st.is_evaluation(state, claim.microbatch):
        return Ignored("an evaluation item has no backward")
    last = claim.stage == st.num_stages(state) - 1
    if last and not _is_fp32(claim.loss_bits):
        return Ignored("the receipt lacks the loss")
    if lacks := intake_audits.lacks_output(state, item, claim):
        return Ignored(lacks)
    watch.computed(member, claim.compute_s, backward=True)
    loss = claim.loss_bits if last else None
    forward = "" if item.forwarded else claim.forward
    return [ev.Backwarded(claim.step, claim.microbatch, claim.stage, claim.generation, claim.output, loss, forward)]


def _is_fp32(bits: int | None) -> bool:
    return bits is not None and 0 <= bits < 2**32


def _not_accumulated(state: RunState, member: Member, claim: msg.NotAccumulatedClaim) -> Admitted:
    item = _own_lease(state, member, claim.step, claim.microbatch, claim.stage, claim.generation)
    if isinstance(item, Ignored):
        return item
    if item.status != st.REVOKING:
        return Ignored("the lease isn't being revoked")
    return [ev.NotAccumulated(claim.step, claim.microbatch, claim.stage, claim.generation)]


def _failed(state: RunState, member: Member, claim: msg.FailedClaim) -> Admitted:
    item = _own_lease(state, member, claim.step, claim.microbatch, claim.stage, claim.generation)
    if isinstance(item, Ignored):
        return item
    return [ev.ItemFailed(claim.step, claim.microbatch, claim.stage, claim.generation, claim.failure)]


def _missing(state: RunState, member: Member, claim: msg.MissingClaim, watch: Watch) -> Admitted:
    """Noted for :mod:`validator.decide_leases`, which deals a replay if the producer is receipted."""
    if claim.stage != state.members[member].stage:
        return Ignored("another stage's boundary")
    producer = claim.stage + 1 if claim.backward else claim.stage - 1
    key = (claim.step, claim.microbatch, producer, claim.backward)
    if not replay_allowed(state, key):
        return Ignored("its producer is still due")
    watch.missing[key] = None
    return Ignored("noted")


def replay_allowed(state: RunState, key: tuple[int, int, int, bool]) -> bool:
    """Whether the boundary was receipted, so that its bytes are lost and not just late."""
    step, m, producer, backward = key
    item, work = st.item(state, step, m, producer), st.work_at(state, step)
    if item is None or work is None or m in work.skipped:
        return False
    return item.status == st.DONE or (not backward and item.forwarded)


# --- merges ------------------------------------------------------------------------------------------------------


def _merge(state: RunState, step: int, group: int, phase: str) -> Merge | Ignored:
    merge = st.merge_of(state, step, group)
    if merge is None:
        return Ignored("no such group at the open step")
    if merge.phase != phase:
        return Ignored(f"the group is {merge.phase}, not {phase}")
    return merge


def is_current(version: int, merge: Merge) -> bool:
    """What was said about an earlier manifest says nothing about this one."""
    return version == merge.version


def _commit(state: RunState, member: Member, claim: msg.CommitClaim, watch: Watch) -> Admitted:
    merge = _merge(state, claim.step, claim.group, st.FROZEN)
    if isinstance(merge, Ignored):
        return merge
    if member in merge.commitments:
        return Ignored("known")
    commitment = claim.commitment
    stage = state.members[member].stage
    if commitment.member != member or commitment.stage != stage:
        return Ignored("another member's commitment")
    if stage not in st.group_shape(state, claim.group).stages:
        return Ignored("another group's commitment")
    if tuple(p for p, _ in commitment.hashes) != st.partitions_of(state, claim.group, stage):
        return Ignored("not one hash for each partition of the stage")
    if not commits_done_set(state, member, claim, merge):
        return Ignored("not this freeze, or not the leases the fold shows as done")
    if any(blob not in watch.blobs for blob in blobs_to_confirm(claim)):
        return Ignored("the store doesn't have the slices yet")
    return [ev.Committed(claim.step, claim.group, claim.number, commitment)]


def commits_done_set(state: RunState, member: Member, claim: msg.CommitClaim, merge: Merge) -> bool:
    """For the present freeze, and exactly what the member has done: no more, no less."""
    commitment: Commitment = claim.commitment
    done = st.done_set(state, member)
    return claim.number == merge.number and bool(done) and commitment.microbatches == done


def _merged(state: RunState, member: Member, claim: msg.MergedClaim, watch: Watch) -> Admitted:
    merge = _merge(state, claim.step, claim.group, st.REDUCING)
    if isinstance(merge, Ignored):
        return merge
    if not is_current(claim.version, merge):
        return Ignored("another version")
    if not 0 <= claim.partition < len(merge.owners) or member not in owners_of(merge, claim.partition):
        return Ignored("another member's partition")
    if claim.partition in merge.merged:
        return Ignored("known")
    if not is_squares(claim.squares) or claim.size_bytes < 1:
        return Ignored("malformed squares or size")
    if any(blob not in watch.blobs for blob in blobs_to_confirm(claim)):
        return Ignored("the store doesn't have the blob yet")
    return [
        ev.PartitionMerged(
            step=claim.step,
            group=claim.group,
            version=merge.version,
            partition=claim.partition,
            hash=claim.hash,
            blob=claim.blob,
            size_bytes=claim.size_bytes,
            squares=claim.squares,
            second=member != merge.owners[claim.partition],
        )
    ]


def is_squares(squares: str) -> bool:
    """A non-negative whole number in hexadecimal, of bounded length."""
    canonical = squares == "0" or not squares.startswith("0")
    return canonical and 0 < len(squares) <= MAX_SQUARES_DIGITS and all(c in "0123456789abcdef" for c in squares)


def _fingerprint(state: RunState, member: Member, claim: msg.FingerprintClaim) -> Admitted:
    merge = _merge(state, claim.step, claim.group, st.REVEALED)
    if isinstance(merge, Ignored):
        return merge
    if not is_current(claim.version, merge):
        return Ignored("another version")
    entry = next((entry for entry in merge.entries if entry.member == member), None)
    if entry is None:
        return Ignored("contributes nothing")
    if member in merge.fingerprints:
        return Ignored("known")
    if claim.stage != entry.stage or [p for p, _ in claim.values] != [p for p, _ in entry.hashes]:
        return Ignored("not one fingerprint for each partition it contributes to")
    return [ev.Fingerprinted(claim.step, claim.group, merge.version, member, claim.stage, claim.values)]


def _checked(state: RunState, member: Member, claim: msg.CheckClaim) -> Admitted:
    merge = _merge(state, claim.step, claim.group, st.REVEALED)
    if isinstance(merge, Ignored):
        return merge
    if not is_current(claim.version, merge):
        return Ignored("another version")
    stage = state.members[member].stage
    if stage not in st.group_shape(state, claim.group).stages or member not in st.ready(state, stage):
        return Ignored("no replica of this group at this step")
    if member in merge.checks:
        return Ignored("known")
    if len(merge.fingerprints) < len(merge.entries):
        return Ignored("fingerprints are still missing")
    return [ev.Checked(claim.step, claim.group, merge.version, member, claim.ok)]


def _snapshot(state: RunState, member: Member, claim: msg.SnapshotClaim, watch: Watch) -> Admitted:
    info = state.members[member]
    if claim.step != state.next_step or not st.snapshot_due(state) or claim.stage != info.stage:
        return Ignored("no snapshot is due there")
    if info.version != claim.step or member not in st.up_to_date(state, info.stage):
        return Ignored("its own state isn't the agreed one")
    if claim.root != info.root:
        return [ev.Gone(member, "checksum")]  # it contradicts itself: nobody honest reports one root and stores another
    if st.stored_snapshot(state, info.stage, claim.step) is not None:
        return Ignored("known")
    if any(blob not in watch.blobs for blob in blobs_to_confirm(claim)):
        return Ignored("the store doesn't have the manifest yet")
    return [ev.SnapshotStored(claim.step, claim.stage, member, claim.manifest, claim.root)]
