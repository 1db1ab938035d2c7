"""What the nodes of a schedule share: the blob store, messages under way, and who leads; one half of the simulator."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import schedule_toy as toy
from schedule_audit import Audit
from schedule_miner import Miner
from schedule_nodes import Coordinator, Crash, Log, Trouble

from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.run import state as st
from validator import journal_core


class World(Audit):
    """Filled by :class:`schedule_sim.Sim`."""

    rng: random.Random
    up: bool
    log: Log
    coordinator: Any
    coordinators: list[Coordinator]
    miners: list[Miner]
    bag: list[tuple[Any, Any, str, tuple[Any, ...], Any]]
    """Messages under way: to, source, kind, arguments, and the mark that keeps a second one of the same from being sent."""
    flying: set[Any]
    signed: set[Any]
    """(member, boundary, generation, hash) that its sender has signed."""
    history: dict[bool, list[tuple[Any, str, tuple[Any, ...]]]]
    num_sent: int
    leads_on_acknowledged: bool
    _unique: int

    # --- what nodes use

    def unique(self) -> str:
        self._unique += 1
        return f"u{self._unique}"

    def coldkey_of(self, hotkey: str) -> str:
        return f"cold{hotkey}"

    def answers(self, node: Any) -> bool:
        """Whether the blob store answers this node; ``takes``: what it puts; ``commit_fails``: the coordinator's disk."""
        return self.up

    def takes(self, node: Any) -> bool:
        return self.up

    def commit_fails(self, coordinator: Coordinator) -> bool:
        return False

    def new_coordinator(self, journal: list[ev.Record], term: int, acknowledged: int, segments: int) -> Coordinator:
        return Coordinator(self, journal, term, acknowledged, segments)

    def new_miner(self, hotkey: str) -> Miner:
        return Miner(self, hotkey)

    def put(self, value: Any) -> str:
        address = toy.name(value)
        if address not in self.store:
            self.store[address] = value
            self.progress = True
        return address

    def send(self, to: Any, source: Any, kind: str, *args: Any, key: Any = None) -> None:
        if to is None:
            return
        mark = (id(to), id(source), kind, args if key is None else key)
        if mark not in self.flying:
            self.flying.add(mark)
            self.num_sent += 1
            self.bag.append((to, source, kind, args, mark))
            if kind in ("claim", "hello"):
                merging = kind == "claim" and hasattr(args[1], "group")
                self.history[merging].append((source, kind, args))

    def echo(self) -> None:
        """A claim or hello of long ago arrives once more, at whoever leads."""
        if self.coordinator.dead or not self.coordinator.core.may_speak:
            return
        state = self.coordinator.state
        entries = self.history[self.rng.random() < 0.7][-300:]
        present = [entry for entry in entries if entry[1] == "hello" or entry[2][0] in state.members]
        earlier = [entry for entry in present if self._is_superseded(entry)]
        choice = earlier if earlier and self.rng.random() < 0.7 else present
        if choice:
            source, kind, args = self.rng.choice(choice)
            self._receive(self.coordinator, source, kind, *args)

    def _is_superseded(self, entry: tuple[Any, str, tuple[Any, ...]]) -> bool:
        """A claim about an earlier version of a manifest that is being reduced or checked."""
        version = getattr(entry[2][-1], "version", None)
        if entry[1] != "claim" or version is None:
            return False
        merge = st.merge_of(self.coordinator.state, entry[2][1].step, entry[2][1].group)
        if merge is None or version >= merge.version:
            return False
        revealed = merge.phase == st.REVEALED and len(merge.fingerprints) < len(merge.entries)
        return revealed == isinstance(entry[2][1], msg.FingerprintClaim)

    # --- leaders

    def lead(self) -> None:
        """Another validator leads, from what the log store has."""
        records = [record for segment in self.log.segments for record in segment]
        ahead = self.coordinators and any(not m.dead and m.follower.number > len(records) for m in self.miners)
        if ahead and not self.leads_on_acknowledged:
            return
        term = sum(isinstance(record.event, ev.TermStarted) for record in records) + 1
        started = journal_core.term_started(term, "validator", self.unique())
        journal = [*records, ev.Record(len(records), 0, started)]
        new = self.new_coordinator(journal, term, len(records), len(self.log.segments))
        self.coordinators.append(new)
        self.coordinator = new

    def _new_rival(self) -> None:
        """Another validator takes over at the same moment as the one before it; members listen to either."""
        self.lead()
        for miner in self.miners:
            if self.rng.random() < 0.5:
                miner.coordinator = self.coordinator

    def restart(self, old: Coordinator) -> None:
        """The same validator again: its journal is on its disk."""
        core = old.core
        new = self.new_coordinator(old.journal, core.term, core.acknowledged, core.num_segments)
        self.coordinators[self.coordinators.index(old)] = new
        self.coordinator = new
        for miner in self.miners:
            if miner.coordinator is old:
                miner.coordinator = new

    # --- messages

    def _deliver_some(self, trouble: Trouble) -> None:
        rng = self.rng
        batch, self.bag = self.bag, []
        rng.shuffle(batch)
        for to, source, kind, args, mark in batch:
            x = rng.random()
            if to.paused or x < trouble.delayed:
                self.bag.append((to, source, kind, args, mark))
                continue
            twice = rng.random() < trouble.doubled
            if twice:
                self.bag.append((to, source, kind, args, mark))
            else:
                self.flying.discard(mark)
            if not to.dead and rng.random() >= trouble.lost:
                self._receive(to, source, kind, *args)

    def _receive(self, to: Any, source: Any, kind: str, *args: Any) -> None:
        with contextlib.suppress(Crash):
            to.receive(source, kind, *args)

    def _deliver_all(self) -> None:
        """Everything under way arrives, in some order; what it causes is the next round's."""
        batch, self.bag = self.bag, []
        if self.rng.random() < 0.5:
            self.rng.shuffle(batch)
        for to, source, kind, args, mark in batch:
            self.flying.discard(mark)
            if not to.dead:
                to.receive(source, kind, *args)
