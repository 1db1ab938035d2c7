"""Cases from the journal alone: what an audit replays is named by hashes that the run has agreed on, never by whoever audits.

Before the seal a case is made from the fold's open work, after it from the :class:`WorkLedger`. The state comes from the newest
stored snapshot that two coldkeys agree on and the log of merged gradients behind it. The inputs of an item are the boundaries
that its neighbours have receipted; None instead of a case means that one of them isn't said (yet).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from subnet.audit.case import (
    CASE_VERSION,
    Case,
    ItemCase,
    LogStep,
    MergeCase,
    MergedCase,
    PartialCase,
    RedoneItem,
    RedonePartial,
    StateRef,
    digest,
)
from subnet.audit.ledger import SealedStage, WorkLedger, inputs_of
from subnet.errors import NotFound
from subnet.run.schedule import Terms
from subnet.run.state import (
    RunState,
    StepWork,
    StoredSnapshot,
    agreed_root,
    config,
    group_of,
    num_counted,
    num_stages,
    partitions_of,
    plan,
    work_at,
)
from subnet.words import CALIBRATION_STEP, Commitment, Member, Want

# --- before the seal ---------------------------------------------------------------------------------------------


def case_before_seal(
    state: RunState, ledger: WorkLedger, step: int, stage: int, members: Sequence[Member]
) -> Case | None:
    """Of members that have committed to a sum of the open step; None while an input isn't receipted or one hasn't committed."""
    work = work_at(state, step)
    if work is None:
        raise NotFound(f"step {step} isn't open")
    group = group_of(state, stage)
    merge = work.merges[group]
    entries = {
        entry.member: entry for entry in merge.entries or tuple(merge.commitments.values()) if entry.stage == stage
    }
    chosen = [entries[member] for member in sorted(set(members)) if member in entries]
    if not chosen or len(chosen) < len(set(members)):
        return None
    items = [_open_items(state, work, stage, entry) for entry in chosen]
    if any(found is None for found in items):
        return None
    merged = tuple(
        MergedCase(p, merge.owners[p], part.hash, part.blob, part.size_bytes, part.squares)
        for p in partitions_of(state, group, stage)
        if (part := merge.merged.get(p)) is not None
    )
    manifest = None
    if merge.entries:
        whole = len(chosen) == len(entries) and len(merged) == len(partitions_of(state, group, stage))
        manifest = MergeCase(group, merge.version, merge.seed, num_counted(work), merged, whole)
    return Case(
        version=CASE_VERSION,
        planned=plan(state),
        branch=ledger.branch,
        step=step,
        stage=stage,
        state=state_ref(state, ledger, stage, config(state).version_of(step)),
        partials=tuple(
            PartialCase(entry.member, entry, found or (), merge.fingerprints.get(entry.member, ()))
            for entry, found in zip(chosen, items, strict=True)
        ),
        merge=manifest,
        skipped=tuple(sorted(m for m in work.skipped if m < work.num_training)),
        hardware_class=_hardware_class(state),
        terms=_terms_to(state, step),
    )


def _open_items(state: RunState, work: StepWork, stage: int, entry: Commitment) -> tuple[ItemCase, ...] | None:
    found: list[ItemCase] = []
    for m in entry.microbatches:
        x, gradient = inputs_of(state, work, stage, m)
        if not _complete(state, stage, x, gradient):
            return None
        item = work.items[stage][m]
        found.append(ItemCase(m, x, gradient, item.forward_hash, item.backward_hash, item.loss_bits))
    return tuple(found)


def _complete(state: RunState, stage: int, x: str, gradient: str) -> bool:
    """Whether each input that there should be is named."""
    return (stage == 0 or x != "") and (stage == num_stages(state) - 1 or gradient != "")


# --- after the seal ----------------------------------------------------------------------------------------------


def case_after_seal(
    state: RunState, ledger: WorkLedger, step: int, stage: int, members: Sequence[Member]
) -> Case | None:
    """Of members whose sums are in the seal of (step, stage). None where an input was never receipted.

    :class:`NotFound` where the evidence is no longer kept, or a member has no part in the seal.
    """
    sealed = ledger.sealed(step, stage)
    if sealed is None:
        raise NotFound(f"nothing is known (any more) of the seal of step {step} at stage {stage}")
    entries = {entry.member: entry for entry in sealed.entries}
    unknown = [member for member in members if member not in entries]
    if unknown or not members:
        raise NotFound(f"{unknown[0] if unknown else 'nobody'} has no part in the seal of step {step} at stage {stage}")
    chosen = [entry for entry in sealed.entries if entry.member in set(members)]
    items = [_sealed_items(state, sealed, entry) for entry in chosen]
    if any(found is None for found in items):
        return None
    whole = len(chosen) == len(sealed.entries)
    version = config(state).version_of(step)
    # With a delayed update the state of the gradients isn't the one that is updated: the roots of the log tell about that.
    update = log_step(state, ledger, stage, step) if whole and step in state.sealed and version == step else None
    return Case(
        version=CASE_VERSION,
        planned=plan(state),
        branch=ledger.branch,
        step=step,
        stage=stage,
        state=state_ref(state, ledger, stage, version),
        partials=tuple(
            PartialCase(entry.member, entry, found or (), sealed.fingerprints.get(entry.member, ()))
            for entry, found in zip(chosen, items, strict=True)
        ),
        merge=MergeCase(sealed.group, sealed.version, sealed.seed, sealed.total_items, sealed.merged, whole),
        update=update,
        skipped=sealed.skipped,
        hardware_class=_hardware_class(state),
        terms=_terms_to(state, step),
    )


def _sealed_items(state: RunState, sealed: SealedStage, entry: Commitment) -> tuple[ItemCase, ...] | None:
    found: list[ItemCase] = []
    for m in entry.microbatches:
        item = sealed.items[m]
        if not _complete(state, sealed.stage, item.x, item.gradient):
            return None
        found.append(ItemCase(m, item.x, item.gradient, item.forward, item.backward, item.loss_bits))
    return tuple(found)


def _terms_to(state: RunState, step: int) -> tuple[Terms, ...]:
    return tuple(terms for terms in state.terms if terms.first_step <= step)


def _hardware_class(state: RunState) -> tuple[str, ...]:
    return state.hardware_class.hashes if state.hardware_class is not None else ()


# --- the state ---------------------------------------------------------------------------------------------------


def state_ref(state: RunState, ledger: WorkLedger, stage: int, version: int) -> StateRef:
    """Where the stage's state after ``version`` updates is to be had. :class:`NotFound`: it can't be restored any more.

    From the newest snapshot that a joiner may trust: one that a second coldkey's root confirms. A stage that belongs to one
    coldkey can't hide a wrong update behind a snapshot of it: the log of merged gradients leads past it, from what was sure.
    """
    stored = [s for s in reversed(state.snapshots.get(stage, [])) if s.step <= version]
    for snapshot in (s for s in stored if s.verified and _agreed(state, ledger, stage, s)):
        log = _log(state, ledger, stage, snapshot.step, version)
        if log is not None:
            return StateRef(snapshot.step, snapshot.manifest, False, snapshot.root, log)
    log = _log(state, ledger, stage, CALIBRATION_STEP, version)
    if log is not None:
        return StateRef(CALIBRATION_STEP, plan(state).snapshot, True, "", log)
    for snapshot in (s for s in stored if _agreed(state, ledger, stage, s)):
        log = _log(state, ledger, stage, snapshot.step, version)
        if log is not None:
            return StateRef(snapshot.step, snapshot.manifest, False, snapshot.root, log)
    raise NotFound(f"stage {stage} can't be brought to the state after {version} updates any more")


def _agreed(state: RunState, ledger: WorkLedger, stage: int, snapshot: StoredSnapshot) -> bool:
    """Whether the stage's replicas were of one mind about it; a snapshot that says otherwise is no place to begin."""
    root = root_at(state, ledger, stage, snapshot.step)
    return snapshot.root == root if root else snapshot.verified


def _log(state: RunState, ledger: WorkLedger, stage: int, first: int, end: int) -> tuple[LogStep, ...] | None:
    if any(step not in state.sealed for step in range(first, end)):
        return None
    return tuple(log_step(state, ledger, stage, step) for step in range(first, end))


def log_step(state: RunState, ledger: WorkLedger, stage: int, step: int) -> LogStep:
    """One sealed update, as far as it concerns the stage."""
    found, group = state.sealed[step], group_of(state, stage)
    seal = found.groups[group]
    partitions = tuple((p, seal.hashes[p], *seal.blobs[p]) for p in partitions_of(state, group, stage))
    root = root_at(state, ledger, stage, step + 1)
    return LogStep(step, found.scalars, found.num_counted, found.coefficient_bits, partitions, root)


def root_at(state: RunState, ledger: WorkLedger, stage: int, version: int) -> str:
    """The stage root after ``version`` updates that its replicas agree on; "" where it isn't known."""
    if version == state.next_step:
        return agreed_root(state, stage) or ""
    return ledger.roots(version, stage)


def root_case(state: RunState, ledger: WorkLedger, stage: int) -> Case:
    """About the roots that live members have reported of ``next_step``; :class:`NotFound` as :func:`state_ref`."""
    version = state.next_step
    members = sorted(state.members.items())
    return Case(
        version=CASE_VERSION,
        planned=plan(state),
        branch=ledger.branch,
        step=version - 1,
        stage=stage,
        state=state_ref(state, ledger, stage, version),
        partials=(),
        hardware_class=_hardware_class(state),
        terms=_terms_to(state, version - 1),
        roots=tuple((k, info.root) for k, info in members if (info.stage, info.version) == (stage, version)),
    )


# --- what a case asks for and says -------------------------------------------------------------------------------


def wants_of(case: Case, present: Collection[str] = ()) -> tuple[Want, ...]:
    """The inputs of the case's items, each once and in order, without those whose hash is in ``present``."""
    wants: dict[Want, None] = {}
    for partial in case.partials:
        for item in partial.items:
            if item.x and item.x not in present:
                wants[Want(case.stage - 1, item.microbatch, False, item.x)] = None
            if item.gradient and item.gradient not in present:
                wants[Want(case.stage + 1, item.microbatch, True, item.gradient)] = None
    return tuple(wants)


def blobs_of(case: Case) -> tuple[str, ...]:
    """Store addresses that the case itself names: data and snapshot manifests, the log's partitions, the items' inputs.

    Manifests name further blobs (:func:`subnet.audit.bundle.needed_blobs`).
    """
    update = (case.update,) if case.update is not None else ()
    log = [blob for step in (*case.state.log, *update) for _, _, blob, _ in step.partitions]
    inputs = [want.hash for want in wants_of(case)]
    return tuple(dict.fromkeys((case.planned.data, case.state.manifest, *log, *inputs)))


def narrow(case: Case, members: Collection[Member]) -> Case:
    """The same case with these members' partials alone; its merge can't be redone then."""
    partials = tuple(partial for partial in case.partials if partial.member in members)
    if len(partials) == len(case.partials):
        return case
    merge = None if case.merge is None else msgspec.structs.replace(case.merge, whole=False)
    return msgspec.structs.replace(case, partials=partials, merge=merge, update=None)


def accusation(case: Case, member: Member) -> Case:
    """What a case against one member replays: its partial and nothing else."""
    merge = None if case.merge is None else msgspec.structs.replace(case.merge, whole=False)
    return msgspec.structs.replace(narrow(case, (member,)), merge=merge, update=None)


def claimed_digest(case: Case, member: Member) -> str | None:
    """What a run of :func:`accusation` would give if all that the member claims were true.

    None where it can't be told: an output that was never said.
    """
    partial = next((partial for partial in case.partials if partial.member == member), None)
    if partial is None:
        return None
    last = len(case.planned.cuts) - 1
    if any(not item.forward for item in partial.items) and case.stage < last:
        return None
    items = tuple(RedoneItem(i.microbatch, i.forward, i.backward, i.loss_bits) for i in partial.items)
    return digest((RedonePartial(member, items, partial.commitment.hashes, (), ()),))
