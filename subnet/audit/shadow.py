"""A validator's own copies of stage states: brought to any step by snapshot and log, every agreed root compared on the way.

A kept state goes on from where it is only where it is certainly the same state: it began at the same snapshot, or its root
is one that the replicas agreed on, and what was applied since is what the log says. So a rewound run is never mixed with what
it left behind. A root that differs is a finding and no error; an error drops the state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import torch
from blake3 import blake3

from subnet.allocator import give_back
from subnet.audit.case import LogStep, StateRef
from subnet.audit.memory import state_bytes
from subnet.engine.stage_merge import StageMerge
from subnet.engine.stage_state import StageState
from subnet.errors import HashMismatch, InputError, OutOfSpace
from subnet.model.plan import ModelPlan
from subnet.model.snapshots import decode_manifest, select_entries
from subnet.words import short

Buffer = bytes | bytearray | memoryview
Blobs = Callable[[str], Buffer]
"""The bytes of a hash, checked against it; raises where they aren't there."""
WrongRoots = tuple[tuple[int, str], ...]

Tick = Callable[[str, int, int], None]
"""Told of progress: (what, done, of how many)."""
_REMEMBERED = 1024
"""Updates behind a state that it is recognised by."""


def no_tick(what: str, done: int, total: int) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Shadow:
    state: StageState
    wrong_roots: WrongRoots
    """(version, why): on the way to this state, itself included."""


@dataclass
class _Kept:
    state: StageState
    size_bytes: int
    start: int
    manifest: str
    """Hash of the snapshot that it began from, at version ``start``."""
    applied: dict[int, bytes] = field(default_factory=dict[int, bytes])
    roots: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def version(self) -> int:
        return self.state.next_step

    def leads_to(self, ref: StateRef) -> bool:
        """Whether it certainly is a state on the way from the snapshot to the end of the log."""
        if not self.state.intact or not ref.version <= self.version <= ref.version + len(ref.log):
            return False
        agreed, log = _named_roots(ref), {step.step: step for step in ref.log}
        for version in range(self.version, ref.version - 1, -1):
            begun = version == self.start == ref.version and self.manifest == ref.manifest
            if begun or (agreed[version] and self.roots.get(version) == agreed[version]):
                return True
            if version > ref.version and self.applied.get(version - 1) != _update_key(log[version - 1]):
                return False
        return False

    def forget_old(self) -> None:
        for known in (self.applied, self.roots):
            for version in [version for version in known if version < self.version - _REMEMBERED]:
                del known[version]


class ShadowPool:
    """``budget_bytes`` bounds the states that are kept and, beside them, what the work on a stage takes (``work_bytes``)."""

    def __init__(
        self,
        plan: ModelPlan,
        *,
        budget_bytes: int,
        work_bytes: Callable[[int], int] = lambda stage: 0,
        device: str = "cpu",
    ) -> None:
        self.plan, self.budget_bytes, self._work_bytes = plan, budget_bytes, work_bytes
        self.device = torch.device(device)
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    @property
    def versions(self) -> dict[int, int]:
        """By stage: the state that is kept, as the number of updates it has had (-1: before calibration)."""
        return {stage: kept.version for stage, kept in self._kept.items() if kept.state.intact}

    def goes_on_from(self, stage: int, ref: StateRef) -> int | None:
        """The kept version that :meth:`at` would begin with; None: it needs the snapshot."""
        kept = self._kept.get(stage)
        return kept.version if kept is not None and kept.leads_to(ref) else None

    def at(self, stage: int, ref: StateRef, blobs: Blobs, tick: Tick = no_tick) -> Shadow:
        """The stage's state at the end of the reference's log."""
        kept = self._kept.get(stage)
        try:
            self.make_room(stage)
            if kept is None or not kept.leads_to(ref):
                kept = self._load(stage, ref, blobs)
            self._kept.move_to_end(stage)
            if ref.root and kept.version == ref.version:
                self._note_root(kept)
            for number, log in enumerate(ref.log):
                if log.step == kept.version:
                    self._follow(stage, kept, log, blobs)
                    tick("updates", number + 1, len(ref.log))
        except BaseException:
            self._kept.pop(stage, None)
            raise
        wrong = _wrong_roots(_named_roots(ref), kept.roots)
        return Shadow(kept.state, wrong)

    def apply(self, stage: int, update: LogStep, merged: Mapping[int, Buffer], hashes: Mapping[int, str]) -> WrongRoots:
        """The kept state's next update from these merged partitions; compares the root after it."""
        kept = self._kept[stage]
        try:
            self._apply(stage, kept, update, merged, hashes)
            if update.root:
                self._note_root(kept)
        except BaseException:
            self._kept.pop(stage, None)
            raise
        return _wrong_roots({update.step + 1: update.root}, kept.roots)

    def drop(self, stage: int) -> None:
        self._kept.pop(stage, None)

    def _load(self, stage: int, ref: StateRef, blobs: Blobs) -> _Kept:
        old = self._kept.pop(stage, None)
        state = old.state if old is not None else StageState(self.plan, stage, device=self.device)
        manifest = decode_manifest(memoryview(blobs(ref.manifest)))
        state.load(select_entries(manifest, state.specs), lambda ref: memoryview(blobs(ref.hash)))
        if state.next_step != ref.version:
            raise InputError(f"the snapshot is of state {state.next_step}, not {ref.version}")
        kept = self._kept[stage] = _Kept(state, state_bytes(self.plan, stage), ref.version, ref.manifest)
        return kept

    def make_room(self, stage: int) -> None:
        """For the stage's state and the work on it; the states of others that were used least lately go."""
        size_bytes, work_bytes = state_bytes(self.plan, stage), self._work_bytes(stage)
        left = self.budget_bytes - size_bytes - work_bytes
        if left < 0:
            raise OutOfSpace(
                f"stage {stage} takes {size_bytes} bytes for its state and {work_bytes} for the work on it, "
                f"the budget for audits is {self.budget_bytes}",
                hint="raise the memory that audits may take",
            )
        others = [other for other in self._kept if other != stage]
        while others and sum(self._kept[other].size_bytes for other in others) > left:
            del self._kept[others.pop(0)]

    def _follow(self, stage: int, kept: _Kept, log: LogStep, blobs: Blobs) -> None:
        merge = StageMerge(self.plan, stage, kept.state)
        merged = Sealed(merge, log, blobs)
        self._apply(stage, kept, log, merged, {index: hash_ for index, hash_, _, _ in log.partitions}, merge)
        if log.root:
            self._note_root(kept)

    def _apply(
        self,
        stage: int,
        kept: _Kept,
        log: LogStep,
        merged: Mapping[int, Buffer],
        hashes: Mapping[int, str],
        merge: StageMerge | None = None,
    ) -> None:
        merge = merge or StageMerge(self.plan, stage, kept.state)
        sections = merge.merged_sections(merged, total_items=log.num_counted)
        kept.state.apply_step(log.step, sections, coefficient_bits=log.coefficient_bits, scalars=log.scalars)
        del sections
        give_back()
        kept.applied[log.step] = _update_key(log, hashes)
        kept.forget_old()

    def _note_root(self, kept: _Kept) -> None:
        if kept.version not in kept.roots:
            kept.roots[kept.version] = kept.state.stage_root()


class Sealed(Mapping[int, Buffer]):
    """The stage's merged partitions of the log, each read when it is asked for: one is in memory at a time."""

    def __init__(self, merge: StageMerge, log: LogStep, blobs: Blobs) -> None:
        self._merge, self._log, self._blobs = merge, log, blobs

    def __getitem__(self, index: int) -> Buffer:
        if index not in self._merge.partitions:
            raise KeyError(index)
        return opened(self._merge, self._log, index, self._blobs)

    def __contains__(self, index: object) -> bool:
        return index in self._merge.partitions

    def __iter__(self) -> Iterator[int]:
        return iter(self._merge.partitions)

    def __len__(self) -> int:
        return len(self._merge.partitions)


def opened(merge: StageMerge, log: LogStep, index: int, blobs: Blobs) -> Buffer:
    """The canonical bytes of a merged partition of the log, unpacked where they were stored in exact widths."""
    _, hash_, blob, _ = next(named for named in log.partitions if named[0] == index)
    data = blobs(blob)
    if blob == hash_:
        return data
    canonical = merge.unpack(index, data, log.num_counted)
    if blake3(canonical).hexdigest() != hash_:
        raise HashMismatch(f"update {log.step}: merged partition {index} is not what its hash {short(hash_)} says")
    return canonical


def _named_roots(ref: StateRef) -> dict[int, str]:
    return {ref.version: ref.root, **{log.step + 1: log.root for log in ref.log}}


def _wrong_roots(agreed: Mapping[int, str], found: Mapping[int, str]) -> WrongRoots:
    return tuple(
        (version, f"the state after {version} updates has the root {short(found[version])}, agreed was {short(root)}")
        for version, root in sorted(agreed.items())
        if root and version in found and found[version] != root
    )


def _update_key(log: LogStep, hashes: Mapping[int, str] | None = None) -> bytes:
    """What an update does to a state."""
    applied = {index: hash_ for index, hash_, _, _ in log.partitions} if hashes is None else hashes
    numbers = (log.step, log.scalars, log.num_counted, log.coefficient_bits, sorted(applied.items()))
    return blake3(msgspec.msgpack.encode(numbers)).digest()
