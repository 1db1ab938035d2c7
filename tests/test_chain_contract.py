"""One contract for three chains: the local one, and a Subtensor node through the SDK and through substrate-interface.

The node is tests/loopback, whose README says what this proves and what it doesn't.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from loopback.worlds import COLD, KINDS, MINER, OTHER, OWNER, POOR, STRANGER, VALIDATOR, Worlds, genesis

from subnet.chain.base import Axon
from subnet.chain.genesis import GenesisNeuron
from subnet.chain.refusals import CHAIN_ERRORS, ChainRefused
from subnet.errors import ConfigError, InputError, NotFound
from validator.scoring import Score
from validator.weights import WeightPolicy, WeightSetter

PERMITTED = GenesisNeuron(STRANGER.hotkey, COLD.hotkey, 10.0)


@pytest.fixture
async def worlds(tmp_path: Path) -> AsyncIterator[Worlds]:
    made = Worlds(tmp_path)
    yield made
    await made.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


async def refusal(call: Any) -> ChainRefused:
    with pytest.raises(ChainRefused) as caught:
        await call
    assert caught.value.reason.startswith(caught.value.code)
    assert caught.value.code in CHAIN_ERRORS
    assert caught.value.hint, "a refusal says what to do"
    return caught.value


async def test_reading_shows_the_subnet_as_it_is(worlds: Worlds, kind: str):
    world = await worlds.make(kind, genesis(min_allowed_weights=2, weights_version_key=7, mechanisms=2))
    chain = world.chain(None)
    newest = await chain.block()
    assert newest == 3
    assert await chain.block_time_s() == 0.25
    hashes = [await chain.block_hash(number) for number in range(newest + 1)]
    assert all(len(bytes.fromhex(one)) == 32 for one in hashes)
    assert len(set(hashes)) == len(hashes)
    with pytest.raises(NotFound) as early:
        await chain.block_hash(newest + 4)
    assert early.value.retry_after_s == pytest.approx(4 * 0.25, abs=0.26)
    await world.advance(2)
    assert await chain.block() == newest + 2
    assert await chain.block_hash(newest) == hashes[-1]
    graph = await chain.metagraph(1)
    assert (graph.netuid, graph.block, graph.tempo, graph.owner_uid) == (1, newest + 2, 20, 0)
    assert [n.hotkey for n in graph.neurons] == [s.hotkey for s in (OWNER, VALIDATOR, MINER, OTHER)]
    assert {n.coldkey for n in graph.neurons} == {COLD.hotkey}
    assert [n.stake for n in graph.neurons] == [0, 1000.0, 0, 0]
    assert [n.uid for n in graph.permit_holders()] == [1]
    rules = await chain.hyperparameters(1)
    assert (rules.min_allowed_weights, rules.weights_version_key, rules.mechanisms) == (2, 7, 2)
    assert (rules.tempo, rules.weights_rate_limit, rules.max_validators) == (20, 5, 64)
    assert (rules.commit_reveal, rules.registration_allowed, rules.registration_cost) == (False, True, 1.0)
    assert await chain.weights(1, 1) is None
    assert await chain.weights(1, 99) is None
    assert await chain.commitments(1) == {}


async def test_a_netuid_that_is_not_there_is_one_clear_line(worlds: Worlds, kind: str):
    chain = (await worlds.make(kind)).chain()
    for call in (
        chain.metagraph(9),
        chain.hyperparameters(9),
        chain.weights(9, 0),
        chain.commitments(9),
        chain.set_weights(9, {0: 1.0}),
        chain.serve(9, "192.0.2.1", 1),
        chain.set_commitment(9, b"x"),
        chain.register(9, coldkey=COLD, hotkey=STRANGER.hotkey),
    ):
        said = await refusal(call)
        assert said.code == "SubnetNotExists"
        assert "there is no subnet 9" in said.reason
        assert "\n" not in str(said)


async def test_reads_need_no_key_and_writes_say_that_they_do(worlds: Worlds, kind: str):
    chain = (await worlds.make(kind)).chain(None)
    for call in (chain.set_weights(1, {0: 1.0}), chain.serve(1, "192.0.2.1", 1), chain.set_commitment(1, b"x")):
        with pytest.raises(ConfigError, match="no hotkey"):
            await call


async def test_an_address_is_announced_once_and_paced(worlds: Worlds, kind: str):
    world = await worlds.make(kind, genesis(serving_rate_limit=50))
    chain = world.chain(MINER)
    for host, port, code in (
        ("miner.example", 8091, "InvalidIpType"),
        ("127.0.0.1", 8091, "InvalidIpAddress"),
        ("192.0.2.7", 0, "InvalidPort"),
    ):
        assert (await refusal(chain.serve(1, host, port))).code == code
    await chain.serve(1, "192.0.2.7", 8091)
    assert (await chain.metagraph(1)).neuron(MINER.hotkey).axon == Axon("192.0.2.7", 8091)
    nonce = world.state.nonces[MINER.hotkey]
    await chain.serve(1, "192.0.2.7", 8091)
    assert world.state.nonces[MINER.hotkey] == nonce, "the same address again sends nothing"
    assert (await refusal(chain.serve(1, "192.0.2.8", 8091))).code == "ServingRateLimitExceeded"
    await world.advance(60)
    await chain.serve(1, "2001:db8::7", 8092)
    assert (await chain.metagraph(1)).neuron(MINER.hotkey).axon == Axon("2001:db8::7", 8092)
    stranger = world.chain(STRANGER)
    assert (await refusal(stranger.serve(1, "192.0.2.9", 1))).code == "HotKeyNotRegisteredInNetwork"


async def test_weights_are_stored_as_u16_ratios_and_paced(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    chain = world.chain()
    receipt = await chain.set_weights(1, {MINER.hotkey: 0.25, OTHER.hotkey: 0.75, OWNER.hotkey: 0.0})
    assert (receipt.uids, receipt.values, receipt.reveal_round) == ((2, 3), (21845, 65535), None)
    assert await chain.weights(1, 1) == receipt
    assert (await chain.metagraph(1)).neurons[1].last_update == receipt.block
    await world.advance(1)
    said = await refusal(chain.set_weights(1, {2: 1.0}))
    assert said.code == "SettingWeightsTooFast"
    assert said.retry_after_s is not None
    assert 0.25 <= said.retry_after_s <= 5 * 0.25
    await world.advance(round(said.retry_after_s / 0.25))
    again = await chain.set_weights(1, {2: 3.0, 0: 1.0})
    assert (again.uids, again.values) == ((0, 2), (21845, 65535))
    assert again.block > receipt.block


@pytest.mark.parametrize(
    ("code", "rules", "signer", "weights", "how"),
    [
        ("NeuronNoValidatorPermit", {}, MINER, {3: 1.0}, {}),
        ("HotKeyNotRegisteredInSubNet", {}, STRANGER, {2: 1.0}, {}),
        ("IncorrectWeightVersionKey", {"weights_version_key": 5}, VALIDATOR, {2: 1.0}, {"version_key": 4}),
        ("WeightVecLengthIsLow", {"min_allowed_weights": 3}, VALIDATOR, {2: 1.0, 3: 0.0}, {}),
        ("UidVecContainInvalidOne", {}, VALIDATOR, {2: 1.0, 44: 1.0}, {}),
        ("UidVecContainInvalidOne", {}, VALIDATOR, {STRANGER.hotkey: 1.0}, {}),
        ("MechanismDoesNotExist", {}, VALIDATOR, {2: 1.0}, {"mechanism": 3}),
        ("UidsLengthExceedUidsInSubNet", {}, VALIDATOR, {n: 1.0 for n in range(5)}, {}),
        ("NotEnoughStakeToSetWeights", {"stake_threshold": 2000.0}, VALIDATOR, {2: 1.0}, {}),
    ],
)
async def test_refusals_bear_the_runtimes_names(worlds: Worlds, kind: str, code, rules, signer, weights, how):
    chain = (await worlds.make(kind, genesis(**rules))).chain(signer)
    said = await refusal(chain.set_weights(1, weights, **how))
    assert said.code == code
    assert said.retry_after_s is None
    assert await chain.weights(1, 1) is None


async def test_bad_weights_are_never_sent(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    chain = world.chain()
    for bad in ({2: -1.0}, {2: float("nan")}, {2: float("inf")}):
        with pytest.raises(InputError):
            await chain.set_weights(1, bad)
    assert VALIDATOR.hotkey not in world.state.nonces


async def test_the_owner_and_a_single_self_weight_need_no_permit(worlds: Worlds, kind: str):
    world = await worlds.make(kind, genesis(min_allowed_weights=2))
    assert (await world.chain(OWNER).set_weights(1, {2: 1.0, 3: 1.0})).uids == (2, 3)
    assert (await world.chain(MINER).set_weights(1, {2: 1.0})).uids == (2,)


async def test_mechanisms_have_weights_and_paces_of_their_own(worlds: Worlds, kind: str):
    world = await worlds.make(kind, genesis(mechanisms=2, weights_rate_limit=100))
    chain = world.chain()
    await chain.set_weights(1, {2: 1.0})
    receipt = await chain.set_weights(1, {3: 1.0}, mechanism=1)
    assert (await chain.weights(1, 1)).uids == (2,)
    assert await chain.weights(1, 1, mechanism=1) == receipt
    assert (await refusal(chain.set_weights(1, {3: 1.0}, mechanism=1))).code == "SettingWeightsTooFast"


async def test_where_the_subnet_wants_it_weights_are_committed(worlds: Worlds, kind: str):
    world = await worlds.make(kind, genesis(commit_reveal=True))
    chain = world.chain()
    receipt = await chain.set_weights(1, {2: 0.25, 3: 0.75})
    assert receipt.reveal_round is not None
    assert receipt.reveal_round > 0
    assert (receipt.uids, receipt.values) == ((2, 3), (21845, 65535))
    assert await chain.weights(1, 1) is None, "sealed: nobody sees them yet"
    (commit,) = world.state.subnets[1].commits
    assert (commit.hotkey, commit.block) == (VALIDATOR.hotkey, receipt.block)
    assert (await chain.metagraph(1)).neurons[1].last_update == receipt.block
    said = await refusal(chain.set_weights(1, {2: 1.0}))
    assert said.code == "CommittingWeightsTooFast"
    assert said.retry_after_s is not None


async def test_commitments_are_kept_byte_for_byte(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    chain = world.chain()
    for data in (b"s3://bucket/prefix", b"\x00\xff\x80binary", bytes(range(128)), b"q" * 129, bytes(512)):
        await chain.set_commitment(1, data)
        (found,) = (await chain.commitments(1)).values()
        assert found.data == data
        await world.advance(25)
    for bad in (b"", b"x" * 513):
        assert (await refusal(chain.set_commitment(1, bad))).code == "TooManyFieldsInCommitmentInfo"
    await world.chain(MINER).set_commitment(1, b"mine")
    assert sorted(c.data for c in (await chain.commitments(1)).values()) == [bytes(512), b"mine"]
    assert (await refusal(world.chain(STRANGER).set_commitment(1, b"x"))).code in (
        "AccountNotAllowedCommit",
        "HotKeyNotRegisteredInSubNet",
    )


async def test_registration_takes_a_slot_for_the_price(worlds: Worlds, kind: str):
    world = await worlds.make(kind, genesis(registration_cost=60.0))
    chain = world.chain(None)
    assert await chain.register(1, coldkey=COLD, hotkey=STRANGER.hotkey) == 4
    assert (await chain.metagraph(1)).neuron(STRANGER.hotkey).coldkey == COLD.hotkey
    again = await refusal(chain.register(1, coldkey=COLD, hotkey=STRANGER.hotkey))
    assert again.code == "HotKeyAlreadyRegisteredInSubNet"
    poor = await refusal(chain.register(1, coldkey=POOR, hotkey=POOR.hotkey))
    assert poor.code == "NotEnoughBalanceToStake"
    closed = await worlds.make(kind, genesis(registration_allowed=False))
    said = await refusal(closed.chain(None).register(1, coldkey=COLD, hotkey=STRANGER.hotkey))
    assert said.code == "SubNetRegistrationDisabled"


async def test_what_a_tempo_paid_is_shown(worlds: Worlds, kind: str):
    neurons = (  # what hotkeys of the owner's coldkey earn is burned: these have another
        GenesisNeuron(OWNER.hotkey, COLD.hotkey),
        GenesisNeuron(VALIDATOR.hotkey, POOR.hotkey, 1000.0),
        GenesisNeuron(MINER.hotkey, POOR.hotkey),
        GenesisNeuron(OTHER.hotkey, POOR.hotkey),
    )
    world = await worlds.make(kind, genesis(tempo=9, neurons=neurons))
    chain = world.chain()
    await chain.set_weights(1, {2: 0.25, 3: 0.75})
    await world.advance(12)
    graph = await chain.metagraph(1)
    assert [n.incentive for n in graph.neurons] == pytest.approx([0, 0, 0.25, 0.75], abs=1e-4)
    assert [n.dividends for n in graph.neurons] == pytest.approx([0, 1, 0, 0], abs=1e-4)
    _, validator, miner, other = (n.emission for n in graph.neurons)
    assert miner > 0
    assert (other, validator) == pytest.approx((3 * miner, 4 * miner), rel=1e-3)


async def test_two_processes_with_one_key_both_get_through(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    first, second = world.chain(), world.chain()
    for number in range(3):
        await first.set_commitment(1, f"first {number}".encode())
        await second.set_commitment(1, f"second {number}".encode())
    (found,) = (await first.commitments(1)).values()
    assert found.data == b"second 2"


async def test_scores_become_weights_with_the_burn_share_on_the_owners_uid(worlds: Worlds, kind: str):
    """The validator's own loop, on each chain: planned, sent, read back, compared."""
    world = await worlds.make(kind, genesis(weights_version_key=5))
    chain = world.chain()
    scores = {
        miner.hotkey: Score(
            hotkey=miner.hotkey,
            registered_at_block=0,
            total=total,
            work=total,
            sealed_work=total,
            last_sealed_s=0.0,
        )
        for miner, total in ((MINER, 0.25), (OTHER, 0.75))
    }
    policy = WeightPolicy(burn_share=0.5, version_key=5)
    setter = WeightSetter(chain, 1, VALIDATOR.hotkey, lambda: scores, policy)
    report = await setter.attempt()
    assert report.status == "set", report
    assert (report.uids, report.values) == ((0, 2, 3), (65535, 16384, 49151))
    report = await setter.attempt()
    assert (report.status, report.code) == ("nothing", "SettingWeightsTooFast")
