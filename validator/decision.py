"""What a decision is: an event to journal or an action for the shell, with a reason of a code and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from subnet.audit.case import Findings
from subnet.run.events import AnyEvent
from subnet.words import Member, Want


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


class RunAudit(msgspec.Struct, frozen=True):
    """Do the partials of an open audit again; its :class:`AuditResult` goes to ``Watch.audits.results``, then it is done.

    Failed: nothing can be said (yet); it is asked for again after a pause.
    """

    audit: int


class RunAppeal(msgspec.Struct, frozen=True):
    """Run the bundle of a closed case again, in a fresh process, and journal ``Appealed``."""

    case: int


class RunRoots(msgspec.Struct, frozen=True):
    """Bring the stage to the state after ``version`` updates, since replicas differ about its root.

    Its :class:`RootResult` goes to ``Watch.audits.roots``. Failed: nothing can be said yet; it is asked for again.
    """

    version: int
    stage: int


class JudgeBoundary(msgspec.Struct, frozen=True):
    """Read the bytes of a receipted boundary, which its receiver calls unusable: whether they are goes to
    ``Watch.audits.judged``. Failed: the store doesn't have them, or can't be asked."""

    hash: str


Action = ProbeSlices | TraceVerdict | FinishRun | RunAudit | RunAppeal | RunRoots | JudgeBoundary


class Accused(msgspec.Struct, frozen=True):
    """Somebody whom two runs of its work found wrong, with the same digest both times. ``bundle``: its own evidence."""

    member: Member
    charge: str
    """``partial``, ``merge`` or ``root``."""
    bundle: str
    digest: str
    claimed: str = ""
    """The digest that the bundle would give if what it claims were true; "" where that can't be told."""


class AuditResult(msgspec.Struct, frozen=True):
    """What came of :class:`RunAudit`. Nothing in it depends on when it is read."""

    audit: int
    findings: Findings | None
    """Of those members all of whose inputs were there; None where there were none, or we couldn't do it."""
    repeated: bool = True
    """False: a second run contradicted the first somewhere, so our machine is at fault, and nobody is accused of that."""
    accused: tuple[Accused, ...] = ()
    missing: tuple[Want, ...] = ()
    """Inputs that nobody has put into the store in time."""
    trouble: str = ""
    """Why we have given it up, in words."""
    untrusted: str = ""
    """Also why, where it is the snapshot it would begin from: that isn't the state that was agreed on."""


class RootResult(msgspec.Struct, frozen=True):
    """What came of :class:`RunRoots`. ``root``: to which snapshot and log lead; "" where we have given it up."""

    version: int
    stage: int
    root: str
    accused: tuple[Accused, ...] = ()
    """Whoever had reported another one."""
    trouble: str = ""


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
