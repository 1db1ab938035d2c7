"""The local chain refuses by the runtime's names in the runtime's order, forgets nothing, and never goes back."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.chain.base import Axon, Chain, to_u16, upscale_u16
from subnet.chain.extrinsics import (
    AddStake,
    BurnedRegister,
    Faucet,
    ServeAxon,
    SetCommitment,
    SetWeights,
    SignedExtrinsic,
    sign_extrinsic,
)
from subnet.chain.genesis import (
    DEFAULT_LOCAL_GENESIS,
    REALISTIC_GENESIS,
    Genesis,
    GenesisNeuron,
    SubnetGenesis,
    load_genesis,
)
from subnet.chain.local import LocalNode
from subnet.chain.local_client import LocalChain
from subnet.chain.local_epochs import advance
from subnet.chain.local_server import ChainServer
from subnet.chain.local_state import StoredWeights, genesis_state
from subnet.chain.refusals import CHAIN_ERRORS, ChainRefused
from subnet.errors import ConfigError, Corrupt, DeadlinePassed, InputError, NotFound, Refusal, Unreachable
from subnet.protocol.signing import Signer, create_wallet
from subnet.timing import ManualClock

OWNER, VALIDATOR, MINER = (Signer.from_uri(f"//{name}") for name in ("Own", "Val", "Min"))
OTHER, STRANGER, COLD, POOR = (Signer.from_uri(f"//{name}") for name in ("Other", "Stranger", "Cold", "Poor"))


def subnet(**changes: object) -> SubnetGenesis:
    """uid 0 owner, 1 validator with stake and permit, 2 miner, 3 other."""
    rules: dict[str, object] = {
        "owner_hotkey": OWNER.hotkey,
        "owner_coldkey": COLD.hotkey,
        "neurons": (
            GenesisNeuron(OWNER.hotkey, COLD.hotkey),
            GenesisNeuron(VALIDATOR.hotkey, COLD.hotkey, 1000.0),
            GenesisNeuron(MINER.hotkey, COLD.hotkey),
            GenesisNeuron(OTHER.hotkey, COLD.hotkey),
        ),
    }
    return SubnetGenesis(**(rules | changes))


def genesis(*, stake_threshold: float = 0.0, loopback: bool = True, faucet: float = 0.0, **changes: object) -> Genesis:
    return Genesis(
        stake_threshold=stake_threshold,
        allow_loopback_addresses=loopback,
        faucet=faucet,
        balances={COLD.hotkey: 100.0},
        subnets=(subnet(**changes),),
    )


REPOSITORY = Path(__file__).resolve().parent.parent


class Bench:
    """A node on a clock that stands still, and a short way to send calls to it."""

    def __init__(self, directory: Path, start: Genesis) -> None:
        self.directory, self.genesis, self.clock = directory, start, ManualClock()
        self.node = LocalNode.open(directory, start, clock=self.clock)

    def send(self, signer: Signer, call: object) -> object:
        nonce = self.node.account(signer.hotkey).nonce
        return self.node.submit(sign_extrinsic(signer, self.node.state.genesis_hash, nonce, call))

    def refused(self, signer: Signer, call: object) -> ChainRefused:
        with pytest.raises(ChainRefused) as caught:
            self.send(signer, call)
        return caught.value

    def blocks(self, count: int) -> None:
        self.clock.advance(count * self.genesis.block_time_s)
        self.node.tick()

    def reopen(self) -> None:
        self.node.close()
        self.node = LocalNode.open(self.directory, self.genesis, clock=self.clock)

    def crash(self) -> None:
        """What is left on disk when the process dies: no snapshot is taken."""
        self.node._db.close()
        self.node = LocalNode.open(self.directory, self.genesis, clock=self.clock)


@pytest.fixture
def bench(tmp_path: Path):
    made: list[Bench] = []

    def make(start: Genesis | None = None) -> Bench:
        made.append(Bench(tmp_path / f"chain{len(made)}", start or genesis()))
        made[-1].blocks(1)
        return made[-1]

    yield make
    for one in made:
        one.node.close()


def weights(uids: tuple[int, ...] = (2, 3), values: tuple[int, ...] | None = None, **changes: object) -> SetWeights:
    call: dict[str, object] = {"netuid": 1, "mechanism": 0, "version_key": 0}
    return SetWeights(uids=uids, values=values or (1,) * len(uids), **(call | changes))


# Each row has the faults of every row below it too, so that passing means the first fault in the order is named.
SET_WEIGHTS_ORDER: list[tuple[str, dict[str, object], Signer, SetWeights]] = [
    ("CommitRevealEnabled", {"commit_reveal": True}, VALIDATOR, weights((9, 9), (1,), mechanism=9)),
    ("CanNotSetRootNetworkWeights", {}, STRANGER, weights((9, 9), (1,), netuid=0)),
    ("WeightVecNotEqualSize", {}, STRANGER, weights((9, 9), (1,), netuid=7)),
    ("SubnetNotExists", {}, STRANGER, weights((9, 9), netuid=7)),
    ("MechanismDoesNotExist", {}, STRANGER, weights((9,) * 5, mechanism=9)),
    ("UidsLengthExceedUidsInSubNet", {}, STRANGER, weights((9,) * 5)),
    ("HotKeyNotRegisteredInSubNet", {}, STRANGER, weights((9, 9))),
    ("NotEnoughStakeToSetWeights", {"threshold": 2000.0}, MINER, weights((9, 9))),
    ("IncorrectWeightVersionKey", {}, MINER, weights((9, 9), version_key=4)),
    ("SettingWeightsTooFast", {"again": True}, MINER, weights((9, 9), version_key=5)),
    ("NeuronNoValidatorPermit", {}, MINER, weights((9, 9), version_key=5)),
    ("DuplicateUids", {}, VALIDATOR, weights((9, 9), version_key=5)),
    ("UidVecContainInvalidOne", {}, VALIDATOR, weights((2, 9), version_key=5)),
    ("WeightVecLengthIsLow", {}, VALIDATOR, weights((2,), version_key=5)),
]


@pytest.mark.parametrize(("code", "how", "signer", "call"), SET_WEIGHTS_ORDER, ids=[r[0] for r in SET_WEIGHTS_ORDER])
def test_set_weights_is_refused_for_the_first_fault(bench, code, how, signer, call):
    how = dict(how)
    threshold, again = how.pop("threshold", 0.0), how.pop("again", False)
    rules = {"weights_version_key": 5, "min_allowed_weights": 3, "weights_rate_limit": 10} | how
    chain = bench(genesis(stake_threshold=threshold, **rules))
    if again:
        chain.send(signer, weights((2,), version_key=5))  # one self-weight needs no permit
    refused = chain.refused(signer, call)
    assert refused.code == code
    assert refused.hint
    assert refused.reason.startswith(code)
    assert (refused.retry_after_s is not None) == (code == "SettingWeightsTooFast")


def test_weights_are_stored_as_the_chain_stores_them(bench):
    chain = bench(genesis(weights_version_key=5, min_allowed_weights=2))
    uids, values = to_u16({2: 0.25, 3: 0.75, 0: 0.0})
    assert (uids, values) == ((2, 3), (21845, 65535))
    outcome = chain.send(VALIDATOR, weights(uids, values, version_key=6))
    stored = chain.node.weights(1, 1, 0)
    assert (stored.uids, stored.values, stored.block) == ((2, 3), (21845, 65535), outcome.block)
    chain.blocks(10)
    chain.send(VALIDATOR, weights((2, 3), (1, 3), version_key=5))  # sent small, stored large
    assert chain.node.weights(1, 1, 0).values == (21845, 65535)
    assert chain.node.weights(1, 3, 0) is None


def test_rate_limit_counts_blocks_and_says_how_long(bench):
    chain = bench(genesis(weights_rate_limit=10))
    chain.send(VALIDATOR, weights())
    chain.blocks(4)
    assert chain.refused(VALIDATOR, weights()).retry_after_s == 6.0
    chain.blocks(5)
    assert chain.refused(VALIDATOR, weights()).retry_after_s == 1.0
    chain.blocks(1)
    chain.send(VALIDATOR, weights())


def test_owner_and_self_weight_need_no_permit_and_newcomers_wait(bench):
    chain = bench(genesis(stake_threshold=500.0))
    chain.send(OWNER, weights())
    assert chain.refused(MINER, weights()).code == "NotEnoughStakeToSetWeights"
    chain = bench(genesis(min_allowed_weights=3))
    chain.send(MINER, weights((2,)))
    chain.send(COLD, BurnedRegister(netuid=1, hotkey=STRANGER.hotkey))
    assert chain.refused(STRANGER, weights((4,))).code == "SettingWeightsTooFast"  # LastUpdate = registration


REGISTER: list[tuple[str, dict[str, object], Signer, int, Signer]] = [
    ("RegistrationNotPermittedOnRootSubnet", {}, POOR, 0, MINER),
    ("SubnetNotExists", {}, POOR, 7, MINER),
    ("SubNetRegistrationDisabled", {"registration_allowed": False}, POOR, 1, MINER),
    ("TooManyRegistrationsThisBlock", {"max_registrations_per_block": 0}, POOR, 1, MINER),
    ("HotKeyAlreadyRegisteredInSubNet", {}, POOR, 1, MINER),
    ("NotEnoughBalanceToStake", {}, POOR, 1, STRANGER),
    ("NoNeuronIdAvailable", {"max_uids": 4, "neurons": 1}, COLD, 1, STRANGER),
]


@pytest.mark.parametrize(("code", "rules", "coldkey", "netuid", "hotkey"), REGISTER, ids=[r[0] for r in REGISTER])
def test_registration_is_refused_for_the_first_fault(bench, code, rules, coldkey, netuid, hotkey):
    rules = dict(rules)
    if rules.pop("neurons", 0):
        rules |= {"neurons": (GenesisNeuron(OWNER.hotkey, COLD.hotkey),), "max_uids": 1}
    chain = bench(genesis(**rules))
    assert chain.refused(coldkey, BurnedRegister(netuid=netuid, hotkey=hotkey.hotkey)).code == code


def test_registration_takes_the_cost_and_binds_the_hotkey(bench):
    chain = bench(genesis(registration_cost=40.0, faucet=1000.0))
    assert chain.send(COLD, BurnedRegister(netuid=1, hotkey=STRANGER.hotkey)).uid == 4
    assert chain.node.account(COLD.hotkey).balance == 60 * 10**9
    chain.send(COLD, Faucet())
    assert chain.refused(COLD, Faucet()).code == "FaucetDisabled"
    chain.send(POOR, Faucet())
    pruned_elsewhere = bench(genesis(faucet=1000.0, max_uids=4, immunity_period=0))
    pruned_elsewhere.send(COLD, BurnedRegister(netuid=1, hotkey=STRANGER.hotkey))  # takes uid 1's slot or another's
    gone = next(s for s in (VALIDATOR, MINER, OTHER) if pruned_elsewhere.node.metagraph(1).neuron(s.hotkey) is None)
    pruned_elsewhere.send(POOR, Faucet())
    call = BurnedRegister(netuid=1, hotkey=gone.hotkey)
    assert pruned_elsewhere.refused(POOR, call).code == "NonAssociatedColdKey"


def test_pruning_takes_who_earned_least_then_the_oldest_and_spares_owner_and_newcomers(bench):
    neurons = tuple(
        GenesisNeuron(neuron.hotkey, COLD.hotkey if uid == 0 else f"cold{uid}", neuron.stake)
        for uid, neuron in enumerate(subnet().neurons)
    )
    chain = bench(genesis(max_uids=5, immunity_period=30, tempo=9, neurons=neurons, weights_rate_limit=0))
    chain.send(VALIDATOR, weights((0, 2), (1, 1)))  # half is burned: the miner earns less than the validator
    chain.blocks(30)
    newcomers = [Signer.from_uri(f"//New{i}") for i in range(5)]
    uids = [chain.send(COLD, BurnedRegister(netuid=1, hotkey=s.hotkey)).uid for s in newcomers]
    # A free slot; who earned nothing: 3; then the miner, then the validator; then newcomers, as none else is left.
    assert uids == [4, 3, 2, 1, 1]
    graph = chain.node.metagraph(1)
    assert graph.neurons[0].hotkey == OWNER.hotkey
    assert graph.neuron(VALIDATOR.hotkey) is None
    assert graph.neurons[1].registered_at_block > 30
    chain = bench(genesis(max_uids=4, immunity_period=5, min_non_immune_uids=3))
    chain.blocks(10)
    assert chain.refused(COLD, BurnedRegister(netuid=1, hotkey=STRANGER.hotkey)).code == "NoNeuronIdAvailable"


def test_permits_go_to_the_largest_stakes_once_per_tempo(bench):
    chain = bench(genesis(max_validators=2, tempo=20, stake_threshold=10.0, faucet=5000.0))
    assert [n.hotkey for n in chain.node.metagraph(1).permit_holders()] == [VALIDATOR.hotkey]
    chain.send(COLD, Faucet())
    for hotkey, amount in ((MINER, 2000), (OTHER, 1500), (OWNER, 5)):
        chain.send(COLD, AddStake(netuid=1, hotkey=hotkey.hotkey, amount=amount * 10**9))
    assert [n.uid for n in chain.node.metagraph(1).permit_holders()] == [1]  # not before the tempo's end
    chain.blocks(21)
    graph = chain.node.metagraph(1)
    assert [n.uid for n in graph.permit_holders()] == [2, 3]
    assert graph.neuron(MINER.hotkey).stake == 2000.0
    assert chain.refused(VALIDATOR, weights()).code == "NeuronNoValidatorPermit"


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("SubnetNotExists", AddStake(netuid=9, hotkey=MINER.hotkey, amount=0)),
        ("HotKeyAccountNotExists", AddStake(netuid=1, hotkey=STRANGER.hotkey, amount=0)),
        ("AmountTooLow", AddStake(netuid=1, hotkey=MINER.hotkey, amount=0)),
        ("NotEnoughBalanceToStake", AddStake(netuid=1, hotkey=MINER.hotkey, amount=10**12)),
        ("FaucetDisabled", Faucet()),
    ],
)
def test_stake_is_refused_by_name(bench, code, call):
    assert bench().refused(COLD, call).code == code


def test_incentives_are_what_the_majority_backs_each_tempo(bench):
    second = GenesisNeuron(STRANGER.hotkey, COLD.hotkey, 3000.0)
    chain = bench(genesis(neurons=(*subnet().neurons, second), tempo=20))
    chain.send(VALIDATOR, weights((1, 2, 3), (9, 1, 3)))  # the self-weight doesn't count
    chain.send(STRANGER, weights((2, 3), (3, 1)))
    assert sum(n.incentive for n in chain.node.metagraph(1).neurons) == 0  # not before the tempo's end
    chain.blocks(21)
    graph = chain.node.metagraph(1)
    # The majority gives .75 and .25; what the minority gives uid 3 above .25 is cut off.
    ranks = {2: 0.25 * 1000 + 0.75 * 3000, 3: 0.25 * 1000 + 0.25 * 3000}
    assert [graph.neurons[uid].consensus for uid in ranks] == pytest.approx([0.75, 0.25], rel=1e-4)
    expected = [0, 0, *(rank / sum(ranks.values()) for rank in ranks.values()), 0]
    assert [n.incentive for n in graph.neurons] == pytest.approx(expected, rel=1e-4)
    assert graph.neurons[1].validator_trust == pytest.approx(0.5, rel=1e-4)
    assert graph.neurons[4].validator_trust == pytest.approx(1.0, rel=1e-4)


def test_a_weight_given_before_its_target_registered_does_not_count(bench):
    chain = bench(genesis(max_uids=4, immunity_period=0, tempo=20))
    chain.send(VALIDATOR, weights((2, 3), (3, 1)))
    chain.blocks(21)
    victim = chain.send(COLD, BurnedRegister(netuid=1, hotkey=STRANGER.hotkey)).uid
    assert victim == 2  # the owner's coldkey holds the miners: what they earn is burned, and 2 comes first
    chain.blocks(21)
    assert [n.incentive for n in chain.node.metagraph(1).neurons] == pytest.approx([0, 0, 0, 1], abs=1e-4)


SERVE: list[tuple[str, Signer, str, int]] = [
    ("HotKeyNotRegisteredInNetwork", STRANGER, "localhost", 0),
    ("InvalidIpType", MINER, "localhost", 0),
    ("InvalidIpAddress", MINER, "127.0.0.1", 0),
    ("InvalidIpAddress", MINER, "0.0.0.0", 0),
    ("InvalidIpAddress", MINER, "::1", 8100),
    ("InvalidPort", MINER, "10.0.0.1", 0),
    ("InvalidPort", MINER, "10.0.0.1", 70_000),
]


@pytest.mark.parametrize(("code", "signer", "host", "port"), SERVE)
def test_serving_is_refused_by_name(bench, code, signer, host, port):
    chain = bench(genesis(loopback=False, serving_rate_limit=50))
    assert chain.refused(signer, ServeAxon(netuid=1, host=host, port=port)).code == code


def test_serving_again_waits_for_the_limit(bench):
    chain = bench(genesis(serving_rate_limit=50))
    chain.send(MINER, ServeAxon(netuid=1, host="127.0.0.1", port=8100))
    chain.blocks(20)
    refused = chain.refused(MINER, ServeAxon(netuid=1, host="127.0.0.1", port=0))
    assert (refused.code, refused.retry_after_s) == ("ServingRateLimitExceeded", 30.0)
    chain.blocks(30)
    chain.send(MINER, ServeAxon(netuid=1, host="127.0.0.1", port=8101))
    assert chain.node.metagraph(1).neuron(MINER.hotkey).axon == Axon("127.0.0.1", 8101)


def test_commitments_are_bounded(bench):
    chain = bench(genesis(tempo=20))
    assert chain.refused(STRANGER, SetCommitment(netuid=1, data=b"")).code == "AccountNotAllowedCommit"
    for data in (b"", b"x" * 513):
        assert chain.refused(MINER, SetCommitment(netuid=1, data=data)).code == "TooManyFieldsInCommitmentInfo"
    for _ in range(6):
        chain.send(MINER, SetCommitment(netuid=1, data=b"x" * 512))
    refused = chain.refused(MINER, SetCommitment(netuid=1, data=b"y"))
    assert refused.code == "SpaceLimitExceeded"
    chain.blocks(int(refused.retry_after_s))
    chain.send(MINER, SetCommitment(netuid=1, data=b"y"))
    assert chain.node.commitments(1)[MINER.hotkey].data == b"y"


# ---- extrinsics, blocks, disk


def test_an_extrinsic_works_once_and_only_as_it_was_signed(bench):
    chain = bench()
    root = chain.node.state.genesis_hash
    good = sign_extrinsic(VALIDATOR, root, 0, weights())
    chain.node.submit(good)

    def code(signed: SignedExtrinsic) -> str:
        with pytest.raises(ChainRefused) as caught:
            chain.node.submit(signed)
        return caught.value.code

    assert code(good) == "Stale"
    assert code(sign_extrinsic(VALIDATOR, root, 2, weights())) == "Future"
    assert code(sign_extrinsic(VALIDATOR, "00" * 32, 1, weights())) == "AncientBirthBlock"
    other = sign_extrinsic(VALIDATOR, root, 1, weights((2,)))
    assert code(SignedExtrinsic(other.payload, good.signature)) == "BadProof"
    assert code(SignedExtrinsic(other.payload, b"")) == "BadProof"
    with pytest.raises(InputError):
        chain.node.submit(SignedExtrinsic(b"\x00", good.signature))
    # A refused call has cost its nonce: the same bytes can't come true later.
    early = sign_extrinsic(VALIDATOR, root, 1, weights((2,)))
    assert code(early) == "SettingWeightsTooFast"
    chain.blocks(50)
    assert code(early) == "Stale"


def test_blocks_follow_the_clock_and_never_go_back(bench):
    chain = bench()
    chain.blocks(9)
    assert chain.node.tick() == 10
    chain.clock.advance(-8.5)
    assert chain.node.tick() == 10
    chain.crash()
    assert chain.node.tick() == 10
    chain.clock.advance(9.4)
    assert chain.node.tick() == 10
    chain.clock.advance(0.1)
    assert chain.node.tick() == 11


def test_hashes_are_chained_and_stay(bench):
    chain = bench()
    with pytest.raises(NotFound) as caught:
        chain.node.block_hash(3)
    assert caught.value.retry_after_s == 2.0
    for uid in (2, 3):
        chain.send(COLD, AddStake(netuid=1, hotkey=MINER.hotkey, amount=uid))
        chain.blocks(3)
    before = [chain.node.block_hash(n) for n in range(8)]
    assert len(set(before)) == 8
    assert before[0] == chain.node.state.genesis_hash
    chain.crash()
    assert [chain.node.block_hash(n) for n in range(8)] == before
    fork = bench()
    fork.send(COLD, AddStake(netuid=1, hotkey=MINER.hotkey, amount=2))
    fork.blocks(3)
    fork.send(COLD, AddStake(netuid=1, hotkey=MINER.hotkey, amount=4))
    fork.blocks(3)
    after = [fork.node.block_hash(n) for n in range(8)]
    assert after[:5] == before[:5]
    assert all(a != b for a, b in zip(after[5:], before[5:], strict=True))


@pytest.mark.parametrize("how", ["reopen", "crash"])
def test_restart_finds_the_same_state(bench, how, monkeypatch):
    monkeypatch.setattr("subnet.chain.local.SNAPSHOT_EVERY", 5)
    chain = bench(genesis(faucet=100.0))
    rng = random.Random(1)
    for i in range(17):
        call = rng.choice([weights((2, 3), (i + 1, 9)), SetCommitment(1, bytes([i])), ServeAxon(1, "10.0.0.1", 80 + i)])
        with contextlib.suppress(ChainRefused):  # some come too fast: they cost their nonce, and that stays too
            chain.send(VALIDATOR, call)
        chain.blocks(rng.randrange(0, 12))
    before = msgspec.msgpack.encode(chain.node.state)
    getattr(chain, how)()
    assert msgspec.msgpack.encode(chain.node.state) == before
    replayed = genesis_state(chain.genesis, chain.node._started_ns)
    assert replayed.genesis_hash == chain.node.state.genesis_hash


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 25))
def test_a_long_gap_equals_many_short_ones(gaps: list[int], tempo: int):
    start = genesis(tempo=tempo, max_validators=1)
    states = [genesis_state(start, 0) for _ in range(2)]
    for state in states:
        net = state.subnets[1]
        net.slots[1].permit = net.slots[2].permit = True
        net.stakes[MINER.hotkey] = {COLD.hotkey: 1}  # counts once, then loses its permit to uid 1
        net.slots[1].weights[0] = StoredWeights((3,), (65535,))
        net.slots[2].weights[0] = StoredWeights((0,), (65535,))
        net.slots[1].last_updates[0] = net.slots[2].last_updates[0] = 1
    total = 1
    for gap in gaps:
        total += gap
        for block in range(states[0].block, total + 1):
            advance(states[0], block)
        advance(states[1], total)
        assert states[0] == states[1]


def test_directories_are_guarded(bench, tmp_path):
    chain = bench()
    with pytest.raises(ConfigError, match="can't open"):
        LocalNode.open(chain.directory, chain.genesis)
    chain.node.close()
    with pytest.raises(ConfigError, match="other genesis"):
        LocalNode.open(chain.directory, genesis(tempo=7))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "chain.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(Corrupt, match="damaged"):
        LocalNode.open(damaged, chain.genesis)
    chain.node = LocalNode.open(chain.directory, chain.genesis, clock=chain.clock)


def test_genesis_files_are_checked(tmp_path):
    path = tmp_path / "genesis.toml"
    path.write_text('block_time_s = 2\n[[subnets]]\nnetuid = 3\ntempo = 99\n[balances]\n"5abc" = 7\n')
    loaded = load_genesis(path)
    assert (loaded.block_time_s, loaded.subnets[0].tempo, loaded.balances) == (2.0, 99, {"5abc": 7.0})
    for text, words in (("tempo = 3", "tempo"), ("[[subnets]]\ntempo = 0", "tempo = 0"), ("= 3", "genesis.toml")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_genesis(path)
    with pytest.raises(ConfigError, match="no genesis file"):
        load_genesis(tmp_path / "none.toml")
    assert DEFAULT_LOCAL_GENESIS.subnets[0].tempo == 20
    assert REALISTIC_GENESIS.subnets[0].weights_rate_limit == 100


# ---- u16


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.integers(0, 300), st.floats(0, 1e9), max_size=20))
def test_u16_keeps_ratios_and_drops_zeros(given_weights: dict[int, float]):
    uids, values = to_u16(given_weights)
    largest = max(given_weights.values(), default=0.0)
    assert list(uids) == sorted(uids)
    assert all(1 <= value <= 65535 for value in values)
    assert (max(values, default=0) == 65535) == (largest > 0)
    for uid, weight in given_weights.items():
        value = dict(zip(uids, values, strict=True)).get(uid, 0)
        assert largest == 0 or abs(value - weight / largest * 65535) <= 0.5 + 1e-9
    assert upscale_u16(values) == values


def test_u16_refuses_what_is_no_weight():
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError):
            to_u16({1: bad})
    assert upscale_u16((1, 2, 3)) == (21845, 43690, 65535)
    assert upscale_u16((0, 0)) == (0, 0)


# ---- over HTTP


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[ChainServer, ManualClock]]:
    clock = ManualClock()
    start = genesis(weights_version_key=5, min_allowed_weights=2, faucet=1000.0, serving_rate_limit=50)
    server = ChainServer(tmp_path / "chain", port=0, genesis=start, clock=clock)
    await server.start()
    clock.advance(1)
    yield server, clock
    await server.stop()


async def test_the_client_does_all_a_chain_does(served):
    server, clock = served
    async with LocalChain(server.url, VALIDATOR) as chain, LocalChain(server.url, MINER) as miner:
        typed: Chain = chain
        assert (await typed.block(), await typed.block_time_s()) == (1, 1.0)
        assert len(await chain.block_hash(1)) == 64
        cold, hot = create_wallet("w", "h", Path(os.environ["HOME"])), STRANGER
        await chain.faucet(coldkey=cold)
        assert await chain.register(1, coldkey=cold, hotkey=hot.hotkey) == 4
        await chain.add_stake(1, coldkey=cold, hotkey=hot.hotkey, amount=12.5)
        assert await chain.balance(cold.hotkey) == 1000 - 1 - 12.5
        await miner.serve(1, "127.0.0.1", 8100)
        await miner.serve(1, "127.0.0.1", 8100)  # shown already: not sent, so not too fast
        await miner.set_commitment(1, b"r2://bucket")
        assert (await chain.commitments(1))[MINER.hotkey].data == b"r2://bucket"
        receipt = await chain.set_weights(1, {MINER.hotkey: 0.25, OTHER.hotkey: 0.75}, version_key=5)
        assert (receipt.uids, receipt.values) == ((2, 3), (21845, 65535))
        assert await chain.weights(1, 1) == receipt
        assert await chain.weights(1, 3) is None
        clock.advance(21)
        graph = await chain.metagraph(1)
        assert (graph.block, graph.tempo, graph.owner_uid, len(graph.neurons)) == (22, 20, 0, 5)
        assert graph.neuron(MINER.hotkey).axon == Axon("127.0.0.1", 8100)
        assert graph.by_hotkey()[OTHER.hotkey].incentive == pytest.approx(0.75, abs=1e-4)
        assert [n.stake for n in graph.permit_holders()] == [1000.0, 12.5]
        assert (await chain.hyperparameters(1)).min_allowed_weights == 2


async def test_refusals_keep_their_names_over_http(served):
    server, _ = served
    async with LocalChain(server.url, VALIDATOR) as chain, LocalChain(server.url, MINER) as miner:
        cases: list[tuple[str, object]] = [
            ("SubnetNotExists", chain.metagraph(7)),
            ("IncorrectWeightVersionKey", chain.set_weights(1, {2: 1.0, 3: 1.0})),
            ("WeightVecLengthIsLow", chain.set_weights(1, {2: 1.0, 3: 0.0}, version_key=5)),
            ("WeightVecLengthIsLow", chain.set_weights(1, {}, version_key=5)),
            ("UidVecContainInvalidOne", chain.set_weights(1, {STRANGER.hotkey: 1.0}, version_key=5)),
            ("NeuronNoValidatorPermit", miner.set_weights(1, {2: 1.0, 3: 1.0}, version_key=5)),
            ("InvalidIpType", miner.serve(1, "miner.example", 80)),
        ]
        for code, call in cases:
            with pytest.raises(ChainRefused) as caught:
                await call
            assert (caught.value.code, caught.value.retryable) == (code, False)
            assert caught.value.code in CHAIN_ERRORS
        await chain.set_weights(1, {2: 1.0, 3: 1.0}, version_key=5)
        with pytest.raises(ChainRefused) as caught:
            await chain.set_weights(1, {2: 1.0, 3: 1.0}, version_key=5)
        assert (caught.value.code, caught.value.retry_after_s) == ("SettingWeightsTooFast", 10.0)
        with pytest.raises(NotFound) as unfinished:
            await chain.block_hash(99)
        assert (unfinished.value.code, unfinished.value.retry_after_s) == ("not_found", 98.0)


async def test_two_processes_with_one_key_both_get_through(served):
    server, _ = served
    clients = [LocalChain(server.url, MINER) for _ in range(3)]
    await asyncio.gather(*(client.set_commitment(1, b"x") for client in clients))
    for client in clients:
        await client.close()


async def test_raw_requests_are_refused_with_a_body(served):
    server, _ = served
    async with aiohttp.ClientSession(server.url) as session:
        for method, path, body, status, code in (
            ("POST", "/v1/extrinsics", b"junk", 400, "bad_input"),
            ("POST", "/v1/extrinsics", b"\x00" * (2 << 20), 413, "too_large"),
            ("GET", "/v1/blocks/-1", None, 400, "bad_input"),
            ("GET", "/v1/nowhere", None, 404, "not_found"),
            ("GET", "/v1/subnets/9/metagraph", None, 422, "SubnetNotExists"),
        ):
            async with session.request(method, path, data=io.BytesIO(body) if body else None) as response:
                refusal = msgspec.json.decode(await response.read(), type=Refusal)
                assert (response.status, refusal.code) == (status, code)


async def test_the_client_says_what_is_wrong(tmp_path):
    async def html(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if b"/v1/blocks" not in request:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\nConnection: close\r\n\r\n<b/>"
            )
            await writer.drain()
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(html, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, LocalChain(f"http://127.0.0.1:{port}") as chain:
        with pytest.raises(InputError, match="doesn't answer as a local chain"):
            await chain.block()
        with pytest.raises(DeadlinePassed):
            await chain.block_hash(1, timeout_s=0.05)
        with pytest.raises(ConfigError, match="no hotkey"):
            await chain.set_weights(1, {})
        busy = ChainServer(tmp_path / "chain", port=port)
        with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}"):
            await busy.start()
    async with LocalChain(f"http://127.0.0.1:{port}") as chain:
        with pytest.raises(Unreachable, match="no chain at"):
            await chain.block()


_SERVE = """
import asyncio, sys
from pathlib import Path
from subnet.chain.local_server import serve_chain
asyncio.run(serve_chain(Path(sys.argv[1]), port=0, on_ready=lambda url: print(url, flush=True)))
"""


async def test_kill_9_loses_no_answer(tmp_path):
    def start() -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-c", _SERVE, str(tmp_path / "chain")]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=REPOSITORY
        )
        return process, process.stdout.readline().strip()

    seen: tuple[int, float, int] = (0, 0.0, 0)
    for round_number in range(2):
        process, url = start()
        try:
            async with LocalChain(url, MINER) as chain:
                if round_number == 0:
                    await chain.faucet(coldkey=COLD)
                    uid = await chain.register(1, coldkey=COLD, hotkey=MINER.hotkey)
                    await chain.set_commitment(1, b"still here")
                    seen = (uid, await chain.balance(COLD.hotkey), await chain.block())
                else:
                    assert (await chain.metagraph(1)).neuron(MINER.hotkey).uid == seen[0]
                    assert await chain.balance(COLD.hotkey) == seen[1]
                    assert await chain.block() >= seen[2]
                    assert (await chain.commitments(1))[MINER.hotkey].data == b"still here"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(10)
            process.stdout.close()
