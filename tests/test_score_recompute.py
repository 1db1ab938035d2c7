"""Anybody counts a run's scores anew from its journal, wherever it lies, and has a validator's bits; a kill -9 changes none."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import journal_cases
import msgspec
import pytest
from journal_cases import OFTEN, SEEDS, Rig, records_of
from lead_cases import Keys, Run
from score_cases import Owner, judged, put_schedule
from score_kill_case import play
from store_worlds import SECRET

from iota.cli.main import main
from iota.score_recompute import Recomputed, recompute_journal, recompute_run
from iota.store_check import StoreAddress
from subnet.errors import ConfigError, Corrupt, InputError, NotFound
from subnet.run import events as ev
from subnet.score.book import RunBook
from subnet.score.policy import ScorePolicy
from subnet.score.recompute import combined, recompute
from subnet.score.score import Score
from subnet.store.embedded import EmbeddedStore
from subnet.store.server import start_store
from subnet.timing import Deadline
from validator.journal_store import JournalStore
from validator.score_files import read_journal, recount
from validator.scoring import ScoreBook

NOWHERE = StoreAddress("unused")
HERE = Path(__file__).parent


def of(found: Recomputed) -> dict[str, Score]:
    return {score.hotkey: score for score in found.scores}


def counted(
    path: Path | str, run: str = "", policy: ScorePolicy | None = None, at_s: float | None = None
) -> Recomputed:
    return recompute_journal(str(path), NOWHERE, run, policy or ScorePolicy(), at_s=at_s)


def files(directory: Path) -> dict[str, bytes]:
    """All but the index of a write-ahead log, where readers leave their marks."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.endswith("-shm")}


def in_store(name: str = "tiny") -> tuple[Keys, Run, ScoreBook]:
    run, book = Run(Keys(), name), ScoreBook()
    put_schedule(run, 54)
    for data in run.records:
        book.run(run.run_id).note(msgspec.msgpack.decode(data, type=ev.Record))
    return run.keys, run, book


# --- where a journal lies ------------------------------------------------------------------------------------------


async def test_the_same_bits_from_a_store_a_directory_a_file_and_a_saved_file(tmp_path: Path):
    keys, run, book = in_store()
    saved, runs = tmp_path / "saved.journal", tmp_path / "validator" / "runs"
    stored = await recompute_run(keys, "tiny", ScorePolicy(), save=saved)
    JournalStore.create(runs / "tiny" / "journal.db", run.records, run.segments)
    wanted = book.scores(stored.time_s)
    assert of(stored) == wanted != {}
    for place in (saved, runs / "tiny", runs / "tiny" / "journal.db", tmp_path / "validator"):
        found = await asyncio.to_thread(counted, place)
        assert found == stored, place
    later = await asyncio.to_thread(counted, saved, at_s=stored.time_s + 1234.5)
    assert of(later) == book.scores(stored.time_s + 1234.5) != wanted
    early = await asyncio.to_thread(counted, saved, at_s=0.0)
    assert of(early) == wanted, "scores are never of a time before the last record"


def test_of_several_runs_one_is_named(tmp_path: Path):
    for name in ("one", "two"):
        _, run, _ = in_store(name)
        JournalStore.create(tmp_path / "runs" / name / "journal.db", run.records, run.segments)
    assert counted(tmp_path, "two").run_id == "two-00000001"
    with pytest.raises(ConfigError, match="journals of 2 runs"):
        counted(tmp_path)
    with pytest.raises(NotFound, match="'three'"):
        counted(tmp_path, "three")
    with pytest.raises(NotFound, match="no journal"):
        counted(tmp_path / "runs")
    with pytest.raises(ConfigError, match="cannot read"):
        counted(tmp_path / "nowhere")
    (tmp_path / "text").write_text("no journal at all")
    with pytest.raises(InputError, match="is no journal"):
        counted(tmp_path / "text")


@pytest.mark.parametrize("what", ["a record", "the end", "the length", "all of it"])
async def test_a_saved_file_that_was_touched_gives_no_scores(tmp_path: Path, what: str):
    keys, _, _ = in_store()
    saved = tmp_path / "saved.journal"
    await recompute_run(keys, "tiny", ScorePolicy(), save=saved)
    data = bytearray(saved.read_bytes())
    if what == "a record":
        data[len(data) // 2] ^= 1
    elif what == "the end":
        del data[-5:]
    elif what == "the length":
        data[len(b"iota/journal/1\n") + 7] = 0xFF
    else:
        del data[len(b"iota/journal/1\n") :]
    saved.write_bytes(data)
    with pytest.raises((Corrupt, InputError)):
        await asyncio.to_thread(counted, saved)


async def test_what_cant_be_saved_leaves_nothing(tmp_path: Path):
    keys, run, _ = in_store()
    run.spoil(2, hotkey="somebody else")
    with pytest.raises(Corrupt):
        await recompute_run(keys, run.run_id, ScorePolicy(), save=tmp_path / "saved")
    with pytest.raises(ConfigError, match="cannot write"):
        await recompute_run(keys, run.run_id, ScorePolicy(), save=tmp_path / "nowhere" / "saved")
    with pytest.raises(ConfigError, match="only a log store's"):
        recompute_journal(str(tmp_path), NOWHERE, "", ScorePolicy(), at_s=None, save=tmp_path / "saved")
    assert files(tmp_path) == {}


async def test_the_command_line_over_a_store_and_its_saved_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    keys, _, book = in_store()
    served = await start_store(tmp_path / "store", "127.0.0.1", 0, SECRET, 512 << 20)
    store = EmbeddedStore(served.url, SECRET)
    (tmp_path / "secret").write_text(SECRET.hex())
    (tmp_path / "secret").chmod(0o600)
    try:
        for name, data in keys.keys.items():
            await store.put_named(name, data, deadline=Deadline.after(60))

        async def iota(*arguments: object) -> str:
            status = await asyncio.to_thread(main, ["score", "recompute", *map(str, arguments)])
            out = capsys.readouterr()
            assert status == 0, out.err
            return out.out

        url, secret, saved = served.url, ("--store.secret", tmp_path / "secret"), tmp_path / "saved"
        told = msgspec.json.decode(await iota(url, *secret, "--save", saved, "--json"), type=Recomputed)
        assert of(told) == book.scores(told.time_s)
        again = msgspec.json.decode(await iota(saved, "tiny-00000001", "--json"), type=Recomputed)
        assert again == told
        best = told.scores[0]
        text = await iota(saved, "--hotkey", best.hotkey)
        assert f"{told.num_records} records checked" in text
        assert f"{best.sealed_items} items in {best.sealed_partials} sealed sums, paid" in text
        assert best.hotkey in await iota(saved)
        assert json.loads(await iota(saved, "--json", "--at", told.time_s + 60))["time_s"] == told.time_s + 60
    finally:
        await store.close()
        await served.close()


# --- compacted journals --------------------------------------------------------------------------------------------


@dataclass
class Compacted:
    rig: Rig
    path: Path

    @property
    def seen(self) -> list[ev.Record]:
        return self.rig.counter.seen


async def compacted(directory: Path, monkeypatch: pytest.MonkeyPatch, policy: ScorePolicy | None = None) -> Compacted:
    """A journal that begins with a copy; its leader is still there."""
    monkeypatch.setattr(journal_cases, "Counter", lambda: Owner(policy))
    rig = Rig(directory / "journal.db", copies=OFTEN)
    await play(rig, records_of(44))
    assert rig.journal.base > 0
    return Compacted(rig, directory / "journal.db")


async def test_a_compacted_journal_gives_the_bits_of_the_whole_one_while_it_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    journal = await compacted(tmp_path, monkeypatch)
    before = files(tmp_path)
    found = await asyncio.to_thread(counted, tmp_path)
    after = files(tmp_path)
    assert (found.num_records, found.head) == (len(journal.seen), journal.rig.journal.head)
    assert 0 < found.from_copy < found.num_records
    assert of(found) == recompute(journal.seen, ScorePolicy(), found.time_s) != {}
    assert before == after, "who reads changes nothing"
    await journal.rig.emit([])
    journal.rig.close()
    closed = await asyncio.to_thread(counted, tmp_path)
    assert of(closed) == of(found)


async def test_another_policy_needs_all_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    journal = await compacted(tmp_path, monkeypatch)
    with pytest.raises(Corrupt, match="another policy") as error:
        await asyncio.to_thread(counted, tmp_path, "", ScorePolicy(half_life_s=60.0))
    assert "log store" in error.value.hint
    journal.rig.close()


async def test_a_leader_whose_copy_has_no_scores_counts_them_anew_from_its_log_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As after a change of the policy: what is behind the copy is noted, what lies before is fetched."""
    journal, quick = await compacted(tmp_path, monkeypatch), ScorePolicy(half_life_s=60.0)
    rig, seen = journal.rig, journal.seen
    monkeypatch.setattr(journal_cases, "Counter", lambda: Owner(quick))
    again = Rig(rig.copy_files(tmp_path / "again"), rig.keys)
    now_s = rig.clock.wall_ns() / 1e9
    assert again.counter.projection.lost
    wanted = recompute(seen, quick, now_s)
    assert combined([again.counter.book], quick, now_s) != wanted
    await recount(again.counter.book, "run", again.journal, rig.keys)
    assert combined([again.counter.book], quick, now_s) == wanted != {}
    rig.close()
    again.close()


@pytest.mark.parametrize("how", ["missing", "other"])
async def test_a_log_store_that_doesnt_fit_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str):
    journal = await compacted(tmp_path, monkeypatch)
    keys, book = journal.rig.keys, RunBook()
    first = sorted(keys.keys)[1]
    if how == "missing":
        del keys.keys[first]
    else:
        other = await compacted(tmp_path / "other", monkeypatch)
        keys.keys[first] = other.rig.keys.keys[sorted(other.rig.keys.keys)[2]]
        other.rig.close()
    await recount(book, "run", journal.rig.journal, keys)
    assert book.tallies(0.0) == {}
    journal.rig.close()


# --- kill -9 -------------------------------------------------------------------------------------------------------


FIRST, EACH = 1, 11
"""Of the writes those are deadly; eleven runs with FIRST 1 to 11 try them all."""


@pytest.mark.timeout(400)
async def test_killed_between_two_writes_the_ledger_is_that_of_the_records_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = await compacted(tmp_path, monkeypatch)
    seen, command = whole.seen, [sys.executable, "tests/score_kill_case.py", tmp_path / "killed", "44", FIRST, EACH]
    done = await asyncio.to_thread(
        lambda: subprocess.run([*map(str, command)], cwd=HERE.parent, capture_output=True, text=True, check=False)
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.split()
    deadly = [int(number) for number in said[1::2]]
    assert said[::2] == ["killed"] * len(deadly)
    assert len(deadly) > 9
    lengths, from_copy = set[int](), 0
    for write in deadly:
        path = tmp_path / "killed" / f"at{write}" / "journal.db"
        book, again = RunBook(), Rig(path)
        read = await asyncio.to_thread(read_journal, path, book)
        assert len(again.journal) == read.number
        now_s = 5.0 + (seen[read.number - 1].time_ns / 1e9 if read.number else 0.0)
        wanted = recompute(seen[: read.number], ScorePolicy(), now_s)
        assert combined([book], ScorePolicy(), now_s) == wanted
        assert combined([again.counter.book], ScorePolicy(), now_s) == wanted
        lengths.add(read.number)
        from_copy += read.from_copy > 0
        again.close()
    assert len(lengths) > 4, "it always died at the same place"
    assert from_copy, "no journal began with a copy"
    whole.rig.close()


# --- to the bit ----------------------------------------------------------------------------------------------------


def test_rewinds_new_registrations_and_cases_are_counted_alike_by_all():
    """Live, from dumps at every cut, and anew; some of the journals have another leader in the middle."""
    scores = [score for seed in SEEDS for score in counted_alike(seed).values()]
    for what in ("sealed_items", "redone_items", "witness_items", "audits_failed", "convicted"):
        assert any(getattr(score, what) for score in scores), f"no {what}: the journals tell too little"


def counted_alike(seed: int) -> dict[str, Score]:
    records = judged(records_of(seed), random.Random(seed), often=0.3)
    kinds = {type(record.event) for record in records}
    assert {ev.Rewound, ev.CaseClosed, ev.AuditClosed, ev.Appealed, ev.WitnessSaid} <= kinds
    blocks = {record.event.registered_at_block for record in records if isinstance(record.event, ev.Joined)}
    assert len(blocks) > 1, "nobody registered again"
    live, policy = RunBook(), ScorePolicy()
    for number, record in enumerate(records, start=1):
        live.note(record)
        if number % 97 == 0:
            cut = RunBook()
            cut.load(live.dump())
            for later in records[number : number + 97]:
                cut.note(later)
            now_s = records[min(number + 97, len(records)) - 1].time_ns / 1e9
            assert combined([cut], policy, now_s) == recompute(records[: number + 97], policy, now_s)
    now_s = records[-1].time_ns / 1e9
    scores = combined([live], policy, now_s)
    assert scores == recompute(records, policy, now_s)
    return scores
