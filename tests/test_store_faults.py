"""A store that breaks is tried again, or refused with the reason; wrong, short and unstored bytes never count.

While it is away nobody is late, nobody is void, and everything owed stays owed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from store_faults import (
    SECRET,
    FaultyStore,
    crash,
    cut_short,
    drip,
    expired,
    full,
    half,
    later,
    lost_answer,
    reset,
    silence,
    wrong_bytes,
)
from test_decide import POLICY, Desk

from miner.blobs import Blobs
from subnet.errors import (
    Busy,
    DeadlinePassed,
    Exists,
    Expired,
    HashMismatch,
    IotaError,
    NotFound,
    OutOfSpace,
    Refused,
    Unreachable,
)
from subnet.protocol import messages as msg
from subnet.protocol.messages import GrantRequest
from subnet.protocol.wire import blob_hash
from subnet.run import events as ev
from subnet.store.base import Grant, Hold
from subnet.store.embedded import EmbeddedStore
from subnet.store.presigned import BlobClient
from subnet.timing import Deadline, ManualClock
from subnet.words import BlobHash, Commitment, Member
from validator.decide import decide
from validator.decision import ProbeSlices
from validator.store_clock import GRACE_S, StoreClock
from validator.store_health import SLOW_LOG_S, StoreHealth, first_look

LOG = Hold("log", "run-1", 3)
DATA = bytes(range(256)) * 4000


def soon() -> Deadline:
    return Deadline.after(20)


@pytest.fixture
async def faulty(tmp_path: Path) -> AsyncIterator[FaultyStore]:
    store = await FaultyStore(tmp_path / "store").start()
    yield store
    await store.close()


@pytest.fixture
async def owner(faulty: FaultyStore) -> AsyncIterator[EmbeddedStore]:
    async with EmbeddedStore(faulty.url, SECRET) as store:
        store.blobs = BlobClient(try_s=5, idle_s=1)
        yield store


@pytest.fixture
async def grant(owner: EmbeddedStore, faulty: FaultyStore) -> Grant:
    blob = await owner.put_blob(DATA, LOG, deadline=soon())
    faulty.seen.clear()
    return owner.presign_get(blob, len(DATA))


# --- downloads and uploads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [reset, half, cut_short, wrong_bytes, silence, later(0), later(1)])
async def test_a_download_survives_each_fault_once(
    faulty: FaultyStore, owner: EmbeddedStore, grant: Grant, fault: Any
) -> None:
    faulty.on("GET", fault)
    assert await owner.blobs.get(grant, deadline=soon()) == DATA
    assert faulty.fired.total() == 1
    assert faulty.asked("GET") == 2


async def test_what_has_come_is_not_fetched_twice(faulty: FaultyStore, owner: EmbeddedStore, grant: Grant) -> None:
    faulty.on("GET", half, half, half)
    assert await owner.blobs.get(grant, deadline=soon()) == DATA
    starts = [int(wanted.removeprefix("bytes=").partition("-")[0] or 0) for _, _, wanted in faulty.seen]
    assert len(starts) == 4
    assert starts == sorted(set(starts))


async def test_wrong_bytes_are_never_accepted(faulty: FaultyStore, owner: EmbeddedStore, grant: Grant) -> None:
    for fault in (wrong_bytes, cut_short):
        faulty.seen.clear()
        faulty.on("GET", fault, times=2)
        with pytest.raises(HashMismatch):
            await owner.blobs.get(grant, deadline=soon())
        assert faulty.asked("GET") == 2, "once more, and no oftener"


async def test_a_drip_ends_at_the_deadline(faulty: FaultyStore, owner: EmbeddedStore, grant: Grant) -> None:
    faulty.on("GET", drip)
    with pytest.raises(DeadlinePassed):
        await owner.blobs.get(grant, deadline=Deadline.after(0.5))


async def test_retry_after_is_kept_within_the_deadline(faulty: FaultyStore, owner: EmbeddedStore, grant: Grant) -> None:
    faulty.on("GET", later(100))
    with pytest.raises(Busy, match="come again in 100 s"):
        await owner.blobs.get(grant, deadline=soon())
    assert faulty.asked("GET") == 1


async def test_an_expired_url_is_replaced_once_per_try_and_the_transfer_goes_on(
    faulty: FaultyStore, owner: EmbeddedStore, grant: Grant
) -> None:
    renewed: list[Deadline] = []

    async def renew(limit: Deadline) -> Grant:
        renewed.append(limit)
        return owner.presign_get(BlobHash(grant.hash), grant.size_bytes)

    faulty.on("GET", half, expired)
    assert await owner.blobs.get(grant, deadline=soon(), renew=renew) == DATA
    assert len(renewed) == 1
    assert not faulty.seen[-1][2].startswith("bytes=0-"), "not from the beginning"
    faulty.on("GET", expired, expired)
    with pytest.raises(Expired):
        await owner.blobs.get(grant, deadline=soon(), renew=renew)
    faulty.on("PUT", expired)
    put = owner.presign_put(BlobHash(grant.hash), grant.size_bytes, LOG)

    async def renew_put(limit: Deadline) -> Grant:
        return put

    await owner.blobs.put(put, DATA, deadline=soon(), renew=renew_put)
    faulty.on("GET", expired)
    with pytest.raises(IotaError, match="for something else"):
        await owner.blobs.get(grant, deadline=soon(), renew=renew_put)


async def test_real_expiry_in_the_middle_of_a_download(tmp_path: Path) -> None:
    """The double is strict: the old URL is dead for good."""
    clock = ManualClock()
    faulty = await FaultyStore(tmp_path / "store", clock=clock).start()
    async with EmbeddedStore(faulty.url, SECRET, clock=clock) as owner:
        blob = await owner.put_blob(DATA, LOG, deadline=soon())
        grant = owner.presign_get(blob, len(DATA), ttl_s=10)

        async def renew(limit: Deadline) -> Grant:
            return owner.presign_get(blob, len(DATA), ttl_s=10)

        async def half_and_late(store: FaultyStore, request: Any, handler: Any) -> Any:
            clock.advance(60)
            return await half(store, request, handler)

        faulty.on("GET", half_and_late)
        assert await owner.blobs.get(grant, deadline=soon(), renew=renew) == DATA
        with pytest.raises(Expired):
            await owner.blobs.get(grant, deadline=soon())
    await faulty.close()


@pytest.mark.parametrize("fault", [reset, lost_answer, later(0)])
async def test_an_upload_survives_each_fault_once(faulty: FaultyStore, owner: EmbeddedStore, fault: Any) -> None:
    faulty.on("PUT", fault)
    blob = await owner.put_blob(DATA, LOG, deadline=soon())
    assert await owner.get_blob(blob, len(DATA), deadline=soon()) == DATA
    faulty.on("PUT", fault)
    await owner.put_named("journal/1", b"segment", deadline=soon())
    with pytest.raises(Exists):
        await owner.put_named("journal/1", b"another", deadline=soon())
    assert faulty.fired.total() == 2


async def test_what_is_permanent_is_not_repeated(faulty: FaultyStore, owner: EmbeddedStore, grant: Grant) -> None:
    absent = owner.presign_get(blob_hash(b"absent"), 6)
    with pytest.raises(NotFound):
        await owner.blobs.get(absent, deadline=soon())
    faulty.on("PUT", full)
    with pytest.raises(OutOfSpace, match="full on purpose"):
        await owner.put_blob(b"more", LOG, deadline=soon())
    faulty.on("GET", crash)
    with pytest.raises(Refused) as refused:
        await owner.blobs.get(grant, deadline=soon())
    assert refused.value.code == "internal"
    assert len(faulty.seen) == 3


async def test_an_outage_within_the_deadline_is_waited_out(
    faulty: FaultyStore, owner: EmbeddedStore, grant: Grant
) -> None:
    faulty.down = True
    works = [
        asyncio.create_task(owner.blobs.get(grant, deadline=soon())),
        asyncio.create_task(owner.put_blob(b"new", LOG, deadline=soon())),
        asyncio.create_task(owner.put_named("journal/9", b"segment", deadline=soon())),
        asyncio.create_task(owner.sizes([BlobHash(grant.hash)], deadline=soon())),
    ]
    while faulty.fired["outage"] < 8:
        await asyncio.sleep(0.01)
    faulty.down = False
    data, _, _, sizes = await asyncio.gather(*works)
    assert data == DATA
    assert sizes == {grant.hash: len(DATA)}
    assert await owner.get_named("journal/9", deadline=soon()) == b"segment"
    faulty.down = True
    with pytest.raises(Unreachable):
        await owner.get_named("journal/9", deadline=Deadline.after(0.3))


# --- the miner's side: grants, several blobs, nothing left behind -----------------------------------------------------


class Granting:
    """The validator's part in :class:`Blobs`: mints grants of the owner's."""

    def __init__(self, owner: EmbeddedStore, ttl_s: float = 60) -> None:
        self.owner, self.ttl_s, self.asked = owner, ttl_s, 0

    async def request(
        self, method: str, path: str, body: GrantRequest, kind: Any, *, deadline: Deadline
    ) -> tuple[Grant, ...]:
        self.asked += 1
        if body.put:
            hold = Hold(body.retention, body.run, 0)
            return tuple(self.owner.presign_put(BlobHash(b), size, hold, ttl_s=self.ttl_s) for b, size in body.blobs)
        known = await self.owner.sizes([BlobHash(blob) for blob, _ in body.blobs], deadline=deadline)
        return tuple(
            self.owner.presign_get(BlobHash(b), size or known[BlobHash(b)], ttl_s=self.ttl_s) for b, size in body.blobs
        )


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_the_first_failure_of_many_is_raised_as_it_is(faulty: FaultyStore, owner: EmbeddedStore) -> None:
    """Not wrapped in a group: whoever owes the work must see an error that it may try again after."""
    blobs = Blobs(Granting(owner), owner.blobs, "run-1")
    data = [os.urandom(1000) for _ in range(6)]
    refs = [(str(blob_hash(one)), 1000) for one in data]
    faulty.on("PUT", full)
    with pytest.raises(OutOfSpace):
        await blobs.put_many(list(zip((ref[0] for ref in refs), data, strict=True)), "log", soon())
    await blobs.put_many(list(zip((ref[0] for ref in refs), data, strict=True)), "log", soon())
    faulty.down = True
    with pytest.raises(Unreachable):
        await blobs.get_many(refs, Deadline.after(0.3))
    faulty.down = False
    faulty.on("GET", expired, times=2)
    assert await blobs.get_many(refs, soon()) == data
    assert await blobs.get_patiently((refs[0][0], 0)) == data[0]


async def test_two_hundred_failed_fetches_leave_nothing(faulty: FaultyStore, owner: EmbeddedStore) -> None:
    blobs = Blobs(Granting(owner), owner.blobs, "run-1")
    refs = [(str(await owner.put_blob(os.urandom(50_000), LOG, deadline=soon())), 50_000) for _ in range(4)]
    await blobs.get_many(refs, soon())
    tasks, before = len(asyncio.all_tasks()), descriptors()
    for i in range(50):
        fault = (wrong_bytes, expired, full, cut_short)[i % 4]
        faulty.on(
            "GET", fault, times=16
        )  # wrong bytes are fetched twice, and twice again once the validator has looked
        with pytest.raises(IotaError):
            await blobs.get_many(refs, soon())
        faulty._faults.clear()
    for _ in range(3):
        task = asyncio.create_task(blobs.get_many(refs, soon()))
        faulty.on("GET", silence, times=4)
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait({task})
        faulty._faults.clear()
    assert len(await blobs.get_many(refs, soon())) == 4
    async with asyncio.timeout(10):
        while len(asyncio.all_tasks()) > tasks + 40 or descriptors() > before + 70:
            await asyncio.sleep(0.02)
    assert owner.blobs._session is not None
    assert len(owner.blobs._session.connector._acquired) == 0, "no connection is held by a transfer that has ended"
    assert blobs._slots._value == 8
    assert not list((faulty.directory / "tmp").iterdir())


# --- the coordinator's side -------------------------------------------------------------------------------------------


def test_time_stands_still_while_the_store_is_away_and_a_little_longer() -> None:
    clock = StoreClock(grace_s=20)
    clock.answered(100)
    assert clock.work_s(110) == 110
    clock.failed("away", 112)
    assert clock.work_s(112) == clock.work_s(500) == 100, "it may have been away since it was last seen"
    clock.answered(500)
    assert clock.trouble == ""
    assert clock.work_s(519) == 100
    assert clock.work_s(530) == 110
    clock.answered(531)
    assert clock.work_s(531) == 111
    clock.failed("again", 532)
    clock.answered(533)
    clock.failed("and again", 540)
    assert clock.work_s(600) == 111, "a fault within the grace goes on with it"
    clock.answered(600)
    assert clock.work_s(621) == 112


def test_a_store_that_never_answered_counts_from_the_first_look() -> None:
    clock = StoreClock()
    clock.failed("away", 50)
    assert clock.work_s(40) == 40
    assert clock.work_s(90) == 50


def reducing(num_members: int = 2) -> tuple[Desk, list[Member]]:
    """One stage in which everything is committed, and nothing merged yet."""
    desk = Desk(1, 2)
    members = [desk.member(f"hot{i}") for i in range(num_members)]
    for member in members:
        desk.say(member, msg.UpdatedClaim(-1, ""))
    desk.settle()
    work = desk.state.work
    assert work is not None
    for m, item in sorted(work.items[0].items()):
        assert item.member is not None
        desk.say(item.member, msg.BackwardReceipt(-1, m, 0, item.generation, "", "", 0.1, 0))
    desk.settle()
    for member in sorted({item.member for item in work.items[0].values() if item.member}):
        done = tuple(m for m, item in sorted(work.items[0].items()) if item.member == member)
        hashes = tuple((p, f"{member.number}-{p}") for p in range(2))
        for _, value in hashes:
            desk.watch.blob_confirmed(value)
        desk.say(member, msg.CommitClaim(-1, 0, 1, Commitment(member, 0, done, hashes)))
    assert [type(what) for what, _ in desk.settle()] == [ev.ReduceOrdered]
    return desk, members


def test_owners_are_not_late_while_the_store_is_away() -> None:
    desk, members = reducing()
    desk.watch.store.answered(desk.now)
    for _ in range(100):
        desk.now += 10
        desk.watch.store.failed("unreachable", desk.now)
        assert desk.settle() == []
    assert set(desk.state.members) == set(members)
    desk.watch.store.answered(desk.now)
    desk.now += GRACE_S + POLICY.owner_s - 1
    desk.watch.store.answered(desk.now)
    assert desk.settle() == []
    desk.now += 2
    assert [type(what) for what, _ in desk.settle()] == [ev.StoreRouted], "the clocks go on where they stood"


def test_a_probe_that_failed_says_nothing_of_anybody() -> None:
    desk, _ = reducing()
    desk.now += POLICY.owner_s
    desk.settle()
    desk.now += POLICY.routed_s
    desk.emit = lambda event: desk.actions.append(event) if isinstance(event, ProbeSlices) else None  # type: ignore[method-assign]
    ((probe, code),) = [(what, code) for what, code in desk.settle() if isinstance(what, ProbeSlices)]
    assert code == "owner_late_again"
    desk.watch.failed(probe)
    again = [what for what, _ in desk.settle()]
    assert again == [probe], "asked again, and nobody void meanwhile"
    desk.watch.blobs.clear()
    desk.watch.done(probe)
    assert [type(what) for what, _ in one_round(desk)] == [ev.Voided], "an answered one does"


def one_round(desk: Desk) -> list[tuple[object, str]]:
    return [(d.what, d.reason.code) for d in decide(desk.now, desk.state, desk.watch, POLICY, desk.rng)]


class Prober:
    def __init__(self) -> None:
        self.trouble = ""

    async def probe_store(self) -> str:
        return self.trouble


async def test_the_stores_health_is_looked_after() -> None:
    prober, store, clock = Prober(), StoreClock(), ManualClock(0.0)
    waiting: list[int | None] = [None]
    changes: list[str] = []
    health = StoreHealth(prober, store, clock, lambda: waiting[0], lambda: changes.append(store.trouble))
    await health.look()
    prober.trouble = "unreachable: nobody listens"
    await health.look()
    clock.advance(100)
    await health.look()
    assert store.trouble == "unreachable: nobody listens"
    prober.trouble = ""
    await health.look()
    assert store.trouble == ""
    waiting[0] = 7
    await health.look()
    clock.advance(SLOW_LOG_S)
    await health.look()
    assert store.trouble.startswith("log store: record 7 isn't acknowledged")
    waiting[0] = 8
    await health.look()
    assert store.trouble == ""
    assert [bool(change) for change in changes] == [True, False, True, False]


async def test_a_validator_that_has_runs_starts_without_its_store(tmp_path: Path, faulty: FaultyStore) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "old" / "runs").mkdir(parents=True)
    async with EmbeddedStore(faulty.url, b"x" * 32) as stranger:
        for directory in ("none", "new", "old"):
            with pytest.raises(Refused):
                await first_look(stranger, tmp_path / directory)
    async with EmbeddedStore(faulty.url, SECRET) as owner:
        await first_look(owner, tmp_path / "none")
        owner.usage = lambda *, deadline: fails()  # type: ignore[method-assign,assignment]
        for directory in ("none", "new"):
            with pytest.raises(Unreachable):
                await first_look(owner, tmp_path / directory)
        await first_look(owner, tmp_path / "old")


async def fails() -> Any:
    raise Unreachable("the store is away")
