"""The machines of a scenario in virtual time: speed, cost, and every outage, drawn once from a seed.

Each machine has a random stream of its own, so the same seed gives the same machines and outages under every policy: what
differs between two policies then is the policies' doing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subnet.incentives.behaviour import Behaviour
from subnet.incentives.scenario import Hardware, Scenario

HOUR_S = 3600.0
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    group: str
    hardware: str
    behaviour: Behaviour
    flops_per_s: float
    cost_per_h: float
    late_share: float
    outages: tuple[tuple[float, float], ...]
    """(from, to) in seconds, in order, apart."""


def make_machines(scenario: Scenario, seed: int, until_s: float) -> list[Machine]:
    found: list[Machine] = []
    for number, group in enumerate(scenario.groups):
        hardware, does = scenario.hardware[group.hardware], group.made()
        for index in range(group.count):
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number, index])))
            found.append(_machine(group.name, group.hardware, hardware, does, rng, until_s))
    return found


def _machine(
    group: str, name: str, hardware: Hardware, does: Behaviour, rng: np.random.Generator, until_s: float
) -> Machine:
    flops_per_s, between_h, outage_h = hardware.flops_per_s, hardware.hours_between_outages, hardware.outage_h
    late_share = hardware.late_share
    if hardware.measured:
        own = hardware.measured[int(rng.integers(len(hardware.measured)))]
        flops_per_s, between_h, outage_h, late_share = own
    else:
        flops_per_s *= float(np.exp(rng.normal(0.0, hardware.spread)))
    outages: list[tuple[float, float]] = []
    now_s = float(rng.exponential(between_h)) * HOUR_S
    while now_s < until_s and outage_h > 0:
        end_s = now_s + max(1.0, float(rng.exponential(outage_h)) * HOUR_S)
        outages.append((now_s, end_s))
        now_s = end_s + float(rng.exponential(between_h)) * HOUR_S
    return Machine(group, name, does, flops_per_s, hardware.cost_per_h, late_share, tuple(outages))


@dataclass(frozen=True)
class Change:
    """A machine goes down, or comes up again."""

    time_s: float
    machine: int
    is_up: bool


class Timeline:
    """All outages by interval: what part of it each machine is up, and when that changes."""

    def __init__(self, machines: list[Machine], interval_s: float, num_intervals: int) -> None:
        self.up_IM: Floats = np.ones((num_intervals, len(machines)))
        """Part of interval I that machine M is up."""
        self.changes: list[list[Change]] = [[] for _ in range(num_intervals)]
        for number, machine in enumerate(machines):
            for down_s, up_s in machine.outages:
                self._down(number, down_s, up_s, interval_s)
        for found in self.changes:
            found.sort(key=lambda change: (change.time_s, change.machine))

    def _down(self, machine: int, down_s: float, up_s: float, interval_s: float) -> None:
        count = len(self.changes)
        for time_s, is_up in ((down_s, False), (up_s, True)):
            if (interval := int(time_s / interval_s)) < count:
                self.changes[interval].append(Change(time_s, machine, is_up))
        for interval in range(int(down_s / interval_s), min(count - 1, int(up_s / interval_s)) + 1):
            begins_s = interval * interval_s
            lost_s = min(up_s, begins_s + interval_s) - max(down_s, begins_s)
            self.up_IM[interval, machine] = max(0.0, self.up_IM[interval, machine] - lost_s / interval_s)
