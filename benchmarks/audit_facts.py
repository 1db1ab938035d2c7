"""What a run's journal says of audits: who was accused, who convicted and when, what was voided, undone and paid.

A plain table of JSON values, so that a benchmark keeps it as a part and counts over several of them later.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cheats import Lie
from benchmarks.run_log import run_records
from subnet.run import events as ev

CAUGHT, CONVICTED = ("convicted", "fault"), ("convicted",)
"""Outcomes of a case that take the pay; a fault's sealed lies aren't undone."""
LYING = ("liar", "accused")
"""Why an accused member is gone."""
WARM_STEPS = 2


@dataclass
class _Fold:
    planned: int = -1
    leader: str = ""
    ended_ns: int = 0
    seals: list[tuple[int, int]] = field(default_factory=list)
    voids: Counter[str] = field(default_factory=Counter)
    void_whys: Counter[str] = field(default_factory=Counter)
    gone: list[dict[str, Any]] = field(default_factory=list)
    cases: dict[int, dict[str, Any]] = field(default_factory=dict)
    audits: Counter[str] = field(default_factory=Counter)
    opened: dict[int, ev.AuditOpened] = field(default_factory=dict)
    audited_items: int = 0
    audits_of: Counter[str] = field(default_factory=Counter)
    """Partials redone to an end, by hotkey."""
    rewinds: list[dict[str, Any]] = field(default_factory=list)
    items: Counter[str] = field(default_factory=Counter)
    """Sealed work items by hotkey, those of steps that were taken back included."""
    windows: int = 0
    joined: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    held: dict[tuple[int, int], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Leased items by (step, stage) and hotkey, to know how many a void takes back."""


def facts_of(store: Path) -> dict[str, Any]:
    """Of the only run in this store's folder."""
    return facts_from(run_records(store))


def facts_from(records: Iterable[ev.Record]) -> dict[str, Any]:
    fold = _Fold()
    for record in records:
        _take(fold, record)
        fold.ended_ns = record.time_ns
    times = [(at - before) / 1e9 for (_, before), (step, at) in pairwise(fold.seals) if step >= WARM_STEPS]
    return {
        "steps": [step for step, _ in fold.seals],
        "step_s": median(times) if times else None,
        "training_s": (fold.seals[-1][1] - fold.seals[0][1]) / 1e9 if fold.seals else None,
        "sealed_ns": [at for _, at in fold.seals],
        "void_items": dict(fold.voids),
        "void_whys": dict(fold.void_whys),
        "gone": fold.gone,
        "cases": list(fold.cases.values()),
        "audits": dict(fold.audits),
        "audited_items": fold.audited_items,
        "audits_of": dict(fold.audits_of),
        "num_audits": len(fold.opened),
        "rewinds": fold.rewinds,
        "items": dict(fold.items),
        "windows": fold.windows,
        "joined": dict(fold.joined),
        "skipped": fold.skipped,
    }


def _take(fold: _Fold, record: ev.Record) -> None:
    event, at = record.event, {"step": fold.planned, "time_ns": record.time_ns}
    match event:
        case ev.TermStarted():
            fold.leader = event.hotkey
        case ev.StepPlanned():
            fold.planned = event.step
        case ev.StepSealed():
            fold.seals.append((event.step, record.time_ns))
        case ev.Leased():
            fold.held[event.step, event.stage][event.member.hotkey] += 1
        case ev.Voided():
            fold.voids[event.member.hotkey] += fold.held[event.step, event.stage].pop(event.member.hotkey, 0)
            fold.void_whys[event.why] += 1
        case ev.Gone():
            fold.gone.append({"hotkey": event.member.hotkey, "why": event.why, **at})
        case ev.Joined():
            fold.joined[event.member.hotkey] += 1
        case ev.MicrobatchSkipped():
            fold.skipped += 1
        case ev.StageSealed():
            for entry in event.entries:
                fold.items[entry.member.hotkey] += len(entry.microbatches)
        case _:
            _take_audit(fold, event, at)


def _take_audit(fold: _Fold, event: ev.AnyEvent, at: dict[str, Any]) -> None:
    match event:
        case ev.AuditOpened():
            if event.by == fold.leader:  # another validator's are its own affair
                fold.opened[event.audit] = event
        case ev.AuditClosed():
            if (opened := fold.opened.get(event.audit)) is not None:
                for name in ("passed", "failed", "undecided", "unopened"):
                    fold.audits[name] += len(getattr(event, name))
                done = (*event.passed, *event.failed)
                fold.audits["before_seal" if opened.number else "after_seal"] += len(done)
                items = dict(zip(opened.members, opened.num_items, strict=False))
                fold.audited_items += sum(items.get(member, 0) for member in done)
                fold.audits_of.update(member.hotkey for member in done)
        case ev.WindowClosed():
            fold.windows += 1
        case ev.CaseOpened():
            said = {"charge": event.charge, "of_step": event.step, "stage": event.stage, "sealed": event.sealed}
            fold.cases[event.case] = {"hotkey": event.hotkey, **said, "opened": at, "outcome": "", "closed": None}
        case ev.CaseClosed():
            if (case := fold.cases.get(event.case)) is not None:
                case.update(outcome=event.outcome, closed=at)
        case ev.Appealed():
            if (case := fold.cases.get(event.case)) is not None and not event.upheld:
                case.update(outcome="reversed", closed=at)
        case ev.Rewound():
            fold.rewinds.append({"to": event.step, "branch": event.branch, "case": event.case, **at})
        case _:
            return


def accused(facts: dict[str, Any]) -> set[str]:
    """Hotkeys that anybody has accused, however it ended."""
    gone = {gone["hotkey"] for gone in facts["gone"] if gone["why"] in LYING}
    return {case["hotkey"] for case in facts["cases"]} | gone


def convictions(
    facts: dict[str, Any], whys: tuple[str, ...] = LYING, outcomes: tuple[str, ...] = CAUGHT
) -> dict[str, dict[str, Any]]:
    """By hotkey: the step that was open, and the time, when first a case ended so, or it was gone for one of ``whys``."""
    found: dict[str, dict[str, Any]] = {}
    closed = [(case["hotkey"], case["closed"]) for case in facts["cases"] if case["outcome"] in outcomes]
    gone = [(gone["hotkey"], gone) for gone in facts["gone"] if gone["why"] in whys]
    for hotkey, at in sorted([*closed, *gone], key=lambda entry: entry[1]["time_ns"]):
        found.setdefault(hotkey, {"step": at["step"], "time_ns": at["time_ns"]})
    return found


def surviving_lies(store: Path, lies: dict[str, list[Lie]]) -> list[list[Any]]:
    """Lies that the run's end rests on, as [hotkey, step, stage, microbatch]: told before the work was sealed, and never undone."""
    if not lies:
        return []
    told: dict[tuple[str, int, int], list[Lie]] = defaultdict(list)
    for hotkey, some in lies.items():
        for lie in some:
            if not lie.in_work:
                continue
            told[hotkey, lie.step, lie.stage].append(lie)
    since: list[tuple[int, int]] = []
    found: dict[int, list[list[Any]]] = defaultdict(list)
    for record in run_records(store):
        event = record.event
        if isinstance(event, ev.Rewound):
            since.append((event.step, record.time_ns))
            for step in [step for step in found if step >= event.step]:
                del found[step]
        elif isinstance(event, ev.StageSealed):
            after = max((at for step, at in since if step <= event.step), default=0)
            for entry in event.entries:
                for lie in told.get((entry.member.hotkey, event.step, entry.stage), ()):
                    if after < lie.time_ns <= record.time_ns and lie.microbatch in (-1, *entry.microbatches):
                        found[event.step].append([entry.member.hotkey, event.step, entry.stage, lie.microbatch])
    return [lie for step in sorted(found) for lie in found[step]]
