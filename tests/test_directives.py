"""A member folds only what the leader signed, chained, in order; anything else changes nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from miner.directives import Directives
from subnet.errors import InputError
from subnet.net.client import SignedClient
from subnet.protocol.signing import Signer
from subnet.run.config import NO_AUDITS, ModelSection, RunConfig, RunSection
from subnet.run.events import Batch, RunPlanned, TermStarted
from subnet.words import Cursor, GroupShape
from validator.directive_stream import DirectiveFeed
from validator.journal_store import JournalStore

LEADER = Signer.from_uri("//Leader")
PLANNED = RunPlanned(
    run_id="r",
    config=RunConfig(audit=NO_AUDITS, run=RunSection(name="r"), model=ModelSection(config={"model_type": "llama"})),
    model_config={},
    unit_tensors=(),
    unit_flops_per_token=(1.0, 1.0, 1.0),
    tied=None,
    cuts=(0,),
    groups=(GroupShape((0,), ((0,),)),),
    data="",
    snapshot="",
    tokenizer="",
    submitter="",
)


async def _feed(path: Path, terms: int = 1, signer: Signer = LEADER) -> tuple[JournalStore, DirectiveFeed]:
    journal = JournalStore(path)
    feed = DirectiveFeed(journal, signer)
    journal.stage(PLANNED, 0)
    for term in range(1, terms + 1):
        journal.stage(TermStarted(term, signer.hotkey, f"n{term}"), term)
        feed.term = term
    await journal.commit()
    feed.advance(len(journal))
    return journal, feed


def _member() -> Directives:
    return Directives(SignedClient("http://127.0.0.1:1", Signer.from_uri("//Miner"), LEADER.hotkey), "run")


async def _frame(feed: DirectiveFeed, position: int = 0) -> bytes:
    frame = await feed.next_frame(position)
    assert frame is not None
    return frame.data


async def test_folds_what_is_signed(tmp_path: Path) -> None:
    journal, feed = await _feed(tmp_path / "j.db")
    member = _member()
    member.take(await _frame(feed))
    assert member.state.term == 1
    assert member.cursor == Cursor(1, 2)
    journal.close()


@pytest.mark.parametrize("what", ["signature", "head", "record", "count", "gap"])
async def test_refuses_what_does_not_fit(tmp_path: Path, what: str) -> None:
    journal, feed = await _feed(tmp_path / "j.db")
    batch = msgspec.msgpack.decode(await _frame(feed), type=Batch)
    record = bytearray(bytes(batch.records[-1]))
    record[-1] ^= 1
    changed = {
        "signature": {"signature": bytes(64)},
        "head": {"head": "0" * 64},
        "record": {"records": (batch.records[0], msgspec.Raw(bytes(record)))},
        "count": {"cursor": Cursor(1, 5)},
        "gap": {"first_number": 3, "cursor": Cursor(1, 5)},
    }[what]
    member = _member()
    with pytest.raises(InputError):
        member.take(msgspec.msgpack.encode(msgspec.structs.replace(batch, **changed)))
    assert member.cursor == Cursor(0, 0)
    assert member.state.term == 0
    journal.close()


async def test_refuses_another_signer_and_an_older_term(tmp_path: Path) -> None:
    journal, feed = await _feed(tmp_path / "a.db", terms=2)
    other, forged = await _feed(tmp_path / "b.db", signer=Signer.from_uri("//Mallory"))
    member = _member()
    with pytest.raises(InputError, match="isn't signed"):
        member.take(await _frame(forged))
    member.take(await _frame(feed))
    older, old_feed = await _feed(tmp_path / "c.db")
    with pytest.raises(InputError, match="has seen term 2"):
        member.take(await _frame(old_feed))
    for store in (journal, other, older):
        store.close()


async def test_a_repeated_batch_is_refused(tmp_path: Path) -> None:
    journal, feed = await _feed(tmp_path / "j.db")
    member = _member()
    frame = await _frame(feed)
    member.take(frame)
    with pytest.raises(InputError, match="don't follow"):
        member.take(frame)
    assert member.cursor == Cursor(1, 2)
    journal.close()


async def test_a_closed_feed_ends(tmp_path: Path) -> None:
    journal, feed = await _feed(tmp_path / "j.db")
    feed.close()
    assert await feed.next_frame(2) is None
    journal.close()
