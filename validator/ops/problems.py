"""What is wrong with a validator, as a list: health, metrics and alerts all say the same because they all read this.

Pure: everything is in the :class:`Look` that is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from subnet.protocol.api import RunSummary
from validator.weights import WeightsReport

Severity = Literal["warning", "critical"]


class Problem(msgspec.Struct, frozen=True):
    """``code`` is the same for as long as the matter is; ``summary`` may name numbers that change."""

    code: str
    severity: Severity
    summary: str
    hint: str
    blocks: bool = False
    """Nothing can be sealed, or nobody can be paid, until it is gone: the validator isn't ready."""


class Limits(msgspec.Struct, frozen=True):
    """When something is worth saying."""

    metagraph_s: float = 300.0
    """Age of the last metagraph. 25 blocks of 12 s: a node that restarts is no problem yet."""
    weights_tempos: float = 3.0
    """Tempos without weights set."""
    loop_lag_s: float = 5.0
    """The event loop was held up so long within the last minute: members time out at about that."""
    disk_warning: float = 0.10
    """Free share of the disk."""
    disk_critical_bytes: int = 2 << 30


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """A validator at one moment. Ages are in seconds."""

    leads: bool
    hotkey: str
    started_s_ago: float
    loop_lag_s: float = 0.0
    """Worst of the last minute."""
    metagraph_age_s: float | None = None
    chain_trouble: str = ""
    """Why the last read of the metagraph failed; empty when it didn't."""
    registered: bool = True
    permit: bool = True
    sets_weights: bool = True
    tempo_s: float = 4320.0
    weights: WeightsReport | None = None
    """How the last try ended."""
    weights_set_s_ago: float | None = None
    """None: never since the start."""
    may_speak: bool = True
    """Its term is in the log store, so members may be told anything at all; true where there is no run."""
    store_trouble: str = ""
    journal_trouble: str = ""
    unacknowledged_records: int = 0
    disk_free_bytes: int = 0
    disk_bytes: int = 0
    run: RunSummary | None = None
    spikes: tuple[str, ...] = ()
    """Of its last steps: those that are far off the ones before, in words."""
    follow_troubles: tuple[str, ...] = ()
    """Of a follower: runs that it can't follow further, in words."""


def problems(look: Look, limits: Limits = Limits()) -> tuple[Problem, ...]:
    """All of them, the critical first."""
    found = [*_chain(look, limits), *_weights(look, limits), *_store(look), *_journal(look)]
    found += [*_disk(look, limits), *_run(look, limits)]
    return tuple(sorted(found, key=lambda problem: (problem.severity != "critical", problem.code)))


def _chain(look: Look, limits: Limits) -> Iterator[Problem]:
    age = look.metagraph_age_s
    if age is None or age > limits.metagraph_s:
        since = "was never read" if age is None else f"is {age:.0f} s old"
        why = f": {look.chain_trouble}" if look.chain_trouble else ""
        yield Problem(
            "metagraph_old",
            "critical",
            f"the metagraph {since} (limit {limits.metagraph_s:.0f} s){why}",
            "is the chain's endpoint up, and does this SDK fit it? iota doctor --chain says",
            blocks=age is None,
        )
    if not look.registered:
        yield Problem(
            "not_registered",
            "critical",
            f"hotkey {look.hotkey} isn't registered any more",
            "register it again; nobody takes its weights until then",
        )
    elif look.sets_weights and not look.permit:
        yield Problem(
            "no_permit",
            "warning",
            "the hotkey holds no validator permit",
            "permits go to the largest stakes once per tempo: add stake and wait",
        )


def _weights(look: Look, limits: Limits) -> Iterator[Problem]:
    if not look.sets_weights:
        return
    limit_s = limits.weights_tempos * look.tempo_s
    ago_s = look.started_s_ago if look.weights_set_s_ago is None else look.weights_set_s_ago
    report = look.weights
    idle = report is not None and report.status == "nothing" and report.code == "no_scores"
    if ago_s > limit_s and not idle:
        last = str(report) if report is not None else "no try was made"
        yield Problem(
            "weights_not_set",
            "critical",
            f"no weights set for {ago_s / look.tempo_s:.1f} tempos (limit {limits.weights_tempos:g}); last: {last}",
            (
                report.hint
                if report is not None and report.hint
                else "see docs/chain.md for what the chain's refusal means"
            ),
        )
    if report is not None and report.status == "differs":
        yield Problem(
            "weights_differ",
            "critical",
            f"the chain stores other weights than were sent: {report.reason}",
            "does this SDK fit the runtime? iota doctor --chain says",
        )


def _store(look: Look) -> Iterator[Problem]:
    if look.store_trouble:
        yield Problem(
            "store",
            "critical",
            f"the store: {look.store_trouble}",
            "nothing is sealed until it is well; iota store check URL says what it lacks",
            blocks=True,
        )


def _journal(look: Look) -> Iterator[Problem]:
    if look.journal_trouble:
        yield Problem(
            "journal",
            "critical",
            look.journal_trouble,
            "nothing is acknowledged until the database answers; the validator ends when it stays away",
            blocks=True,
        )


def _disk(look: Look, limits: Limits) -> Iterator[Problem]:
    if look.disk_bytes <= 0:
        return
    free = f"{look.disk_free_bytes / 1e9:.1f} GB of {look.disk_bytes / 1e9:.0f} GB are free"
    hint = "free some, or move --dir to a larger disk: journals, audit bundles and logs lie there"
    if look.disk_free_bytes < limits.disk_critical_bytes:
        yield Problem("disk_full", "critical", free, hint, blocks=look.disk_free_bytes == 0)
    elif look.disk_free_bytes < limits.disk_warning * look.disk_bytes:
        yield Problem("disk_low", "warning", free, hint)


def _run(look: Look, limits: Limits) -> Iterator[Problem]:
    if look.loop_lag_s > limits.loop_lag_s:
        yield Problem(
            "event_loop",
            "warning",
            f"the process stood still for {look.loop_lag_s:.1f} s within the last minute",
            "give it a core of its own and memory that doesn't swap",
        )
    run = look.run
    if look.leads and run is not None and not look.may_speak:
        yield Problem(
            "no_term",
            "critical",
            f"run {run.name} waits for its term to be in the log store",
            "nobody may be told anything before; is the store well?",
            blocks=True,
        )
    if run is not None and run.stall is not None:
        waits = "; ".join(f"{wait.who}: {wait.what} ({wait.waited_s:.0f} s)" for wait in run.stall.waits[:4])
        yield Problem(
            "stalled",
            "critical",
            f"run {run.name} sealed nothing for {run.stall.no_seal_s:.0f} s (limit {run.stall.limit_s:.0f} s): {waits}",
            "iota run status names all that is waited for",
        )
    if run is not None and look.spikes:
        yield Problem(
            "spike",
            "warning",
            f"run {run.name}: {'; '.join(look.spikes)}",
            "its owner may go back and lower the rate: iota run rollback, then set-lr; [alarms] says what a spike is",
        )
    for trouble in look.follow_troubles:
        yield Problem(
            "follow", "critical", trouble, "docs/follow.md says what ends the following of a run", blocks=True
        )
