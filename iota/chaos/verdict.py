"""What a chaos run has shown, as a function of what was seen: same root, nobody evicted without cause, no silent deaths."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from iota.chaos.plan import Disruption, Kind
from iota.chaos.runner import Done
from subnet.protocol.api import RunStatus

EVICTION_WINDOW_S = 30.0
"""A member that is gone this long after the end of a disruption of it is gone because of it."""
_HOTKEY_DIGITS = 8
_EXCUSED = ("left", "replaced")
_HALF_DAY_S = 43_200.0
_BLUR_S = 1.5
"""A line's time has whole seconds."""


@dataclass(frozen=True)
class Stall:
    """No step was sealed for so long."""

    from_s: float
    """Wall clock."""
    seconds: float
    step: int
    """The step that was open."""


@dataclass(frozen=True)
class ChaosResult:
    """What was done and what came of it; all times are wall-clock seconds."""

    finished: bool
    root: str | None
    status: RunStatus | None
    """The last one; of a finished run with all its steps."""
    done: tuple[Done, ...]
    """In the order of their beginnings."""
    skipped: tuple[tuple[Disruption, str], ...] = ()
    events: tuple[tuple[float, str], ...] = ()
    """(first seen, line of the run's status)"""
    progress: tuple[tuple[float, int], ...] = ()
    """(first seen, steps sealed)"""
    died: tuple[str, ...] = ()
    """Processes that ended though nobody ended them."""
    error: str = ""
    """Why it ended before its time, or empty."""
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """Times between two seals, longest first."""
        return stalls(self.progress, None if self.finished else self.ended_s)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool
    reasons: tuple[str, ...]
    """Why it isn't ok."""
    finished: bool
    root: str | None
    expected_root: str | None
    num_disruptions: int
    by_kind: dict[str, int]
    num_no_effect: int
    num_skipped: int
    longest_stall_s: float
    longest_stall_step: int
    false_evictions: tuple[str, ...]
    num_gone: int
    seconds: float


@dataclass(frozen=True)
class Demands:
    finished: bool = True
    root: str | None = None
    max_false_evictions: int = 0
    eviction_window_s: float = EVICTION_WINDOW_S
    excused: tuple[Kind, ...] = field(default=())
    """Disruptions of these kinds excuse every eviction in their window."""


def judge(result: ChaosResult, demands: Demands = Demands()) -> Verdict:
    reasons: list[str] = [result.error] if result.error else []
    if demands.finished and not result.finished:
        reasons.append("the run didn't finish")
    if demands.root is not None and result.root != demands.root:
        reasons.append(f"the run root is {result.root or 'unknown'}, expected was {demands.root}")
    reasons += [f"nobody ended it, but {text}" for text in result.died]
    evicted = false_evictions(result, demands)
    if len(evicted) > demands.max_false_evictions:
        reasons.append(f"{len(evicted)} members were evicted without a disruption of them")
    happened = [done for done in result.done if done.happened]
    longest = next(iter(result.stalls), Stall(0.0, 0.0, 0))
    return Verdict(
        ok=not reasons,
        reasons=tuple(reasons),
        finished=result.finished,
        root=result.root,
        expected_root=demands.root,
        num_disruptions=len(happened),
        by_kind=dict(sorted(Counter(done.kind.value for done in happened).items())),
        num_no_effect=len(result.done) - len(happened),
        num_skipped=len(result.skipped),
        longest_stall_s=round(longest.seconds, 1),
        longest_stall_step=longest.step,
        false_evictions=evicted,
        num_gone=result.status.num_gone if result.status is not None else 0,
        seconds=round(result.ended_s - result.began_s, 1),
    )


def lines(verdict: Verdict) -> list[str]:
    """For a person."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in verdict.by_kind.items()) or "none"
    extra = f"; {verdict.num_no_effect} without effect" if verdict.num_no_effect else ""
    extra += f"; {verdict.num_skipped} found no target" if verdict.num_skipped else ""
    said = [
        f"disruptions      {verdict.num_disruptions} in {verdict.seconds:.0f} s ({kinds}){extra}",
        f"longest stall    {verdict.longest_stall_s:.1f} s, at step {verdict.longest_stall_step}",
        f"members gone     {verdict.num_gone}, of them without a disruption {len(verdict.false_evictions)}",
        *(f"                 {line}" for line in verdict.false_evictions),
    ]
    if verdict.root is not None:
        same = (
            "" if verdict.expected_root is None else " (as expected)" if verdict.root == verdict.expected_root else ""
        )
        said.append(f"run root         {verdict.root}{same}")
    if verdict.ok:
        said.append("verdict          nothing was lost")
    else:
        said += [f"verdict          FAILED: {reason}" for reason in verdict.reasons]
    return said


def stalls(progress: Sequence[tuple[float, int]], until_s: float | None = None) -> tuple[Stall, ...]:
    """Times from each number of sealed steps to the next, longest first; ``until_s`` ends the last one."""
    points = [*progress, *([(until_s, progress[-1][1] + 1)] if until_s is not None and progress else [])]
    found = [Stall(a_s, b_s - a_s, step) for (a_s, step), (b_s, _) in pairwise(points)]
    return tuple(sorted(found, key=lambda stall: -stall.seconds))


def false_evictions(result: ChaosResult, demands: Demands = Demands()) -> tuple[str, ...]:
    """Lines of members that were found gone with no disruption of them under way or just over."""
    found: list[str] = []
    for seen_s, line in result.events:
        gone = parse_gone(line)
        if gone is None or gone[1] in _EXCUSED:
            continue
        at_s = line_time(line, seen_s)
        if at_s < result.began_s - _BLUR_S:
            continue  # before our time
        if not any(_excuses(done, gone[0], at_s, demands) for done in result.done):
            found.append(line)
    return tuple(found)


def _excuses(done: Done, hotkey: str, at_s: float, demands: Demands) -> bool:
    if not done.hotkey.startswith(hotkey) and done.kind not in demands.excused:
        return False
    end_s = (done.ended_s if done.ended_s is not None else float("inf")) + demands.eviction_window_s
    return done.began_s - _BLUR_S <= at_s <= end_s


def parse_gone(line: str) -> tuple[str, str] | None:
    """(head of the hotkey, why) of ``12:34:56 5FP6LeoM#1.2 is gone: silent``."""
    _, _, text = line.partition(" ")
    member, found, why = text.partition(" is gone: ")
    hotkey = member.partition("#")[0]
    return (hotkey, why) if found and len(hotkey) == _HOTKEY_DIGITS else None


def line_time(line: str, seen_s: float) -> float:
    """The line's own local time of day, on the day that is nearest to when it was seen."""
    try:
        stamp = time.strptime(line[:8], "%H:%M:%S")
    except ValueError:
        return seen_s
    seen = time.localtime(seen_s)
    day_s = (stamp.tm_hour - seen.tm_hour) * 3600 + (stamp.tm_min - seen.tm_min) * 60 + stamp.tm_sec - seen.tm_sec
    at_s = float(int(seen_s) + day_s)
    if at_s - seen_s > _HALF_DAY_S:
        return at_s - 2 * _HALF_DAY_S
    return at_s + 2 * _HALF_DAY_S if seen_s - at_s > _HALF_DAY_S else at_s
