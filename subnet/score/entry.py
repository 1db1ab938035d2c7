"""One registration's numbers in one run, and how they decay: plain data of :mod:`subnet.score.book`."""

from __future__ import annotations

import math

import msgspec

from subnet.score.policy import ScorePolicy
from subnet.score.score import Tally
from subnet.words import Member

AWAY, PRESENT, ABSENT = 0, 1, 2
"""Not a member through nobody's fault (left, replaced, between two terms), a member, gone without a word."""
DECAYED = ("settled", "present_s", "absent_s", "done", "late", "silent", "passed", "failed", "unopened")


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """A sealed partial whose audit may still be to come."""

    step: int
    stage: int
    member: Member
    time_s: float
    items: int
    work: float


class TakenBack(msgspec.Struct, frozen=True, array_like=True):
    credit: Credit
    why: str
    time_s: float
    audit: int


class Entry(msgspec.Struct):
    """One registration. The numbers in ``DECAYED`` are decayed to ``as_of_s``."""

    registered_at_block: int
    first_joined_s: float
    as_of_s: float
    member: Member | None = None
    status: int = AWAY
    settled: float = 0.0
    """Work whose audits are over."""
    present_s: float = 0.0
    absent_s: float = 0.0
    done: float = 0.0
    late: float = 0.0
    silent: float = 0.0
    passed: float = 0.0
    failed: float = 0.0
    unopened: float = 0.0
    sealed_work: float = 0.0
    sealed_items: int = 0
    sealed_partials: int = 0
    last_sealed_s: float = 0.0
    credits: list[Credit] = []
    taken_back: list[TakenBack] = []
    convictions: dict[int, tuple[float, str]] = {}
    """By case (0: judged from a trace): when and why."""


def factor(age_s: float, half_life_s: float) -> float:
    return 2.0 ** (-max(0.0, age_s) / half_life_s)


def decayed(credit: Credit, now_s: float, half_life_s: float) -> float:
    return credit.work * factor(now_s - credit.time_s, half_life_s)


def advance(entry: Entry, now_s: float, half_life_s: float) -> None:
    """Decays the entry to ``now_s``, and adds the time since as presence or absence, decayed as it goes."""
    gap_s = now_s - entry.as_of_s
    if gap_s <= 0:
        return
    kept = factor(gap_s, half_life_s)
    for name in DECAYED:
        value = getattr(entry, name)
        if value:
            setattr(entry, name, value * kept)
    passed_s = -math.expm1(-gap_s * math.log(2) / half_life_s) * half_life_s / math.log(2)
    if entry.status == PRESENT:
        entry.present_s += passed_s
    elif entry.status == ABSENT:
        entry.absent_s += passed_s
    entry.as_of_s = now_s


def tally_of(hotkey: str, entry: Entry, now_s: float, policy: ScorePolicy) -> Tally:
    """The entry decayed to ``now_s``; it stays as it is."""
    at = msgspec.structs.replace(entry)
    advance(at, now_s, policy.half_life_s)
    remembered = [why for since_s, why in entry.convictions.values() if now_s - since_s < policy.memory_s]
    return Tally(
        hotkey=hotkey,
        registered_at_block=at.registered_at_block,
        first_joined_s=at.first_joined_s,
        work=math.fsum((at.settled, *(decayed(credit, now_s, policy.half_life_s) for credit in at.credits))),
        present_s=at.present_s,
        absent_s=at.absent_s,
        done=at.done,
        late=at.late,
        silent=at.silent,
        passed=at.passed,
        failed=at.failed,
        unopened=at.unopened,
        sealed_work=at.sealed_work,
        sealed_items=at.sealed_items,
        sealed_partials=at.sealed_partials,
        last_sealed_s=at.last_sealed_s,
        is_absent=at.status == ABSENT,
        convicted=remembered[-1] if remembered else "",
    )
