"""Schedules and faults of runs whose boundaries and slices go through the store: all of them, or those of some members.

Demanded beyond what every schedule is: nothing goes straight to or from a member that can't be reached, and nothing is
receipted that the store doesn't have. Blobs of boundaries get lost now and then.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fault_effects import WRONG
from fault_sim import Cell, FaultMiner, FaultSim, NotHit
from schedule_miner import Miner
from schedule_nodes import Bad, Coordinator
from schedule_sim import Sim

from miner import owed as owing
from miner.local_view import BoundaryKey
from miner.owes import Fetch, FetchSlice, FetchStored, StoreBoundary
from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.run import state as st
from subnet.words import Member

STRAIGHT = ("boundary", "need", "slice", "need_slice")
LOOKS = 3


class ByStore(Miner):
    """What a member does with the store, over either kind of toy member."""

    sim: Any

    def __init__(self, sim: Any, hotkey: str) -> None:
        super().__init__(sim, hotkey)
        self.looks: dict[BoundaryKey, int] = {}

    def say_hello(self) -> None:
        hardware = self.state.hardware_class.hashes if self.state.hardware_class else ("golden",)
        reachable = self.hotkey not in self.sim.unreachable
        request = msg.JoinRequest(
            1, "toy", self.boot, "127.0.0.1", 1, hardware, self.follower.cursor, reachable=reachable
        )
        self.sim.send(self.coordinator, self, "hello", request)

    def do(self, me: Member, owe: Any) -> None:
        if isinstance(owe, FetchStored):
            self.fetch_stored(me, owe)
        elif isinstance(owe, StoreBoundary):
            if self.writes and self.lie != "mute" and owe.key in self.values:
                self.sim.put_boundary(self.values[owe.key])
                self.local.in_store[owe.key] = owe.turn
        elif isinstance(owe, Fetch):  # who is gone has no address
            present = tuple(source for source in owe.sources if source in self.state.members)
            super().do(me, msgspec.structs.replace(owe, sources=present))
        else:
            super().do(me, owe)

    def do_FetchSlice(self, me: Member, owe: FetchSlice) -> None:
        if not owe.routed:
            super().do_FetchSlice(me, owe)
        elif self.reads and owe.hash in self.sim.store:
            self.slices[owe.hash] = self.sim.store[owe.hash]
            self.local.slices.add(owe.hash)

    def fetch_stored(self, me: Member, owe: FetchStored) -> None:
        if not self.reads:
            return
        value = self.sim.store.get(owe.hash)
        if value is not None:
            if owing.still_needs(self.state, me, owe.key, owe.hash):
                self.have(owe.key, value)
            return
        self.looks[owe.key] = self.looks.get(owe.key, 0) + 1
        if self.looks[owe.key] >= LOOKS:
            self.local.unavailable.add(owe.key)


class FaultyByStore(ByStore, FaultMiner):
    pass


class StoreRules:
    """The judging half: over :class:`schedule_sim.Sim` or :class:`fault_sim.FaultSim`."""

    unreachable: set[str]
    all_by_store: bool
    kept: list[str]
    lost: set[str]

    def begin(self, *, all_by_store: bool) -> None:
        self.unreachable, self.all_by_store, self.kept, self.lost = set(), all_by_store, [], set()

    def put_boundary(self: Any, value: int) -> None:
        address = self.put(value)
        self.lost.discard(address)
        if address not in self.kept:
            self.kept.append(address)

    def lose(self: Any, address: str) -> None:
        self.store.pop(address, None)
        self.kept.remove(address)
        self.lost.add(address)

    def judge_way(self, to: Any, source: Any, kind: str) -> None:
        if kind in STRAIGHT and (self.all_by_store or {to.hotkey, source.hotkey} & self.unreachable):
            raise Bad(f"a {kind} goes straight from {source.hotkey} to {to.hotkey}")

    def judge_receipt(self: Any, coordinator: Coordinator, event: ev.AnyEvent) -> None:
        if not isinstance(event, ev.Forwarded | ev.Backwarded) or event.output in ("", WRONG):
            return
        found = st.item(coordinator.state, event.step, event.microbatch, event.stage)
        maker = found.member.hotkey if found is not None and found.member is not None else ""
        durable = event.output in self.store or event.output in self.lost
        if not durable and (self.all_by_store or maker in self.unreachable):
            raise Bad(f"{maker} receipts what the store doesn't have")


def planned_by_store(planned: ev.RunPlanned) -> ev.RunPlanned:
    pipeline = msgspec.structs.replace(planned.config.pipeline, boundaries="store")
    return msgspec.structs.replace(planned, config=msgspec.structs.replace(planned.config, pipeline=pipeline))


class StoreSim(StoreRules, Sim):
    """A random schedule. ``mixed``: some members can't be reached, the others are straight with each other.

    ``losses``: the share of faults that are the loss of a boundary's blob.
    """

    def __init__(self, seed: int, *, mixed: bool = False, losses: float = 0.3, **options: Any) -> None:
        self.begin(all_by_store=not mixed)
        self.losses = losses
        super().__init__(seed, **options)

    def _choose(self, lie: str) -> int:
        count = super()._choose(lie)
        if self.all_by_store:
            self.run_planned = planned_by_store(self.run_planned)
        else:
            names = [f"hot{i}" for i in range(14)]
            self.unreachable = set(self.rng.sample(names[:count], self.rng.randint(1, count)))
            self.unreachable |= {name for name in names[count:] if self.rng.random() < 0.5}
        return count

    def new_miner(self, hotkey: str) -> Miner:
        return ByStore(self, hotkey)

    def send(self, to: Any, source: Any, kind: str, *args: Any, key: Any = None) -> None:
        if to is not None:
            self.judge_way(to, source, kind)
        super().send(to, source, kind, *args, key=key)

    def saw(self, coordinator: Coordinator, event: ev.AnyEvent) -> None:
        super().saw(coordinator, event)
        self.judge_receipt(coordinator, event)

    def fault(self) -> None:
        if self.kept and self.rng.random() < self.losses:
            self.lose(self.rng.choice(self.kept))
        else:
            super().fault()


class StoreFaultSim(StoreRules, FaultSim):
    """A cell of the fault table, everything through the store."""

    def __init__(self, cell: Cell, seed: int = 1) -> None:
        self.begin(all_by_store=True)
        super().__init__(cell, seed)

    def _choose(self, lie: str) -> int:
        count = super()._choose(lie)
        self.run_planned = planned_by_store(self.run_planned)
        return count

    def new_miner(self, hotkey: str) -> FaultMiner:
        return FaultyByStore(self, hotkey)

    def send(self, to: Any, source: Any, kind: str, *args: Any, key: Any = None) -> None:
        if to is not None:
            self.judge_way(to, source, kind)
        super().send(to, source, kind, *args, key=key)

    def saw(self, coordinator: Coordinator, event: ev.AnyEvent) -> None:
        super().saw(coordinator, event)
        self.judge_receipt(coordinator, event)


def makes_sense(cell: Cell) -> bool:
    """Members say nothing straight to each other here, so nothing on that way can be cut or spoilt."""
    return cell.variant not in ("peers", "flight")


def attempt_by_store(cell: Cell) -> StoreFaultSim:
    for seed in range(1, 9):
        sim = StoreFaultSim(cell, seed)
        try:
            sim.run()
        except NotHit:
            continue
        return sim
    raise NotHit(f"{cell}: nothing ever ran into the fault")


def failures(seeds: range, **options: Any) -> dict[str, int]:
    """First seed of each kind of failure."""
    found: dict[str, int] = {}
    for seed in seeds:
        try:
            StoreSim(seed, checks_all=False, **options).run()
        except Exception as error:  # noqa: BLE001  every failure is counted by its kind
            found.setdefault(f"{type(error).__name__}: {error}"[:90], seed)
    return found
