"""What a decision is: an event to journal or an action for the shell, with a reason of a code and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from subnet.run.events import AnyEvent


class ProbeSlices(msgspec.Struct, frozen=True):
    """Ask the store which of these slices it has; tell the watch of each, then that this is done."""

    step: int
    group: int
    version: int
    hashes: tuple[str, ...]


class TraceVerdict(msgspec.Struct, frozen=True):
    """Read the slices and merged partitions, find the guilty (:mod:`validator.trace`), journal what follows."""

    step: int
    group: int
    version: int
    patient: bool
    """Whether slices that are missing may still come; else their contributors are void."""


class FinishRun(msgspec.Struct, frozen=True):
    """Compute the run root from the stages' final manifests and journal ``RunFinished``."""

    step: int
    manifests: tuple[str, ...]
    evaluation: tuple[int, ...]


Action = ProbeSlices | TraceVerdict | FinishRun


@dataclass(frozen=True)
class Reason:
    """Why: a code to compare, and what it was decided on. Rendered at the edge."""

    code: str
    numbers: dict[str, int | float | str] = field(default_factory=dict[str, int | float | str])

    def __str__(self) -> str:
        numbers = " ".join(
            f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.numbers.items()
        )
        return f"{self.code} {numbers}".strip()


@dataclass(frozen=True)
class Decision:
    """An event to append, apply and act on, or an action to start; then decide again."""

    what: AnyEvent | Action
    reason: Reason


def because(code: str, **numbers: int | float | str) -> Reason:
    return Reason(code, dict(numbers))
