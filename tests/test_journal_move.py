"""Journals move between files and PostgreSQL whole, checked, and each run at one moment; a wrong ``--journal`` is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from journal_cases import SEEDS, Rig, records_of
from lead_cases import Keys, Run, submission
from postgres_server import PASSWORD, Server

from iota import backup
from iota.cli.main import main
from subnet.errors import ConfigError, Corrupt, IotaError
from validator import journal_move
from validator.directory_lock import directory_lock
from validator.journal_move import move, show
from validator.journal_postgres import PostgresJournal
from validator.journal_store import JournalStore
from validator.journals import Journals, place_of
from validator.lead_from import lead_from
from validator.run_registry import RunEntry, RunRegistry

FILES = Journals()
WHOLE = records_of(SEEDS[0])[:120]


@pytest.fixture
def database(postgres: Server) -> Journals:
    return Journals(postgres.url())


async def begun(directory: Path, journals: Journals) -> tuple[RunEntry, str]:
    """``tiny`` has begun, ``next`` waits."""
    registry = RunRegistry(directory, journals=journals)
    entry, _ = (registry.add("5Owner", submission(name)) for name in ("tiny", "next"))
    rig = Rig(entry.journal_to_lead())  # type: ignore[arg-type]
    await rig.emit(WHOLE)
    head = rig.journal.head
    rig.close()
    return entry, head


def read(directory: Path, journals: Journals) -> JournalStore:
    return JournalStore(RunRegistry(directory, journals=journals).get("tiny").journal(), read_only=True)


async def test_there_and_back_again(database: Journals, tmp_path: Path) -> None:
    entry, head = await begun(tmp_path, FILES)
    tiny, waiting = move(tmp_path, FILES, database)
    assert (tiny.what, tiny.records, tiny.head) == ("moved", 120, head)
    assert waiting.what == "no journal yet"
    assert not entry.journal_path.exists()
    assert [placed.place for placed in show(tmp_path, database)] == ["postgresql", "none"]
    assert move(tmp_path, FILES, database)[0].what == "already there"
    rig = Rig(RunRegistry(tmp_path, journals=database).get("tiny").journal_to_lead())  # type: ignore[arg-type]
    await rig.emit(records_of(SEEDS[0])[120:160])  # goes on there
    later = rig.journal.head
    rig.close()
    assert move(tmp_path, database, FILES)[0].head == later
    assert not database.here(entry.directory, entry.stored.run_id).exists()
    journal = read(tmp_path, FILES)
    assert (len(journal), journal.head, journal.num_dropped) == (160, later, 0)


async def test_a_validator_that_was_told_another_place_refuses(database: Journals, tmp_path: Path) -> None:
    await begun(tmp_path / "a", FILES)
    with pytest.raises(ConfigError, match=r"is a file.*iota journal move file"):
        RunRegistry(tmp_path / "a", journals=database).get("tiny").journal_to_lead()
    assert len(read(tmp_path / "a", database)) == 120, "a finished run's file is read, whatever --journal says"
    await begun(tmp_path / "b", database)
    with pytest.raises(ConfigError, match=r"PostgreSQL database.*--journal"):
        RunRegistry(tmp_path / "b").get("tiny").journal_to_lead()
    (tmp_path / "b/runs/tiny/journal-place").write_text("postgresql another\n")
    with pytest.raises(ConfigError, match="another PostgreSQL"):
        RunRegistry(tmp_path / "b", journals=database).get("tiny").journal_to_lead()


@pytest.mark.parametrize("breaks", ["while it is filled", "before it counts", "before the old one goes"])
@pytest.mark.parametrize("back", [False, True])
async def test_a_move_that_breaks_off_is_done_again(
    database: Journals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str, back: bool
) -> None:
    source, target = (database, FILES) if back else (FILES, database)
    entry, head = await begun(tmp_path, source)
    old = type(source.here(entry.directory, "x"))

    def gone(*_: object) -> None:
        raise RuntimeError("the machine is gone")

    def half(self: object) -> Iterator[object]:
        yield "records", (0, "x", b"half")
        gone()

    with monkeypatch.context() as broken:
        if breaks == "while it is filled":
            broken.setattr(old, "rows", half)
        elif breaks == "before it counts":
            broken.setattr(journal_move, "say_place", gone)
        else:
            broken.setattr(old, "discard", gone)
        with pytest.raises(RuntimeError, match="gone"):
            move(tmp_path, source, target)
    moved = breaks == "before the old one goes"
    assert read(tmp_path, target if moved else source).head == head
    assert place_of(entry.directory) == (target if moved else source).place
    assert move(tmp_path, source, target)[0].what == ("already there" if moved else "moved")
    assert read(tmp_path, target).head == head
    assert not source.here(entry.directory, entry.stored.run_id).exists()


async def test_what_was_written_otherwise_stays_where_it_was(
    database: Journals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, head = await begun(tmp_path, FILES)
    real = PostgresJournal.fill

    def fills_short(self: PostgresJournal, rows: Iterator[tuple[str, tuple[object, ...]]]) -> None:
        whole = list(rows)
        real(self, whole[:-1])  # type: ignore[arg-type]

    monkeypatch.setattr(PostgresJournal, "fill", fills_short)
    with pytest.raises(Corrupt, match="the run stays where it was"):
        move(tmp_path, FILES, database)
    assert place_of(entry.directory) == "file"
    assert read(tmp_path, FILES).head == head


async def test_nothing_is_moved_under_a_running_validator(database: Journals, tmp_path: Path) -> None:
    await begun(tmp_path, FILES)
    with directory_lock(tmp_path), pytest.raises(ConfigError, match="a validator runs in"):
        move(tmp_path, FILES, database)
    with pytest.raises(ConfigError, match="the same one"):
        move(tmp_path, database, database)


async def test_by_the_command(database: Journals, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, head = await begun(tmp_path, FILES)
    assert main(["journal", "move", "file", database.url, "--dir", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert PASSWORD not in said.out + said.err
    assert json.loads(said.out)[0] == {"run": "tiny", "what": "moved", "records": 120, "head": head}
    assert main(["journal", "show", "--journal", database.url, "--dir", str(tmp_path)]) == 0
    assert f"120 records, head {head[:12]}" in capsys.readouterr().out
    assert main(["journal", "move", database.url, "mysql://x", "--dir", str(tmp_path)]) == 2


async def test_a_backup_has_the_journals_wherever_they_lie(database: Journals, tmp_path: Path) -> None:
    """Beside the one who writes; restored they are files, which go where they are wanted."""
    _, head = await begun(tmp_path / "v", database)
    with pytest.raises(ConfigError, match="--journal"):
        backup.save(tmp_path / "v", tmp_path / "none")
    writing = JournalStore(RunRegistry(tmp_path / "v", journals=database).get("tiny").journal_to_lead())
    backup.save(tmp_path / "v", tmp_path / "one", database)
    writing.close()
    assert backup.rehearse(tmp_path / "one")[1][0].head == head
    backup.restore(tmp_path / "one", tmp_path / "w")
    shutil.rmtree(tmp_path / "v")
    assert move(tmp_path / "w", FILES, database)[0].head == head


async def test_a_lost_run_is_led_from_its_log_store_into_the_database(database: Journals, tmp_path: Path) -> None:
    run = Run(Keys()).begin()
    assert await lead_from(run.keys, tmp_path, journals=database) == ("tiny",)
    entry = RunRegistry(tmp_path, journals=database).get("tiny")
    assert place_of(entry.directory) == database.place
    journal = JournalStore(entry.journal_to_lead())
    assert len(journal) == journal.acknowledged > 0
    journal.close()
    journal_of = entry.journal()
    journal_of.fill(iter(()))  # the database lost it
    with pytest.raises(IotaError):
        JournalStore(entry.journal_to_lead())
    assert await lead_from(run.keys, tmp_path, journals=database) == ("tiny",)
    assert len(read(tmp_path, database)) == len(journal)
