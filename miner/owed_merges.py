"""What a member owes its group's merge: a commitment, slices, reduced partitions, fingerprints, a check."""

from __future__ import annotations

from miner.local_view import LocalView
from miner.owed_mismatch import owed_before_commitment, wrong_input
from miner.owes import Check, Commit, FetchSlice, Fingerprint, Owe, Reduce, Report, SendSlice, StoreSlice
from miner.ways import by_store, stores_all
from subnet.numerics.owners import owners_of
from subnet.protocol import messages as msg
from subnet.run import state as st
from subnet.run.state import Merge, RunState, StepWork
from subnet.words import CALIBRATION_STEP, Commitment, Member


def owed_merges(state: RunState, work: StepWork, me: Member, stage: int, local: LocalView, owes: list[Owe]) -> None:
    """Of the one group that my stage is in."""
    group = st.group_of(state, stage)
    merge = work.merges[group]
    if merge.phase == st.FROZEN and me not in merge.commitments:
        _owed_commitment(state, work, me, group, merge, local, owes)
    if merge.phase not in (st.REDUCING, st.REVEALED):
        return
    mine = my_entry(merge, me, local)
    if mine is not None:
        _owed_slices(state, work, me, group, merge, mine, local, owes)
        if merge.phase == st.REVEALED and me not in merge.fingerprints:
            _owed_fingerprint(work, stage, group, merge, mine, local, owes)
    if merge.phase == st.REDUCING:
        _owed_partitions(state, work, me, group, merge, local, owes)
    elif len(merge.fingerprints) == len(merge.entries) and me not in merge.checks:
        _owed_check(state, work, stage, group, merge, local, owes)


def _owed_commitment(
    state: RunState, work: StepWork, me: Member, group: int, merge: Merge, local: LocalView, owes: list[Owe]
) -> None:
    """For exactly what the fold shows me done, if exactly that is in my sum, of the receipted inputs; else silence voids it.

    Maxima have no linear fingerprint: at calibration everybody checks by merging the slices again, so they are stored.
    So are slices that nobody can have straight.
    """
    done, epoch = st.done_set(state, me), st.epoch(state, me, work.step)
    if not done or not sum_is(done, work, local, epoch):
        return
    if any(wrong_input(state, work, state.members[me].stage, m, local) for m in done):
        return
    claim = owed_before_commitment(state, work, state.members[me].stage, done, local)
    if claim is not None:
        owes.append(Report(claim))
        return
    commitment = local.commitments.get((work.step, epoch, done))
    if commitment is None:
        owes.append(Commit(work.step, group, epoch, done))
        return
    unstored = [(p, value) for p, value in commitment.hashes if value not in local.stored]
    if unstored and (work.step == CALIBRATION_STEP or stores_all(state, me)):
        owes.extend(StoreSlice(work.step, group, p, value) for p, value in unstored)
    else:
        owes.append(Report(msg.CommitClaim(work.step, group, merge.number, commitment)))


def sum_is(done: tuple[int, ...], work: StepWork, local: LocalView, epoch: int) -> bool:
    """Whether exactly these microbatches are in my sum of this epoch."""
    return done == tuple(sorted(m for step, m, at in local.added if step == work.step and at == epoch))


def my_entry(merge: Merge, me: Member, local: LocalView) -> Commitment | None:
    """My line of the manifest, if I still have the sum behind it."""
    entry = next((entry for entry in merge.entries if entry.member == me), None)
    return entry if entry is not None and entry in local.commitments.values() else None


def _owed_slices(
    state: RunState,
    work: StepWork,
    me: Member,
    group: int,
    merge: Merge,
    mine: Commitment,
    local: LocalView,
    owes: list[Owe],
) -> None:
    for partition, value in mine.hashes:
        awaited = merge.phase == st.REDUCING and partition not in merge.merged
        others = [owner for owner in owners_of(merge, partition) if owner != me] if awaited else []
        stores = any(by_store(state, me, owner) for owner in others)
        for owner in others:
            if not by_store(state, me, owner) and (value, owner) not in local.sent:
                owes.append(SendSlice(work.step, group, partition, value, owner))
        if (stores or merge.routed or merge.tracing) and value not in local.stored:
            owes.append(StoreSlice(work.step, group, partition, value))


def _owed_partitions(
    state: RunState, work: StepWork, me: Member, group: int, merge: Merge, local: LocalView, owes: list[Owe]
) -> None:
    """The partitions I own: gather what the manifest names, and nothing else; merge; say so once the store has it."""
    version = (work.step, group, merge.version)
    for partition in range(len(merge.owners)):
        if partition in merge.merged or me not in owners_of(merge, partition):
            continue
        result = local.merged.get((version, partition))
        if result is not None:
            claim = msg.MergedClaim(
                step=work.step,
                group=group,
                version=merge.version,
                partition=partition,
                hash=result.hash,
                blob=result.blob,
                size_bytes=result.size_bytes,
                squares=result.squares,
            )
            owes.append(Report(claim))
            continue
        lacking = False
        hashes: list[str] = []
        for entry in merge.entries:
            value = dict(entry.hashes).get(partition)
            if value is None:
                continue
            hashes.append(value)
            if entry.member != me and value not in local.slices:
                lacking = True
                routed = merge.routed or by_store(state, me, entry.member)
                owes.append(FetchSlice(work.step, group, partition, entry.stage, value, entry.member, routed=routed))
        if not lacking:
            owes.append(Reduce(work.step, group, merge.version, partition, tuple(hashes)))


def _owed_fingerprint(
    work: StepWork, stage: int, group: int, merge: Merge, mine: Commitment, local: LocalView, owes: list[Owe]
) -> None:
    version = (work.step, group, merge.version)
    values = local.fingerprints.get((version, merge.seed))
    if values is None:
        owes.append(Fingerprint(work.step, group, merge.version, merge.seed, tuple(p for p, _ in mine.hashes)))
    else:
        owes.append(Report(msg.FingerprintClaim(work.step, group, merge.version, stage, values)))


def _owed_check(
    state: RunState, work: StepWork, stage: int, group: int, merge: Merge, local: LocalView, owes: list[Owe]
) -> None:
    ok = local.checks.get((work.step, group, merge.version))
    if ok is None:
        owes.append(Check(work.step, group, merge.version, st.partitions_of(state, group, stage)))
    else:
        owes.append(Report(msg.CheckClaim(work.step, group, merge.version, ok)))
