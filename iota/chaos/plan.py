"""What will be done to a swarm: a function of the seed and the numbers given, and of nothing else.

Targets are drawn as a fraction of whoever is alive when a disruption is due, so a plan doesn't depend on the fleet.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Mapping, Sequence

import msgspec

from subnet.errors import ConfigError
from subnet.timing import seeded

MAX_DISRUPTIONS = 100_000


class Kind(enum.StrEnum):
    """What can happen. All but the last two leave the fleet as large as it was."""

    KILL = "kill"
    """SIGKILL of a miner, which is started again."""
    PREEMPT = "preempt"
    """SIGTERM and, after a notice, SIGKILL; started again."""
    PAUSE = "pause"
    """SIGSTOP, then SIGCONT."""
    SLOW = "slow"
    """A miner's links get delay and little bandwidth, or its process runs for part of the time only."""
    PARTITION = "partition"
    """A miner is cut off from the validator, from the other miners, or from both."""
    CORRUPT = "corrupt"
    """Bytes on a miner's connections are flipped."""
    STORE_OUTAGE = "store-outage"
    """The store resets, says nothing, answers 503, breaks off its answers, or crawls."""
    VALIDATOR_KILL = "validator-kill"
    REJOIN = "rejoin"
    """A miner leaves in order and comes back."""
    JOIN = "join"
    LEAVE = "leave"


MINER_KINDS = frozenset(
    (Kind.KILL, Kind.PREEMPT, Kind.PAUSE, Kind.SLOW, Kind.PARTITION, Kind.CORRUPT, Kind.REJOIN, Kind.LEAVE)
)
NETWORK_KINDS = frozenset((Kind.PARTITION, Kind.CORRUPT))
"""Not possible without proxies."""
RESTARTED_KINDS = frozenset((Kind.KILL, Kind.PREEMPT, Kind.REJOIN, Kind.VALIDATOR_KILL))

PROCESS = "process"
"""As a link: the process itself is held, no connection."""


class Disruption(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that will be done. Fields that don't concern its kind keep their defaults."""

    number: int
    at_s: float
    """After the clock of the chaos has started; where ``at_step`` is set, after that step was first seen."""
    kind: Kind
    choice: float
    """In [0, 1): which of those that are alive."""
    at_step: int | None = None
    for_s: float = 0.0
    """How long a pause, a partition, an outage or a slow time lasts; the most a corruption waits for bytes."""
    back_s: float = 0.0
    """From the end of a process to its next start."""
    notice_s: float = 0.0
    link: str = ""
    """``validator``, ``peers``, ``both``, ``store`` or ``process``."""
    mode: str = ""
    """``reset``, ``blackhole``, ``busy``, ``truncate`` or ``slow``."""
    delay_ms: float = 0.0
    kbit_per_s: float = 0.0
    share: float = 1.0
    """Part of the time that a slow process runs."""
    num_bytes: int = 0
    every_bytes: int = 0
    truncate_after: int = 0


class Ranges(msgspec.Struct, frozen=True, kw_only=True):
    """From what the numbers of a disruption are drawn, evenly on a logarithmic scale; all seconds but for the names."""

    pause: tuple[float, float] = (0.5, 15.0)
    back: tuple[float, float] = (1.0, 10.0)
    validator_back: tuple[float, float] = (0.5, 8.0)
    slow: tuple[float, float] = (4.0, 20.0)
    partition: tuple[float, float] = (1.0, 15.0)
    outage: tuple[float, float] = (1.0, 20.0)
    corrupt: tuple[float, float] = (5.0, 10.0)
    notice: float = 1.0
    delay_ms: tuple[float, float] = (20.0, 400.0)
    kbit_per_s: tuple[float, float] = (1_000.0, 20_000.0)
    share: tuple[float, float] = (0.15, 0.6)
    every_bytes: tuple[float, float] = (300.0, 30_000.0)
    truncate_after: tuple[float, float] = (50.0, 20_000.0)

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            low, high = value if isinstance(value, tuple) else (value, value)
            if not 0 < low <= high:
                raise ConfigError(f"{name} = {value} is not allowed", hint="allowed: 0 < low <= high")


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """``kill,pause`` as kinds, in that order, each once."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [kind.value for kind in Kind]
    for name in names:
        if name not in known:
            raise ConfigError(f"fault {name!r} is unknown", hint=f"known: {', '.join(known)}")
    if not names:
        raise ConfigError("no fault is named", hint=f"known: {', '.join(known)}")
    return tuple(Kind(name) for name in dict.fromkeys(names))


def make_plan(
    seed: int,
    duration_s: float,
    mtbf_s: float,
    faults: Sequence[Kind],
    *,
    network: bool = True,
    ranges: Ranges = Ranges(),
) -> tuple[Disruption, ...]:
    """Disruptions of a Poisson process: ``mtbf_s`` from one to the next on average, kinds with equal chances.

    ``network``: links may be slowed down; otherwise only processes are.
    """
    _check(faults, network)
    if not (0 < mtbf_s < math.inf and 0 <= duration_s < math.inf):
        raise ConfigError(
            f"a disruption each {mtbf_s:g} s for {duration_s:g} s is not allowed", hint="allowed: above 0"
        )
    if duration_s / mtbf_s > MAX_DISRUPTIONS / 2:
        raise ConfigError(f"about {duration_s / mtbf_s:g} disruptions are too many", hint="raise the mtbf")
    times, kinds = seeded("chaos times", seed), seeded("chaos kinds", seed)
    plan: list[Disruption] = []
    at_s = times.expovariate(1 / mtbf_s)
    while at_s < duration_s:
        plan.append(_drawn(seed, len(plan), at_s, None, kinds.choice(list(faults)), network, ranges))
        at_s += times.expovariate(1 / mtbf_s)
    return tuple(plan)


def make_plan_counted(
    seed: int,
    num: int,
    faults: Sequence[Kind],
    *,
    span_s: float | None = None,
    num_steps: int | None = None,
    fixed: Mapping[Kind, int] | None = None,
    network: bool = True,
    ranges: Ranges = Ranges(),
) -> tuple[Disruption, ...]:
    """Exactly ``num`` disruptions over ``span_s`` seconds, or over a run of ``num_steps`` steps.

    One falls into each ``num``-th part of the span, somewhere in it. ``fixed``: kinds with an exact count; the others
    occur equally often, give or take one. By steps, all of them happen however long the run takes.
    """
    counts = dict(fixed or {})
    rest = [kind for kind in dict.fromkeys(faults) if kind not in counts]
    _check([*rest, *counts], network)
    left = num - sum(counts.values())
    if num > MAX_DISRUPTIONS or min([left, *counts.values()]) < 0 or left < len(rest) or (left and not rest):
        raise ConfigError(
            f"{num} disruptions can't be {left} of {len(rest)} kinds and {sum(counts.values())} fixed ones",
            hint="every requested kind must occur",
        )
    if (span_s is None) == (num_steps is None) or not (span_s or num_steps or 0) > 0:
        raise ConfigError("a counted plan is over seconds or over steps", hint="give one of the two, above 0")
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    kinds += [rest[i % len(rest)] for i in range(left)]
    generator = seeded("chaos counted", seed)
    generator.shuffle(kinds)
    plan: list[Disruption] = []
    for number, kind in enumerate(kinds):
        place = (number + generator.random()) / num
        if num_steps is None:
            plan.append(_drawn(seed, number, place * (span_s or 0.0), None, kind, network, ranges))
        else:
            step, part = divmod(place * num_steps, 1.0)
            plan.append(_drawn(seed, number, round(part, 3), int(step), kind, network, ranges))
    return tuple(plan)


def needs_network(plan: Sequence[Disruption]) -> bool:
    """Whether a plan acts on connections."""
    return any(disruption.link not in ("", PROCESS) for disruption in plan)


def describe(disruption: Disruption) -> str:
    """Its numbers in words, without its target."""
    d = disruption
    match d.kind:
        case Kind.KILL | Kind.REJOIN | Kind.VALIDATOR_KILL:
            return f"back after {d.back_s:.1f} s"
        case Kind.PREEMPT:
            return f"{d.notice_s:g} s notice, back after {d.back_s:.1f} s"
        case Kind.SLOW if d.link == PROCESS:
            return f"runs {d.share:.0%} of the time for {d.for_s:.1f} s"
        case Kind.SLOW:
            return f"{d.delay_ms:.0f} ms and {d.kbit_per_s:,.0f} kbit/s for {d.for_s:.1f} s"
        case Kind.PAUSE:
            return f"for {d.for_s:.1f} s"
        case Kind.PARTITION:
            return f"{d.mode} to {d.link} for {d.for_s:.1f} s"
        case Kind.CORRUPT:
            return f"{d.num_bytes} bytes to {d.link}, one in {d.every_bytes:,}"
        case Kind.STORE_OUTAGE:
            return f"{'paused' if d.link == PROCESS else d.mode} for {d.for_s:.1f} s"
        case Kind.JOIN | Kind.LEAVE:
            return ""


def _check(faults: Sequence[Kind], network: bool) -> None:
    if not faults:
        raise ConfigError("no fault is named", hint="name at least one")
    impossible = [kind.value for kind in faults if kind in NETWORK_KINDS]
    if impossible and not network:
        raise ConfigError(
            f"{', '.join(impossible)} needs a swarm behind proxies", hint="let iota chaos start a swarm of its own"
        )


def _drawn(
    seed: int, number: int, at_s: float, at_step: int | None, kind: Kind, network: bool, ranges: Ranges
) -> Disruption:
    """A disruption with the numbers of its kind, from a generator of its own: none depends on another."""
    generator = seeded("chaos disruption", seed, number)
    base = Disruption(number=number, at_s=at_s, at_step=at_step, kind=kind, choice=generator.random())
    return msgspec.structs.replace(base, **_numbers(generator, kind, network, ranges))


def _numbers(generator: random.Random, kind: Kind, network: bool, ranges: Ranges) -> dict[str, object]:
    def between(limits: tuple[float, float]) -> float:
        return round(math.exp(generator.uniform(math.log(limits[0]), math.log(limits[1]))), 3)

    match kind:
        case Kind.KILL | Kind.REJOIN:
            return {"back_s": between(ranges.back)}
        case Kind.VALIDATOR_KILL:
            return {"back_s": between(ranges.validator_back)}
        case Kind.PREEMPT:
            return {"notice_s": ranges.notice, "back_s": between(ranges.back)}
        case Kind.PAUSE:
            return {"for_s": between(ranges.pause)}
        case Kind.SLOW:
            for_s = between(ranges.slow)
            if not network or generator.random() < 0.5:
                return {"link": PROCESS, "share": between(ranges.share), "for_s": for_s}
            delay_ms, kbit = between(ranges.delay_ms), between(ranges.kbit_per_s)
            return {"link": "both", "mode": "slow", "delay_ms": delay_ms, "kbit_per_s": kbit, "for_s": for_s}
        case Kind.PARTITION:
            link, mode = generator.choice(("validator", "peers", "both")), generator.choice(("reset", "blackhole"))
            return {"link": link, "mode": mode, "for_s": between(ranges.partition)}
        case Kind.CORRUPT:
            return {
                "link": generator.choice(("validator", "peers")),
                "num_bytes": generator.randint(1, 8),
                "every_bytes": round(between(ranges.every_bytes)),
                "for_s": between(ranges.corrupt),
            }
        case Kind.STORE_OUTAGE:
            for_s = between(ranges.outage)
            if not network:
                return {"link": PROCESS, "mode": "blackhole", "for_s": for_s}
            mode = generator.choice(("reset", "blackhole", "busy", "truncate", "slow"))
            numbers: dict[str, object] = {"link": "store", "mode": mode, "for_s": for_s}
            if mode == "truncate":
                numbers["truncate_after"] = round(between(ranges.truncate_after))
            if mode == "slow":
                numbers |= {"delay_ms": between(ranges.delay_ms), "kbit_per_s": between(ranges.kbit_per_s)}
            return numbers
        case Kind.JOIN | Kind.LEAVE:
            return {}
