"""A policy changed on a live validator: from when on it counts, that everybody counts alike, and that nothing loses it."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from aiohttp.web import StreamResponse
from follow_cases import Published, journal_of
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_cases import SEEDS, records_of
from lead_cases import Keys
from policy_kill_case import AFTER, BEFORE, Blocks
from score_cases import Journal, judged, member

from iota.cli.main import main
from iota.remote import Remote
from subnet.chain.base import Metagraph, Neuron
from subnet.chain.genesis import Genesis, GenesisNeuron, SubnetGenesis
from subnet.chain.local_client import LocalChain
from subnet.chain.local_epochs import next_epoch_after
from subnet.chain.local_server import ChainServer
from subnet.errors import ConfigError, Corrupt, Refused, Unreachable, VersionUnsupported
from subnet.net.border import Listener, listen
from subnet.net.http import Call, Route, answer, create_app
from subnet.policy.api import PolicyLine, PolicyRequest
from subnet.policy.policy import AdmissionRules, SubnetPolicy
from subnet.policy.score import ScorePolicy, WorkPolicy
from subnet.protocol.messages import Hello
from subnet.protocol.signing import RequestVerifier, Signer, create_wallet
from subnet.run import events as ev
from subnet.score.book import RunBook, Told
from subnet.score.recompute import combined, recompute
from subnet.score.timeline import Counting, Timeline
from subnet.timing import Deadline, ManualClock
from validator.follow_policy import PolicyDoubts, doubt_of
from validator.follow_run import FollowedRun
from validator.policy_desk import PolicyDesk, blocks_left, policy_routes
from validator.policy_keeper import DEFAULT_DIGEST, NAME, PolicyKeeper, changed_of
from validator.scoring import ScoreBook
from validator.stakes import stake_refusal

A = member("a")
QUICK, SLOW = BEFORE.score, AFTER.score


def changed(policy: SubnetPolicy, effective_s: float) -> ev.PolicyChanged:
    return ev.PolicyChanged(policy, policy.digest, effective_s, 7, "owner")


# --- what counts when ----------------------------------------------------------------------------------------------


def test_what_has_faded_stays_faded_and_the_rest_fades_anew():
    j = Journal(QUICK).join("a").seal(0, {A: 4})
    done = j.book.tallies(1000.0)["a"].work
    j.wait(50).add(changed(SubnetPolicy(score=SLOW), 1200.0))

    def work(now_s: float) -> float:
        return j.book.tallies(now_s)["a"].work / done

    assert work(1100.0) == pytest.approx(0.5)
    assert work(1200.0) == pytest.approx(0.25), "it isn't in force before its time"
    assert work(1600.0) == pytest.approx(0.125)
    j.wait(550).seal(1, {A: 4})
    assert work(1600.0) == pytest.approx(1.125), "a record behind the change counts otherwise than looking there"
    assert combined([j.book], j.book.timeline, 1600.0)["a"].rate == pytest.approx(1.125 * done * math.log(2) / 400)


def test_presence_and_leases_fade_across_a_change():
    j = Journal(QUICK).join("a").seal(0, {A: 2}).add(changed(SubnetPolicy(score=SLOW), 1100.0)).wait(500)
    tally = j.book.tallies(j.now_s)["a"]
    before = 100 / math.log(2) * (1 - 0.5) * 0.5
    after = 400 / math.log(2) * (1 - 0.5)
    assert tally.present_s == pytest.approx(before + after)
    j.seal(1, {A: 2})
    assert j.book.tallies(j.now_s)["a"].done == pytest.approx(2 + 2 * 0.25)


def test_exponents_priors_and_memory_are_those_of_the_moment():
    j = Journal(QUICK).join("a").seal(0, {A: 4}).audit(0, failed=(A,)).seal(1, {A: 4})
    hard = ScorePolicy(half_life_s=100.0, audit_exponent=2, audit_prior_partials=1.0, forget_after_half_lives=4.0)
    j.add(changed(SubnetPolicy(score=hard), 1050.0))
    assert combined([j.book], j.book.timeline, 1049.0)["a"].reliability == 1.0
    assert combined([j.book], j.book.timeline, 1050.0)["a"].reliability < 0.5
    j.add(ev.Gone(A, "liar"))
    assert j.book.tallies(1049.0)["a"].convicted_until_s == 1000 + 30 * 100
    assert j.book.tallies(1051.0)["a"].convicted_until_s == 1000 + 4 * 100


def test_what_redone_and_witnessed_work_pays():
    work = WorkPolicy(redone_pay=0.5, witness_pay=2.0)
    full, other = RunBook(QUICK), RunBook(Timeline.of(QUICK, work))
    for record in Journal(QUICK).join("a").records:
        full.note(record)
        other.note(record)
    for book, redone, witness in ((full, 1.0, 1.0), (other, 0.5, 2.0)):
        accounts = book._accounts  # pyright: ignore[reportPrivateUsage]
        accounts.pay_redone(A, 0, 3, accounts.data.now_s)
        one = accounts.work(0, 1)
        assert book.tallies(1000.0)["a"].redone_work == pytest.approx(3 * redone * one)
        accounts.pay_witness("a", 0, 5)
        assert book.tallies(1000.0)["a"].witness_work == pytest.approx(5 * witness * one)
        assert book.tallies(1000.0)["a"].work == pytest.approx((3 * redone + 5 * witness) * one)


def with_changes(records: list[ev.Record], rng: random.Random) -> list[ev.Record]:
    """Changes at random, some in force at once, some later."""
    found, number = list[ev.Record](), 0
    for record in records:
        found.append(msgspec.structs.replace(record, number=number))
        number += 1
        if record.number and rng.random() < 0.01:
            score = ScorePolicy(half_life_s=rng.uniform(10, 1e4), audit_exponent=rng.randrange(4))
            policy = SubnetPolicy(work=WorkPolicy(redone_pay=rng.random()), score=score)
            when_s = record.time_ns / 1e9 + rng.choice([-100.0, 0.0, 50.0, 5000.0])
            found.append(ev.Record(number, record.time_ns, changed(policy, when_s)))
            number += 1
    return found


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SEEDS), st.integers(0, 2**32), st.floats(0.0, 9000.0))
def test_live_resumed_and_recomputed_agree_to_the_bit_whatever_changes(seed: int, noise: int, later_s: float):
    rng = random.Random(noise)
    records = with_changes(judged(records_of(seed), rng), rng)
    now_s = records[-1].time_ns / 1e9 + later_s
    live, resumed = RunBook(), RunBook()
    for record in records:
        live.note(record)
        resumed.note(record)
        if rng.random() < 0.02:
            data = resumed.dump()
            resumed = live.fresh()
            resumed.load(data)
            resumed.tallies(now_s)
    assert resumed.dump() == live.dump()
    assert (
        recompute(records, None, now_s)
        == combined([live], live.timeline, now_s)
        == combined([resumed], resumed.timeline, now_s)
    )
    own = recompute(records, QUICK, now_s, own_policy=True)
    plain = [record for record in records if not isinstance(record.event, ev.PolicyChanged)]
    assert own == recompute(plain, QUICK, now_s), "a book with a policy of its own listens to the journal's"


def test_a_change_reaches_every_book_once_and_a_restart_has_the_same():
    """The active run's book hears it from its journal, a finished one's from the validator; a follower's never from a journal."""
    policy = SubnetPolicy(score=SLOW)
    counting = Counting(1100.0, SLOW)
    leader = ScoreBook(Timeline.of(QUICK))
    active, finished = leader.run("active"), leader.run("finished")
    for record in Journal().join("a").records:
        active.note(record)
        finished.note(record)
    kept = finished.dump()
    active.note(ev.Record(9, 1050 * 10**9, changed(policy, 1100.0)))
    leader.change(counting, told="active")
    assert active.timeline.entries[1:] == finished.timeline.entries[1:] == (counting,)
    assert leader.policy_at(1099.0) == QUICK
    assert leader.policy_at(1100.0) == SLOW

    again = ScoreBook(leader.timeline)
    again.run("finished").load(kept)
    again.catch_up("finished")
    again.catch_up("finished")
    assert again.run("finished").timeline == finished.timeline

    follower = ScoreBook(Timeline.of(QUICK), leader_audits=False)
    book = follower.run("active")
    for record in Journal().join("a").records:
        book.note(record)
    book.note(ev.Record(9, 1050 * 10**9, changed(policy, 1100.0)))
    assert book.timeline == Timeline.of(QUICK)
    assert book.told == Told(policy.digest, 1100.0)
    before = book.dump()
    follower.change(counting)
    assert book.timeline.entries[1:] == (counting,)
    anew = ScoreBook(follower.timeline, leader_audits=False).run("active")
    anew.load(before)
    assert anew.timeline == book.timeline, "what was counted before the change was thrown away"
    late = ScoreBook(Timeline((*Timeline.of(QUICK).entries, Counting(900.0, SLOW))), leader_audits=False).run("active")
    with pytest.raises(Corrupt, match="another policy"):
        late.load(before)


# --- what is kept --------------------------------------------------------------------------------------------------


def line(policy: SubnetPolicy, since_s: float, block: int = 7) -> PolicyLine:
    return PolicyLine(policy, policy.digest, since_s, block, "owner", since_s - 10)


P, Q = BEFORE, AFTER


def test_a_validator_begins_with_a_file_and_keeps_what_came_of_it(tmp_path: Path):
    assert PolicyKeeper(tmp_path / "default", None, "own", 5.0).policy(5.0) == SubnetPolicy()
    with pytest.raises(ConfigError, match="--policy is policy"):
        PolicyKeeper(tmp_path / "default", P, "own", 5.0)
    keeper = PolicyKeeper(tmp_path, P, "own", 5.0)
    keeper.add(line(Q, 100.0))
    assert (keeper.policy(99.0), keeper.policy(100.0)) == (P, Q)
    assert (keeper.pending(99.0), keeper.pending(100.0)) == (keeper.lines[1], None)
    for begins in (None, P, Q):
        assert PolicyKeeper(tmp_path, begins, "own", 50.0).lines == keeper.lines
    with pytest.raises(ConfigError, match=r"this validator began with .* and has") as caught:
        PolicyKeeper(tmp_path, SubnetPolicy(), "own", 50.0)
    assert "iota policy apply" in caught.value.hint
    assert [counting.score for counting in keeper.timeline().entries] == [QUICK, SLOW]


def test_a_spoilt_file_is_said_and_not_replaced(tmp_path: Path):
    PolicyKeeper(tmp_path, P, "own", 5.0)
    path = tmp_path / NAME
    good = path.read_text()
    path.write_text(good[:-20])
    with pytest.raises(Corrupt, match=r"policy\.json can't be read"):
        PolicyKeeper(tmp_path, P, "own", 5.0)
    path.write_text(good.replace("100.0", "200.0"))
    with pytest.raises(Corrupt, match="doesn't fit its digest"):
        PolicyKeeper(tmp_path, P, "own", 5.0)
    path.write_text(good.replace("100.0", "0.5"))
    with pytest.raises(Corrupt, match=r"score\.half_life_s = 0\.5 is not allowed"):
        PolicyKeeper(tmp_path, P, "own", 5.0)
    path.write_text(good.replace('"format": 1', '"format": 2'))
    with pytest.raises(VersionUnsupported, match="format 2"):
        PolicyKeeper(tmp_path, P, "own", 5.0)


def test_a_journal_is_told_what_it_has_not_been_told(tmp_path: Path):
    default = PolicyKeeper(tmp_path / "default", None, "own", 5.0)
    assert default.untold(None, 50.0) == ()
    assert default.untold(Told(P.digest, 3.0), 50.0) == (changed_of(default.lines[0]),)  # another leader's
    keeper = PolicyKeeper(tmp_path, P, "own", 5.0)
    first = changed_of(keeper.lines[0])
    assert keeper.untold(None, 50.0) == (first,)
    assert keeper.untold(Told(P.digest, 0.0), 50.0) == ()
    assert keeper.untold(Told(P.digest, 3.0), 50.0) == ()
    keeper.add(line(Q, 100.0))
    second = changed_of(keeper.lines[1])
    assert keeper.untold(None, 50.0) == (first, second)
    assert keeper.untold(None, 100.0) == (second,)
    assert keeper.untold(Told(P.digest, 0.0), 50.0) == keeper.untold(Told(P.digest, 0.0), 200.0) == (second,)
    assert keeper.untold(Told(Q.digest, 100.0), 50.0) == keeper.untold(Told(Q.digest, 100.0), 150.0) == ()
    keeper.add(line(SubnetPolicy(), 200.0))
    assert keeper.untold(None, 250.0) == ()
    assert [e.effective_s for e in keeper.untold(Told(P.digest, 0.0), 250.0)] == [200.0]
    assert keeper.lines[2].digest == DEFAULT_DIGEST


def graph(owner: str = "owner", **stakes: float) -> Metagraph:
    neurons = tuple(
        Neuron(
            uid=n, hotkey=name, coldkey="c", stake=stake, validator_permit=False, last_update=0, registered_at_block=0
        )
        for n, (name, stake) in enumerate(stakes.items())
    )
    return Metagraph(netuid=1, block=30, tempo=20, owner_hotkey=owner, neurons=neurons)


def test_a_change_survives_a_kill_before_any_journal_has_it(tmp_path: Path):
    command = [sys.executable, str(Path(__file__).parent / "policy_kill_case.py"), str(tmp_path)]
    died = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    keeper = PolicyKeeper(tmp_path, P, "own", 5.0)
    assert [kept.policy for kept in keeper.lines] == [P, Q]
    began_s = ManualClock().wall_ns() / 1e9
    assert (keeper.lines[1].since_s, keeper.lines[1].since_block) == (began_s + 12.0 * 10, 40)
    (event,) = keeper.untold(Told(P.digest, 0.0), began_s + 999)
    j = Journal(QUICK).join("a").seal(0, {A: 4})
    live = ScoreBook(keeper.timeline())
    j.now_s = began_s + 999
    j.add(event)
    assert j.book.timeline.at(j.now_s) == SLOW == live.policy_at(j.now_s)


# --- over HTTP and on the command line -----------------------------------------------------------------------------

OWNER, STRANGER = (Signer.from_uri(f"//{name}") for name in ("Own", "Someone"))


@dataclass
class Served:
    own: Signer
    listener: Listener
    keeper: PolicyKeeper
    desk: PolicyDesk
    chain: LocalChain
    clock: ManualClock
    told: list[PolicyLine]

    async def change(self, signer: Signer, policy: SubnetPolicy, base: str = "") -> float:
        """Seconds until it is in force."""
        remote = Remote(self.listener.url, signer)
        request = PolicyRequest(policy, base or self.keeper.in_force(self.now_s).digest)
        view = await asyncio.to_thread(remote.change_policy, request, Deadline.after(20))
        return (view.pending or view.in_force).since_s - view.time_s

    @property
    def now_s(self) -> float:
        return self.clock.wall_ns() / 1e9


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    own, clock = create_wallet("validator", "default", tmp_path / "wallets"), ManualClock(wall_ns=time.time_ns())
    net = SubnetGenesis(
        owner_hotkey=OWNER.hotkey, owner_coldkey="cold", neurons=(GenesisNeuron(own.hotkey, "cold", 100.0),)
    )
    server = ChainServer(tmp_path / "chain", port=0, genesis=Genesis(subnets=(net,)), clock=clock)
    await server.start()
    clock.advance(1)
    chain = LocalChain(server.url, own)
    told, keeper = list[PolicyLine](), PolicyKeeper(tmp_path, None, own.hotkey, clock.wall_ns() / 1e9)
    metagraph = await chain.metagraph(1)
    desk = PolicyDesk(keeper, own.hotkey, chain, lambda: metagraph, clock, tell=told.append, effect=told.append)
    verifier = RequestVerifier(own.hotkey, is_known=lambda hotkey: True)

    async def hello(call: Call) -> StreamResponse:
        return answer(Hello(1, 1, time.time_ns(), own.hotkey, 0, 0, None, ""))

    routes = [*policy_routes(desk), Route("GET", "/v1/hello", hello, signed=False)]
    listener = await listen(create_app(routes, verifier), "127.0.0.1", 0)
    try:
        yield Served(own, listener, keeper, desk, chain, clock, told)
    finally:
        await listener.close()
        await chain.close()
        await server.stop()


def nearly(half_life_s: float) -> SubnetPolicy:
    return SubnetPolicy(score=ScorePolicy(half_life_s=half_life_s))


async def test_a_change_is_the_validators_own_or_the_owners_and_waits_for_the_tempo(served: Served):
    first, second = nearly(half_life_s=7200.0), nearly(half_life_s=14_400.0)
    with pytest.raises(Refused, match="may not change the policy of this validator") as refused:
        await served.change(STRANGER, first)
    assert (refused.value.code, refused.value.retryable) == ("not_allowed", False)
    assert OWNER.hotkey in refused.value.hint
    block = await served.chain.block()
    wait_s = await served.change(served.own, first)
    assert wait_s == pytest.approx(blocks_left(block, 1, 20) * 1.0)
    assert served.keeper.lines[1].since_block == block + blocks_left(block, 1, 20)
    assert [one.digest for one in served.told] == [first.digest]
    assert await served.change(served.own, first) == wait_s, "the same again is another change"
    with pytest.raises(Refused, match="takes effect in") as refused:
        await served.change(served.own, second)
    assert (refused.value.code, refused.value.retry_after_s) == ("policy_pending", pytest.approx(wait_s))
    assert served.desk.view().in_force.policy == SubnetPolicy()
    served.clock.advance(wait_s)
    assert served.desk.view().in_force.policy == first
    with pytest.raises(Refused, match="is in force, not") as refused:
        await served.change(OWNER, second, base=SubnetPolicy().digest)
    assert refused.value.code == "other_base"
    assert 0 < await served.change(OWNER, second) <= 21
    assert [one.by for one in served.keeper.lines] == [served.own.hotkey, served.own.hotkey, OWNER.hotkey]


async def test_what_goes_too_far_is_refused_with_its_limit(served: Served):
    with pytest.raises(Refused, match=r"score\.half_life_s = 36000\.0 is too far from 3600\.0") as refused:
        await served.change(served.own, nearly(half_life_s=36_000.0))
    assert refused.value.code == "change_too_large"
    assert "14400.0 is allowed now" in refused.value.hint
    bad = PolicyRequest(SubnetPolicy(), SubnetPolicy().digest)
    raw = msgspec.to_builtins(bad)
    raw["policy"]["score"]["half_life_s"] = 0.5
    with pytest.raises(Refused, match=r"half_life_s = 0.5 is not allowed"):
        await asyncio.to_thread(Remote(served.listener.url, served.own).change_policy, raw, Deadline.after(20))
    assert len(served.keeper.lines) == 1
    assert served.told == []


async def test_nobody_knows_the_tempo_without_the_chain(tmp_path: Path):
    keeper = PolicyKeeper(tmp_path, None, "own", 5.0)
    desk = PolicyDesk(keeper, "own", Blocks(), lambda: None, ManualClock(), tell=print, effect=print)  # type: ignore[arg-type]
    with pytest.raises(Unreachable, match="the chain wasn't seen yet"):
        await desk.apply("own", PolicyRequest(nearly(half_life_s=7200.0), SubnetPolicy().digest))
    assert len(keeper.lines) == 1


def test_the_next_tempo_is_where_the_chain_settles():
    net = SubnetGenesis(owner_hotkey="o", owner_coldkey="c", netuid=3, tempo=20)
    for block in range(1, 90):
        assert block + blocks_left(block, 3, 20) == next_epoch_after(net, block)


async def test_the_command_applies_in_steps(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, wallets = tmp_path / "policy.toml", tmp_path / "wallets"
    path.write_text("[weights]\nburn_share = 0.6")
    options = ["--validator.url", served.listener.url, "--wallet.path", str(wallets)]

    async def apply(*more: str) -> tuple[int, str]:
        status = await asyncio.to_thread(main, ["policy", "apply", str(path), *options, *more])
        out = capsys.readouterr()
        return status, out.out + out.err

    status, said = await apply()
    assert status == 2
    assert "weights.burn_share = 0.6 is too far from 0.0 for one change (it moves by 0.25 at most)" in said
    shares: list[float] = []
    for _ in range(4):
        status, said = await apply("--in-steps")
        assert status == 0, said
        shares.append(served.keeper.lines[-1].policy.weights.burn_share)
        served.clock.advance(25)
    assert shares == [0.25, 0.5, 0.6, 0.6]
    assert "in force already, nothing was changed" in said
    status = await asyncio.to_thread(main, ["policy", "show", "--live", "--validator.url", served.listener.url])
    out = capsys.readouterr().out
    assert status == 0
    assert out.count("# before: policy") == 3
    status = await asyncio.to_thread(main, ["policy", "diff", served.listener.url, str(path)])
    assert (status, capsys.readouterr().out) == (0, "the same policy\n")
    assert "burn_share = 0.6" in out


async def test_watching_says_when_it_is_in_force(served: Served):
    task = asyncio.create_task(served.desk.watch())
    try:
        await served.change(served.own, nearly(half_life_s=7200.0))
        served.clock.advance(30)
        async with asyncio.timeout(20):
            while len(served.told) < 2:
                await asyncio.sleep(0.05)
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert served.told[0] == served.told[1] == served.keeper.lines[1]


# --- who is let in, and who follows --------------------------------------------------------------------------------


def test_stake_is_asked_for_where_the_policy_says_so():
    metagraph = graph(poor=9.5, rich=10.0)
    assert stake_refusal(metagraph, "poor", AdmissionRules()) is None
    assert stake_refusal(metagraph, "rich", AdmissionRules(min_stake=10.0)) is None
    refusal = stake_refusal(metagraph, "poor", AdmissionRules(min_stake=10.0))
    assert refusal is not None
    assert (refusal.code, refusal.retry_after) == ("stake_too_low", 60.0)
    assert "poor has 9.5 staked, this validator's policy asks for 10" in refusal.reason


def test_a_follower_says_that_its_leader_counts_otherwise(tmp_path: Path):
    records = list(journal_of(5))
    middle = len(records) // 2
    event = changed(Q, 1_700_000_100.0)
    records.insert(middle, ev.Record(middle, records[middle].time_ns, event))
    records = [msgspec.structs.replace(record, number=number) for number, record in enumerate(records)]
    published = Published(Keys(), records)
    run = FollowedRun(published.run_id, tmp_path, ScoreBook(leader_audits=False).run(published.run_id), ManualClock())
    own = [DEFAULT_DIGEST]
    doubts = PolicyDoubts(lambda: [run], lambda: own[0])
    run.take(published.segments[0])
    doubts.look()
    assert run.view().doubts == ()
    for segment in published.segments[1:]:
        run.take(segment)
    doubts.look()
    (doubt,) = run.view().doubts
    assert f"its leader counts with policy {Q.digest[:12]} since 2023-11-14 22:15:00 UTC, this validator with" in doubt
    assert run.book.timeline == Timeline.of(), "a follower took its leader's policy"
    own[0] = Q.digest
    doubts.look()
    assert run.view().doubts == ()
    again = FollowedRun(published.run_id, tmp_path, ScoreBook(leader_audits=False).run(published.run_id), ManualClock())
    run.write_copy(run.copy())
    again.load_copy()
    assert again.book.told == Told(Q.digest, 1_700_000_100.0)
    assert doubt_of(None, DEFAULT_DIGEST) == ""
    assert "with policy" in doubt_of(None, Q.digest)
