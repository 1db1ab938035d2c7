"""What disturbed a run, as marks for the loss curve: one small struct for each event that a person would ask about."""

from __future__ import annotations

import msgspec

from subnet.run.events import (
    AnyEvent,
    CaseClosed,
    CaseOpened,
    Gone,
    Joined,
    MicrobatchSkipped,
    OwnerFailed,
    Rewound,
    RunControlled,
    TermStarted,
    TraceStarted,
    Voided,
)
from subnet.words import short

MAX_MARKS = 10_000
KINDS = (
    "lost",
    "left",
    "out",
    "joined",
    "void",
    "leader",
    "owner",
    "trace",
    "skipped",
    "case",
    "rewound",
    "control",
    "alarm",
)
"""``lost``: silent or unreachable; ``left``: by itself; ``out``: put out for what it did;
``control``: what the run's owner said of it; ``alarm``: a loss or a gradient far off those before."""

_OUT = frozenset({"liar", "checksum", "accused"})
_LEFT = frozenset({"left", "replaced"})


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened while ``step`` was open, at wall time ``time_ns``."""

    step: int
    time_ns: int
    kind: str
    who: str
    text: str


def mark_of(event: AnyEvent, step: int, time_ns: int) -> Mark | None:
    """``step``: the one that is open."""
    match event:
        case Gone():
            kind = "left" if event.why in _LEFT else "out" if event.why in _OUT else "lost"
            return Mark(step, time_ns, kind, str(event.member), f"{event.member} is gone: {event.why}")
        case Joined():
            return Mark(step, time_ns, "joined", str(event.member), f"{event.member} joined stage {event.stage}")
        case Voided():
            text = f"work of {event.member} at stage {event.stage} is void ({event.why}) and done again"
            return Mark(event.step, time_ns, "void", str(event.member), text)
        case TermStarted() if event.number > 1:
            text = f"term {event.number}: validator {short(event.hotkey, 8)} leads; unsealed work is done again"
            return Mark(step, time_ns, "leader", event.hotkey, text)
        case OwnerFailed():
            text = f"{event.member} no longer owns partitions of group {event.group}"
            return Mark(event.step, time_ns, "owner", str(event.member), text)
        case TraceStarted():
            return Mark(event.step, time_ns, "trace", "", f"a merge check failed in group {event.group}: it is traced")
        case MicrobatchSkipped():
            return Mark(event.step, time_ns, "skipped", "", f"microbatch {event.microbatch} skipped")
        case CaseOpened():
            text = f"case {event.case}: {event.member} stands accused (step {event.step}, stage {event.stage})"
            return Mark(step, time_ns, "case", str(event.member), text)
        case CaseClosed():
            return Mark(step, time_ns, "case", "", f"case {event.case} closed: {event.outcome}")
        case Rewound() if event.owner:
            return Mark(event.step, time_ns, "rewound", "", f"rewound to step {event.step} by the run's owner")
        case Rewound():
            text = f"rewound to step {event.step}: a sealed lie is undone (case {event.case})"
            return Mark(event.step, time_ns, "rewound", "", text)
        case RunControlled():
            said = " ".join(filter(None, (event.action, event.argument)))
            return Mark(step, time_ns, "control", event.by, f"{said} by the run's owner {short(event.by, 8)}")
        case _:
            return None
