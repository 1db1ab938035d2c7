"""A run without a seal for ten median steps is stalled, and everyone who is waited for is named: pure, from state and watch.

Liveness is judged by progress: seals are what counts, however healthy everything looks. What is named is what the seal needs
now; how long it has been awaited is the coordinator's own clock for it, or else the time since the last seal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from subnet.numerics.owners import owners_of
from subnet.run import state as st
from subnet.run.state import Merge, RunState, StepWork
from subnet.timing import TIMEOUTS
from subnet.words import Member
from validator.audit_words import waited_audit, waiting_for_audits, waiting_for_seal
from validator.decision import FinishRun, ProbeSlices
from validator.watch import Watch

MAX_NAMED = 6
"""Microbatches or partitions that are named one by one."""


@dataclass(frozen=True)
class StallPolicy:
    """No seal for ``factor`` median steps and at least ``floor_s``; ``first_s`` before any step was sealed."""

    factor: float = 10.0
    floor_s: float = TIMEOUTS.stall_floor_s
    first_s: float = TIMEOUTS.stall_first_s
    num_steps: int = 20
    """The median is over so many last steps."""

    def limit_s(self, step_seconds: Sequence[float]) -> float:
        last = step_seconds[-self.num_steps :]
        return max(self.floor_s, self.factor * median(last)) if last else self.first_s


@dataclass(frozen=True)
class Wait:
    """Who is waited for, for what, for how long."""

    who: str
    what: str
    waited_s: float

    def __str__(self) -> str:
        return f"{self.who}: {self.what} ({self.waited_s:.0f} s)"


@dataclass(frozen=True)
class Stall:
    """No seal since ``since_s``, longer than ``limit_s``."""

    since_s: float
    limit_s: float
    waits: tuple[Wait, ...]

    @property
    def reason(self) -> str:
        return "; ".join(map(str, self.waits)) or "nothing that is known of"


def stall(
    now_s: float,
    last_seal_s: float,
    step_seconds: Sequence[float],
    state: RunState,
    watch: Watch,
    *,
    log_records: int = 0,
    policy: StallPolicy = StallPolicy(),
) -> Stall | None:
    """``last_seal_s``: when anything was last sealed; ``step_seconds``: durations of the sealed steps.

    ``log_records``: records that the log store hasn't acknowledged although one of them has to be.
    """
    if state.run is None or state.finished is not None or (state.paused and state.work is None):
        return None
    limit_s = policy.limit_s(step_seconds)
    if now_s - max(last_seal_s, watch.lanes_moved_s) < limit_s:
        return None
    return Stall(last_seal_s, limit_s, tuple(waits(now_s, last_seal_s, state, watch, log_records=log_records)))


def waits(now_s: float, last_seal_s: float, state: RunState, watch: Watch, *, log_records: int = 0) -> list[Wait]:
    """All that the next seal waits for now, stage by stage."""
    clocks = _Clocks(now_s, now_s - last_seal_s, watch)
    found: list[Wait] = []
    if log_records:
        found.append(Wait("the log store", f"to take {log_records} journal records", clocks.whole_s))
    if state.hardware_class is None:
        found.append(Wait("coldkeys", "to agree on the run's hardware class", clocks.whole_s))
    found += _members(clocks, state)
    if state.work is not None:
        for stage in range(st.num_stages(state)):
            found += _items(clocks, state, state.work, stage)
        for group, merge in enumerate(state.work.merges):
            found += _merge(clocks, state, state.work, group, merge)
    found += _snapshots(clocks, state)
    found += _audits(clocks, state, watch)
    found += _store(clocks, watch)
    return found


@dataclass(frozen=True)
class _Clocks:
    """``whole_s``: since the last seal."""

    now_s: float
    whole_s: float
    watch: Watch

    def waited_s(self, *keys: Hashable) -> float:
        """The longest of those that are timed."""
        known = [age for key in keys if (age := self.watch.waited_s(key, self.now_s)) is not None]
        return max(known, default=self.whole_s)


def _members(clocks: _Clocks, state: RunState) -> Iterator[Wait]:
    """Stages with nobody, and members that don't have the run's state where their stage has no other."""
    for stage in range(st.num_stages(state)):
        here = st.members_of(state, stage)
        if not here:
            yield Wait(f"stage {stage}", "a miner", clocks.waited_s(("empty_stage", stage)))
        elif not st.up_to_date(state, stage):
            for member in here:
                yield Wait(str(member), f"to have the state of step {state.next_step}", clocks.whole_s)


def _items(clocks: _Clocks, state: RunState, work: StepWork, stage: int) -> Iterator[Wait]:
    """Leases by holder, and items that nobody has a lease on although somebody could."""
    held: dict[Member, list[int]] = {}
    for m in sorted(work.live[stage]):
        holder = work.items[stage][m].member
        if holder is not None:
            held.setdefault(holder, []).append(m)
    for member, items in sorted(held.items()):
        keys: list[Hashable] = []
        for m in items:
            generation = work.items[stage][m].generation
            keys += [("lease", work.step, m, stage, generation, phase) for phase in (False, True)]
            keys.append(("revoking", work.step, m, stage, generation))
        yield Wait(str(member), f"leases of stage {stage}: {_some(items)}", clocks.waited_s(*keys))
    if work.undealt[stage] and st.ready(state, stage):
        yield Wait(f"stage {stage}", f"items to be dealt: {_some(sorted(work.undealt[stage]))}", clocks.whole_s)


def _merge(clocks: _Clocks, state: RunState, work: StepWork, group: int, merge: Merge) -> Iterator[Wait]:
    name, step = f"group {group}", work.step
    if merge.phase == st.FROZEN:
        for member in sorted(st.holders(state, group) - set(merge.commitments)):
            key = ("commit", step, group, merge.number, member)
            yield Wait(str(member), f"commitment of {name}", clocks.waited_s(key))
    elif merge.phase == st.REDUCING:
        left: dict[Member, list[int]] = {}
        for partition in range(len(merge.owners)):
            for owner in owners_of(merge, partition) if partition not in merge.merged else ():
                left.setdefault(owner, []).append(partition)
        key = ("routed" if merge.routed else "owner", step, group, merge.version)
        for owner, partitions in sorted(left.items()):
            yield Wait(str(owner), f"merged partitions of {name}: {_some(partitions)}", clocks.waited_s(key))
    elif merge.phase == st.REVEALED:
        yield from _checks(clocks, state, step, group, merge)


def _checks(clocks: _Clocks, state: RunState, step: int, group: int, merge: Merge) -> Iterator[Wait]:
    late = [entry.member for entry in merge.entries if entry.member not in merge.fingerprints]
    for member in late:
        key = ("fingerprint", step, group, merge.version, member)
        yield Wait(str(member), f"fingerprints of group {group}", clocks.waited_s(key))
    if late:
        return
    if merge.tracing:
        key = ("trace", step, group, merge.version)
        yield Wait("the store", f"slices for the trace of group {group}", clocks.waited_s(key))
        return
    for stage in st.group_shape(state, group).stages:
        for member in st.ready(state, stage):
            if member not in merge.checks:
                key = ("check", step, group, merge.version, member)
                yield Wait(str(member), f"check of group {group}", clocks.waited_s(key))


def _snapshots(clocks: _Clocks, state: RunState) -> Iterator[Wait]:
    if not st.snapshot_due(state):
        return
    for stage, member in sorted(state.orders.items()):
        if st.stored_snapshot(state, stage, state.next_step) is None:
            key = ("snapshot", stage, str(member))
            yield Wait(str(member), f"snapshot of stage {stage} after {state.next_step} steps", clocks.waited_s(key))


def _audits(clocks: _Clocks, state: RunState, watch: Watch) -> Iterator[Wait]:
    """Work that must be found right before a seal, a step or the end; whoever stands accused until a third party has spoken."""
    number = waited_audit(state)
    if number is not None and state.audits.open[number].number:
        yield Wait("this validator", waiting_for_seal(state, state.audits.open[number].stage), clocks.whole_s)
    elif words := waiting_for_audits(state, watch):
        yield Wait("audits", words, clocks.whole_s)


def _store(clocks: _Clocks, watch: Watch) -> Iterator[Wait]:
    """What is wrong with it, what the coordinator itself wants of it, and what members say they put there."""
    if watch.store.trouble:
        yield Wait("the store", watch.store.trouble, clocks.whole_s)
    if watch.unconfirmed:
        since_s = min(since for _, since in watch.unconfirmed.values())
        names = ", ".join(sorted({str(member) for member, _ in watch.unconfirmed.values()}))
        yield Wait("the store", f"{len(watch.unconfirmed)} blobs of {names}", clocks.now_s - since_s)
    for action in watch.started:
        if isinstance(action, ProbeSlices):
            yield Wait("the store", f"which slices of group {action.group} it has", clocks.whole_s)
        elif isinstance(action, FinishRun):
            yield Wait("the store", "the final snapshots' manifests", clocks.whole_s)


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:MAX_NAMED]))
    return shown if len(numbers) <= MAX_NAMED else f"{shown} and {len(numbers) - MAX_NAMED} more"
