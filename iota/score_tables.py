"""Scores on a terminal: tables of terms, of what holds a hotkey back, and of what wasn't paid. Wide where it isn't a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from iota.score_recompute import Recomputed
from subnet.errors import NotFound
from subnet.policy.policy import short
from subnet.score.api import ScoreDetail
from subnet.score.score import Score, Unpaid, whole_worth
from subnet.score.terms import Term, terms_of

_LIST = (
    "hotkey",
    "block",
    "score",
    "work FLOPs",
    "FLOP/s",
    "uptime",
    "deadlines",
    "audits",
    "reliability",
    "items",
    "",
)


def print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_list(scores: Sequence[Score]) -> None:
    rows = (
        (
            score.hotkey,
            "?" if score.registered_at_block is None else str(score.registered_at_block),
            f"{score.total:.4f}",
            f"{score.work:.4g}",
            f"{score.rate:.4g}",
            f"{score.uptime:.4f}",
            f"{score.deadlines:.4f}",
            f"{score.audits:.4f}",
            f"{score.reliability:.4f}",
            str(score.sealed_items),
            score.convicted,
        )
        for score in scores
    )
    _print_table(_LIST, rows)


def print_detail(found: ScoreDetail) -> None:
    place = (
        f"place {found.place} of {found.num_scores}" if found.place else "no score: never a member here, or forgotten"
    )
    block = found.score.registered_at_block if found.score is not None else None
    registered = f", registered at block {block}" if block is not None else ""
    print(f"{found.hotkey}: {place}{registered}\n{found.where}")
    if found.in_force is not None:
        print(f"counted with policy {policy_words(found.in_force.digest, found.in_force.since_s)}")
    if found.terms:
        print("\nScore")
        _print_terms(found.terms)
    if found.holds:
        print("\nHeld back by")
        _print_table(("what", "why", "until", "hint"), ((h.what, h.why, h.ends, h.hint) for h in found.holds))
    _print_unpaid(found.unpaid)


def print_recomputed(found: Recomputed, hotkey: str) -> None:
    print(f"run {found.run_id}: {found.num_records} records checked, as of {found.time_s:.3f}, head {found.head}")
    if found.from_copy:
        print(
            f"records before {found.from_copy} are no longer there: what was earned in them is as the journal's copy says "
            "(its log store has them all)"
        )
    if found.told is not None:
        print(f"its validator counts with policy {policy_words(found.told.digest, found.told.effective_s)}")
    if not hotkey:
        print_list(found.scores)
        return
    scores = {score.hotkey: score for score in found.scores}
    if hotkey not in scores:
        raise NotFound(f"{hotkey} has no score in this journal", hint="see it without --hotkey")
    _print_terms(terms_of(found.policy, scores[hotkey], whole_worth(scores)))
    _print_unpaid(found.unpaid.get(hotkey, ()))


def policy_words(digest: str, since_s: float) -> str:
    """``0123456789ab since 2026-01-31 12:00:00 UTC``."""
    when = time.strftime("since %Y-%m-%d %H:%M:%S UTC", time.gmtime(since_s)) if since_s else "since it was set up"
    return f"{short(digest)} {when}"


def _print_terms(terms: Sequence[Term]) -> None:
    rows = ((term.name, f"{term.value:.6g} {term.unit}".rstrip(), term.how) for term in terms)
    _print_table(("term", "value", "is"), rows)


def _print_unpaid(unpaid: Sequence[Unpaid]) -> None:
    if not unpaid:
        return
    print("\nNot paid")
    rows = (
        (
            str(one.step),
            str(one.stage),
            str(one.items) if one.items else "in part",
            f"{one.work:.6g}",
            one.why if one.sealed else f"{one.why}, found before its seal",
            str(one.audit) if one.audit else "",
            one.run,
        )
        for one in unpaid
    )
    _print_table(("step", "stage", "items", "FLOPs", "why", "audit", "run"), rows)


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=name in ("hotkey", "term", "value", "what"), overflow="fold")
    for row in rows:
        table.add_row(*(_escaped(cell) for cell in row))
    console.print(table)


def _escaped(cell: str) -> str:
    """Square brackets are no markup."""
    from rich.markup import escape

    return escape(cell)
