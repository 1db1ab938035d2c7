"""An auditor of another hardware class passes what it can compare, convicts nobody by itself, and says what it can't tell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from audit_cases import LiveRun, a_plan, edit_slice
from runner_cases import SIGNERS, STAGE, STEP, Scripted, World
from store_worlds import EmbeddedWorld

from subnet.audit import build
from subnet.audit.bundle import decode_case
from subnet.audit.case import Distance, Findings, OtherClass, RedonePartial
from subnet.errors import Busy, InputError, IotaError, NotFound
from subnet.run.audits import CaseState
from subnet.run.state import new_state
from subnet.timing import Deadline
from subnet.words import BlobHash, Member
from validator.audit_evidence import BundleMaker
from validator.audit_runner import MAX_TRIES

pytestmark = pytest.mark.timeout(900)
OURS, THEIRS = "1" * 64, "2" * 64


@pytest.fixture(scope="module")
def live() -> LiveRun:
    return LiveRun(a_plan((0, 2)), hotkeys=[signer.hotkey for signer in SIGNERS]).run(2)


@pytest.fixture
async def world(live: LiveRun, tmp_path: Path) -> AsyncIterator[World]:
    store = EmbeddedWorld(tmp_path / "store")
    try:
        yield World(live, await store.start(), tmp_path / "runs", Scripted())
    finally:
        await store.stop()


def found(members: list[Member], *distances: tuple[Member, float], not_compared: int = 0) -> Findings:
    """What a replay elsewhere says: nothing is wrong, and how far things are apart."""
    apart = tuple(Distance(member, "output", distance, 0.01) for member, distance in distances)
    partials = tuple(RedonePartial(member, (), (), (), ()) for member in members)
    other = OtherClass(OURS, THEIRS, apart, not_compared)
    return Findings("", partials, None, (), 0.1, 0.1, 100, other_class=other)


async def test_what_is_near_enough_passes(world: World) -> None:
    await world.put()
    members = world.live.members
    result = await world.audit(1, world.new_runner(Scripted(found(members, (members[0], 0.001)))))
    assert result is not None
    assert result.findings is not None
    assert [partial.member for partial in result.findings.partials] == members
    assert (result.accused, result.trouble) == ((), "")


async def test_what_can_not_be_compared_is_looked_for_and_then_left_open(world: World) -> None:
    await world.put()
    members = world.live.members
    replayer = Scripted(found(members, not_compared=3), found(members, not_compared=3))
    runner = world.new_runner(replayer)
    result = await world.audit(1, runner)
    assert result is not None
    assert result.findings is not None
    assert (result.findings.partials, result.accused) == ((), ()), "neither right nor wrong"
    assert replayer.fresh == [False, False], "once more with the claimed outputs that the store has"
    assert "hardware class" in runner.doing[1]


async def test_who_is_too_far_off_is_accused_without_a_digest(world: World) -> None:
    await world.put()
    members = world.live.members
    far = found(members, (members[0], 0.5), (members[1], 0.001))
    replayer = Scripted(far, far)
    runner = world.new_runner(replayer)
    result = await world.audit(1, runner)
    assert result is not None
    (accused,) = result.accused
    assert (accused.member, accused.charge, accused.digest) == (members[0], "partial", "")
    assert replayer.fresh == [False, True]
    index = await runner._shelf.index(accused.bundle, Deadline.after(10))  # type: ignore[attr-defined]
    case = decode_case(
        await world.store.get_blob(BlobHash(accused.bundle), index.case_bytes, deadline=Deadline.after(10))
    )
    assert [partial.member for partial in case.partials] == [members[0]]
    assert accused.claimed == build.claimed_digest(case, members[0])
    kept = {blob for blob, _ in index.blobs}
    claimed = {blob for _, blob in case.partials[0].commitment.hashes} & set(world.live.blobs)
    assert claimed <= kept, "what the store has of the claimed outputs is part of the evidence"


async def test_claims_that_are_no_hashes_name_no_file(world: World) -> None:
    honest = world.live.case(STEP, STAGE)
    world.case = edit_slice(honest, honest.partials[0].commitment.hashes[0][0], "../../../etc/passwd")
    await world.put()
    with pytest.raises(InputError, match="a slice without a hash"):
        await world.audit()


async def test_an_appeal_is_not_decided_here(world: World) -> None:
    await world.put()
    members = world.live.members
    far = found(members, (members[0], 0.5))
    result = await world.audit(1, world.new_runner(Scripted(far, far)))
    assert result is not None
    state = new_state()
    state.audits.cases[1] = CaseState(
        hotkey=members[0].hotkey,
        member=members[0],
        coldkey="cold",
        step=STEP,
        stage=STAGE,
        charge="partial",
        bundle=result.accused[0].bundle,
        digest="d" * 64,
        sealed=True,
        branch=0,
        outcome="convicted",
    )
    near = found([members[0]], (members[0], 0.001))
    with pytest.raises(IotaError, match="hardware class"):
        await world.new_runner(Scripted(near)).appeal(1, state)
    with pytest.raises(NotFound, match="no bundle"):
        await world.new_runner(Scripted()).appeal(2, state)


async def test_a_convicted_hotkey_is_not_accused_twice(world: World) -> None:
    await world.put()
    members, state = world.live.members, new_state()
    state.convicted.add(members[0].hotkey)
    wrong = RedonePartial(members[0], (), (), (), ("its slice",))
    right = RedonePartial(members[1], (), (), (), ())
    replayer = Scripted(Findings("e" * 64, (wrong, right), None, (), 0.1, 0.1, 100))
    runner = world.new_runner(replayer)
    assert world.case is not None
    opened = world.opened()
    result = await runner.redo(1, opened, state)
    assert result is not None
    assert (result.accused, result.repeated) == ((), True)
    assert replayer.fresh == [False], "no second run"


async def test_why_an_audit_fails_here_is_told_until_it_succeeds(world: World) -> None:
    await world.put()
    members = world.live.members
    runner = world.new_runner(Scripted(*[IotaError("it has no memory left")] * (MAX_TRIES + 1), found(members)))
    for _ in range(MAX_TRIES - 1):
        with pytest.raises(IotaError):
            await world.audit(1, runner)
        assert "it has no memory left" in runner.doing[1]
    result = await world.audit(1, runner)
    assert result is not None
    assert "it has no memory left" in result.trouble
    assert "it has no memory left" in runner.doing[1], "it is asked for again"
    with pytest.raises(IotaError):
        await world.audit(1, runner)
    assert (await world.audit(1, runner)) is not None
    assert 1 not in runner.doing


async def test_a_disk_full_of_other_bundles_is_waited_for_and_no_failure(world: World) -> None:
    await world.put()
    cases = [world.live.case(STEP, stage) for stage in (0, 1)]
    sizes: list[int] = []
    for number, case in enumerate(cases):
        alone = BundleMaker(world.store, world.directory / f"alone-{number}", 1 << 30)
        async with alone.bundle(case, Deadline.after(60)) as bundle:
            sizes.append(sum(bundle.sizes.values()))
    maker = BundleMaker(world.store, world.directory / "both", max(sizes) + 1000)
    async with maker.bundle(cases[0], Deadline.after(60)):
        with pytest.raises(Busy, match="other bundles"):
            async with maker.bundle(cases[1], Deadline.after(60)):
                pytest.fail("there was room for both")
    async with maker.bundle(cases[1], Deadline.after(60)) as bundle:
        assert sum(bundle.sizes.values()) == sizes[1]


async def test_nothing_is_said_of_an_audit_that_ended_meanwhile(world: World) -> None:
    await world.put()
    members = world.live.members
    asked: list[int] = []
    replayer = Scripted(found(members, (members[0], 0.5)))
    runner = world.new_runner(replayer)

    def wanted() -> bool:
        asked.append(1)
        return len(asked) < 2

    assert await runner.redo(1, world.opened(), new_state(), wanted=wanted) is None
    assert replayer.answers == []
    assert 1 not in runner.doing
