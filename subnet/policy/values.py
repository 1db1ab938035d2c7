"""What is known of each value of a policy: its unit, its reason, what is allowed, and how far one live change may take it.

It stands in the type, as ``Annotated[float, Value(...)]``; checks, the file with comments and docs/policy.md are made of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from subnet.errors import ConfigError

Plain = bool | int | float | str


@dataclass(frozen=True)
class Value:
    """``low`` and ``high`` are both allowed. ``choices`` stand for them where the value is a text, weakest first."""

    unit: str
    low: float
    high: float
    why: str
    """What it does and why it is what it is, for people."""
    factor: float = 0.0
    """One live change may multiply or divide it by so much at most; 0: any change."""
    base: float = 0.0
    """With ``factor``: what is below counts as this, so that a 0 can be left."""
    step: float = 0.0
    """One live change may add or take so much at most; 0: any change."""
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        if self.choices:
            return ", ".join(self.choices)
        return f"{self.low:g} to {self.high:g}"

    @property
    def pace(self) -> str:
        """How far one live change may take it, in words."""
        if self.factor:
            least = f" (less than {self.base:g} counts as {self.base:g})" if self.base else ""
            return f"by a factor of {self.factor:g} at most{least}"
        if self.step:
            return f"by {self.step:g} at most"
        return "any"


def choice(why: str, *choices: str) -> Value:
    """Of a text."""
    return Value("-", 0.0, 0.0, why, choices=choices)


@cache
def values_of(section: type) -> Mapping[str, Value]:
    """By field name, in order."""
    found: dict[str, Value] = {}
    for name, hint in get_type_hints(section, include_extras=True).items():
        if get_origin(hint) is Annotated:
            found[name] = next(extra for extra in get_args(hint)[1:] if isinstance(extra, Value))
    return found


@cache
def type_of(section: type, name: str) -> type:
    """The plain type of a field."""
    return get_type_hints(section)[name]


def check_values(section: Any, heading: str) -> None:
    """:class:`ConfigError` with the name, the value and what is allowed."""
    for name, value in values_of(type(section)).items():
        given: Plain = getattr(section, name)
        if not is_allowed(value, given):
            raise ConfigError(f"{heading}.{name} = {given!r} is not allowed", hint=f"allowed: {value.allowed}")


def is_allowed(value: Value, given: Plain) -> bool:
    if isinstance(given, str):
        return given in value.choices
    return not value.choices and math.isfinite(given) and value.low <= given <= value.high
