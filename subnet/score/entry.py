"""One registration's numbers in one run, and how they decay: plain data of :mod:`subnet.score.book`."""

from __future__ import annotations

import math

import msgspec

from subnet.score.decay import LN2, half_power, half_power_lost
from subnet.score.score import Tally
from subnet.score.timeline import Fading
from subnet.words import Member

AWAY, PRESENT, ABSENT = 0, 1, 2
"""Not a member through nobody's fault (left, replaced, between two terms), a member, gone without a word."""
KEPT_UNPAID = 64


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """A partial: sealed and paid while its audit may still come, or taken back."""

    step: int
    stage: int
    member: Member
    time_s: float
    items: int
    work: float
    """FLOPs."""


class TakenBack(msgspec.Struct, frozen=True, array_like=True):
    credit: Credit
    why: str
    time_s: float
    audit: int
    sealed: bool = True
    """False: it failed before its seal and was never paid."""


class Entry(msgspec.Struct):
    """One registration. What fades is decayed to ``as_of_s``, leases to ``leases_as_of_s``."""

    registered_at_block: int
    first_joined_s: float
    as_of_s: float
    since: tuple[int, int] = (0, 0)
    """(term, number) of its first incarnation: what older ones did is another registration's."""
    member: Member | None = None
    status: int = AWAY
    settled: float = 0.0
    """Work that can't be taken back any more."""
    present_s: float = 0.0
    absent_s: float = 0.0
    passed: float = 0.0
    failed: float = 0.0
    unopened: float = 0.0
    leases_as_of_s: float = 0.0
    done: float = 0.0
    late: float = 0.0
    silent: float = 0.0
    sealed_work: float = 0.0
    sealed_items: int = 0
    sealed_partials: int = 0
    redone_work: float = 0.0
    redone_items: int = 0
    witness_work: float = 0.0
    witness_items: int = 0
    last_sealed_s: float = 0.0
    credits: list[Credit] = []
    taken_back: list[TakenBack] = []
    convictions: dict[int, tuple[float, str]] = {}
    """By case (0: judged from a trace, or by this validator's own audits): when and why."""


def decayed(credit: Credit, now_s: float, fading: Fading) -> float:
    return credit.work * half_power(fading.halves(credit.time_s, now_s))


def owns(entry: Entry, member: Member) -> bool:
    """Whether this incarnation is one of the entry's registration; ``number`` 0 stands for any (an accused that had left)."""
    return not member.number or (member.term, member.number) >= entry.since


def advance(entry: Entry, now_s: float, fading: Fading) -> None:
    """Decays the entry to ``now_s``, and adds the time since as presence or absence, decayed as it goes."""
    for end_s, half_life_s in fading.spans(entry.as_of_s, now_s):
        _advance(entry, end_s, half_life_s)


def _advance(entry: Entry, now_s: float, half_life_s: float) -> None:
    gap_s = now_s - entry.as_of_s
    kept = half_power(gap_s / half_life_s)
    entry.settled *= kept
    entry.present_s *= kept
    entry.absent_s *= kept
    entry.passed *= kept
    entry.failed *= kept
    entry.unopened *= kept
    if entry.status == PRESENT:
        entry.present_s += half_power_lost(gap_s / half_life_s) * half_life_s / LN2
    elif entry.status == ABSENT:
        entry.absent_s += half_power_lost(gap_s / half_life_s) * half_life_s / LN2
    entry.as_of_s = now_s


def count_lease(entry: Entry, now_s: float, fading: Fading, *, done: int = 0, late: int = 0, silent: int = 0) -> None:
    """One more, the others fade to its time."""
    if now_s > entry.leases_as_of_s:
        kept = half_power(fading.halves(entry.leases_as_of_s, now_s))
        entry.done *= kept
        entry.late *= kept
        entry.silent *= kept
        entry.leases_as_of_s = now_s
    entry.done += done
    entry.late += late
    entry.silent += silent


def take_back(entry: Entry, credit: Credit, why: str, now_s: float, audit: int, *, sealed: bool) -> None:
    """Kept for whoever asks, and for the case that it is given back."""
    taken = TakenBack(credit, why, now_s, audit, sealed)
    entry.taken_back = [*entry.taken_back, taken][-KEPT_UNPAID:]


def _left(time_s: float, now_s: float, fading: Fading, faded: dict[float, float]) -> float:
    left = faded.get(time_s)
    if left is None:
        left = faded[time_s] = half_power(fading.halves(time_s, now_s))
    return left


def tally_of(hotkey: str, entry: Entry, now_s: float, fading: Fading, faded: dict[float, float]) -> Tally:
    """The entry decayed to ``now_s``; it stays as it is. ``faded``: what is left of work of some time, kept for the next
    entry: what is sealed together has one time."""
    at = msgspec.structs.replace(entry)
    advance(at, now_s, fading)
    memory_s = fading.at(now_s).memory_s
    remembered = [(s + memory_s, why) for s, why in entry.convictions.values() if now_s - s < memory_s]
    until_s, why = max(remembered, default=(0.0, ""))
    return Tally(
        hotkey=hotkey,
        registered_at_block=at.registered_at_block,
        first_joined_s=at.first_joined_s,
        work=math.fsum(
            (at.settled, *(credit.work * _left(credit.time_s, now_s, fading, faded) for credit in at.credits))
        ),
        present_s=at.present_s,
        absent_s=at.absent_s,
        leases_as_of_s=at.leases_as_of_s,
        done=at.done,
        late=at.late,
        silent=at.silent,
        passed=at.passed,
        failed=at.failed,
        unopened=at.unopened,
        sealed_work=at.sealed_work,
        sealed_items=at.sealed_items,
        sealed_partials=at.sealed_partials,
        redone_work=at.redone_work,
        redone_items=at.redone_items,
        witness_work=at.witness_work,
        witness_items=at.witness_items,
        last_sealed_s=at.last_sealed_s,
        is_absent=at.status == ABSENT,
        convicted=why,
        convicted_until_s=until_s,
    )
