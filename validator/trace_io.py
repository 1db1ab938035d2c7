"""A trace's evidence from the store: every slice of a manifest, judged by exact arithmetic, one partition at a time.

What is kept of a slice is whether its fingerprint is the reported one, of a partition what its slices add up to; the
bytes go. A verdict is reached on a copy of the merge and journaled against the state as it is then. No torch here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from blake3 import blake3
from loguru import logger
from numpy.typing import NDArray

from subnet.errors import InputError, NotFound
from subnet.model.plan import ModelPlan
from subnet.numerics.fingerprint import slice_fingerprint
from subnet.numerics.layout import Group, Partition, Section
from subnet.numerics.packing import pack_slice
from subnet.numerics.slices import Buffer, merge_slices, parse_slice, slice_size, sum_bits
from subnet.protocol.wire import is_blob_hash
from subnet.run import state as st
from subnet.run.events import AnyEvent
from subnet.run.state import Merge, MergedPartition, RunState
from subnet.store.base import OwnerStore
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import CALIBRATION_STEP, BlobHash, Commitment
from validator.decision import TraceVerdict
from validator.scale_replay import ScaleReplay, all_of
from validator.trace import Trial, Verdict, verdict_events

VERDICT_S = 20 * TIMEOUTS.store_request_s
"""One attempt at a verdict; the next starts from the scales that this one derived."""
NO_HASH = ""
"""In place of the hash of a sum that isn't stored as what its hash says."""


@dataclass(frozen=True)
class Judged:
    """What is left of a slice: its fingerprint, or for bytes that are no slice one that differs from the reported."""

    fingerprint: tuple[int, ...]
    is_reported: bool


@dataclass(frozen=True)
class Place:
    """Slice of partition ``partition`` by the manifest's entry ``entry``.

    The trial names slices by place: two members may name the same bytes, as sums of different numbers of microbatches.
    """

    entry: int
    partition: int
    hash: BlobHash
    num_items: int
    reported: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.entry}/{self.partition}"


@dataclass
class Evidence:
    """Answers a :class:`Trial` from what was found; implements :class:`validator.trace.SliceArithmetic`."""

    slices: dict[str, Judged] = field(default_factory=dict[str, Judged])
    sums: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])

    @property
    def contributor_lied(self) -> bool:
        return not all(judged.is_reported for judged in self.slices.values())

    def read(self, group: int, partition: int, hash: str) -> Judged | None:
        return self.slices.get(hash)

    def fingerprint(self, group: int, partition: int, values: Judged, seed: str) -> tuple[int, ...]:
        return values.fingerprint

    def merge(self, group: int, partition: int, slices: Sequence[Judged]) -> tuple[str, str]:
        return self.sums[partition]


@dataclass(frozen=True)
class _Case:
    """A merge on trial, with what its slices are measured by."""

    group: Group
    merge: Merge
    places: tuple[Place, ...]
    total_items: int
    step: int

    @property
    def calibration(self) -> bool:
        """Slices are maxima only, fingerprints empty."""
        return self.step == CALIBRATION_STEP

    @property
    def seed(self) -> bytes:
        return bytes.fromhex(self.merge.seed)


class TraceReader:
    """Finds out who lied; reads from the store and changes nothing."""

    def __init__(self, plan: ModelPlan, store: OwnerStore) -> None:
        self._plan, self._store = plan, store
        self._scales = ScaleReplay(plan, store)

    async def verdict(self, action: TraceVerdict, state: RunState) -> Callable[[RunState], Iterable[AnyEvent]]:
        """What to journal, asked with the state as it is then; raises our errors where the store can't be read.

        ``state`` may go on meanwhile; if the merge does, nothing comes of the verdict.
        """
        if not _is_current(action, state):
            return lambda _: ()
        case = self._case(action, state)
        evidence = await self._evidence(case, action, state, Deadline.after(VERDICT_S))
        if evidence is None:
            return lambda _: ()
        entries = tuple(_by_place(entry, case.places, i) for i, entry in enumerate(case.merge.entries))
        named = msgspec.structs.replace(case.merge, entries=entries)
        verdict = Trial(state, action.group, named, evidence).verdict()
        _log(action, verdict)
        return lambda later: [
            decision.what for decision in verdict_events(later, action, verdict) if isinstance(decision.what, AnyEvent)
        ]

    def _case(self, action: TraceVerdict, state: RunState) -> _Case:
        merge = st.merge_of(state, action.step, action.group)
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(merge), type=Merge)
        group = self._plan.layout.groups[action.group]
        places: list[Place] = []
        for i, entry in enumerate(copy.entries):
            reported = dict(copy.fingerprints.get(entry.member, ()))
            places += [
                Place(i, p, BlobHash(value), len(entry.microbatches), reported.get(p, ())) for p, value in entry.hashes
            ]
        total = sum(len(entry.microbatches) for entry in copy.entries if entry.stage == group.stages[0])
        return _Case(group, copy, tuple(places), total, action.step)

    async def _evidence(
        self, case: _Case, action: TraceVerdict, state: RunState, deadline: Deadline
    ) -> Evidence | None:
        """None if the merge goes on; without any sums if there is somebody to name already."""
        evidence = Evidence()
        wanted = {place.hash for place in case.places if is_blob_hash(place.hash)}
        sizes = await self._store.sizes(wanted, deadline=deadline.sooner(TIMEOUTS.store_request_s))
        if any(place.hash not in sizes for place in case.places):
            for place in case.places:
                if place.hash in sizes:
                    evidence.slices[place.name] = Judged(place.reported, is_reported=True)
            return evidence
        for partition in case.group.partitions:
            if not _is_current(action, state):
                return None
            await self._partition(case, partition, evidence, sizes, state, deadline)
        return evidence

    async def _partition(
        self,
        case: _Case,
        partition: Partition,
        evidence: Evidence,
        sizes: dict[BlobHash, int],
        state: RunState,
        deadline: Deadline,
    ) -> None:
        section = self._plan.layout.sections[partition.section]
        places = [place for place in case.places if place.partition == partition.index]
        found = await all_of([self._slice(case, section, partition, place, sizes, deadline) for place in places])
        pairs = list(zip(places, found, strict=True))
        for place, data in pairs:
            if isinstance(data, _Gone):
                continue
            evidence.slices[place.name] = await asyncio.to_thread(_judge, case, section, partition, place, data)
        if evidence.contributor_lied or any(isinstance(data, _Gone) for data in found):
            return
        slices = [(data, place.num_items) for place, data in pairs if isinstance(data, bytearray)]
        scales = await self._scales.exponents(section, case.step, state, deadline=deadline)
        said = case.merge.merged[partition.index]
        evidence.sums[partition.index] = await asyncio.to_thread(
            _sum, section, partition, slices, case.total_items, scales, said
        )

    async def _slice(
        self,
        case: _Case,
        section: Section,
        partition: Partition,
        place: Place,
        sizes: dict[BlobHash, int],
        deadline: Deadline,
    ) -> bytearray | _Gone | None:
        """The bytes; None where the blob with that hash has another size, and so is no slice of this place."""
        size = slice_size(section, partition, place.num_items, calibration=case.calibration)
        if sizes[place.hash] != size:
            return None
        try:
            limit = deadline.sooner(TIMEOUTS.store_request_s)
            return await self._store.get_blob(place.hash, size, deadline=limit)
        except NotFound:
            return _Gone()


class _Gone:
    """The store had the slice and has it no more."""


def _is_current(action: TraceVerdict, state: RunState) -> bool:
    merge = st.merge_of(state, action.step, action.group)
    return merge is not None and merge.phase == st.REVEALED and merge.version == action.version


def _by_place(entry: Commitment, places: Sequence[Place], index: int) -> Commitment:
    names = tuple((place.partition, place.name) for place in places if place.entry == index)
    return msgspec.structs.replace(entry, hashes=names)


def _judge(case: _Case, section: Section, partition: Partition, place: Place, data: Buffer | None) -> Judged:
    """The bytes have the hash that the contributor committed to: if they are no slice, it is its fault."""
    none_such = Judged((*place.reported, 0), is_reported=False)
    if data is None:
        return none_such
    bound = section.item_bound // len(section.stages)
    try:
        integers, maxima = parse_slice(
            section, partition, data, place.num_items, calibration=case.calibration, item_bound=bound
        )
    except InputError:
        return none_such
    width = sum_bits(case.total_items, section.item_bound)
    values = ()
    if integers is not None:
        values = slice_fingerprint(integers, maxima, case.seed, width, partition.index)
    return Judged(values, is_reported=values == place.reported)


def _sum(
    section: Section,
    partition: Partition,
    slices: Sequence[tuple[Buffer, int]],
    total_items: int,
    scales: NDArray[np.int16] | None,
    said: MergedPartition,
) -> tuple[str, str]:
    """Hash and square-sum of the slices' sum; no hash if the owner stored something else under the right one."""
    data, squares, hash = merge_slices(section, partition, slices, total_items=total_items, exponents=scales)
    stored_as = hash
    if said.blob != hash and scales is not None:
        stored_as = blake3(pack_slice(section, partition, data, total_items)).hexdigest()
    return hash if said.blob == stored_as else NO_HASH, format(squares, "x")


def _log(action: TraceVerdict, verdict: Verdict) -> None:
    guilty = ", ".join(map(str, verdict.guilty)) or "nobody"
    missing = f"; slices missing of {', '.join(map(str, verdict.missing))}" if verdict.missing else ""
    logger.info("trace of step {} group {}: guilty is {}{}", action.step, action.group, guilty, missing)
