"""Weights say what the scores say, go to those who earned them, and count as set only when the chain shows them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.chain.base import Hyperparameters, Metagraph, Neuron, WeightsReceipt
from subnet.chain.genesis import Genesis, GenesisNeuron, SubnetGenesis
from subnet.chain.local_client import LocalChain
from subnet.chain.local_server import ChainServer
from subnet.chain.refusals import ChainRefused
from subnet.errors import ConfigError
from subnet.protocol.signing import Signer
from subnet.timing import ManualClock
from validator.scoring import Score
from validator.weights import (
    NoWeights,
    WeightPlan,
    WeightPolicy,
    WeightSetter,
    WeightsReport,
    blocks_to_next_try,
    plan_weights,
)

OWNER, VALIDATOR, A, B = (Signer.from_uri(f"//{name}") for name in ("Own", "Val", "A", "B"))


def score(hotkey: str, total: float, registered: int | None = 0) -> Score:
    return Score(
        hotkey=hotkey,
        registered_at_block=registered,
        total=total,
        work=total,
        sealed_work=total,
        last_sealed_s=0.0,
    )


def neuron(uid: int, hotkey: str, **changes: object) -> Neuron:
    fields: dict[str, object] = {
        "coldkey": "c",
        "stake": 0.0,
        "validator_permit": False,
        "last_update": 0,
        "registered_at_block": 0,
    }
    return Neuron(uid=uid, hotkey=hotkey, **(fields | changes))


def graph(*extra: Neuron, block: int = 50, owner: str = "own", **validator: object) -> Metagraph:
    standing = {"stake": 100.0, "validator_permit": True} | validator
    neurons = (neuron(0, "own"), neuron(1, "val", **standing), neuron(2, "a"), neuron(3, "b"), *extra)
    return Metagraph(netuid=1, block=block, tempo=20, owner_hotkey=owner, neurons=neurons)


def rules(**changes: object) -> Hyperparameters:
    fields: dict[str, object] = {
        "tempo": 20,
        "immunity_period": 0,
        "max_uids": 9,
        "min_allowed_weights": 1,
        "weights_rate_limit": 10,
        "weights_version_key": 0,
        "serving_rate_limit": 0,
        "max_validators": 9,
        "commit_reveal": False,
        "registration_allowed": True,
        "registration_cost": 0.0,
        "stake_threshold": 0.0,
    }
    return Hyperparameters(**(fields | changes))


BOTH = {"a": score("a", 0.25), "b": score("b", 0.75)}


def test_scores_become_weights_with_the_burn_share_on_the_owner():
    assert plan_weights(graph(), BOTH, "val", 0.0) == WeightPlan({2: 0.25, 3: 0.75})
    assert plan_weights(graph(), BOTH, "val", 0.8) == WeightPlan(
        {2: pytest.approx(0.05), 3: pytest.approx(0.15), 0: 0.8}
    )
    assert plan_weights(graph(), {}, "val", 1.0) == WeightPlan({0: 1.0})
    assert plan_weights(graph(), BOTH, "val", 1.0) == WeightPlan({0: 1.0})


def test_only_the_registration_that_earned_it_is_paid():
    gone = BOTH | {"left": score("left", 5.0), "val": score("val", 5.0)}
    assert plan_weights(graph(), gone, "val", 0.0) == WeightPlan({2: 0.25, 3: 0.75})
    again = {"a": score("a", 0.25, registered=7), "b": score("b", 0.75, registered=None)}
    assert plan_weights(graph(), again, "val", 0.0) == WeightPlan({3: 1.0})


@pytest.mark.parametrize(
    ("code", "metagraph", "scores", "own", "burn", "limits"),
    [
        ("HotKeyNotRegisteredInSubNet", graph(), BOTH, "nobody", 0.0, rules()),
        ("NeuronNoValidatorPermit", graph(validator_permit=False), BOTH, "val", 0.0, rules()),
        ("NotEnoughStakeToSetWeights", graph(), BOTH, "val", 0.0, rules(stake_threshold=101.0)),
        ("SettingWeightsTooFast", graph(last_update=45), BOTH, "val", 0.0, rules()),
        ("no_scores", graph(), {}, "val", 0.5, rules()),
        ("no_scores", graph(), {"a": score("a", 0.0)}, "val", 0.0, rules()),
        ("no_burn_uid", graph(owner="gone"), BOTH, "val", 0.5, rules()),
        ("WeightVecLengthIsLow", graph(), BOTH, "val", 0.0, rules(min_allowed_weights=3)),
        ("WeightVecLengthIsLow", graph(), {"a": score("a", 1.0), "b": score("b", 1e-6)}, "val", 0.0,
         rules(min_allowed_weights=2)),
    ],
)  # fmt: skip
def test_what_cannot_be_set_is_not_tried(code, metagraph, scores, own, burn, limits):
    plan = plan_weights(metagraph, scores, own, burn, limits)
    assert isinstance(plan, NoWeights)
    assert plan.code == code
    assert plan.reason
    assert (plan.wait_blocks is not None) == (code == "SettingWeightsTooFast")
    if plan.wait_blocks is not None:
        assert plan.wait_blocks == 4  # the extrinsic goes into block 51 at the earliest


def test_the_owner_needs_neither_permit_nor_stake():
    scores = BOTH | {"own": score("own", 9.0)}
    plan = plan_weights(graph(), scores, "own", 0.0, rules(stake_threshold=50.0))
    assert plan == WeightPlan({2: 0.25, 3: 0.75})


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, -1.0])
def test_what_is_no_number_takes_nobodys_weight_away(broken: float):
    scores = BOTH | {"a": score("a", broken)}
    assert plan_weights(graph(), scores, "val", 0.0, rules()) == WeightPlan({3: 1.0})
    assert plan_weights(graph(), scores, "val", 0.25, rules()) == WeightPlan({3: 0.75, 0: 0.25})
    nothing = plan_weights(graph(), {"a": score("a", broken)}, "val", 0.0, rules())
    assert isinstance(nothing, NoWeights)
    assert nothing.code == "no_scores"


def test_whoever_took_a_uid_over_gets_nothing_of_what_was_earned_under_it():
    """The miner of uid 2 is gone, its place is another hotkey's; or its own, registered again."""
    taken = Metagraph(
        netuid=1,
        block=50,
        tempo=20,
        owner_hotkey="own",
        neurons=(
            neuron(0, "own"),
            neuron(1, "val", stake=100.0, validator_permit=True),
            neuron(2, "new", registered_at_block=40),
            neuron(3, "b"),
        ),
    )
    assert plan_weights(taken, BOTH, "val", 0.0) == WeightPlan({3: 1.0})
    again = BOTH | {"new": score("new", 0.9, registered=7)}
    assert plan_weights(taken, again, "val", 0.0) == WeightPlan({3: 1.0})


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["a", "b", "left", "own"]), st.floats(1e-6, 1.0), min_size=1),
    st.floats(0.0, 1.0),
)
def test_plans_sum_to_one(totals: dict[str, float], burn: float):
    plan = plan_weights(graph(), {h: score(h, t) for h, t in totals.items()}, "val", burn)
    if isinstance(plan, WeightPlan):
        assert sum(plan.weights.values()) == pytest.approx(1.0)
        assert plan.weights.get(0, 0.0) >= burn
    else:
        assert set(totals) == {"left"}


def test_one_try_per_tempo_with_back_off_and_cap():
    def wait(status: str, failures: int, wait_blocks: int | None = None) -> int:
        return blocks_to_next_try(WeightsReport(status=status, wait_blocks=wait_blocks), failures, 21, 8)

    assert [wait("refused", n) for n in (1, 2, 3, 4, 5, 99)] == [21, 42, 84, 168, 168, 168]
    assert [wait("failed", n) for n in (0, 1, 5)] == [21, 21, 21], "no verdict: the next tempo tries again"
    assert wait("set", 0) == 21
    assert wait("nothing", 0) == 5
    assert wait("nothing", 3, 13) == 13


@pytest.mark.parametrize("bad", [{"burn_share": 1.5}, {"burn_share": float("nan")}, {"backoff_cap": 0}])
def test_policies_are_checked(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        WeightPolicy(**bad)


# ---- against the local chain


@pytest.fixture
async def chain(tmp_path: Path) -> AsyncIterator[tuple[LocalChain, ManualClock]]:
    clock = ManualClock()
    neurons = (
        GenesisNeuron(VALIDATOR.hotkey, "cold", 100.0),
        GenesisNeuron(A.hotkey, "cold"),
        GenesisNeuron(B.hotkey, "cold"),
    )
    net = SubnetGenesis(owner_hotkey=OWNER.hotkey, owner_coldkey="cold", weights_version_key=5, neurons=neurons)
    server = ChainServer(tmp_path / "chain", port=0, genesis=Genesis(subnets=(net,)), clock=clock)
    await server.start()
    clock.advance(1)
    client = LocalChain(server.url, VALIDATOR)
    yield client, clock
    await client.close()
    await server.stop()


async def test_weights_are_set_read_back_and_paced(chain):
    client, clock = chain
    scores = dict[str, Score]()
    seen: list[Metagraph] = []
    policy = WeightPolicy(burn_share=0.5, version_key=5)
    setter = WeightSetter(client, 1, VALIDATOR.hotkey, lambda: scores, policy, on_metagraph=seen.append)
    report = await setter.attempt()
    assert (report.status, report.code) == ("nothing", "no_scores")
    scores |= {A.hotkey: score(A.hotkey, 0.25), B.hotkey: score(B.hotkey, 0.75, registered=None)}
    report = await setter.attempt()
    assert report.status == "set", report
    assert (report.uids, report.values) == ((0, 2, 3), (65535, 16384, 49151))
    assert await client.weights(1, 1) == WeightsReceipt(report.block, report.uids, report.values)
    assert len(seen) == 2
    report = await setter.attempt()
    assert (report.status, report.code, report.wait_blocks) == ("nothing", "SettingWeightsTooFast", 10)
    clock.advance(10)
    assert (await setter.attempt()).status == "set"
    assert setter.last_report is not None
    assert "weights set at block" in str(setter.last_report)


async def test_a_refusal_is_reported_by_name_and_backed_off_from(chain):
    client, clock = chain
    scores = {A.hotkey: score(A.hotkey, 1.0)}
    waits: list[float] = []
    reports: list[WeightsReport] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.advance(seconds)
        if len(waits) == 4:
            raise asyncio.CancelledError

    setter = WeightSetter(
        client, 1, VALIDATOR.hotkey, lambda: scores, WeightPolicy(version_key=4), sleep=sleep, clock=clock
    )
    with pytest.raises(asyncio.CancelledError):
        await setter.run(reports.append)
    assert [(r.status, r.code) for r in reports] == [("refused", "IncorrectWeightVersionKey")] * 4
    assert reports[0].hint
    assert waits == [21.0, 42.0, 84.0, 168.0]
    assert await client.weights(1, 1) is None


async def test_tries_that_take_long_do_not_cost_a_tempo(chain):
    """Each takes 3 s here: waits are counted from its beginning, and never shorter than a block."""
    client, clock = chain
    waits: list[float] = []
    takes_s = iter((3.0, 100.0))

    class Slow(LocalChain):
        async def metagraph(self, netuid, *, timeout_s=1.0):
            clock.advance(next(takes_s))
            return await super().metagraph(netuid, timeout_s=timeout_s)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        raise asyncio.CancelledError

    async with Slow(client.url, VALIDATOR) as slow:
        for _ in range(2):
            setter = WeightSetter(
                slow, 1, VALIDATOR.hotkey, dict, WeightPolicy(burn_share=1.0), sleep=sleep, clock=clock
            )
            with pytest.raises(asyncio.CancelledError):
                await setter.run()
            assert setter.last_report is not None
    assert waits == [18.0, 1.0]


class Forgetful(LocalChain):
    """A chain that says yes and stores nothing, or something else."""

    stored: WeightsReceipt | None = None

    async def weights(self, netuid, uid, *, mechanism=0, timeout_s=1.0):
        return self.stored


async def test_a_yes_that_is_not_stored_is_no_success(chain):
    client, clock = chain
    for stored, code in ((None, "not_stored"), (WeightsReceipt(1, (3,), (65535,)), "not_as_sent")):
        async with Forgetful(client.url, VALIDATOR) as liar:
            liar.stored = stored
            setter = WeightSetter(
                liar, 1, VALIDATOR.hotkey, lambda: {A.hotkey: score(A.hotkey, 1.0)}, WeightPolicy(version_key=5)
            )
            report = await setter.attempt()
            assert (report.status, report.code) == ("differs", code)
        clock.advance(30)


async def test_a_chain_that_is_away_is_said_and_tried_again():
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        raise asyncio.CancelledError

    async with LocalChain("http://127.0.0.1:1", VALIDATOR) as away:
        setter = WeightSetter(away, 1, VALIDATOR.hotkey, dict, sleep=sleep, clock=ManualClock())
        with pytest.raises(asyncio.CancelledError):
            await setter.run()
    assert setter.last_report is not None
    assert (setter.last_report.status, setter.last_report.code) == ("failed", "unreachable")
    assert waits == [5.0]


async def test_a_refusal_while_planning_was_right_is_reported(chain):
    """The metagraph may be a moment old: what the chain says counts."""
    client, _ = chain

    class Late(LocalChain):
        async def set_weights(self, *args, **kwargs):
            raise ChainRefused("SettingWeightsTooFast", retry_after_s=3.0)

    async with Late(client.url, VALIDATOR) as late:
        setter = WeightSetter(late, 1, VALIDATOR.hotkey, lambda: {A.hotkey: score(A.hotkey, 1.0)})
        report = await setter.attempt()
    assert (report.status, report.code) == ("refused", "SettingWeightsTooFast")
