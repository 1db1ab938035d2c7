"""Cheats about sums and states: slices, fingerprints, merged partitions, roots and updates. Calibration's maxima included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from benchmarks.cheats import Liar, Patches
from miner.member_merge import MergeWork
from miner.owes import Fingerprint
from miner.reporter import Reporter
from subnet.engine.stage_executor import StagePartial
from subnet.engine.stage_merge import SliceEncoder, StageMerge
from subnet.engine.stage_state import StageState
from subnet.numerics.slices import integer_type
from subnet.protocol.messages import UpdatedClaim
from subnet.run.state import num_counted
from subnet.words import CALIBRATION_STEP

Method = Callable[..., Any]
GROWTH = 8.0
PRIME = 2**61 - 1


def _at_commit(
    liar: Liar, patches: Patches, change: Callable[[StagePartial], None], *, while_calibrating: bool = True
) -> None:
    """The sum is changed once, before the first of its slices is made: commitment and fingerprints agree with the lie."""
    done: list[StagePartial] = []

    def init(original: Method) -> Method:
        def changed(self: SliceEncoder, merge: StageMerge, partial: StagePartial) -> None:
            tells = not merge.calibration or while_calibrating
            if (
                tells
                and not any(partial is one for one in done)
                and liar.lies_of_step(partial.key.step, group=merge.group)
            ):
                change(partial)
                done[:] = [*done[-3:], partial]
            original(self, merge, partial)

        return changed

    patches.put(SliceEncoder, "__init__", init)


def lying_partial(liar: Liar, patches: Patches) -> None:
    def change(partial: StagePartial) -> None:
        values = next(iter(partial.sums.values())).values
        values[0] += 1 if float(values[0]) <= 0 else -1

    _at_commit(liar, patches, change, while_calibrating=False)  # there are only maxima then


def inflated_maxima(liar: Liar, patches: Patches) -> None:
    def change(partial: StagePartial) -> None:
        for one in partial.sums.values():
            one.maxima.mul_(GROWTH)

    _at_commit(liar, patches, change)


def lying_fingerprint(liar: Liar, patches: Patches) -> None:
    def make(original: Method) -> Method:
        def changed(self: StageMerge, partial: StagePartial, seed: bytes, *, total_items: int) -> Any:
            found = original(self, partial, seed, total_items=total_items)
            if self.calibration or not liar.lies_of_step(self.step, group=self.group):
                return found
            first = min(found)
            return {**found, first: ((found[first][0] + 1) % PRIME, *found[first][1:])}

        return changed

    patches.put(StageMerge, "partial_fingerprints", make)


def off_by_one(merge: StageMerge, index: int, data: Any, num_items: int) -> memoryview:
    """A slice whose first integer is another."""
    _, section = merge.find(index)
    changed: NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8).copy()
    integers = changed.view()[: integer_type(section, num_items).itemsize].view(integer_type(section, num_items))
    integers[0] += 1 if integers[0] <= 0 else -1
    return changed.data


def _of_owner(
    liar: Liar,
    patches: Patches,
    change: Callable[[StageMerge, int, Any, int], memoryview],
    *,
    while_calibrating: bool = True,
) -> None:
    """One slice is replaced before the sum is made, so that hash and squares fit the lie."""

    def make(original: Method) -> Method:
        def changed(self: StageMerge, index: int, slices: Sequence[tuple[Any, int]], *, total_items: int) -> Any:
            tells = bool(slices) and (not self.calibration or while_calibrating)
            if tells and liar.lies_of_step(self.step, group=self.group):
                (data, num_items), *others = slices
                slices = [(change(self, index, data, num_items), num_items), *others]
            return original(self, index, slices, total_items=total_items)

        return changed

    patches.put(StageMerge, "merge_partition", make)


def lying_owner(liar: Liar, patches: Patches) -> None:
    def change(merge: StageMerge, index: int, data: Any, num_items: int) -> memoryview:
        return off_by_one(merge, index, data, num_items)

    _of_owner(liar, patches, change, while_calibrating=False)


def inflated_by_owner(liar: Liar, patches: Patches) -> None:
    def change(merge: StageMerge, index: int, data: Any, num_items: int) -> memoryview:
        partition, _ = merge.find(index)
        changed: NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8).copy()
        changed[len(changed) - 4 * partition.num_blocks :].view("<f4")[:] *= np.float32(GROWTH)
        return changed.data

    _of_owner(liar, patches, change)


def colluding_owner(liar: Liar, patches: Patches) -> None:
    """Both alter the contributor's slice in the way they know: the owner in the sum, the contributor in its fingerprint."""

    def slice_(original: Method) -> Method:
        def changed(self: MergeWork, hash_: str) -> memoryview:
            data = original(self, hash_)
            merge = self._context.held_stage().merge()
            if merge.calibration or not liar.lies_of_step(merge.step):
                return data
            found = _accomplice_slice(liar, merge.group, hash_)
            return data if found is None else off_by_one(merge, found[0], data, found[1])

        return changed

    def fingerprints(original: Method) -> Method:
        async def changed(self: MergeWork, owe: Fingerprint) -> None:
            await original(self, owe)
            merge = self._context.held_stage().merge()
            if not merge.calibration and liar.lies_of_step(owe.step):
                _tell_what_the_owner_has(liar, merge, owe)

        return changed

    patches.put(MergeWork, "_slice", slice_)
    patches.put(MergeWork, "fingerprint", fingerprints)


def _accomplice_slice(liar: Liar, group: int, hash_: str) -> tuple[int, int] | None:
    """Partition and number of microbatches, if the slice is an accomplice's."""
    work = liar.context.run_state.work if liar.context is not None else None
    for entry in work.merges[group].entries if work is not None else ():
        for index, value in entry.hashes:
            if value == hash_ and entry.member.hotkey in liar.accomplices():
                return index, len(entry.microbatches)
    return None


def _tell_what_the_owner_has(liar: Liar, merge: StageMerge, owe: Fingerprint) -> None:
    context = liar.context
    work = context.run_state.work if context is not None else None
    if context is None or work is None:
        return
    open_merge = work.merges[owe.group]
    entry = next(entry for entry in open_merge.entries if entry.member == context.member)
    key = ((owe.step, owe.group, owe.version), owe.seed)
    told = dict(context.local.fingerprints[key])
    slices = dict(entry.hashes)
    for index in told:
        if open_merge.owners[index].hotkey not in liar.accomplices() or index not in slices:
            continue
        num_items = len(entry.microbatches)
        data = off_by_one(merge, index, context.slices[slices[index]], num_items)
        told[index] = merge.slice_fingerprint(
            index, data, num_items, bytes.fromhex(owe.seed), total_items=num_counted(work)
        )
    context.local.fingerprints[key] = tuple(sorted(told.items()))


def wrong_root(liar: Liar, patches: Patches) -> None:
    def make(original: Method) -> Method:
        async def changed(self: Reporter, claims: Sequence[Any]) -> None:
            await original(self, [_other_root(liar, claim) for claim in claims])

        return changed

    patches.put(Reporter, "say", make)


def _other_root(liar: Liar, claim: Any) -> Any:
    if isinstance(claim, UpdatedClaim) and claim.root and liar.lies_of_step(claim.step):
        return UpdatedClaim(claim.step, blake3(claim.root.encode()).hexdigest())
    return claim


def wrong_update(liar: Liar, patches: Patches) -> None:
    """Weights are a thousandth too large after the update: the same at each of them, so that their roots agree."""

    def make(original: Method) -> Method:
        def changed(self: StageState, step: int, merged: Any, **named: Any) -> None:
            original(self, step, merged, **named)
            if step != CALIBRATION_STEP and liar.lies_of_step(step, stage=self.stage):
                next(iter(self._buffers.values())).arrays["weight"].mul_(1.001)
                self._leaves = None
                self.module.refresh()

        return changed

    patches.put(StageState, "apply_step", make)
