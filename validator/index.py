"""What decisions would otherwise search the whole state for, kept in step with the fold event by event.

The coordinator notes every event it folds; whoever asks at another state than the last one noted has it built anew. With an
index a decision costs by what changed; without one (``Watch.index`` is None) everything is looked at each time. Both decide
the same (``tests/test_index.py``).

*When to look* is kept here too: a lease can't be late, nor a member be lost, before a time that is known from the last look.
"""

from __future__ import annotations

import bisect
from collections import Counter
from math import inf

from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import RunState, StepWork
from subnet.words import Member
from validator import decide_leases


class RunIndex:
    """Of one run. Read the public fields after :meth:`sync`."""

    def __init__(self) -> None:
        self._number = -1
        self.membership = 0
        """Changes with every member that comes or goes."""
        self._clear()

    def _clear(self) -> None:
        self.members: list[Member] = []
        """In order."""
        self.by_stage: list[list[Member]] = []
        """In order; by stage."""
        self.lost_look_s = -inf
        """Nobody is lost earlier, if nobody comes meanwhile,"""
        self.lost_looked = -1
        """since this membership."""
        self.merges_look_s = -inf
        """Merges in which nothing has happened needn't be looked at earlier."""
        self._stage_of: dict[Member, int] = {}
        self.membership += 1
        self._clear_items(0)

    def _clear_items(self, num_stages: int) -> None:
        stages = range(num_stages)
        self.load: Counter[Member] = Counter()
        """Items a member has ahead: leases that are live or being revoked."""
        self.ahead: list[set[int]] = [set() for _ in stages]
        """By stage: items without a lease whose item of the stage before has one, or had."""
        self.failing: set[tuple[int, int]] = set()
        """(stage, microbatch) of items without a lease that failed more than once."""
        self.revoked_evaluations: set[tuple[int, int]] = set()
        """(stage, microbatch)."""
        self.revoking: list[set[int]] = [set() for _ in stages]
        """By stage: training items whose lease is being revoked."""
        self.fresh: list[set[int]] = [set() for _ in stages]
        """By stage: leases whose clock is to be started."""
        self.over: list[tuple[object, ...]] = []
        """Clocks of leases that are finished: nobody asks for them again."""
        self.progressed: list[bool] = [False for _ in stages]
        """By stage: somebody finished something since the last look."""
        self.late_look_s: list[float] = [-inf for _ in stages]
        """By stage, in the store's working time: no lease is late earlier."""
        self.merges_dirty: set[int] = set()
        """Groups in whose merge something may have to be decided."""
        self._ready: list[list[Member] | None] = [None for _ in stages]
        self._holders: list[dict[int, Member]] = [{} for _ in stages]
        self._clocks: list[dict[int, tuple[int, int]]] = [{} for _ in stages]
        self._had: dict[Member, set[int]] = {}
        """Everything that each member had a lease on in this step."""

    # --- asked -------------------------------------------------------------------------------------------------------

    def sync(self, state: RunState) -> RunIndex:
        """This index, of this state."""
        if self._number != state.number:
            self._rebuild(state)
        return self

    def ready(self, state: RunState, stage: int) -> list[Member]:
        """As :func:`subnet.run.state.ready`; not to be changed."""
        if state.work is None or state.work.step != state.next_step:
            return []
        found = self._ready[stage]
        if found is None:
            root, version = st.agreed_root(state, stage), state.next_step
            infos = state.members
            found = self._ready[stage] = [
                k for k in self.by_stage[stage] if infos[k].version == version and infos[k].root == root
            ]
        return found

    def holders(self, state: RunState, group: int) -> set[Member]:
        """As :func:`subnet.run.state.holders`."""
        work = state.work
        if work is None:
            return set()
        held, first = work.held, work.num_training
        return {
            member
            for stage in st.group_shape(state, group).stages
            for member in self.by_stage[stage]
            if any(m < first for m in held.get(member, ()))
        }

    def running(self, stage: int, member: Member) -> list[int]:
        """The member's leases whose clock runs, being revoked or not."""
        clocks, holders = self._clocks[stage], self._holders[stage]
        return [m for m in self._had.get(member, ()) if m in clocks and holders.get(m) == member]

    # --- told --------------------------------------------------------------------------------------------------------

    def note(self, state: RunState, event: ev.AnyEvent) -> None:
        """``event`` was just applied to ``state``."""
        if state.number != self._number + 1:
            return  # not in step: built anew when somebody asks
        self._number = state.number
        match event:
            case ev.Leased():
                self._had.setdefault(event.member, set()).add(event.microbatch)
                self._touch(state, event.microbatch, event.stage, event.stage + 1)
            case ev.Forwarded():
                self._touch(state, event.microbatch, event.stage, event.stage + 1)
                self.progressed[event.stage] = True
            case ev.Backwarded():
                self._touch(state, event.microbatch, event.stage - 1, event.stage, event.stage + 1)
                self.progressed[event.stage] = True
                if state.work is not None and st.stage_settled(state.work, event.stage):
                    self._merges_changed(state)
            case ev.Revoking():
                self._touch(state, event.microbatch, event.stage)
            case ev.NotAccumulated() | ev.ItemFailed():
                self._touch(state, event.microbatch, event.stage - 1, event.stage, event.stage + 1)
            case ev.ReplayLeased() | ev.PartsMade():
                pass
            case (
                ev.Frozen()
                | ev.Committed()
                | ev.ReduceOrdered()
                | ev.StoreRouted()
                | ev.OwnerFailed()
                | ev.PartitionMerged()
                | ev.SeedRevealed()
                | ev.Fingerprinted()
                | ev.Checked()
                | ev.TraceStarted()
            ):
                self.merges_dirty.add(event.group)
            case ev.StageSealed():
                self._merges_changed(state)
            case ev.Updated():
                stage = self._stage_of.get(event.member)
                if stage is not None:
                    self._ready[stage] = None
                self._merges_changed(state)
            case ev.Joined():
                self._joined(state, event)
            case ev.Gone():
                self._gone(state, event.member)
            case ev.Voided():
                self._touch_work(state, event.stage, event.member)
                self._merges_changed(state)
            case ev.StepPlanned() | ev.StepSealed():
                self._clear_items(st.num_stages(state))
                self._merges_changed(state)
            case ev.SnapshotOrdered() | ev.SnapshotStored() | ev.HardwareClassSet():
                pass
            case ev.AuditClosed() | ev.CaseOpened() | ev.CaseClosed():
                self._merges_changed(state)
            case (
                ev.AuditOpened()
                | ev.WindowClosed()
                | ev.WindowAudited()
                | ev.WitnessAsked()
                | ev.WitnessSaid()
                | ev.Appealed()
            ):
                pass
            case _:
                self._rebuild(state)

    def _merges_changed(self, state: RunState) -> None:
        if state.work is not None:
            self.merges_dirty.update(range(len(state.work.merges)))

    def _joined(self, state: RunState, event: ev.Joined) -> None:
        for older in [k for k in self._stage_of if k.hotkey == event.member.hotkey]:
            self._gone(state, older)
        bisect.insort(self.members, event.member)
        bisect.insort(self.by_stage[event.stage], event.member)
        self._stage_of[event.member] = event.stage
        self._ready[event.stage] = None
        self.membership += 1
        self._merges_changed(state)

    def _gone(self, state: RunState, member: Member) -> None:
        stage = self._stage_of.pop(member)
        self.members.remove(member)
        self.by_stage[stage].remove(member)
        self._ready[stage] = None
        self.membership += 1
        self._touch_work(state, stage, member)
        self._merges_changed(state)

    # --- items -------------------------------------------------------------------------------------------------------

    def _rebuild(self, state: RunState) -> None:
        self._clear()
        self._number = state.number
        if state.run is None:
            return
        stages = range(st.num_stages(state))
        self._clear_items(len(stages))
        self.members = sorted(state.members)
        self._stage_of = {member: info.stage for member, info in state.members.items()}
        self.by_stage = [[k for k in self.members if self._stage_of[k] == stage] for stage in stages]
        self._merges_changed(state)
        work = state.work
        if work is not None:
            self._had = {member: set(held) for member, held in work.held.items()}
            for stage in stages:
                for m in work.items[stage]:
                    self._item(work, stage, m)

    def _touch_work(self, state: RunState, stage: int, member: Member) -> None:
        """The member's partial is void: its items, and what their neighbours wait for."""
        for m in self._had.pop(member, ()):
            self._touch(state, m, stage - 1, stage, stage + 1)

    def _touch(self, state: RunState, m: int, *stages: int) -> None:
        work = state.work
        if work is None:
            return
        for stage in stages:
            if 0 <= stage < len(work.items):
                self._item(work, stage, m)

    def _item(self, work: StepWork, stage: int, m: int) -> None:
        """Puts one item where it belongs now."""
        found = work.items[stage][m]
        live = found.status in (st.LIVE, st.REVOKING)
        self._hold(stage, m, found.member if live else None)
        undealt = m in work.undealt[stage]
        if stage and undealt and work.items[stage - 1][m].status != st.OPEN:
            self.ahead[stage].add(m)
        else:
            self.ahead[stage].discard(m)
        if undealt and len(found.failures) > 1:
            self.failing.add((stage, m))
        elif self.failing:
            self.failing.discard((stage, m))
        if found.status == st.REVOKING and m >= work.num_training:
            self.revoked_evaluations.add((stage, m))
        elif self.revoked_evaluations:
            self.revoked_evaluations.discard((stage, m))
        clock: tuple[int, int] | None = None
        if found.status == st.REVOKING and m < work.num_training:
            self.revoking[stage].add(m)
        elif self.revoking[stage]:
            self.revoking[stage].discard(m)
        if found.status == st.REVOKING:
            clock = (found.generation, 2)
        elif live and decide_leases.clock_runs(work, stage, m):
            clock = (found.generation, int(found.forwarded))
        clocks = self._clocks[stage]
        if clock is None:
            self.fresh[stage].discard(m)
            if clocks.pop(m, None) is not None and found.status == st.DONE:
                lease = ("lease", work.step, m, stage, found.generation)
                self.over += ((*lease, False), (*lease, True))
        elif clocks.get(m) != clock:
            clocks[m] = clock
            self.fresh[stage].add(m)

    def _hold(self, stage: int, m: int, holder: Member | None) -> None:
        holders = self._holders[stage]
        before = holders.get(m)
        if before == holder:
            return
        if before is not None:
            self.load[before] -= 1
            if not self.load[before]:
                del self.load[before]
        if holder is None:
            del holders[m]
        else:
            holders[m] = holder
            self.load[holder] += 1
