"""Segments are write-once: ours counts even when its answer was lost; another leader's ends this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from subnet.errors import Exists
from subnet.protocol.signing import Signer
from subnet.run.events import NotAccumulated, TermStarted
from subnet.timing import Deadline, ManualClock
from validator.journal_core import JournalCore
from validator.journal_store import JournalStore
from validator.log_publisher import LeadershipLost, LogPublisher, segment_key


class Keys:
    """A store of named keys, as strict as the real one; ``lose_answer``: the PUT happens, its answer doesn't arrive."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.lose_answer = False

    async def put_named(self, name: str, data: bytes, *, deadline: Deadline) -> None:
        if name in self.keys:
            raise Exists(name)
        self.keys[name] = bytes(data)
        if self.lose_answer:
            self.lose_answer = False
            raise ConnectionError("the answer was lost")

    async def get_named(self, name: str, *, deadline: Deadline) -> bytes:
        return self.keys[name]


async def _journal(path: Path, nonce: str) -> tuple[JournalStore, JournalCore]:
    journal = JournalStore(path)
    core = JournalCore(1)
    for event in (TermStarted(1, "hk", nonce), NotAccumulated(0, 1, 2, 3)):
        journal.stage(event, 1)
        core.appended(event)
    await journal.commit()
    return journal, core


async def test_acknowledged_once_it_is_in(tmp_path: Path) -> None:
    journal, core = await _journal(tmp_path / "j.db", "a")
    keys, signer = Keys(), Signer.from_uri("//Alice")
    publisher = LogPublisher("run", journal, keys, signer, ManualClock())
    due = core.segment_due()
    assert due is not None
    assert not core.may_speak
    await publisher.publish(due, core)
    assert core.may_speak
    assert (journal.acknowledged, journal.num_segments) == (2, 1)
    assert list(keys.keys) == [segment_key("run", 0)]
    journal.close()


async def test_a_lost_answer_is_found_by_reading_back(tmp_path: Path) -> None:
    journal, core = await _journal(tmp_path / "j.db", "a")
    keys = Keys()
    keys.lose_answer = True
    publisher = LogPublisher("run", journal, keys, Signer.from_uri("//Alice"), ManualClock())
    due = core.segment_due()
    assert due is not None
    with pytest.raises(ConnectionError):
        await publisher.publish(due, core)
    assert not core.may_speak
    await publisher.publish(due, core)
    assert core.may_speak
    journal.close()


async def test_another_leader_is_noticed(tmp_path: Path) -> None:
    keys = Keys()
    for name, nonce, lost in (("a", "a", False), ("b", "b", True)):
        journal, core = await _journal(tmp_path / f"{name}.db", nonce)
        signer = Signer.from_uri("//Bob" if lost else "//Alice")
        publisher = LogPublisher("run", journal, keys, signer, ManualClock())
        due = core.segment_due()
        assert due is not None
        if lost:
            # The segment there is Alice's: another validator for Bob, a lost disk for herself.
            with pytest.raises(LeadershipLost, match="another validator leads"):
                await publisher.publish(due, core)
            hers = LogPublisher("run", journal, keys, Signer.from_uri("//Alice"), ManualClock())
            with pytest.raises(LeadershipLost, match=r"this disk has lost records.*--lead-from STORE"):
                await hers.publish(due, core)
            assert not core.may_speak
        else:
            await publisher.publish(due, core)
        journal.close()


async def test_only_what_is_on_disk_is_published(tmp_path: Path) -> None:
    journal, core = await _journal(tmp_path / "j.db", "a")
    event = NotAccumulated(0, 2, 2, 3)
    journal.stage(event, 1)
    core.appended(event)
    keys = Keys()
    publisher = LogPublisher("run", journal, keys, Signer.from_uri("//Alice"), ManualClock())
    due = core.segment_due()
    assert due is not None
    assert due.end == 3
    await publisher.publish(due, core)
    assert core.acknowledged == 2, "the third record wasn't committed yet"
    await journal.commit()
    journal.close()
