"""Audits end to end below the coordinator: real store, real worker; what is wrong is said twice, and nothing else accuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from audit_cases import LiveRun, a_plan, edit_merged, edit_slice, other_hash
from runner_cases import SIGNERS, STAGE, STEP, Scripted, World
from store_worlds import EmbeddedWorld

from subnet.audit import build
from subnet.audit.bundle import decode_case, verify_claims
from subnet.audit.case import Findings
from subnet.audit.process import AuditProcess, WorkerDied
from subnet.errors import IotaError, NotFound, OutOfSpace
from subnet.protocol import wire
from subnet.protocol.messages import CommitClaim, Report
from subnet.protocol.signing import Signer, sign_statement, verify_statement
from subnet.run.state import new_state
from subnet.timing import SYSTEM_CLOCK, Deadline
from subnet.words import Cursor, Want
from validator.audit_blocks import look
from validator.audit_evidence import BundleMaker, wait_for_evidence
from validator.audit_runner import MAX_TRIES
from validator.audit_turns import Turns
from validator.journal_store import JournalStore

pytestmark = pytest.mark.timeout(900)  # workers start at a low priority: on a busy machine that takes long


@pytest.fixture(scope="module")
def live() -> LiveRun:
    """Two stages, two members, up to the state after two updates."""
    return LiveRun(a_plan((0, 2)), hotkeys=[signer.hotkey for signer in SIGNERS]).run(2)


@pytest.fixture(scope="module")
def replayer_budget() -> int:
    return 1 << 28


@pytest.fixture
async def world(live: LiveRun, tmp_path: Path, replayer_budget: int) -> AsyncIterator[World]:
    store = EmbeddedWorld(tmp_path / "store")
    replayer = AuditProcess(replayer_budget)
    try:
        yield World(live, await store.start(), tmp_path / "runs", replayer)
    finally:
        await replayer.close()
        await store.stop()


async def test_honest_work_passes_and_what_bundles_share_is_read_once(world: World) -> None:
    await world.put()
    result = await world.audit()
    assert result is not None
    assert (result.accused, result.missing, result.repeated, result.trouble) == ((), (), True, "")
    assert result.findings is not None
    assert [partial.wrong for partial in result.findings.partials] == [(), ()]
    first_bytes = world.runner.counts.read_bytes
    assert first_bytes > 0
    again = await world.audit(2)
    assert again is not None
    assert again.findings is not None
    assert again.findings.digest == result.findings.digest
    assert world.runner.counts.read_bytes == first_bytes, "everything was in the cache"
    assert (world.runner.counts.done, world.runner.counts.repeated) == (2, 0)
    assert not list(world.directory.glob("*/bundles/*")), "a bundle is given back"


async def test_evidence_is_waited_for_and_who_lacks_none_is_judged(world: World) -> None:
    wanted = world.boundaries()
    late, lost = wanted[0], wanted[-1]
    await world.put([blob for blob in world.live.blobs if blob not in (late, lost)])
    audit = asyncio.create_task(world.audit())
    await asyncio.sleep(0.3)
    assert not audit.done()
    await world.put([late])
    result = await audit
    assert result is not None
    assert [want.hash for want in result.missing] == [lost]
    assert world.case is not None
    with_it = {
        partial.member for partial in world.case.partials if any(lost in (i.x, i.gradient) for i in partial.items)
    }
    assert result.findings is not None
    assert {partial.member for partial in result.findings.partials} == set(world.live.members) - with_it
    assert world.runner.counts.evidence_bytes > 0


async def test_a_want_that_its_holder_has_lost_ends_the_wait(world: World) -> None:
    assert world.case is not None
    wants = build.wants_of(world.case)
    await world.put([blob for blob in world.live.blobs if blob not in world.boundaries()])
    world.watch.audits.not_held |= {(1, want) for want in wants}
    world.runner.bind(world.watch, SYSTEM_CLOCK, 1e6)
    result = await asyncio.wait_for(world.audit(), 60)
    assert result is not None
    assert result.findings is None
    assert set(result.missing) == set(wants)


async def test_the_clock_of_evidence_stands_still_while_the_store_is_away() -> None:
    want = Want(0, 0, False, "a" * 64)

    class Away:
        asked = 0

        async def sizes(self, blobs: object, *, deadline: Deadline) -> dict[str, int]:
            self.asked += 1
            if self.asked < 4:
                raise NotFound("away")
            return {}

    store = Away()
    done = await wait_for_evidence(
        store,  # type: ignore[arg-type]
        [want],
        given_up=lambda _: False,
        waited_s=lambda: 1e9,
        limit_s=1.0,
    )
    assert done.missing == (want,)
    assert store.asked == 4, "nothing is missing before the store has said so"


def signed_report(world: World, claims: tuple[CommitClaim, ...], signer: Signer) -> bytes:
    root = wire.merkle_root([wire.encode(claim) for claim in claims])
    member = next(member for member in world.live.members if member.hotkey == signer.hotkey)
    signature = sign_statement(signer, "receipts/1", root)
    assert verify_statement(signer.hotkey, "receipts/1", root, signature)
    return wire.encode(Report(1, "audited", member, Cursor(1, 0), claims, root, signature))


async def test_a_lie_is_said_twice_and_its_bundle_is_kept_with_what_was_signed(world: World) -> None:
    honest = world.live.case(STEP, STAGE)
    liar = honest.partials[0].member
    world.case = edit_slice(honest, honest.partials[0].commitment.hashes[0][0], other_hash("slice"))
    said = world.case.partials[0].commitment
    others = msgspec.structs.replace(said, stage=1)
    world.reports = [
        signed_report(world, (CommitClaim(STEP, 0, 1, said), CommitClaim(STEP, 1, 1, others)), SIGNERS[0]),
        signed_report(world, (CommitClaim(STEP, 0, 1, honest.partials[1].commitment),), SIGNERS[1]),
    ]
    await world.put()
    result = await world.audit()
    assert result is not None
    assert [(one.member, one.charge) for one in result.accused] == [(liar, "partial")]
    assert result.repeated
    (accused,) = result.accused
    runner = world.runner
    assert runner.counts.repeated == 1
    index = await runner._shelf.index(accused.bundle, Deadline.after(10))  # type: ignore[attr-defined]
    for retention in ("evidence", "log", "snapshot", "data"):
        await world.store.expire(retention, "audited", 10**9, deadline=Deadline.after(10))
    sizes = await world.store.sizes([blob for blob, _ in index.blobs], deadline=Deadline.after(10))
    assert sizes == dict(index.blobs), "the bundle is held for the run's life"
    data = await world.store.get_blob(accused.bundle, index.case_bytes, deadline=Deadline.after(10))
    case = decode_case(data)
    assert [partial.member for partial in case.partials] == [liar]
    assert len(case.claims) == 1
    assert verify_claims(case) == []
    assert build.claimed_digest(case, liar) != accused.digest
    # whoever has nothing but the store can run it again
    elsewhere = world.new_runner(world.replayer)
    again, findings = await elsewhere.replay_case(accused.bundle)
    assert again == case
    assert findings.digest == accused.digest
    assert findings.partials[0].wrong


async def test_an_owner_that_lied_is_accused_of_its_partition(world: World) -> None:
    honest = world.live.case(STEP, STAGE)
    assert honest.merge is not None
    part = honest.merge.merged[0]
    world.case = msgspec.structs.replace(edit_merged(honest, 0, hash=other_hash("merged")), update=None)
    await world.put()
    result = await world.audit()
    assert result is not None
    assert [(one.member, one.charge) for one in result.accused] == [(part.owner, "merge")]


async def findings_of(world: World) -> Findings:
    await world.put()
    result = await world.audit()
    assert result is not None
    assert result.findings is not None
    return result.findings


async def test_two_runs_that_differ_accuse_nobody(world: World) -> None:
    true = await findings_of(world)
    partial = msgspec.structs.replace(true.partials[0], wrong=("its slice",))
    wrong = msgspec.structs.replace(true, partials=(partial, *true.partials[1:]))
    other = msgspec.structs.replace(true, digest="f" * 64, partials=(partial,))
    replayer = Scripted(wrong, other)
    result = await world.audit(3, world.new_runner(replayer))
    assert result is not None
    assert (result.accused, result.repeated) == ((), False)
    assert replayer.fresh == [False, True]


async def test_a_state_that_nobody_agreed_on_accuses_nobody(world: World) -> None:
    true = await findings_of(world)
    partial = msgspec.structs.replace(true.partials[0], wrong=("its slice",))
    assert world.case is not None
    version = world.case.state.version
    wrong = msgspec.structs.replace(true, partials=(partial, *true.partials[1:]), wrong_roots=((version, "differs"),))
    runner = world.new_runner(Scripted(*[wrong] * MAX_TRIES))
    for _ in range(MAX_TRIES - 1):
        with pytest.raises(IotaError, match="isn't the agreed state"):
            await world.audit(3, runner)
    result = await world.audit(3, runner)
    assert result is not None
    assert (result.findings, result.accused) == (None, ())
    assert "isn't the agreed state" in result.trouble


async def test_a_worker_that_dies_is_tried_again_and_then_given_up(world: World) -> None:
    true = await findings_of(world)
    runner = world.new_runner(Scripted(WorkerDied("killed"), true, *[WorkerDied("killed")] * MAX_TRIES))
    with pytest.raises(IotaError) as caught:
        await world.audit(3, runner)
    assert caught.value.retryable
    result = await world.audit(3, runner)
    assert result is not None
    assert result.findings == true
    for _ in range(MAX_TRIES - 1):
        with pytest.raises(IotaError):
            await world.audit(4, runner)
    result = await world.audit(4, runner)
    assert result is not None
    assert "killed" in result.trouble
    assert runner.counts.troubled == 1 + MAX_TRIES


async def test_the_disk_of_audits_has_a_budget(world: World) -> None:
    await world.put()
    assert world.case is not None
    maker = BundleMaker(world.store, world.directory / "small", 10_000)
    with pytest.raises(OutOfSpace, match=r"--audit[.]disk"):
        async with maker.bundle(world.case, Deadline.after(60)):
            pytest.fail("there was room")
    assert not list((world.directory / "small" / "bundles").iterdir())


async def test_a_blob_that_is_gone_from_the_store_is_named(world: World) -> None:
    assert world.case is not None
    gone = world.case.state.log[0].partitions[0][2]
    await world.put([blob for blob in world.live.blobs if blob != gone])
    with pytest.raises(NotFound, match=gone[:16]):
        await world.audit()


async def test_nothing_comes_of_an_audit_that_is_closed(world: World) -> None:
    await world.put()
    assert await world.runner.run(1, new_state()) is None
    world.case = None
    assert await world.audit() is None, "an input is being made again"


async def test_turns_go_to_the_most_urgent() -> None:
    turns, order = Turns(), list[str]()

    async def work(name: str, urgency: int) -> None:
        async with turns.take(urgency):
            order.append(name)
            await asyncio.sleep(0)

    async with turns.take(9):
        waiting = [
            asyncio.create_task(work(name, urgency)) for name, urgency in (("later", 1), ("now", 0), ("last", 2))
        ]
        dropped = asyncio.create_task(work("dropped", 0))
        await asyncio.sleep(0.01)
        dropped.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert order == ["now", "later", "last"]
    async with turns.take(0):
        pass  # the turn isn't lost with those who gave up


async def test_kept_reports_are_found_by_hotkey_and_step(tmp_path: Path) -> None:
    journal = JournalStore(tmp_path / "journal.db")
    try:
        for step, hotkey in ((3, "a"), (4, "a"), (4, "b"), (5, "a"), (9, "a")):
            journal.stage_receipts(step, hotkey, f"{hotkey}{step}".encode())
        await journal.commit()
        assert journal.receipts_between("a", 4, 6) == [b"a4", b"a5"]
        journal.forget_receipts(5)
        await journal.commit()
        assert journal.receipts_between("a", 0, 100) == [b"a5", b"a9"]
    finally:
        journal.close()


class Book:
    def __init__(self) -> None:
        self.block: int | None = None
        self.block_hashes: dict[int, str] = {}


class Chain:
    def __init__(self) -> None:
        self.newest, self.finished = 10, 10

    async def block(self, *, timeout_s: float = 1.0) -> int:
        return self.newest

    async def block_hash(self, number: int, *, timeout_s: float = 1.0) -> str:
        if number > self.finished:
            raise NotFound(f"block {number}")
        return f"{number:064x}"


async def test_blocks_are_read_once_they_are_there() -> None:
    chain, book = Chain(), Book()
    assert await look(chain, book, {9, 11, 12})
    assert (book.block, set(book.block_hashes)) == (10, {9})
    assert not await look(chain, book, {9, 11, 12})
    chain.newest = 12
    chain.finished = 11
    assert await look(chain, book, {11, 12})
    assert set(book.block_hashes) == {11}, "what nobody wants is forgotten, what isn't finished isn't known"
