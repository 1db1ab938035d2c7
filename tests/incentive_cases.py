"""A small scenario for tests of the workshop: a few machines of each kind, three days."""

from __future__ import annotations

from pathlib import Path

import msgspec

from iota.incentives import scenario_named
from subnet.incentives.outcome import Seed
from subnet.incentives.scenario import Scenario, scaled
from subnet.incentives.summary import Kind, Result

ROOT = Path(__file__).resolve().parent.parent
SCENARIO = """
days = 3
[hardware.plain]
flops_per_s = 1e13
cost_per_h = 0.05
[[groups]]
name = "workers"
behaviour = "honest"
hardware = "plain"
count = 6
"""


def small(miners: int = 60, days: float = 3.0) -> Scenario:
    return scaled(scenario_named("standard"), miners=miners, days=days)


def only(scenario: Scenario, *names: str) -> Scenario:
    """Some of its groups."""
    groups = tuple(group for group in scenario.groups if group.name in names)
    return msgspec.structs.replace(scenario, groups=groups)


def kind(result: Result, name: str) -> Kind:
    return next(found for found in result.kinds if found.name == name)


def as_bytes(seed: Seed) -> bytes:
    return msgspec.json.encode(seed)
