"""What a simulated miner does, tempo by tempo: one small class per behaviour, and the register that names them.

Adding one: a frozen ``msgspec.Struct`` of its options with ``act``, decorated with :func:`behaviour`; a scenario's group then
names it. What may be done is a :class:`Conduct`; what it is done from is a :class:`View`. What comes of it (pay, audits,
cases, weights) isn't a behaviour's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import msgspec

from subnet.errors import ConfigError


class View(msgspec.Struct):
    """What a hotkey knows when a tempo begins."""

    now_s: float
    """Since the start."""
    seat: int
    """Which of its machine's hotkeys it is, from 0."""
    age_s: float
    """Since this hotkey was registered; 0 where there is none yet."""
    away_s: float
    """Since it left; 0 while it is in."""
    convictions: int
    """Hotkeys that it lost."""
    faults: int
    """Cases of the present hotkey that ended as a fault."""
    income_per_h: float
    """USD, of the last day, faded by half every 12 hours."""
    cost_per_h: float
    """USD, of the machine at full work."""
    going_rate_per_h: float
    """USD that the last tempo paid an honest machine of this speed."""


class Conduct(msgspec.Struct, frozen=True):
    """A tempo of one hotkey. Speeds and costs are shares of the machine's own."""

    stays: bool = True
    """False: it isn't a member in this tempo, and costs nothing."""
    speed: float = 1.0
    """Of work that it hands in, done or made up: leases are dealt by measured speed."""
    cost: float = 1.0
    wrong: float = 0.0
    """Share of its items that aren't what they should be."""
    honest_first: bool = True
    """In probation it works as it should, at its own speed."""
    begins: float = 0.0
    """Part of the tempo before which it is there and does nothing; the leases it is dealt meanwhile run late."""
    unchecked: bool = False
    """All replicas of its stage belong to one coldkey."""


AWAY = Conduct(stays=False)


class Behaviour(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields are options that a scenario's group may set."""

    is_attack: ClassVar[bool] = False
    seats: int = 1
    """Hotkeys of one machine."""
    returns_after_h: float = 24.0
    """After a conviction it registers another hotkey."""

    def act(self, view: View) -> Conduct:
        """What it does until the next tempo."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        check("seats", self.seats, 1, 256)
        check("returns_after_h", self.returns_after_h, 0.0, 1e6)


REGISTER: dict[str, type[Behaviour]] = {}
_Kind = TypeVar("_Kind", bound=type[Behaviour])


def behaviour(name: str) -> Callable[[_Kind], _Kind]:
    """Registers a class under the name that scenarios use."""

    def add(kind: _Kind) -> _Kind:
        if name in REGISTER:
            raise ValueError(f"there is a behaviour {name} already")
        REGISTER[name] = kind
        return kind

    return add


def make_behaviour(name: str, options: dict[str, Any]) -> Behaviour:
    """:class:`ConfigError` where there is no such behaviour, or it has no such option."""
    kind = REGISTER.get(name)
    if kind is None:
        raise ConfigError(f"unknown behaviour {name!r}", hint=f"there are: {', '.join(sorted(REGISTER))}")
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ConfigError(f"behaviour {name}: {error}", hint=f"its options: {known}") from error


def check(name: str, value: float, low: float, high: float) -> None:
    """:class:`ConfigError` unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(f"{name} = {value!r} is not allowed", hint=f"allowed: {low:g} to {high:g}")
