"""Several seeds of a scenario in one result: income, cost and gain by kind, and what differs between two policies.

USD are per machine and day *of membership*: hours in which an attacker waits for its next hotkey count neither way, so that it is
compared with honest machines of the same hardware over the same hours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from subnet.errors import ConfigError
from subnet.incentives.outcome import Band, KindSeed, Seed, band, sure
from subnet.incentives.scenario import Group, Scenario
from subnet.incentives.world import num_tempos
from subnet.policy.policy import SubnetPolicy

VERSION = 1
"""Of the JSON."""
NOT_SIMULATED = (
    "work.redone_pay",
    "work.witness_pay",
    "score.undecided_pay",
    "audit.unopened_max",
    "audit.lost_max",
    "audit.quarantine_retry_s",
    "weights.version_key",
)
"""Values of a policy that change nothing here."""
HONEST = "honest"
"""The behaviour that others are compared with."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One group over all seeds; USD per machine and day of membership where nothing else is said."""

    name: str
    behaviour: str
    hardware: str
    is_attack: bool
    machines: int
    income: Band
    cost: Band
    """All of it: power or rent, registrations, capital that is locked."""
    profit: Band
    return_on_cost: Band | None
    """Profit / cost; None without cost."""
    honest_profit: Band | None
    """Of honest machines of the same hardware; None where there are none."""
    gain: Band | None
    """Profit beyond theirs, seed by seed; below 0: honesty pays more."""
    gain_without_registrations: Band | None
    """The same if registering were free for all."""
    break_even_registration_usd: Band | None
    """Price of a registration at which it earns what honesty earns; None where it registers no more often than the honest."""
    share: Band
    """Of all that miners are paid."""
    member_days: Band
    """Per machine."""
    registrations: Band
    """Per machine."""
    convictions: Band
    """Per machine, as faults and departures."""
    faults: Band
    departures: Band
    found_out_h: Band | None
    """Hours from a hotkey's first lie until it was established; None where nobody was found out."""
    found_out_share: Band | None
    """Of hotkeys that lied, by the end; None where none did."""
    daily_income: tuple[Band, ...]
    """Per machine, whether it was a member or not, day by day."""
    daily_cost: tuple[float, ...]
    """Power or rent, likewise."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """``iota incentives simulate --json``. Times in the unit of the name, shares between 0 and 1."""

    version: int
    policy: str
    """Digest."""
    policy_values: dict[str, bool | int | float | str]
    without_effect: tuple[str, ...]
    """Values that aren't the default and change nothing in a simulation."""
    comment: str
    seeds: tuple[int, ...]
    days: float
    tempos: int
    machines: int
    kinds: tuple[Kind, ...]
    burned_share: Band
    """Of what miners' weights are paid."""
    gini: Band
    """Of machines' incomes."""
    churn: Band
    """Machine-hours away for the price, as a share of all."""
    departures: Band
    honest_dividends: Band
    """USD a day per 1,000 tokens staked with validators that count for themselves."""
    copying_dividends: Band | None
    """The same with those that copy; None without any."""


class Numbers(msgspec.Struct, frozen=True):
    """Of one group in one seed, per day of membership."""

    income: float
    running: float
    registering: float
    registrations: float

    @property
    def cost(self) -> float:
        return self.running + self.registering

    @property
    def profit(self) -> float:
        return self.income - self.cost


def numbers_of(books: Sequence[KindSeed]) -> Numbers:
    days = sum(book.machine_h for book in books) / 24.0
    if not days > 0:
        return Numbers(0.0, 0.0, 0.0, 0.0)
    return Numbers(
        sum(book.income_usd for book in books) / days,
        sum(book.running_usd + book.capital_usd for book in books) / days,
        sum(book.registering_usd for book in books) / days,
        sum(book.registrations for book in books) / days,
    )


def result_of(policy: SubnetPolicy, scenario: Scenario, seeds: Sequence[Seed]) -> Result:
    values, default = policy.values(), SubnetPolicy().values()
    return Result(
        version=VERSION,
        policy=policy.digest,
        policy_values=values,
        without_effect=tuple(name for name in NOT_SIMULATED if values[name] != default[name]),
        comment=scenario.comment,
        seeds=tuple(seed.seed for seed in seeds),
        days=scenario.days,
        tempos=num_tempos(scenario),
        machines=scenario.num_machines,
        kinds=tuple(_kind(group, scenario, seeds) for group in scenario.groups),
        burned_share=sure([seed.burned_share for seed in seeds]),
        gini=sure([seed.gini for seed in seeds]),
        churn=sure([seed.churn for seed in seeds]),
        departures=sure([float(seed.departures) for seed in seeds]),
        honest_dividends=sure([seed.honest_dividends for seed in seeds]),
        copying_dividends=band([seed.copying_dividends for seed in seeds if seed.copying_dividends is not None]),
    )


def honest_like(group: Group, scenario: Scenario) -> list[str]:
    """Names of the groups of honest machines with this hardware."""
    return [other.name for other in scenario.groups if (other.behaviour, other.hardware) == (HONEST, group.hardware)]


def _kind(group: Group, scenario: Scenario, seeds: Sequence[Seed]) -> Kind:
    books = [seed.kinds[group.name] for seed in seeds]
    own, like = [numbers_of([book]) for book in books], honest_like(group, scenario)
    is_attack = group.made().is_attack
    compared = bool(like) and group.name not in like
    honest = [numbers_of([seed.kinds[name] for name in like]) for seed in seeds] if compared else []
    pairs = list(zip(own, honest, strict=True)) if compared else []
    paid = [sum(book.income_usd for book in seed.kinds.values()) for seed in seeds]

    def each(value: Callable[[KindSeed], float]) -> Band:
        return sure([value(book) / book.machines for book in books])

    return Kind(
        name=group.name,
        behaviour=group.behaviour,
        hardware=group.hardware,
        is_attack=is_attack,
        machines=group.count,
        income=sure([n.income for n in own]),
        cost=sure([n.cost for n in own]),
        profit=sure([n.profit for n in own]),
        return_on_cost=band([n.profit / n.cost for n in own if n.cost > 0]),
        honest_profit=band([n.profit for n in honest]),
        gain=band([mine.profit - theirs.profit for mine, theirs in pairs]),
        gain_without_registrations=band([_free_gain(mine, theirs) for mine, theirs in pairs]),
        break_even_registration_usd=band(
            [
                _free_gain(mine, theirs) / (mine.registrations - theirs.registrations)
                for mine, theirs in pairs
                if mine.registrations > theirs.registrations + 1e-9
            ]
        )
        if is_attack
        else None,
        share=sure([book.income_usd / whole if whole > 0 else 0.0 for book, whole in zip(books, paid, strict=True)]),
        member_days=each(lambda book: book.machine_h / 24.0),
        registrations=each(lambda book: book.registrations),
        convictions=each(lambda book: book.convictions),
        faults=each(lambda book: book.faults),
        departures=each(lambda book: book.departures),
        found_out_h=band([sum(b.found_out_h) / len(b.found_out_h) for b in books if b.found_out_h]),
        found_out_share=band(
            [
                len(b.found_out_h) / (len(b.found_out_h) + b.undetected)
                for b in books
                if len(b.found_out_h) + b.undetected
            ]
        ),
        daily_income=tuple(sure(list(day)) for day in zip(*(book.daily_usd for book in books), strict=True)),
        daily_cost=tuple(sum(day) / len(day) for day in zip(*(book.daily_running_usd for book in books), strict=True)),
    )


def _free_gain(mine: Numbers, honest: Numbers) -> float:
    return (mine.income - mine.running) - (honest.income - honest.running)


# --- two policies --------------------------------------------------------------------------------------------------


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One group under A and B; changes are of the same seed, so that chance cancels."""

    name: str
    is_attack: bool
    income_a: Band
    income_b: Band
    income_change: Band
    income_ratio: Band | None
    """B / A; None where A paid nothing."""
    profit_a: Band
    profit_b: Band
    profit_change: Band
    gain_a: Band | None
    gain_b: Band | None
    found_out_h_a: Band | None
    found_out_h_b: Band | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """``iota incentives compare --json``."""

    version: int
    changed: dict[str, tuple[bool | int | float | str, bool | int | float | str]]
    """By name of the value: in A, in B."""
    a: Result
    b: Result
    kinds: tuple[Difference, ...]
    burned_share_change: Band
    gini_change: Band
    churn_change: Band


def compare(a: Result, b: Result, seeds_a: Sequence[Seed], seeds_b: Sequence[Seed]) -> Comparison:
    """:class:`ConfigError` unless both are of the same seeds."""
    if a.seeds != b.seeds:
        raise ConfigError(f"seeds {a.seeds} and {b.seeds} can't be compared", hint="run both with the same")
    pairs = list(zip(seeds_a, seeds_b, strict=True))
    return Comparison(
        version=VERSION,
        changed={
            name: (value, b.policy_values[name])
            for name, value in a.policy_values.items()
            if value != b.policy_values[name]
        },
        a=a,
        b=b,
        kinds=tuple(_difference(one, other, pairs) for one, other in zip(a.kinds, b.kinds, strict=True)),
        burned_share_change=sure([y.burned_share - x.burned_share for x, y in pairs]),
        gini_change=sure([y.gini - x.gini for x, y in pairs]),
        churn_change=sure([y.churn - x.churn for x, y in pairs]),
    )


def _difference(a: Kind, b: Kind, pairs: Sequence[tuple[Seed, Seed]]) -> Difference:
    own = [(numbers_of([x.kinds[a.name]]), numbers_of([y.kinds[a.name]])) for x, y in pairs]
    return Difference(
        name=a.name,
        is_attack=a.is_attack,
        income_a=a.income,
        income_b=b.income,
        income_change=sure([y.income - x.income for x, y in own]),
        income_ratio=band([y.income / x.income for x, y in own if x.income > 0]),
        profit_a=a.profit,
        profit_b=b.profit,
        profit_change=sure([y.profit - x.profit for x, y in own]),
        gain_a=a.gain,
        gain_b=b.gain,
        found_out_h_a=a.found_out_h,
        found_out_h_b=b.found_out_h,
    )
