"""The work of a case done again and compared: what is said to be wrong is wrong on every machine of the class.

Items, sums, slices and fingerprints are computed by the very code that miners run, one partial after the other. Only what
lies in the work itself (an input that can't be decoded, a loss that isn't finite) makes an item fail; what this machine can't
do raises :class:`MachineFault` and accuses nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from subnet.audit.case import (
    Case,
    Findings,
    FingerprintValues,
    ItemCase,
    MergeCase,
    MergedCase,
    PartialCase,
    RedoneItem,
    RedoneMerge,
    RedonePartial,
    digest,
)
from subnet.audit.check import can_update, check_case, needed_version, shared_partitions
from subnet.audit.shadow import Blobs, Buffer, ShadowPool, WrongRoots, opened
from subnet.engine.stage_executor import PartialKey, StageExecutor, StagePartial
from subnet.engine.stage_merge import HashedSlice, MergedPartition, StageMerge
from subnet.engine.stage_state import StageState
from subnet.errors import InputError, IotaError
from subnet.model.items import ItemFailed, ItemShape, failure_hash
from subnet.model.plan import ModelPlan
from subnet.numerics.fixed_point import NonFiniteGradient
from subnet.run.schedule import bits_fp32
from subnet.words import ItemKey, Member, short

Tokens = Callable[[ItemKey], NDArray[np.integer]]
"""The rows of an item; asked at the first and last stage only."""

GRAPH_BUDGET_BYTES = 1 << 30


class MachineFault(IotaError):
    """The replay failed on this machine: out of memory, an exception in a kernel. It says nothing about the case."""

    code = "machine_fault"


def redo(
    case: Case,
    pool: ShadowPool,
    blobs: Blobs,
    tokens: Tokens,
    *,
    graph_budget_bytes: int = GRAPH_BUDGET_BYTES,
    said: Callable[[str], None] = lambda words: None,
) -> Findings:
    """Replay the case; ``said`` is told how it goes. Raises our errors where it can't be replayed."""
    check_case(case)
    source, began_s = _Counting(blobs), time.perf_counter()
    shadow = pool.at(case.stage, case.state, source)
    state_s = time.perf_counter() - began_s
    said(f"stage {case.stage} is at state {shadow.state.next_step} ({state_s:.1f} s)")
    replay = _Replay(case, pool.plan, shadow.state, source, tokens, graph_budget_bytes, said)
    partials = tuple(replay.partial(partial) for partial in case.partials)
    merge = replay.merge(case.merge) if case.merge is not None and case.merge.whole else None
    wrong_roots = shadow.wrong_roots
    clean = merge is not None and not merge.wrong and not any(partial.wrong for partial in partials)
    if clean and can_update(case):
        began_s = time.perf_counter()
        wrong_roots += replay.update(pool)
        state_s += time.perf_counter() - began_s
    return Findings(
        digest=digest(partials),
        partials=partials,
        merge=merge,
        wrong_roots=wrong_roots,
        compute_s=replay.compute_s,
        state_s=state_s,
        read_bytes=source.read_bytes,
    )


@dataclass
class _Counting:
    blobs: Blobs
    read_bytes: int = 0

    def __call__(self, hash: str) -> Buffer:
        data = self.blobs(hash)
        self.read_bytes += memoryview(data).nbytes
        return data


class _ScalesOf:
    """A state as merging sees it, for a step that needn't be the one that updates it (``update_delay`` 1)."""

    def __init__(self, state: StageState, step: int) -> None:
        self.device, self.next_step = state.device, step
        self._state = state

    def exponents(self, section: int, step: int | None = None) -> Tensor | None:
        return self._state.exponents(section, self.next_step if step is None else step)


@dataclass
class _Sum:
    """A partial's slices; kept only where all of them are to be merged."""

    num_items: int
    slices: dict[int, HashedSlice]


@dataclass
class _Replay:
    case: Case
    plan: ModelPlan
    state: StageState
    blobs: Blobs
    tokens: Tokens
    graph_budget_bytes: int
    said: Callable[[str], None]
    compute_s: float = 0.0
    _executor: StageExecutor = field(init=False)
    _merge: StageMerge = field(init=False)
    _sums: dict[Member, _Sum] = field(init=False, default_factory=dict[Member, _Sum])
    _merged: dict[int, MergedPartition] = field(init=False, default_factory=dict[int, MergedPartition])

    def __post_init__(self) -> None:
        case = self.case
        if not self.state.holds(needed_version(case)):
            raise InputError(f"step {case.step} needs state {needed_version(case)}, not {self.state.next_step}")
        self._executor = StageExecutor(
            self.plan, case.stage, self.state, graph_budget_bytes=max(1, self.graph_budget_bytes)
        )
        self._merge = StageMerge(self.plan, case.stage, _ScalesOf(self.state, case.step))
        self._shape = ItemShape.of(self.plan)
        self._is_first, self._is_last = self.plan.is_first(case.stage), self.plan.is_last(case.stage)

    # --- items -------------------------------------------------------------------------------------------------

    def partial(self, partial: PartialCase) -> RedonePartial:
        """One member's sum, from its first item to its fingerprints."""
        member, wrong = partial.member, list[str]()
        key = PartialKey(self.case.step, member.term, member.number, 0)
        items = tuple(self._item(given, key, wrong) for given in partial.items)
        slices: tuple[tuple[int, str], ...] = ()
        fingerprints: FingerprintValues = ()
        if any(item.failure for item in items):
            wrong.append("no sum can hold an item that can't be computed: the slices can't be right")
        else:
            summed = self._executor.partials[key]
            slices = self._slices(partial, summed, wrong)
            fingerprints = self._fingerprints(partial, summed, wrong)
        self._executor.drop_partial(key)
        self.said(f"{member}: {len(items)} items redone, {len(wrong) or 'nothing'} wrong")
        return RedonePartial(member, items, slices, fingerprints, tuple(wrong))

    def _item(self, given: ItemCase, key: PartialKey, wrong: list[str]) -> RedoneItem:
        item = ItemKey(self.case.step, given.microbatch, self.case.stage)
        x = self.blobs(given.x) if given.x else None
        gradient = self.blobs(given.gradient) if given.gradient else None
        rows = self.tokens(item) if self._is_first or self._is_last else None
        forward = ""
        try:
            self._check_input(item, x, "input", self._is_first)
            self._check_input(item, gradient, "gradient", self._is_last)
            if not self._is_last:
                made = self._executor.forward(item, x, rows, keep_graph=True)
                self.compute_s += made.compute_s
                forward = _hash(made.output)
            back = self._executor.backward(item, gradient, x, rows, partial=key)
            self.compute_s += back.compute_s
        except ItemFailed as failed:
            self._executor.drop_graph(item)
            if not _is_of_the_work(failed):
                raise MachineFault(f"{failed.reason}", hint="more memory, or another machine of the class") from failed
            wrong.append(f"item {item} can't be computed from what went into it: {failed.reason}")
            return RedoneItem(given.microbatch, forward, "", None, failed.hash)
        redone = RedoneItem(given.microbatch, forward, _hash(back.output), back.loss_bits)
        wrong += _item_differences(item, given, redone)
        return redone

    def _check_input(self, item: ItemKey, data: Buffer | None, what: str, is_end: bool) -> None:
        """Bytes that nobody can have computed with make the item fail, as they would on any machine."""
        if is_end:
            return
        try:
            self._shape.boundary(data, self.state.device, what)
        except InputError as error:
            raise ItemFailed(failure_hash(item, what), f"{item}: {error.reason}") from None

    # --- sums --------------------------------------------------------------------------------------------------

    def _slices(self, partial: PartialCase, summed: StagePartial, wrong: list[str]) -> tuple[tuple[int, str], ...]:
        made = self._merge.slices(summed)
        if self.case.merge is not None and self.case.merge.whole:
            self._sums[partial.member] = _Sum(len(summed.microbatches), made)
        claimed = dict(partial.commitment.hashes)
        for index in sorted(made):
            if made[index].hash != claimed[index]:
                true = short(made[index].hash)
                wrong.append(f"slice of partition {index}: claimed {short(claimed[index])}, it is {true}")
        return tuple((index, made[index].hash) for index in sorted(made))

    def _fingerprints(self, partial: PartialCase, summed: StagePartial, wrong: list[str]) -> FingerprintValues:
        merge = self.case.merge
        if merge is None or not merge.seed:
            return ()
        seed = bytes.fromhex(merge.seed)
        found = self._merge.partial_fingerprints(summed, seed, total_items=merge.total_items)
        claimed = dict(partial.fingerprints)
        for index in sorted(found) if claimed else ():
            if index not in claimed:
                wrong.append(f"partition {index}: no fingerprint is claimed")
            elif claimed[index] != found[index]:
                wrong.append(f"fingerprint of partition {index}: the claimed one is not that of the true sum")
        return tuple(sorted(found.items()))

    # --- merge -------------------------------------------------------------------------------------------------

    def merge(self, merge: MergeCase) -> RedoneMerge | None:
        """Each partition from the true slices; None where one of the sums can't be had."""
        if len(self._sums) != len(self.case.partials):
            return None
        shared = shared_partitions(self.plan, self.case.stage)
        told = {one.partition: one for one in merge.merged}
        wrong: list[tuple[int, str]] = []
        for index in sorted(self._merge.partitions):
            if index in shared:
                continue
            slices: list[tuple[Buffer, int]] = [(s.slices[index].data, s.num_items) for s in self._sums.values()]
            done = self._merged[index] = self._merge.merge_partition(index, slices, total_items=merge.total_items)
            if index in told:
                wrong += [(index, why) for why in self._merge_differences(told[index], done, merge.total_items)]
        self.said(f"merge: {len(self._merged)} partitions summed, {len(wrong) or 'nothing'} wrong")
        return RedoneMerge(tuple((index, done.hash) for index, done in self._merged.items()), tuple(wrong))

    def _merge_differences(self, told: MergedCase, done: MergedPartition, total_items: int) -> list[str]:
        by = f" by {told.owner}" if told.owner is not None else ""
        if told.hash != done.hash:
            why = "" if self._slices_hold(told.partition) else "; a committed slice of it is wrong as well"
            return [f"merged{by} to {short(told.hash)}, the true slices give {short(done.hash)}{why}"]
        found: list[str] = []
        if int(told.squares, 16) != done.squares:
            found.append(f"square-sum{by} is claimed as {short(told.squares)}, it is {short(done.squares_hex)}")
        if told.blob != done.hash:
            packed = self._merge.pack(told.partition, done.data, total_items)
            if blake3(packed).hexdigest() != told.blob:
                found.append(f"stored{by} as {short(told.blob)}, which is no form of the true sum")
        return found

    def _slices_hold(self, index: int) -> bool:
        """Whether every contributor committed to its true slice of the partition: then the owner alone can be wrong."""
        return all(
            dict(partial.commitment.hashes)[index] == self._sums[partial.member].slices[index].hash
            for partial in self.case.partials
        )

    def update(self, pool: ShadowPool) -> WrongRoots:
        """The step's own update, of what was merged here; partitions shared with another stage are the sealed ones."""
        update = self.case.update
        if update is None:
            return ()
        merged: dict[int, Buffer] = {index: done.data for index, done in self._merged.items()}
        hashes = {index: done.hash for index, done in self._merged.items()}
        sealed = {index: hash_ for index, hash_, _, _ in update.partitions}
        for index in shared_partitions(self.plan, self.case.stage):
            merged[index], hashes[index] = opened(self._merge, update, index, self.blobs), sealed[index]
        return pool.apply(self.case.stage, update, merged, hashes)


def _hash(data: memoryview | None) -> str:
    return blake3(data).hexdigest() if data is not None else ""


def _is_of_the_work(failed: ItemFailed) -> bool:
    """A number that isn't finite is the same on every machine of the class; an exception may be this one's."""
    return failed.__cause__ is None or isinstance(failed.__cause__, NonFiniteGradient)


def _item_differences(item: ItemKey, claimed: ItemCase, redone: RedoneItem) -> Sequence[str]:
    found: list[str] = []
    pairs = (("output", claimed.forward, redone.forward), ("gradient", claimed.backward, redone.backward))
    for what, said, true in pairs:
        if said and said != true:
            is_ = short(true) if true else "nothing: there is none"
            found.append(f"item {item}: {what} claimed as {short(said)}, it is {is_}")
    if claimed.loss_bits is not None and claimed.loss_bits != redone.loss_bits:
        true_loss = "nothing" if redone.loss_bits is None else f"{bits_fp32(redone.loss_bits):.9g}"
        found.append(f"item {item}: loss claimed as {bits_fp32(claimed.loss_bits):.9g}, it is {true_loss}")
    return found
