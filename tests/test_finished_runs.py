"""A finished run's cases can be read, and its evidence and cases leave the store when their time is over, not before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from lead_cases import submission
from store_worlds import EmbeddedWorld, ShiftedClock

from subnet.errors import NotFound
from subnet.protocol import wire
from subnet.run import events as ev
from subnet.run.config import AuditSection, RunConfig
from subnet.store.base import Hold, OwnerStore
from subnet.timing import Deadline
from subnet.words import Member
from validator.finished_runs import EVIDENCE_S, FinishedRuns, end_holds
from validator.journal_store import JournalStore
from validator.run_registry import RunEntry, RunRegistry, run_planned

KEEP_CASES_S = 10 * EVIDENCE_S
LIAR = Member("liar", 1, 1)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[OwnerStore]:
    world = EmbeddedWorld(tmp_path / "store")
    yield await world.start()
    await world.stop()


def audited(registry: RunRegistry, name: str) -> RunEntry:
    made = submission(name)
    config = msgspec.msgpack.decode(made.config, type=RunConfig)
    on = msgspec.structs.replace(config, audit=AuditSection(rate=0.1, before_seal="probation"))
    return registry.add("submitter", msgspec.structs.replace(made, config=wire.encode(on)))


async def kept(store: OwnerStore, blobs: dict[str, str]) -> set[str]:
    sizes = await store.sizes(list(blobs.values()), deadline=Deadline.after(30))  # type: ignore[arg-type]
    return {name for name, blob in blobs.items() if blob in sizes}


async def test_evidence_goes_an_hour_after_the_end_and_cases_when_their_time_is_over(
    store: OwnerStore, tmp_path: Path
) -> None:
    registry, clock, ended = RunRegistry(tmp_path / "validator"), ShiftedClock(), set[tuple[str, str]]()
    first, second = audited(registry, "first"), audited(registry, "second")
    blobs: dict[str, str] = {}
    for entry in (first, second):
        for retention in ("evidence", "case", "snapshot"):
            name = f"{entry.name} {retention}"
            hold = Hold(retention, entry.stored.run_id, 40 if retention == "evidence" else 0)
            blobs[name] = await store.put_blob(name.encode(), hold, deadline=Deadline.after(30))

    async def after(seconds: float) -> set[str]:
        clock.shift_s = seconds
        await end_holds(registry, store, clock, KEEP_CASES_S, ended)
        return set(blobs) - await kept(store, blobs)

    assert await after(1e9) == set(), "no run has finished"
    registry.finish(first)
    assert await after(EVIDENCE_S - 60) == set(), "other validators may still be at it"
    assert await after(EVIDENCE_S + 1) == {"first evidence"}
    assert await after(KEEP_CASES_S - 60) == {"first evidence"}
    assert await after(KEEP_CASES_S + 1) == {"first evidence", "first case"}
    registry.finish(second)
    ended.clear()  # as after a restart
    gone = {"first evidence", "first case", "second evidence", "second case"}
    assert await after(KEEP_CASES_S + 60) == gone, "snapshots stay, for exports"


async def test_cases_can_be_read_when_the_run_is_over(store: OwnerStore, tmp_path: Path) -> None:
    registry = RunRegistry(tmp_path / "validator")
    entry = audited(registry, "done")
    finished = FinishedRuns(registry, store, ShiftedClock(), KEEP_CASES_S)
    with pytest.raises(NotFound, match="neither active nor finished"):
        await finished.audits("done")
    journal = JournalStore(entry.journal_path)
    for event in (
        run_planned(entry),
        ev.TermStarted(1, "validator", "n"),
        ev.HardwareClassSet(("a", "b"), "operator"),
        ev.CaseOpened(1, LIAR.hotkey, LIAR, -1, 0, "partial", "b" * 64, "d" * 64, False),
        ev.CaseClosed(1, "unconfirmed"),
    ):
        journal.stage(event, 0)
    await journal.commit()
    journal.close()
    registry.finish(entry)
    for name in ("done", entry.stored.run_id, ""):
        session = await finished.audits(name)
        assert session.over
        assert session.audit_state.run is not None
        assert session.audit_state.run.run_id == entry.stored.run_id
        (case,) = session.audit_state.audits.cases.values()
        assert (case.hotkey, case.outcome, case.bundle) == (LIAR.hotkey, "unconfirmed", "b" * 64)
    with pytest.raises(NotFound, match="finished: done"):
        await finished.audits("other")
