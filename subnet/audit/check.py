"""A case that passes :func:`check_case` fits its own run: replaying it can't ask for what isn't there or count twice.

Cases come from strangers, so sizes are bounded before anything is laid out. What a case *claims* isn't judged here. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from subnet.audit.case import CASE_VERSION, Case, Findings, LogStep, MergeCase, PartialCase
from subnet.errors import InputError, VersionUnsupported
from subnet.model.plan import ModelPlan, ModelUnits
from subnet.protocol.wire import is_blob_hash
from subnet.run.events import RunPlanned
from subnet.run.schedule import StepScalars, Terms, step_scalars, terms_of
from subnet.words import CALIBRATION_STEP

LIMIT_ELEMENTS = 1 << 42
LIMIT_BLOCKS = 1 << 26
"""Of a whole model: what a layout takes memory for."""
MAX_SQUARES_DIGITS = 256
MAX_SEED_DIGITS = 256


def plan_of(planned: RunPlanned) -> ModelPlan:
    """The run as every process computes it; the same object for the same run."""
    return _plan(msgspec.msgpack.encode(planned))


@lru_cache(maxsize=4)
def _plan(encoded: bytes) -> ModelPlan:
    planned = msgspec.msgpack.decode(encoded, type=RunPlanned)
    if len(planned.unit_tensors) < 3 or not all(planned.unit_tensors):
        raise InputError("the case's run has no layers")
    specs = [spec for unit in planned.unit_tensors for spec in unit]
    specs += [planned.tied] if planned.tied is not None else []
    for spec in specs:
        _require(bool(spec.shape) and all(side > 0 for side in spec.shape), f"{spec.name} has the shape {spec.shape}")
    _require(sum(spec.num_elements for spec in specs) <= LIMIT_ELEMENTS, "the case's model is too large to be one")
    _require(sum(spec.num_blocks for spec in specs) <= LIMIT_BLOCKS, "the case's model has too many blocks")
    _require(len(planned.unit_tensors[0][0].shape) == 2, "the case's model has no embedding")
    units = ModelUnits(planned.unit_tensors, planned.unit_flops_per_token, planned.tied)
    plan = ModelPlan(planned.config, planned.model_config, units, planned.cuts)
    try:
        shapes = [(group.stages, len(group.partitions)) for group in plan.layout.groups]
    except ValueError as error:
        raise InputError(f"the case's model can't be laid out: {error}") from error
    _require(shapes == [(g.stages, len(g.partitions)) for g in planned.groups], "the case's groups aren't its model's")
    return plan


def own_partitions(plan: ModelPlan, stage: int) -> tuple[int, ...]:
    """Partitions of the stage's group that the stage holds, in order."""
    layout = plan.layout
    group, held = layout.groups[layout.group_of_stage[stage]], layout.stage_sections[stage]
    return tuple(p.index for p in group.partitions if p.section in held)


def shared_partitions(plan: ModelPlan, stage: int) -> tuple[int, ...]:
    """Those of them to which another stage contributes too (tied embeddings): this stage's partials don't add up to them."""
    layout = plan.layout
    group = layout.groups[layout.group_of_stage[stage]]
    shared = {p.index for p in group.partitions if len(layout.sections[p.section].stages) > 1}
    return tuple(index for index in own_partitions(plan, stage) if index in shared)


def needed_version(case: Case) -> int:
    """The state that the step's gradients are of; -1: before calibration. Of a case about roots the one after the update."""
    if case.roots:
        return case.step + 1
    return case.planned.config.version_of(case.step)


def can_update(case: Case) -> bool:
    """Whether the state that the work was done from is also the one that the step's update changes."""
    return case.update is not None and needed_version(case) == case.step


def untrusted_state(case: Case, findings: Findings) -> str | None:
    """Why the findings say nothing of who was right: the snapshot that the replay began from isn't the agreed state.

    Behind it the log leads to one state: whoever computed from another is wrong, however many agreed on its root.
    """
    before = [why for version, why in findings.wrong_roots if version <= case.state.version]
    return before[0] if before else None


def check_case(case: Case) -> ModelPlan:
    """The plan of the case's run; raises :class:`InputError` where the case contradicts itself or its run."""
    if case.version != CASE_VERSION:
        raise VersionUnsupported(f"a case of version {case.version}", hint=f"this program reads {CASE_VERSION}")
    plan = plan_of(case.planned)
    _require(0 <= case.stage < plan.num_stages, f"there is no stage {case.stage}")
    first = CALIBRATION_STEP - bool(case.roots)  # whose root is that of the run's first state
    last = max(plan.config.run.steps, *(terms.end for terms in case.terms), 0)
    _require(first <= case.step < last, f"there is no step {case.step}")
    _require(case.branch >= 0, f"there is no branch {case.branch}")
    _require(is_blob_hash(case.planned.data), "the run names no data")
    own = own_partitions(plan, case.stage)
    _check_state(case, plan, own)
    if case.roots:
        _check_roots(case, plan)
        return plan
    _require(bool(case.partials), "no partial is to be redone")
    _distinct([partial.member for partial in case.partials], "members")
    for partial in case.partials:
        _check_partial(case, plan, partial, own)
    _distinct([m for partial in case.partials for m in partial.commitment.microbatches], "microbatches of the partials")
    _check_skipped(case, plan)
    if case.merge is not None:
        _check_merge(case, plan, case.merge, own)
    if case.update is not None:
        _require(case.merge is not None and case.merge.whole, "an update without all of the step's partials")
        _require(case.update.step == case.step, "an update of another step")
        _check_log(plan, case.update, own, case.terms)
    _require(len(case.hardware_class) in (0, plan.num_stages), "not one hardware class a stage")
    return plan


def _check_roots(case: Case, plan: ModelPlan) -> None:
    alone = not case.partials and case.merge is None and case.update is None and not case.skipped
    _require(alone, "a case about roots is about work as well")
    _distinct([member for member, _ in case.roots], "members")
    _require(all(is_blob_hash(root) for _, root in case.roots), "a reported root is no hash")
    _require(len(case.hardware_class) in (0, plan.num_stages), "not one hardware class a stage")


def _check_state(case: Case, plan: ModelPlan, own: Sequence[int]) -> None:
    state, needed = case.state, needed_version(case)
    _require(CALIBRATION_STEP <= state.version <= needed, f"snapshot {state.version} is not before state {needed}")
    _require(is_blob_hash(state.manifest), "the state names no snapshot")
    first = state.version == CALIBRATION_STEP
    _require(not first or (state.manifest == case.planned.snapshot and state.whole), "the state isn't the run's first")
    _require(not state.root or is_blob_hash(state.root), "the snapshot's root is no hash")
    _require([log.step for log in state.log] == [*range(state.version, needed)], "the log has gaps")
    for log in state.log:
        _check_log(plan, log, own, case.terms)


def _check_log(plan: ModelPlan, log: LogStep, own: Sequence[int], said: Sequence[Terms]) -> None:
    what = f"update {log.step}"
    _require((log.scalars is None) == (log.step == CALIBRATION_STEP), f"{what}: scalars where there are none, or none")
    _require(
        log.scalars is None or _on_schedule(plan, log.step, log.scalars, said),
        f"{what}: scalars off the run's schedule",
    )
    _require(1 <= log.num_counted <= plan.config.num_items, f"{what}: {log.num_counted} microbatches")
    _require(0 <= log.coefficient_bits < 1 << 32, f"{what}: the coefficient is no fp32")
    _require(sorted(index for index, *_ in log.partitions) == [*own], f"{what}: not the stage's partitions")
    named = [value for _, hash_, blob, _ in log.partitions for value in (hash_, blob)]
    _require(all(map(is_blob_hash, named)), f"{what}: a partition without a hash")
    _require(all(size >= 0 for *_, size in log.partitions), f"{what}: a partition without a size")
    _require(not log.root or is_blob_hash(log.root), f"{what}: the root is no hash")


def _check_partial(case: Case, plan: ModelPlan, partial: PartialCase, own: Sequence[int]) -> None:
    who, commitment = f"the partial of {partial.member}", partial.commitment
    _require(commitment.member == partial.member and commitment.stage == case.stage, f"{who} is committed by another")
    _require(bool(partial.items), f"{who} has no items")
    _require(tuple(i.microbatch for i in partial.items) == commitment.microbatches, f"{who}: items aren't its m-set")
    count = plan.config.num_items
    _require(all(0 <= m < count for m in commitment.microbatches), f"{who}: a microbatch outside of [0, {count})")
    _require(sorted(index for index, _ in commitment.hashes) == [*own], f"{who}: slices of other partitions")
    _require(all(is_blob_hash(value) for _, value in commitment.hashes), f"{who}: a slice without a hash")
    for item in partial.items:
        name = f"{who}, microbatch {item.microbatch}"
        _check_ends(item.x, plan.is_first(case.stage), f"{name}: the input")
        _check_ends(item.gradient, plan.is_last(case.stage), f"{name}: the gradient")
        for claimed in (item.forward, item.backward):
            _require(not claimed or is_blob_hash(claimed), f"{name}: a claimed output is no hash")
        _require(item.loss_bits is None or 0 <= item.loss_bits < 1 << 32, f"{name}: the loss is no fp32")
    _distinct([index for index, _ in partial.fingerprints], f"fingerprints of {partial.member}")
    _require({index for index, _ in partial.fingerprints} <= {*own}, f"{who}: fingerprints of other partitions")


def _on_schedule(plan: ModelPlan, step: int, told: StepScalars, said: Sequence[Terms]) -> bool:
    """Whether an update's scalars are the run's; another machine's cosine may round the last bit otherwise."""
    due = step_scalars(plan.config, step, terms_of(said, step))
    ours, theirs = msgspec.structs.astuple(due), msgspec.structs.astuple(told)
    return due.decays == told.decays and all(abs(a - b) <= 1 for a, b in zip(ours, theirs, strict=True))


def _check_skipped(case: Case, plan: ModelPlan) -> None:
    count = plan.config.num_items
    _distinct(case.skipped, "skipped microbatches")
    _require(all(0 <= m < count for m in case.skipped), f"a skipped microbatch outside of [0, {count})")
    done = {m for partial in case.partials for m in partial.commitment.microbatches}
    _require(not done & set(case.skipped), "a microbatch is in a partial, and skipped")


def _check_ends(value: str, is_end: bool, what: str) -> None:
    _require(not value if is_end else is_blob_hash(value), f"{what} is {'named' if is_end else 'no hash'}")


def _check_merge(case: Case, plan: ModelPlan, merge: MergeCase, own: Sequence[int]) -> None:
    _require(merge.group == plan.layout.group_of_stage[case.stage], "the merge is another group's")
    _require(1 <= merge.total_items <= plan.config.num_items, f"a merge of {merge.total_items} microbatches")
    seed_ok = len(merge.seed) % 2 == 0 and len(merge.seed) <= MAX_SEED_DIGITS and _is_hex(merge.seed)
    _require(seed_ok, "the merge's seed is no hexadecimal number")
    _distinct([one.partition for one in merge.merged], "merged partitions")
    for one in merge.merged:
        what = f"merged partition {one.partition}"
        _require(one.partition in own, f"{what} isn't the stage's")
        _require(is_blob_hash(one.hash) and is_blob_hash(one.blob), f"{what} has no hash")
        squares_ok = 0 < len(one.squares) <= MAX_SQUARES_DIGITS and _is_hex(one.squares)
        _require(squares_ok and one.size_bytes >= 0, f"{what}: squares or size are no numbers")
    summed = sum(len(partial.items) for partial in case.partials)
    counted = plan.config.num_items - len(case.skipped)
    _require(merge.total_items == counted, f"{merge.total_items} microbatches in the merge, {counted} aren't skipped")
    within = summed == merge.total_items if merge.whole else summed <= merge.total_items
    _require(within, f"{summed} microbatches in the partials, {merge.total_items} in the merge")


def _is_hex(text: str) -> bool:
    return not text.strip("0123456789abcdef")


def _distinct(values: Iterable[object], what: str) -> None:
    listed = list(values)
    _require(len(set(listed)) == len(listed), f"{what}: one is there twice")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InputError(f"the case is unsound: {what}")
