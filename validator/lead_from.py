"""Takes over the runs of a log store: another validator, or the same one without its disk, goes on with the same bits.

Reads the journals of all runs that haven't finished, checks and folds every record (:mod:`validator.log_reader`), and makes of
each a run directory as if it had been led here: written beside, renamed into place, so a take-over that is cut short is done
again from the start. The store's acknowledged records are the truth; a new term always begins behind them
(:func:`validator.leadership.demand_new_term`), because the lost leader may have said more.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from loguru import logger

from subnet.errors import ConfigError, Corrupt, InputError, OutOfSpace
from subnet.protocol import wire
from subnet.store.disk import atomic_write, sync_directory
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock, Deadline
from validator.journal_store import JournalStore
from validator.journals import FILE_NAME, Journals, place_of, say_place
from validator.leadership import demand_new_term, was_imported
from validator.log_reader import RunLog, doubtful_leaders, is_finished, read_log
from validator.run_archive import LIMIT_RUN_BYTES, PREFIX, NamedStore, RunKeys, get_run, group_keys, run_key
from validator.run_registry import RunEntry, StoredRun, plan_submission, run_planned

LISTING_S = 120.0
_TEMP, _REPLACED = "lead-from.tmp", "replaced"


@dataclass(frozen=True)
class Taken:
    """A run to lead: its submission, and its journal as far as the store has it (empty: it was only queued)."""

    stored: StoredRun
    log: RunLog


async def lead_from(
    store: NamedStore,
    directory: Path,
    *,
    only: Sequence[str] = (),
    permits: Mapping[str, bool] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    journals: Journals | None = None,
) -> tuple[str, ...]:
    """Make run directories under ``directory`` for the store's unfinished runs; their names, the next to lead first.

    ``only``: names or ids of runs to take, all where it is empty. ``permits``: by hotkey, what the chain says now; a leader
    that it doesn't know (any more) is warned of, since permits come and go while a journal stays. Nothing is changed in the
    directory unless all that is wanted can be taken over. Raises :class:`ConfigError` and :class:`Corrupt` with the way out.
    """
    shutil.rmtree(directory / _TEMP, ignore_errors=True)
    journals = journals or Journals()
    runs = await _unfinished(store, only, clock)
    taken = _one_of_each_name([Taken(stored, await read_log(store, keys, clock)) for stored, keys in runs])
    for run in taken:
        _check_plan(run, directory)
        for warning in doubtful_leaders(run.log, permits) if permits is not None else ():
            logger.warning(warning)
    changes = [(run, _compare(directory, run, journals)) for run in taken]
    place = _next_place(directory)
    for run, action in changes:
        if action is not None:
            _install(directory, run, place, action, clock, journals)
            place += 1
    names = tuple(run.stored.name for run in taken)
    logger.info("leading from the log store: {}", ", ".join(names))
    return names


# --- what the store has ------------------------------------------------------------------------------------------


async def _unfinished(store: NamedStore, only: Sequence[str], clock: Clock) -> list[tuple[StoredRun, RunKeys]]:
    keys = group_keys(await store.list_named(PREFIX, deadline=Deadline.after(LISTING_S, clock)))
    if not keys:
        raise ConfigError("the log store has no runs", hint="check the store's URL, or start without --lead-from")
    found: list[tuple[StoredRun, RunKeys]] = []
    left: list[str] = []
    for run_id, run in keys.items():
        if run.run is None:
            left.append(f"{run_id} (no {run_key(run_id)}: an older version began it)")
            continue
        stored = await _submission(store, run, clock)
        if only and run_id not in only and stored.name not in only:
            left.append(f"{run_id} (not asked for)")
        elif await is_finished(store, run, clock):
            left.append(f"{run_id} (finished)")
        else:
            found.append((stored, run))
    if left:
        logger.info("runs in the log store that are left alone: {}", ", ".join(left))
    for wanted in only:
        if not any(wanted in (stored.name, stored.run_id) for stored, _ in found):
            raise ConfigError(
                f"--lead-run {wanted}: the log store has no such unfinished run", hint=f"left alone: {', '.join(left)}"
            )
    if not found:
        raise ConfigError(
            "the log store has no unfinished run", hint=f"start without --lead-from; it has {', '.join(left)}"
        )
    return found


async def _submission(store: NamedStore, keys: RunKeys, clock: Clock) -> StoredRun:
    name = run_key(keys.run_id)
    if keys.run is not None and keys.run.size_bytes > LIMIT_RUN_BYTES:
        raise Corrupt(f"{name} has {keys.run.size_bytes} bytes, more than {LIMIT_RUN_BYTES}")
    try:
        return await get_run(store, keys.run_id, deadline=Deadline.after(TIMEOUTS.store_request_s, clock))
    except InputError as error:
        raise Corrupt(
            f"{name} in the log store cannot be read: {error.reason}",
            hint="restore it from a copy of the store, or name the other runs to lead with --lead-run",
        ) from error


def _one_of_each_name(taken: Sequence[Taken]) -> list[Taken]:
    """The run with the newest record first, queued ones last; of several with one name only the first of these."""
    order = sorted(taken, key=lambda run: (-run.log.last_ns, run.stored.place, run.stored.run_id))
    by_name: dict[str, Taken] = {}
    for run in order:
        kept = by_name.setdefault(run.stored.name, run)
        if kept is not run:
            logger.warning(
                "run {} is left alone: {} has the same name and newer records", run.stored.run_id, kept.stored.run_id
            )
    return list(by_name.values())


def _check_plan(run: Taken, directory: Path) -> None:
    """The submission is what the journal was planned from, by this version's code."""
    stored = run.stored
    try:
        config, plan = plan_submission(stored.submission)
    except (InputError, ConfigError) as error:
        raise Corrupt(
            f"the submission of run {stored.run_id} in the log store isn't usable: {error.reason}", hint=error.hint
        ) from error
    planned = run_planned(RunEntry(stored, config, plan, directory))
    if stored.name != config.run.name or (run.log.state.run is not None and run.log.state.run != planned):
        raise Corrupt(
            f"the submission of run {stored.run_id} in the log store doesn't fit its journal's first record",
            hint="lead it with the version of iota that began it, or name the other runs with --lead-run",
        )


# --- what the directory has --------------------------------------------------------------------------------------


def _compare(directory: Path, run: Taken, journals: Journals) -> str | None:
    """What to do with the run's directory: "new", "replace", "mark" (the same records), None (goes on as it is)."""
    target, log = directory / "runs" / run.stored.name, run.log
    if not (target / "run.msgpack").exists():
        return "replace" if target.exists() else "new"
    local = wire.decode(
        (target / "run.msgpack").read_bytes(), StoredRun, limit_bytes=LIMIT_RUN_BYTES, what=str(target / "run.msgpack")
    )
    if local.run_id != run.stored.run_id:
        raise ConfigError(
            f"{target} holds another run of the name {run.stored.name}: {local.run_id}, not {run.stored.run_id}",
            hint="choose another --dir, or name the runs to lead with --lead-run",
        )
    path = target / FILE_NAME
    if place_of(target) is None:
        return "replace"
    try:
        journal = JournalStore(journals.of(target, run.stored.run_id), read_only=True)
    except Corrupt as error:
        logger.warning("{}; the log store's copy takes its place", error)
        return "replace"
    count, length = len(log.records), len(journal)
    diverged = journal.base <= count <= length and journal.head_after(count) != log.head
    journal.close()
    if length < count or diverged:
        return "replace"
    if length == count:
        return "mark"
    if was_imported(path):
        logger.info("run {} was taken over before and goes on from {}", run.stored.name, target)
        return None
    raise ConfigError(
        f"{target} has {length} records of run {run.stored.name}, {length - count} more than the log store",
        hint="nothing is lost here: start without --lead-from",
    )


def _next_place(directory: Path) -> int:
    """Behind all runs that are in the directory."""
    places = [0]
    for path in (directory / "runs").glob("*/run.msgpack"):
        stored = wire.decode(path.read_bytes(), StoredRun, limit_bytes=LIMIT_RUN_BYTES, what=str(path))
        places.append(stored.place + 1)
    return max(places)


def _install(directory: Path, run: Taken, place: int, action: str, clock: Clock, journals: Journals) -> None:
    """Write the run's directory beside, then rename it into place; one that was there before is kept aside."""
    log, target = run.log, directory / "runs" / run.stored.name
    if action == "mark":
        demand_new_term(target / FILE_NAME, log.state.term)
        return
    temp = directory / _TEMP / run.stored.name
    try:
        temp.mkdir(parents=True)
        atomic_write(temp / "run.msgpack", wire.encode(msgspec.structs.replace(run.stored, place=place)))
        if log.records:
            journal = journals.here(temp, run.stored.run_id)
            if action == "replace":
                journal.set_aside(str(clock.wall_ns()))
            journal.create(log.records, log.segments)
            if journals.url:
                say_place(temp, journals.place)
            demand_new_term(temp / FILE_NAME, log.state.term)
        sync_directory(temp)
        if action == "replace":
            aside = directory / _REPLACED / f"{run.stored.name}-{clock.wall_ns()}"
            aside.parent.mkdir(parents=True, exist_ok=True)
            target.rename(aside)
            logger.warning("what was in {} lies in {} now", target, aside)
        target.parent.mkdir(parents=True, exist_ok=True)
        temp.rename(target)
        sync_directory(target.parent)
    except OutOfSpace as error:
        raise OutOfSpace(error.reason, hint="free space and start with --lead-from again") from error
    except OSError as error:
        raise ConfigError(
            f"cannot write the run's directory {target}: {error.strerror or error}", hint="check --dir and its rights"
        ) from error
