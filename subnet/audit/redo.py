"""The work of a case done again and compared: what is said to be wrong is wrong on every machine of the class.

Items, sums, slices and fingerprints are computed by the very code that miners run, one partial after the other. Only what
lies in the work itself (an input that can't be decoded, a loss that isn't finite) makes an item fail; what this machine can't
do raises :class:`MachineFault` and accuses nobody. On a machine of another class nothing is said to be wrong, only how far
apart things are (:mod:`subnet.audit.tolerance`). However many partials there are, two sums are in memory at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from subnet.audit.bundle import num_parts
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
    root_digest,
)
from subnet.audit.check import can_update, check_case, needed_version, shared_partitions
from subnet.audit.redo_lane import LaneSource, redo_lane
from subnet.audit.shadow import Blobs, Buffer, ShadowPool, Tick, WrongRoots, no_tick, opened
from subnet.audit.tolerance import Computed, Elsewhere, Measure, SumsApart, sums_apart
from subnet.engine.stage_executor import PartialKey, StageExecutor, StagePartial
from subnet.engine.stage_merge import HashedSlice, MergedPartition, SliceEncoder, StageMerge
from subnet.engine.stage_state import StageState
from subnet.errors import InputError, IotaError
from subnet.model.items import ItemFailed, ItemShape, failure_hash
from subnet.model.plan import ModelPlan
from subnet.numerics.fixed_point import NonFiniteGradient, host_exponents
from subnet.run.schedule import bits_fp32, terms_of
from subnet.words import ItemKey, Member, short

Tokens = Callable[..., NDArray[np.integer]]
"""The rows of an item (of a lane: and the part, from 1); asked at the first and last stage only."""

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
    elsewhere: Elsewhere | None = None,
    said: Callable[[str], None] = lambda words: None,
    tick: Tick = no_tick,
) -> Findings:
    """Replay the case; ``said`` and ``tick`` are told how it goes. Raises our errors where it can't be replayed."""
    check_case(case)
    source, began_s = _Counting(blobs), time.perf_counter()
    shadow = pool.at(case.stage, case.state, source, tick)
    state_s = time.perf_counter() - began_s
    said(f"stage {case.stage} is at state {shadow.state.next_step} ({state_s:.1f} s)")
    if case.roots:
        root = shadow.state.stage_root()
        return Findings(root_digest(root), (), None, shadow.wrong_roots, 0.0, state_s, source.read_bytes, root=root)
    measure = Measure.of(pool.plan, elsewhere) if elsewhere is not None else None
    replay = _Replay(case, pool.plan, shadow.state, source, tokens, graph_budget_bytes, measure, said, tick)
    partials = tuple(replay.partial(partial) for partial in case.partials)
    merge = replay.merge(case.merge) if case.merge is not None and case.merge.whole else None
    wrong_roots = shadow.wrong_roots
    clean = merge is not None and not merge.wrong and not any(partial.wrong for partial in partials)
    if clean and measure is None and can_update(case):
        began_s = time.perf_counter()
        wrong_roots += replay.update(pool)
        state_s += time.perf_counter() - began_s
    return Findings(
        digest=digest(partials) if measure is None else "",
        partials=partials,
        merge=merge,
        wrong_roots=wrong_roots,
        compute_s=replay.compute_s,
        state_s=state_s,
        read_bytes=source.read_bytes,
        other_class=measure.result() if measure is not None else None,
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
class _Replay:
    case: Case
    plan: ModelPlan
    state: StageState
    blobs: Blobs
    tokens: Tokens
    graph_budget_bytes: int
    measure: Measure | None
    said: Callable[[str], None]
    tick: Tick
    compute_s: float = 0.0
    num_redone: int = 0
    num_parts: int = field(init=False)
    """Of an item's boundaries; 0: they are whole."""
    _executor: StageExecutor = field(init=False)
    _merge: StageMerge = field(init=False)
    _total: StagePartial | None = field(init=False, default=None)
    """The sum of the partials so far; kept only where all of them are to be merged."""
    _slices_of: dict[Member, dict[int, str]] = field(init=False, default_factory=dict[Member, dict[int, str]])
    """Hashes of the true slices of the members whose sums are in it."""
    _merged: dict[int, MergedPartition] = field(init=False, default_factory=dict[int, MergedPartition])

    def __post_init__(self) -> None:
        case = self.case
        self.num_parts = num_parts(self.plan)
        if not self.state.holds(needed_version(case)):
            raise InputError(f"step {case.step} needs state {needed_version(case)}, not {self.state.next_step}")
        self._executor = StageExecutor(
            self.plan, case.stage, self.state, graph_budget_bytes=max(1, self.graph_budget_bytes)
        )
        self._executor.terms = terms_of(case.terms, case.step)
        self._merge = StageMerge(self.plan, case.stage, _ScalesOf(self.state, case.step))
        self._shape = ItemShape.of(self.plan)
        self._is_first, self._is_last = self.plan.is_first(case.stage), self.plan.is_last(case.stage)
        self._num_items = sum(len(partial.items) for partial in case.partials)

    # --- items -------------------------------------------------------------------------------------------------

    def partial(self, partial: PartialCase) -> RedonePartial:
        """One member's sum, from its first item to its fingerprints."""
        member, wrong = partial.member, list[str]()
        key = PartialKey(self.case.step, member.term, member.number, 0)
        items = tuple(self._item(member, given, key, wrong) for given in partial.items)
        slices: tuple[tuple[int, str], ...] = ()
        fingerprints: FingerprintValues = ()
        if any(item.failure for item in items):
            self._no_sum(member, wrong)
        else:
            summed = self._executor.partials[key]
            slices = self._slices(partial, summed, wrong)
            fingerprints = self._fingerprints(partial, summed, wrong)
            if self.case.merge is not None and self.case.merge.whole:
                self._slices_of[member] = dict(slices)
                self._add(key)
        self._executor.drop_partial(key)
        self.said(
            f"{member}: {len(items)} items redone" + ("" if self.measure else f", {len(wrong) or 'nothing'} wrong")
        )
        return RedonePartial(member, items, slices, fingerprints, tuple(wrong))

    def _no_sum(self, member: Member, wrong: list[str]) -> None:
        if self.measure is not None:
            self.measure.no_sum(member)
        else:
            wrong.append("no sum can hold an item that can't be computed: the slices can't be right")

    def _add(self, key: PartialKey) -> None:
        """Whole numbers below 2^24: fp32 adds them exactly, in any order."""
        total = self._total
        if total is None:
            self._total = self._executor.partials.pop(key)
            return
        summed = self._executor.partials[key]
        for index, part in summed.sums.items():
            whole = total.sums[index]
            whole.values.add_(part.values)
            torch.maximum(whole.maxima, part.maxima, out=whole.maxima)
            whole.num_items += part.num_items
        total.microbatches |= summed.microbatches

    def _item(self, member: Member, given: ItemCase, key: PartialKey, wrong: list[str]) -> RedoneItem:
        """One item; what differs goes to ``wrong``, or on a foreign machine to the measure."""
        item = ItemKey(self.case.step, given.microbatch, self.case.stage)
        try:
            computed = self._compute(item, given, key)
        except ItemFailed as failed:
            self._executor.drop_graph(item)
            self._executor.drop_lane(item)
            if not _is_of_the_work(failed):
                raise MachineFault(f"{failed.reason}", hint="more memory, or another machine of the class") from failed
            if self.measure is None:
                wrong.append(f"item {item} can't be computed from what went into it: {failed.reason}")
            computed = Computed(RedoneItem(given.microbatch, "", "", None, failed.hash))
        if self.measure is not None:
            self.measure.item(member, item, given, computed)
        elif not computed.redone.failure:
            wrong += _item_differences(item, given, computed.redone)
        self.num_redone += 1
        self.tick("items", self.num_redone, self._num_items)
        return computed.redone

    def _compute(self, item: ItemKey, given: ItemCase, key: PartialKey) -> Computed:
        """Forward and backward; what comes out is added to the partial, whole or (:class:`ItemFailed`) not at all."""
        if self.num_parts:
            source = LaneSource(self.blobs, self.tokens, self._check_input, self.num_parts)
            redone, compute_s = redo_lane(self._executor, source, item, given, key)
            self.compute_s += compute_s
            return Computed(redone, None, None)
        x = self.blobs(given.x) if given.x else None
        gradient = self.blobs(given.gradient) if given.gradient else None
        rows = self.tokens(item) if self.plan.needs_tokens(self.case.stage) else None
        forward: memoryview | None = None
        self._check_input(item, x, "input", self._is_first)
        self._check_input(item, gradient, "gradient", self._is_last)
        if not self._is_last:
            made = self._executor.forward(item, x, rows, keep_graph=True)
            forward, self.compute_s = made.output, self.compute_s + made.compute_s
        back = self._executor.backward(item, gradient, x, rows, partial=key)
        self.compute_s += back.compute_s
        redone = RedoneItem(given.microbatch, _hash(forward), _hash(back.output), back.loss_bits)
        return Computed(redone, forward, back.output)

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
        encoder, claimed = SliceEncoder(self._merge, summed), dict(partial.commitment.hashes)
        found: list[tuple[int, str]] = []
        for index in sorted(self._merge.partitions):
            made = encoder.make(index)
            found.append((index, made.hash))
            if self.measure is not None:
                self.measure.slice(partial, index, made.hash, self._apart(index, claimed[index], made))
            elif made.hash != claimed[index]:
                true = short(made.hash)
                wrong.append(f"slice of partition {index}: claimed {short(claimed[index])}, it is {true}")
        return tuple(found)

    def _apart(self, index: int, claimed: str, made: HashedSlice) -> SumsApart:
        """Distances of claimed bytes of a sum from the one that was made here."""

        def apart(data: Buffer, packed: bool) -> tuple[float, float]:
            theirs = self._merge.accept_slice(index, data, made.num_items, claimed, packed=packed)
            partition, section = self._merge.find(index)
            scales = self.state.exponents(section.index, self.case.step)
            exponents = None if scales is None else host_exponents(scales)
            return sums_apart(section, partition, theirs, made.data, made.num_items, exponents)

        return apart

    def _fingerprints(self, partial: PartialCase, summed: StagePartial, wrong: list[str]) -> FingerprintValues:
        merge = self.case.merge
        if merge is None or not merge.seed or self.measure is not None:
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
        total = self._total
        if total is None or len(self._slices_of) != len(self.case.partials):
            return None
        shared = shared_partitions(self.plan, self.case.stage)
        told, encoder = {one.partition: one for one in merge.merged}, SliceEncoder(self._merge, total)
        wrong: list[tuple[int, str]] = []
        for index in sorted(self._merge.partitions):
            if index in shared:
                continue
            made = encoder.make(index)
            whole = self._merge.merge_partition(index, [(made.data, made.num_items)], total_items=merge.total_items)
            done = self._merged[index] = MergedPartition(made.data, made.hash, whole.squares)
            if index not in told:
                continue
            if self.measure is not None:
                self.measure.merged(told[index], made.hash, self._apart(index, told[index].hash, made))
            else:
                wrong += [(index, why) for why in self._merge_differences(told[index], done, merge.total_items)]
        words = "" if self.measure else f", {len(wrong) or 'nothing'} wrong"
        self.said(f"merge: {len(self._merged)} partitions summed{words}")
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
            dict(partial.commitment.hashes)[index] == self._slices_of[partial.member][index]
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
