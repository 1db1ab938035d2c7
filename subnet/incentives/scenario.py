"""Who takes part in a simulation, on what hardware, at what prices: a TOML file, checked, or measured in a recorded journal."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from subnet.errors import ConfigError
from subnet.incentives import kinds as kinds
from subnet.incentives.behaviour import Behaviour, check, make_behaviour
from subnet.run.config import AuditSection

LIMIT_SCENARIO_BYTES = 1 << 20
BLOCK_S, TEMPO_BLOCKS = 12.0, 361
TEMPO_S = TEMPO_BLOCKS * BLOCK_S
MAX_MINERS = 20_000
MAX_HOTKEYS = 50_000
MAX_INTERVALS = 100_000_000
"""Of all machines together: what each did in each part of a tempo takes 8 bytes."""
LEAST_BETWEEN_H = 0.1


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of machine. Outages come at random (exponential), lengths too; speeds are log-normal around the median."""

    flops_per_s: float
    """Of items handed in, forward and backward, median."""
    cost_per_h: float
    """USD for power or rent."""
    hours_between_outages: float = 400.0
    outage_h: float = 0.5
    late_share: float = 0.002
    """Leases revoked per lease done."""
    spread: float = 0.1
    """Standard deviation of the logarithm of the speed."""
    measured: tuple[tuple[float, float, float, float], ...] = ()
    """(flops_per_s, hours between outages, hours of one, late share) of real members: a machine is one of them at random."""

    def __post_init__(self) -> None:
        check("flops_per_s", self.flops_per_s, 1.0, 1e20)
        check("cost_per_h", self.cost_per_h, 0.0, 1e6)
        check("hours_between_outages", self.hours_between_outages, LEAST_BETWEEN_H, 1e9)
        check("outage_h", self.outage_h, 0.0, 1e4)
        check("late_share", self.late_share, 0.0, 1.0)
        check("spread", self.spread, 0.0, 2.0)


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Machines that behave alike."""

    name: str
    behaviour: str
    hardware: str
    count: int
    options: dict[str, Any] = {}
    """Of the behaviour."""

    def made(self) -> Behaviour:
        return make_behaviour(self.behaviour, self.options)


class RunRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The run that all work on."""

    step_s: float = 60.0
    item_flops: float = 1e14
    """Of one item at a stage, forward and backward."""
    lease_factor: float = 3.0
    """A lease is late at so many times its expected time (``validator.policy.Policy.lease_factor``)."""
    redo_s: float = 60.0
    """From the block that a window's audits are drawn from until a lie is established."""
    audit: AuditSection = AuditSection()

    def __post_init__(self) -> None:
        check("run.step_s", self.step_s, 1.0, 3600.0)
        check("run.item_flops", self.item_flops, 1.0, 1e30)
        check("run.lease_factor", self.lease_factor, 1.0, 100.0)
        check("run.redo_s", self.redo_s, 0.0, 86_400.0)


class Economy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The subnet on its chain. Prices in USD, stakes and amounts in its token."""

    token_usd: float = 400.0
    emission_per_block: float = 0.004
    """Owner's cut first, then half to miners, half to validators (:mod:`subnet.chain.local_pay`)."""
    registration_cost: float = 0.01
    owner_cut: float = 0.18
    validator_stakes: tuple[float, ...] = (4000.0, 3000.0, 2000.0, 1500.0)
    copying_stakes: tuple[float, ...] = (1500.0,)
    """Validators that set what the others set in the tempo before."""
    capital_cost_per_year: float = 0.15
    """What locked stake costs its holder, where the policy asks miners for some."""
    spare_uids: float = 0.1
    """Free slots, as a share of all hotkeys; beyond them who earns least is pruned."""

    def __post_init__(self) -> None:
        check("economy.token_usd", self.token_usd, 0.0, 1e9)
        check("economy.emission_per_block", self.emission_per_block, 1e-6, 1e6)
        check("economy.registration_cost", self.registration_cost, 0.0, 1e6)
        check("economy.owner_cut", self.owner_cut, 0.0, 1.0)
        check("economy.capital_cost_per_year", self.capital_cost_per_year, 0.0, 10.0)
        check("economy.spare_uids", self.spare_uids, 0.0, 10.0)
        if not self.validator_stakes:
            raise ConfigError("economy.validator_stakes is empty", hint="name at least one stake")


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    hardware: dict[str, Hardware]
    groups: tuple[Group, ...]
    run: RunRules = RunRules()
    economy: Economy = Economy()
    days: float = 30.0
    folds_per_tempo: int = 4
    """Work of so many parts of a tempo is credited in one sum each, at its middle."""
    comment: str = ""

    def __post_init__(self) -> None:
        check("days", self.days, 0.1, 3650.0)
        check("folds_per_tempo", self.folds_per_tempo, 1, 64)
        names = [group.name for group in self.groups]
        if not names or len(set(names)) < len(names):
            raise ConfigError("groups: a name is there twice, or none at all", hint="each group has its own name")
        for group in self.groups:
            if group.hardware not in self.hardware:
                known = ", ".join(sorted(self.hardware))
                raise ConfigError(f"group {group.name}: unknown hardware {group.hardware!r}", hint=f"there is: {known}")
            check(f"group {group.name}: count", group.count, 1, MAX_MINERS)
        hotkeys = sum(group.count * group.made().seats for group in self.groups)
        check("hotkeys of all groups", hotkeys, 1, MAX_HOTKEYS)
        intervals = round(self.days * 86_400 / TEMPO_S * self.folds_per_tempo * self.num_machines)
        check("machines x tempos x folds_per_tempo", intervals, 0, MAX_INTERVALS)

    @property
    def num_machines(self) -> int:
        return sum(group.count for group in self.groups)


def load_scenario(path: Path) -> Scenario:
    """:class:`ConfigError`: one line that names the file, what is wrong, and where."""
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint="check path and rights") from error
    if len(data) > LIMIT_SCENARIO_BYTES:
        raise ConfigError(f"{path} has {len(data)} bytes", hint=f"a scenario has at most {LIMIT_SCENARIO_BYTES}")
    try:
        return msgspec.convert(tomllib.loads(data.decode("utf-8")), Scenario)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}", hint="save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}", hint="see docs/incentives.md for one that works") from error
    except msgspec.ValidationError as error:
        reason = error.__cause__.reason if isinstance(error.__cause__, ConfigError) else str(error)
        hint = error.__cause__.hint if isinstance(error.__cause__, ConfigError) else "docs/incentives.md lists the keys"
        raise ConfigError(f"scenario {path}: {reason}", hint=hint) from error
    except ConfigError as error:
        raise ConfigError(f"scenario {path}: {error.reason}", hint=error.hint) from error


def scaled(scenario: Scenario, *, miners: int | None = None, days: float | None = None) -> Scenario:
    """The same mixture with another number of machines (each group keeps at least one) and as much emission for each, for
    another time."""
    groups, economy = scenario.groups, scenario.economy
    if miners is not None:
        check("miners", miners, len(groups), MAX_MINERS)
        groups = _shared_out(groups, miners)
        emission = economy.emission_per_block * miners / scenario.num_machines
        economy = msgspec.structs.replace(economy, emission_per_block=emission)
    days = scenario.days if days is None else days
    return msgspec.structs.replace(scenario, groups=groups, economy=economy, days=days)


def _shared_out(groups: tuple[Group, ...], miners: int) -> tuple[Group, ...]:
    whole = sum(group.count for group in groups)
    exact = [group.count * miners / whole for group in groups]
    counts = [max(1, math.floor(part)) for part in exact]
    by_rest = sorted(range(len(groups)), key=lambda i: (counts[i] - exact[i], i))
    for k in range(abs(miners - sum(counts))):
        if sum(counts) < miners:
            counts[by_rest[k % len(groups)]] += 1
        else:
            counts[counts.index(max(counts))] -= 1
    return tuple(msgspec.structs.replace(g, count=n) for g, n in zip(groups, counts, strict=True))
