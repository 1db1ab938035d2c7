"""What a validator takes over from a log store is exactly what was acknowledged there, in a new term, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from lead_cases import FIRST, SECOND, Keys, Run

from subnet.errors import ConfigError, Corrupt, IotaError
from subnet.protocol import wire
from subnet.protocol.signing import sign_statement
from subnet.run import events as ev
from subnet.timing import Deadline, ManualClock
from subnet.words import Member
from validator import lead_from as module
from validator.coordinator import Coordinator
from validator.journal_store import JournalStore
from validator.lead_from import lead_from
from validator.leadership import LeadershipWatch, others_term
from validator.log_publisher import LeadershipLost, LogPublisher, segment_key
from validator.run_archive import put_run, run_key
from validator.run_registry import RunRegistry, StoredRun


class Tasks:
    """A coordinator's tasks that never have anything to do."""

    def bind(self, complete: object) -> None: ...


def coordinator(directory: Path, run: Run, signer=FIRST) -> Coordinator:
    journal = JournalStore(directory / "runs" / run.name / "journal.db")
    clock = ManualClock()
    publisher = LogPublisher(run.run_id, journal, run.keys, signer, clock)
    return Coordinator(journal=journal, publisher=publisher, tasks=Tasks(), signer=signer, clock=clock)


async def lead(leader: Coordinator, run: Run) -> None:
    """What the main task and the publisher do, once."""
    leader.begin(run.planned, None)
    await leader.turn()
    await publish(leader)


async def publish(leader: Coordinator) -> None:
    due = leader.core.segment_due()
    assert due is not None
    await leader._publisher.publish(due, leader.core)


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


# --- taking over ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signer", [FIRST, SECOND], ids=["the same hotkey", "another hotkey"])
async def test_an_empty_directory_leads_on_in_a_new_term(tmp_path: Path, signer) -> None:
    run = Run(Keys()).begin()
    assert await lead_from(run.keys, tmp_path) == ("tiny",)
    (entry,) = RunRegistry(tmp_path).entries.values()
    assert (entry.stored, entry.finished) == (run.stored, False)
    leader = coordinator(tmp_path, run, signer)
    assert leader._journal.records_between(0, 6) == run.records
    assert (leader.state.term, leader.state.leader, leader.core.acknowledged) == (1, FIRST.hotkey, 6)
    leader.begin(run.planned, None)
    assert not leader.core.may_speak  # records behind the store's may have been said: it is silent until its term is in
    await leader.turn()
    await publish(leader)
    assert leader.core.may_speak
    assert (leader.state.term, leader.state.leader) == (2, signer.hotkey)
    assert not leader.state.members
    await leader.close()

    again = coordinator(tmp_path, run, signer)
    again.begin(run.planned, None)
    assert again.state.term == 2  # the same disk goes on in the same term
    await again.close()


async def test_a_new_term_is_begun_though_the_take_over_died_before_it(tmp_path: Path) -> None:
    run = Run(Keys()).begin()
    await lead_from(run.keys, tmp_path)
    first = coordinator(tmp_path, run)
    first.begin(run.planned, None)
    await first.close()  # killed before anything was committed
    second = coordinator(tmp_path, run)
    await lead(second, run)
    assert second.state.term == 2
    await second.close()


async def test_what_was_taken_over_can_be_taken_over(tmp_path: Path) -> None:
    run = Run(Keys()).begin()
    for number, signer in enumerate([SECOND, FIRST, FIRST]):
        directory = tmp_path / str(number)
        await lead_from(run.keys, directory)
        leader = coordinator(directory, run, signer)
        await lead(leader, run)
        assert leader.state.term == number + 2
        await leader.close()


async def test_a_queued_run_is_taken_over_without_a_journal(tmp_path: Path) -> None:
    keys = Keys()
    Run(keys, "queued")
    begun = Run(keys, "begun").begin()
    assert await lead_from(keys, tmp_path) == ("begun", "queued")
    active = RunRegistry(tmp_path).active()
    assert active is not None
    assert active.stored.run_id == begun.run_id
    assert not (tmp_path / "runs" / "queued" / "journal.db").exists()


async def test_the_newest_run_leads_and_others_of_its_name_are_left_alone(tmp_path: Path) -> None:
    keys = Keys()
    Run(keys, "tiny", "tiny-old", start_ns=10).begin()
    new = Run(keys, "tiny", "tiny-new", start_ns=30).begin()
    Run(keys, "older", start_ns=20).begin()
    assert await lead_from(keys, tmp_path / "all") == ("tiny", "older")
    assert RunRegistry(tmp_path / "all").get("tiny").stored.run_id == new.run_id
    assert await lead_from(keys, tmp_path / "one", only=("tiny-old",)) == ("tiny",)
    assert RunRegistry(tmp_path / "one").get("tiny").stored.run_id == "tiny-old"


async def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    keys = Keys()
    Run(keys, "done").begin().finish()
    with pytest.raises(ConfigError, match="no unfinished run"):
        await lead_from(keys, tmp_path)
    Run(keys, "tiny").begin()
    assert await lead_from(keys, tmp_path) == ("tiny",)
    with pytest.raises(ConfigError, match="--lead-run done"):
        await lead_from(keys, tmp_path / "other", only=("done",))


async def test_leaders_that_the_chain_does_not_vouch_for_are_warned_of(tmp_path: Path) -> None:
    from loguru import logger

    said: list[str] = []
    handler = logger.add(lambda message: said.append(str(message)), level="WARNING", format="{message}")
    run = Run(Keys()).begin()
    run.put(ev.TermStarted(2, SECOND.hotkey, "n2"), signer=SECOND)
    await lead_from(run.keys, tmp_path, permits={SECOND.hotkey: False})
    logger.remove(handler)
    assert any(FIRST.hotkey in line and "isn't registered" in line for line in said)
    assert any(SECOND.hotkey in line and "no validator permit" in line for line in said)


# --- refused -------------------------------------------------------------------------------------------------------


def missing(run: Run) -> None:
    del run.keys.keys[segment_key(run.run_id, 1)]


def undecodable(run: Run) -> None:
    run.keys.keys[segment_key(run.run_id, 1)] = b"\x93junk"


def of_another_number(run: Run) -> None:
    run.keys.keys[segment_key(run.run_id, 1)] = run.keys.keys[segment_key(run.run_id, 2)]


def a_flipped_byte(run: Run) -> None:
    first, *others = run.records[2:4]
    run.spoil(1, records=(first[:-1] + bytes([first[-1] ^ 1]), *others), head=run.segment().head)


def forged(run: Run) -> None:
    """Chained well, but signed by somebody who didn't lead."""
    run.spoil(1, hotkey=SECOND.hotkey)


def signed_by_another(run: Run) -> None:
    from subnet.run.chain_hash import GENESIS_HEAD, fold_heads

    head = fold_heads(GENESIS_HEAD, run.records[:4])
    run.spoil(1, signature=sign_statement(SECOND, "journal-head", head.encode()))


def a_fact_that_cannot_follow(run: Run) -> None:
    record = wire.encode(ev.Record(2, 5, ev.Updated(Member("nobody", 1, 9), 3, "root")))
    run.spoil(1, records=(record, run.records[3]))


def a_gap_in_the_numbers(run: Run) -> None:
    run.spoil(1, records=(run.records[3], run.records[3]))


def a_usurped_term(run: Run) -> None:
    """A term of somebody else inside a segment that the old leader signed."""
    record = wire.encode(ev.Record(3, 5, ev.TermStarted(2, SECOND.hotkey, "x")))
    run.spoil(1, records=(run.records[2], record))


def empty(run: Run) -> None:
    run.spoil(1, records=())


SPOILS = [
    missing,
    undecodable,
    of_another_number,
    a_flipped_byte,
    forged,
    signed_by_another,
    a_fact_that_cannot_follow,
    a_gap_in_the_numbers,
    a_usurped_term,
    empty,
]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
async def test_a_corrupt_segment_stops_it_with_its_number_and_the_way_out(
    tmp_path: Path, spoil: Callable[[Run], None]
) -> None:
    run = Run(Keys()).begin()
    spoil(run)
    with pytest.raises(Corrupt, match="segment 1 of run tiny-00000001") as caught:
        await lead_from(run.keys, tmp_path)
    assert "segments 0 to 0 are good" in caught.value.hint
    assert "--lead-run" in caught.value.hint
    assert files(tmp_path) == set()
    good = Run(run.keys, "good").begin()
    assert await lead_from(run.keys, tmp_path, only=(good.run_id,)) == ("good",)


async def test_a_segment_too_large_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("validator.log_reader.LIMIT_SEGMENT_BYTES", 400)
    with pytest.raises(Corrupt, match=r"segment 0 of run .* more than 400"):
        await lead_from(Run(Keys()).begin().keys, tmp_path)


async def test_a_submission_that_is_not_the_journals(tmp_path: Path) -> None:
    run = Run(Keys()).begin()
    other = msgspec.structs.replace(run.stored.submission, data="cd" * 32)
    run.keys.keys[run_key(run.run_id)] = wire.encode(msgspec.structs.replace(run.stored, submission=other))
    with pytest.raises(Corrupt, match="doesn't fit its journal's first record"):
        await lead_from(run.keys, tmp_path)
    run.keys.keys[run_key(run.run_id)] = b"junk"
    with pytest.raises(Corrupt, match=r"runs/tiny-00000001/run in the log store cannot be read"):
        await lead_from(run.keys, tmp_path)
    del run.keys.keys[run_key(run.run_id)]
    with pytest.raises(ConfigError, match="no unfinished run"):
        await lead_from(run.keys, tmp_path)


async def test_a_store_without_runs_or_that_is_away(tmp_path: Path) -> None:
    keys = Keys()
    with pytest.raises(ConfigError, match="the log store has no runs"):
        await lead_from(keys, tmp_path)
    keys.down = True
    with pytest.raises(IotaError, match="down"):
        await lead_from(keys, tmp_path)
    assert files(tmp_path) == set()


# --- a directory that has something already -------------------------------------------------------------------------


async def own_directory(directory: Path, run: Run, *, more: int) -> None:
    """The directory of the run's first validator: what the store has, and ``more`` records."""
    target = directory / "runs" / run.name
    target.mkdir(parents=True)
    (target / "run.msgpack").write_bytes(wire.encode(run.stored))
    JournalStore.create(target / "journal.db", run.records, run.segments)
    journal = JournalStore(target / "journal.db")
    for number in range(more):
        journal.stage(ev.HardwareClassSet((str(number),), "operator"), 1)
    await journal.commit()
    journal.close()


async def test_a_journal_that_goes_further_than_the_store_is_refused(tmp_path: Path) -> None:
    run = Run(Keys()).begin()
    await own_directory(tmp_path, run, more=2)
    with pytest.raises(ConfigError, match="8 records of run tiny, 2 more than the log store") as caught:
        await lead_from(run.keys, tmp_path)
    assert "start without --lead-from" in caught.value.hint
    journal = JournalStore(tmp_path / "runs" / "tiny" / "journal.db")
    assert len(journal) == 8
    journal.close()


async def test_the_same_records_stay_and_get_a_new_term(tmp_path: Path) -> None:
    """A directory restored from an old copy looks like this: more may have been said since."""
    run = Run(Keys()).begin()
    await own_directory(tmp_path, run, more=0)
    await lead_from(run.keys, tmp_path)
    assert others_term(tmp_path / "runs" / "tiny" / "journal.db") == 1
    leader = coordinator(tmp_path, run)
    await lead(leader, run)
    assert leader.state.term == 2
    await leader.close()


async def test_a_restart_with_the_same_flag_goes_on(tmp_path: Path) -> None:
    run = Run(Keys()).begin()
    await lead_from(run.keys, tmp_path)
    leader = coordinator(tmp_path, run)
    await lead(leader, run)
    leader._emit(ev.HardwareClassSet(("hash",), "operator"))  # not in the store
    await leader.turn()
    await leader.close()
    assert await lead_from(run.keys, tmp_path) == ("tiny",)
    again = coordinator(tmp_path, run)
    again.begin(run.planned, None)
    assert (again.state.term, len(again._journal)) == (2, 8)
    await again.close()


@pytest.mark.parametrize("how", ["behind", "parted", "unreadable"])
async def test_the_stores_journal_takes_the_place_of_an_old_one(tmp_path: Path, how: str) -> None:
    run = Run(Keys()).begin()
    await own_directory(tmp_path, run, more=3 if how == "parted" else 0)
    path = tmp_path / "runs" / "tiny" / "journal.db"
    if how == "unreadable":
        path.write_bytes(b"junk" * 1000)
    run.put(ev.TermStarted(2, SECOND.hotkey, "n2"), signer=SECOND)
    await lead_from(run.keys, tmp_path)
    leader = coordinator(tmp_path, run)
    assert leader._journal.records_between(0, len(leader._journal)) == run.records
    await leader.close()
    assert any(name.startswith("replaced/tiny-") for name in files(tmp_path))


async def test_another_run_of_the_name_is_refused(tmp_path: Path) -> None:
    run = Run(Keys()).begin()
    await own_directory(tmp_path, run, more=0)
    with pytest.raises(ConfigError, match="another run of the name tiny"):
        await lead_from(Run(Keys(), "tiny", "tiny-2").begin().keys, tmp_path)


async def test_a_take_over_that_was_cut_short_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException): ...

    def die(*_: object) -> None:
        raise Killed

    run = Run(Keys()).begin()
    for name in ("demand_new_term", "sync_directory"):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, die)
            with pytest.raises(Killed):
                await lead_from(run.keys, tmp_path)
        # a directory without its mark would go on in the lost leader's term
        assert not (tmp_path / "runs").exists()
    await lead_from(run.keys, tmp_path)
    assert others_term(tmp_path / "runs" / "tiny" / "journal.db") == 1
    assert not (tmp_path / "lead-from.tmp" / "tiny").exists()


# --- the submission in the log store --------------------------------------------------------------------------------


async def test_a_submission_is_put_once_and_again(tmp_path: Path) -> None:
    keys, deadline = Keys(), Deadline.after(5)
    run = Run(Keys())
    await put_run(keys, run.stored, deadline=deadline)
    await put_run(keys, run.stored, deadline=deadline)
    await put_run(keys, msgspec.structs.replace(run.stored, place=3), deadline=deadline)  # another's queue
    assert wire.decode(keys.keys[run_key(run.run_id)], StoredRun, limit_bytes=1 << 20, what="") == run.stored
    with pytest.raises(Corrupt, match="is not the submission"):
        await put_run(keys, msgspec.structs.replace(run.stored, submitter="x"), deadline=deadline)


# --- two leaders ---------------------------------------------------------------------------------------------------


async def test_the_write_once_segment_decides_between_two_leaders(tmp_path: Path) -> None:
    run = Run(Keys()).begin()
    await own_directory(tmp_path / "old", run, more=0)
    old = coordinator(tmp_path / "old", run)
    old.begin(run.planned, None)
    assert old.core.may_speak
    await lead_from(run.keys, tmp_path / "new")
    new = coordinator(tmp_path / "new", run, SECOND)
    await lead(new, run)

    watch = LeadershipWatch(run.run_id, new._journal, run.keys, ManualClock())
    await watch.check()
    idle = LeadershipWatch(run.run_id, old._journal, run.keys, ManualClock())
    with pytest.raises(LeadershipLost, match=f"is {SECOND.hotkey}'s, not this journal's"):
        await idle.check()  # it has nothing to seal, and notices all the same
    count = len(run.keys.keys)
    old._emit(ev.TermStarted(2, FIRST.hotkey, "n"))  # or any other quorum event
    await old.turn()
    with pytest.raises(LeadershipLost):
        await publish(old)
    assert len(run.keys.keys) == count
    await old.close()
    await new.close()


async def test_two_that_take_over_at_once(tmp_path: Path) -> None:
    """Both have read the same journal: one segment is in, the other ends before it has said a word."""
    run = Run(Keys()).begin()
    leaders = []
    for name, signer in (("a", FIRST), ("b", SECOND)):
        await lead_from(run.keys, tmp_path / name)
        leaders.append(coordinator(tmp_path / name, run, signer))
        leaders[-1].begin(run.planned, None)
        await leaders[-1].turn()
    await publish(leaders[0])
    with pytest.raises(LeadershipLost):
        await publish(leaders[1])
    assert [leader.core.may_speak for leader in leaders] == [True, False]
    for leader in leaders:
        await leader.close()


async def test_a_leaders_own_segment_is_no_rival(tmp_path: Path) -> None:
    run = Run(Keys()).begin()
    await lead_from(run.keys, tmp_path)
    leader = coordinator(tmp_path, run)
    watch = LeadershipWatch(run.run_id, leader._journal, run.keys, ManualClock())
    await watch.check()  # no segment there
    await lead(leader, run)
    put = dict(run.keys.keys)
    await leader.close()
    lost_answer = coordinator(tmp_path, run)
    lost_answer._journal.num_segments, lost_answer._journal.acknowledged = 3, 6  # as if the answer had been lost
    await LeadershipWatch(run.run_id, lost_answer._journal, run.keys, ManualClock()).check()
    run.keys.down = True
    with pytest.raises(IotaError, match="down"):
        await watch.check()
    assert run.keys.keys == put
    await lost_answer.close()
