"""What one live change of a policy may do: miners plan by it, so it moves at a pace that they and the owner can watch.

The limits are in the type (:class:`~subnet.policy.values.Value`: ``factor``, ``step``); there is one change per tempo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from subnet.errors import InputError
from subnet.policy.policy import SECTIONS, SubnetPolicy
from subnet.policy.values import Plain, Value, type_of, values_of


class ChangeTooLarge(InputError):
    """The new policy is allowed, but too far from the one in force for one change."""

    code, http_status = "change_too_large", 409


@dataclass(frozen=True)
class Difference:
    name: str
    """``section.name``"""
    old: Plain
    new: Plain
    nearest: Plain
    """The new value, or how far one change may go towards it."""
    limit: str
    """In words."""

    @property
    def is_too_large(self) -> bool:
        return self.nearest != self.new


def differences(old: SubnetPolicy, new: SubnetPolicy) -> tuple[Difference, ...]:
    """Of two policies, in order of the file."""
    before, after, found = old.values(), new.values(), list[Difference]()
    for heading, section in SECTIONS.items():
        for name, value in values_of(section).items():
            key = f"{heading}.{name}"
            if before[key] != after[key]:
                nearest = _nearest(value, before[key], after[key], whole=type_of(section, name) is int)
                found.append(Difference(key, before[key], after[key], nearest, value.pace))
    return tuple(found)


def check_change(old: SubnetPolicy, new: SubnetPolicy) -> None:
    """:class:`ChangeTooLarge` with the first value that goes too far, its limit, and how many more there are."""
    found = [difference for difference in differences(old, new) if difference.is_too_large]
    if not found:
        return
    first, more = found[0], f", and {len(found) - 1} more" if len(found) > 1 else ""
    raise ChangeTooLarge(
        f"{first.name} = {first.new!r} is too far from {first.old!r} for one change (it moves {first.limit}){more}",
        hint=f"{first.nearest!r} is allowed now; iota policy apply FILE --in-steps goes as far as it may, once a tempo",
    )


def towards(old: SubnetPolicy, new: SubnetPolicy) -> SubnetPolicy:
    """The policy nearest to ``new`` that one change may make of ``old``."""
    sections: dict[str, dict[str, Any]] = {}
    for difference in differences(old, new):
        heading, name = difference.name.split(".")
        sections.setdefault(heading, {})[name] = difference.nearest
    changed = {
        heading: msgspec.structs.replace(getattr(old, heading), **values) for heading, values in sections.items()
    }
    return msgspec.structs.replace(old, **changed)


def _nearest(value: Value, old: Plain, new: Plain, *, whole: bool) -> Plain:
    if isinstance(old, str) or isinstance(new, str):
        return new
    low, high = _reach(value, old)
    if whole:
        low, high = math.ceil(low), math.floor(high)
    nearest = min(max(new, low), high)
    return new if math.isclose(nearest, new, rel_tol=1e-9, abs_tol=1e-12) else nearest


def _reach(value: Value, old: float) -> tuple[float, float]:
    low, high = value.low, value.high
    if value.factor:
        counted = max(old, value.base)
        high = min(high, counted * value.factor)
        low = low if counted / value.factor <= value.base else max(low, counted / value.factor)
    if value.step:
        low, high = max(low, old - value.step), min(high, old + value.step)
    return low, high
