"""Cases over HTTP: anyone can fetch a conviction and run it again; who may appeal, witness and draw, and what the others hear."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from audit_cases import LiveRun, a_plan, edit_slice, other_hash
from store_worlds import EmbeddedWorld

from iota.audit_fetch import _fetch, fetch_case, list_cases
from subnet.audit import build, draw
from subnet.audit.bundle import open_bundle, read_bundle
from subnet.audit.ledger import PartialRecord, SealedStage
from subnet.chain.base import Metagraph, Neuron
from subnet.errors import ConfigError, InputError, NotFound, Refused
from subnet.net.border import Listener, listen
from subnet.net.client import SignedClient
from subnet.net.http import create_app
from subnet.protocol.audit_api import Accepted, AppealRequest, AuditsRequest, CaseDetail, CaseView, WitnessRequest
from subnet.protocol.signing import RequestVerifier, Signer
from subnet.run.audits import CONVICTED, CaseState
from subnet.run.config import AuditSection
from subnet.run.events import WindowClosed
from subnet.run.state import new_state
from subnet.store.base import Hold
from subnet.timing import Deadline, ManualClock
from subnet.words import Member
from validator.audit_cases import CaseShelf
from validator.audit_desk import APPEAL_EVERY_S, BUNDLES_BURST, AuditDesk
from validator.audit_evidence import BundleMaker
from validator.audit_watch import AuditWatch
from validator.http_audits import audit_routes

LEADER, OTHER, LIAR, ANN = (Signer.from_uri(f"//{name}") for name in ("Leader", "Other", "Liar", "Ann"))
BLOCK_HASH = "ab" * 32


def soon() -> Deadline:
    return Deadline.after(30)


class Session:
    """An active run with one conviction, one open case and one case without a bundle."""

    def __init__(self, live: LiveRun, shelf: CaseShelf) -> None:
        config = msgspec.structs.replace(live.planned.config, audit=AuditSection(rate=0.5, before_seal="probation"))
        self.audit_state = new_state()
        self.audit_state.run = msgspec.structs.replace(live.planned, config=config)
        self.audit_watch = AuditWatch()
        self.shelf = shelf
        self.closed_windows: dict[int, WindowClosed] = {}
        self.woken = 0
        self.over = False

    def wake(self) -> None:
        self.woken += 1

    def accuse(self, number: int, signer: Signer, bundle: str, digest: str, outcome: str = "") -> None:
        self.audit_state.audits.cases[number] = CaseState(
            hotkey=signer.hotkey,
            member=Member(signer.hotkey, 1, 0),
            coldkey="cold",
            step=1,
            stage=0,
            charge="partial" if bundle else "unopened",
            bundle=bundle,
            digest=digest,
            sealed=True,
            branch=0,
            outcome=outcome,
        )


class Blocks:
    async def block(self, *, timeout_s: float = 1.0) -> int:
        return 20

    async def block_hash(self, number: int, *, timeout_s: float = 1.0) -> str:
        if number > 20:
            raise NotFound(f"block {number} isn't there yet")
        return BLOCK_HASH


class Served:
    session: Session
    desk: AuditDesk
    clock: ManualClock
    listener: Listener
    kept: str

    async def ask(self, signer: Signer, path: str, body: msgspec.Struct) -> Accepted:
        async with SignedClient(self.listener.url, signer, LEADER.hotkey) as client:
            return await client.request("POST", path, body, Accepted, deadline=soon())

    async def refusal(self, signer: Signer, path: str, body: msgspec.Struct) -> str:
        with pytest.raises(Refused) as caught:
            await self.ask(signer, path, body)
        assert caught.value.reason
        return caught.value.code


def metagraph() -> Metagraph:
    keys = [(LEADER, True), (OTHER, True), (LIAR, False), (ANN, False)]
    neurons = tuple(
        Neuron(
            uid=uid,
            hotkey=signer.hotkey,
            coldkey=f"cold{uid}",
            stake=1.0,
            validator_permit=permit,
            last_update=0,
            registered_at_block=uid,
        )
        for uid, (signer, permit) in enumerate(keys)
    )
    return Metagraph(netuid=1, block=20, tempo=10, owner_hotkey="", neurons=neurons)


@pytest.fixture(scope="module")
def live() -> LiveRun:
    return LiveRun(a_plan((0, 2)), hotkeys=[LIAR.hotkey, ANN.hotkey]).run(2)


@pytest.fixture
async def served(live: LiveRun, tmp_path: Path) -> AsyncIterator[Served]:
    world, served = EmbeddedWorld(tmp_path / "store"), Served()
    store = await world.start()
    for data in live.blobs.values():
        await store.put_blob(data, Hold("data", "audited", 0), deadline=soon())
    honest = live.case(1, 0)
    lied = edit_slice(honest, honest.partials[0].commitment.hashes[0][0], other_hash("slice"))
    case = build.accusation(lied, live.members[0])
    shelf = CaseShelf(store, "audited")
    async with BundleMaker(store, tmp_path / "audits", 1 << 30).bundle(case, soon()) as bundle:
        served.kept = await shelf.keep(case, bundle, soon())
    served.session = Session(live, CaseShelf(store, "audited"))
    served.session.accuse(1, LIAR, served.kept, "d" * 64, CONVICTED)
    served.session.accuse(2, ANN, served.kept, "d" * 64)
    served.session.accuse(3, ANN, "", "", "fault")
    served.clock = ManualClock()

    async def find(run: str) -> Session:
        if run not in ("", "audited"):
            raise NotFound(f"run {run!r} is not active here")
        return served.session

    served.desk = AuditDesk(find, metagraph, store, Blocks(), served.clock, LEADER.hotkey)
    verifier = RequestVerifier(LEADER.hotkey, is_known=lambda hotkey: True)
    served.listener = await listen(create_app(audit_routes(served.desk), verifier), "127.0.0.1", 0)
    try:
        yield served
    finally:
        await served.listener.close()
        await world.stop()


async def test_a_case_is_public_and_its_bundle_can_be_fetched_and_run(served: Served, tmp_path: Path) -> None:
    async with SignedClient(served.listener.url) as client:
        cases = await client.request("GET", "/v1/cases", None, tuple[CaseView, ...], deadline=soon(), signed=False)
        detail = await client.request("GET", "/v1/cases/1?run=audited", None, CaseDetail, deadline=soon(), signed=False)
        with pytest.raises(Refused) as missing:
            await client.request("GET", "/v1/cases/9", None, CaseDetail, deadline=soon(), signed=False)
    assert [(view.case, view.state) for view in cases] == [(1, "convicted"), (2, "open"), (3, "fault")]
    assert (detail.view, detail.run_id) == (cases[0], "audited")
    assert detail.blobs
    assert missing.value.code == "not_found"
    out = tmp_path / "out"
    fetched = await _fetch(served.listener.url, 1, out, soon(), "")
    assert fetched.fetched_bytes > sum(size for _, size in detail.blobs)
    bundle = read_bundle(out)
    assert [partial.member.hotkey for partial in bundle.case.partials] == [LIAR.hotkey]
    damaged = out / "blobs" / detail.blobs[0][0]
    damaged.write_bytes(b"\0" * detail.blobs[0][1])
    again = await _fetch(served.listener.url, 1, out, soon(), "")
    assert again.fetched_bytes == detail.blobs[0][1], "what was damaged is fetched again, and nothing else"
    assert open_bundle(out).missing() == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty directory"):
        await _fetch(served.listener.url, 1, tmp_path / "mine", soon(), "")
    with pytest.raises(InputError, match="has no bundle"):
        await _fetch(served.listener.url, 3, tmp_path / "none", soon(), "")


def test_the_plain_calls_are_there() -> None:
    with pytest.raises(ConfigError):
        list_cases("not a url", soon())
    with pytest.raises(ConfigError):
        fetch_case("not a url", 1, Path("nowhere"), soon())


async def test_bundles_are_not_given_without_end(served: Served) -> None:
    for _ in range(int(BUNDLES_BURST)):
        await served.desk.bundle("", 1, 0)
    with pytest.raises(Exception, match="too many bundles"):
        await served.desk.bundle("", 1, 0)
    served.clock.advance(1.0)
    assert (await served.desk.bundle("", 1, 0))[0].hash == served.kept


async def test_an_appeal_is_the_convicted_hotkeys(served: Served) -> None:
    session = served.session
    assert await served.refusal(ANN, "/v1/appeals", AppealRequest(1)) == "not_allowed"
    assert await served.refusal(ANN, "/v1/appeals", AppealRequest(2)) == "wrong_moment"  # not closed yet
    assert await served.refusal(ANN, "/v1/appeals", AppealRequest(3)) == "wrong_moment"  # nothing to run again
    assert not session.audit_watch.appeals
    await served.ask(LIAR, "/v1/appeals", AppealRequest(1))
    assert list(session.audit_watch.appeals) == [1]
    assert session.woken == 1
    session.over = True
    assert await served.refusal(LIAR, "/v1/appeals", AppealRequest(1)) == "wrong_moment"
    session.over = False
    with pytest.raises(Exception, match="was appealed"):
        await served.desk.appeal(LIAR.hotkey, AppealRequest(1))
    served.clock.advance(APPEAL_EVERY_S)
    await served.desk.appeal(LIAR.hotkey, AppealRequest(1))


async def test_a_witness_holds_a_permit_and_is_not_the_leader(served: Served) -> None:
    word = WitnessRequest(2, "e" * 64)
    assert await served.refusal(ANN, "/v1/witness", word) == "not_allowed"
    assert await served.refusal(LEADER, "/v1/witness", word) == "not_allowed"
    assert await served.refusal(OTHER, "/v1/witness", WitnessRequest(2, "nothing")) == "bad_input"
    assert await served.refusal(OTHER, "/v1/witness", WitnessRequest(1, "e" * 64)) == "wrong_moment"
    await served.ask(OTHER, "/v1/witness", word)
    assert list(served.session.audit_watch.words) == [(2, OTHER.hotkey, "e" * 64)]
    assert await served.refusal(OTHER, "/v1/witness", word) == "wrong_moment"  # once


async def test_evidence_is_opened_for_what_the_callers_own_seed_draws(served: Served, live: LiveRun) -> None:
    session, window = served.session, WindowClosed(0, -1, 1, 12)
    session.closed_windows = {0: window, 1: WindowClosed(1, 2, 3, 30)}
    ledger = session.audit_watch.ledger
    names = [f"hotkey{i}" for i in range(32)]
    records = [PartialRecord(1, 0, Member(name, 1, 0), 1, False, 0) for name in names]
    ledger._data.partials = {1: {0: records}}
    sealed = SealedStage(1, 0, 0, 1, "", (), {}, {}, (), 4, (), False)
    ledger._data.sealed = {1: {0: sealed}}
    drawn = draw.drawn(session.audit_state, ledger, window, BLOCK_HASH, OTHER.hotkey, skip_passed=False)
    mine = sorted(member.hotkey for member in drawn[0].members)
    assert 0 < len(mine) < len(names)
    (stranger, *_) = sorted(set(names) - set(mine))
    ask = AuditsRequest(0, 1, 0, tuple(mine[:2]))
    assert await served.refusal(ANN, "/v1/audits", ask) == "not_allowed"
    assert await served.refusal(OTHER, "/v1/audits", AuditsRequest(0, 1, 0, (mine[0], stranger))) == "not_drawn"
    assert await served.refusal(OTHER, "/v1/audits", AuditsRequest(7, 1, 0, ask.hotkeys)) == "not_found"
    assert await served.refusal(OTHER, "/v1/audits", AuditsRequest(1, 2, 0, ask.hotkeys)) == "not_found"
    assert await served.refusal(OTHER, "/v1/audits", AuditsRequest(0, 5, 0, ask.hotkeys)) == "bad_input"
    assert await served.refusal(OTHER, "/v1/audits", AuditsRequest(0, 1, 0, ())) == "bad_input"
    assert await served.refusal(OTHER, "/v1/audits", AuditsRequest(0, 1, 1, ask.hotkeys)) == "not_found"
    assert not session.audit_watch.requests
    await served.ask(OTHER, "/v1/audits", ask)
    await served.ask(OTHER, "/v1/audits", ask)
    (request,) = session.audit_watch.requests
    assert (request.by, request.window, request.hotkeys) == (OTHER.hotkey, 0, tuple(mine[:2]))
