"""A backup taken beside a writing validator opens, folds to what was there, and is refused when a byte of it is wrong."""

from __future__ import annotations

import io
import os
import sqlite3
import tarfile
from pathlib import Path
from typing import Any, cast

import pytest
import zstandard
from journal_cases import SEEDS, Rig, records_of
from lead_cases import Keys, Run, submission

from iota import backup
from iota.cli.main import main
from subnet.errors import ConfigError, Corrupt, Exists, InputError, IotaError
from subnet.run import events as ev
from subnet.words import Member
from validator.journal_store import JournalStore
from validator.lead_from import lead_from
from validator.run_registry import RunRegistry


async def validator_directory(directory: Path) -> Rig:
    """Two runs: ``tiny`` with a journal that is open and half written, ``next`` that waits."""
    registry = RunRegistry(directory)
    entries = [registry.add("5Owner", submission(name)) for name in ("tiny", "next")]
    rig = Rig(entries[0].journal_path)
    await rig.emit(records_of(SEEDS[0])[:200])
    (entries[0].directory / "audits").mkdir()
    (entries[0].directory / "audits" / "blob").write_bytes(b"made again")
    (entries[0].directory / "scores.msgpack").write_bytes(b"scores")
    return rig


def rewritten(archive: Path, target: Path, change: Any) -> Path:
    """The archive with ``change(name, data)`` done to each file; None leaves the file out."""
    with (
        archive.open("rb") as raw,
        tarfile.open(fileobj=zstandard.ZstdDecompressor().stream_reader(raw), mode="r|") as tar,
    ):
        files = [(m.name, cast(Any, tar.extractfile(m)).read()) for m in tar]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files:
            new = change(name, data)
            if new is not None:
                info = tarfile.TarInfo(new[0])
                info.size = len(new[1])
                tar.addfile(info, io.BytesIO(new[1]))
    target.write_bytes(zstandard.compress(out.getvalue()))
    return target


async def test_saved_beside_a_writer_it_folds_to_what_was_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rig = await validator_directory(tmp_path / "v")
    whole, step = len(rig.journal), max(0, rig.coordinator.state.next_step)
    archive = tmp_path / "one.tar.zst"
    assert main(["backup", "save", str(archive), "--dir", str(tmp_path / "v")]) == 0
    await rig.emit(records_of(SEEDS[0])[200:260])  # goes on; the backup is as it was
    rig.journal.close()
    assert main(["backup", "rehearse", str(archive)]) == 0
    assert f"unfinished, step {step}, {whole} records" in capsys.readouterr().out
    tiny, waiting = backup.rehearse(archive)[1]
    assert (tiny.name, tiny.records, tiny.finished) == ("tiny", whole, False)
    assert (waiting.name, waiting.records) == ("next", 0)
    assert main(["backup", "restore", str(archive), "--dir", str(tmp_path / "again")]) == 0
    registry = RunRegistry(tmp_path / "again")
    assert list(registry.entries) == ["tiny", "next"]
    assert (tmp_path / "again/runs/tiny/scores.msgpack").read_bytes() == b"scores"
    assert not (tmp_path / "again/runs/tiny/audits").exists()
    journal = JournalStore(registry.get("tiny").journal_path)
    assert len(journal) == whole
    assert journal.head == tiny.head
    journal.close()


async def test_a_restored_journal_goes_on(tmp_path: Path):
    rig = await validator_directory(tmp_path / "v")
    backup.save(tmp_path / "v", tmp_path / "one")
    rig.journal.close()
    backup.restore(tmp_path / "one", tmp_path / "w")
    again = Rig(RunRegistry(tmp_path / "w").get("tiny").journal_path, rig.keys)
    await again.emit(records_of(SEEDS[0])[200:260])
    assert len(again.journal) == 260
    again.journal.close()


def test_a_followers_directory_is_saved_too(tmp_path: Path):
    """What it has folded, and its proofs; not the work of its audits, which can be done again."""
    followed = tmp_path / "v" / "follow" / "tiny-1"
    (followed / "audits").mkdir(parents=True)
    (followed / "copy").write_bytes(b"the fold")
    (followed / "audits" / "blob").write_bytes(b"made again")
    (tmp_path / "v" / "follow" / "proof-1.msgpack").write_bytes(b"two heads")
    backup.save(tmp_path / "v", tmp_path / "one")
    manifest, runs = backup.rehearse(tmp_path / "one")
    assert sorted(file.path for file in manifest.files) == ["follow/proof-1.msgpack", "follow/tiny-1/copy"]
    assert runs == ()
    backup.restore(tmp_path / "one", tmp_path / "w")
    assert (tmp_path / "w/follow/tiny-1/copy").read_bytes() == b"the fold"
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="neither runs/ nor follow/"):
        backup.save(tmp_path / "other", tmp_path / "two")


async def test_what_is_wrong_with_an_archive_is_one_line_and_nothing_is_left(tmp_path: Path):
    rig = await validator_directory(tmp_path / "v")
    rig.journal.close()
    archive = tmp_path / "one"
    backup.save(tmp_path / "v", archive)
    manifest = "manifest.json"

    def flipped(name: str, data: bytes) -> tuple[str, bytes]:
        return name, data if not name.endswith(".db") else data[:-1] + bytes([data[-1] ^ 1])

    def renamed(name: str, data: bytes) -> tuple[str, bytes]:
        return name, data.replace(b"runs/next/run.msgpack", b"../../../tmp/evil.msg") if name == manifest else data

    def escaped(name: str, data: bytes) -> tuple[str, bytes]:
        evil = "../../../tmp/evil.msg"
        return renamed(name, data) if name != "runs/next/run.msgpack" else (evil, data)

    def other_format(name: str, data: bytes) -> tuple[str, bytes]:
        return name, data.replace(b'"format":1', b'"format":9') if name == manifest else data

    cases: list[tuple[str, Any, type[IotaError]]] = [
        ("isn't as it was saved", flipped, Corrupt),
        ("leads out of the directory", escaped, InputError),
        ("isn't what its manifest says", renamed, Corrupt),
        ("format 9", other_format, InputError),
        ("ends before", lambda name, data: None if name.endswith("next/run.msgpack") else (name, data), Corrupt),
        ("has no manifest", lambda name, data: None if name == manifest else (name, data), Corrupt),
    ]
    for said, change, kind in cases:
        bad = rewritten(archive, tmp_path / "bad", change)
        with pytest.raises(kind, match=said) as caught:
            backup.restore(bad, tmp_path / "none")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "none").exists()
    (tmp_path / "bad").write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    with pytest.raises(Corrupt):
        backup.restore(tmp_path / "bad", tmp_path / "none")
    assert set(os.listdir(tmp_path)) == {"v", "one", "bad"}  # noqa: PTH208 - a path's own is no better in a coroutine


async def test_a_rehearsal_finds_the_record_that_is_bad(tmp_path: Path):
    rig = await validator_directory(tmp_path / "v")
    rig.journal.close()
    with sqlite3.connect(rig.journal.path) as database:
        database.execute("UPDATE records SET data = x'00' WHERE number = (SELECT max(number) - 3 FROM records)")
    database.close()
    backup.save(tmp_path / "v", tmp_path / "one")
    with pytest.raises(Corrupt, match="record"):
        backup.rehearse(tmp_path / "one")


def test_nothing_is_overwritten_and_no_other_directory_is_saved(tmp_path: Path):
    (tmp_path / "v" / "runs").mkdir(parents=True)
    backup.save(tmp_path / "v", tmp_path / "one")
    with pytest.raises(Exists):
        backup.save(tmp_path / "v", tmp_path / "one")
    with pytest.raises(Exists, match="isn't empty"):
        backup.restore(tmp_path / "one", tmp_path)
    with pytest.raises(ConfigError, match="no validator's directory"):
        backup.save(tmp_path, tmp_path / "two")
    with pytest.raises(Corrupt, match="can't be read"):
        backup.restore(tmp_path / "three", tmp_path / "w")


async def test_a_backup_behind_the_log_store_goes_on_from_there(tmp_path: Path):
    """The validator journaled more after the backup: who leads from the store has all of it."""
    keys = Keys()
    run = Run(keys).begin()
    await lead_from(keys, tmp_path / "v")
    backup.save(tmp_path / "v", tmp_path / "one")
    behind = len(run.records)
    run.put(ev.Leased(-1, 0, 0, Member("miner-0", 1, 1), 1))
    backup.restore(tmp_path / "one", tmp_path / "w")
    assert [found.records for found in backup.runs_of(tmp_path / "w")] == [behind]
    await lead_from(keys, tmp_path / "w")
    assert [found.records for found in backup.runs_of(tmp_path / "w")] == [behind + 1]
