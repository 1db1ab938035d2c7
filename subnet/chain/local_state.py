"""The local chain's state: plain structs that encode to bytes, so that a snapshot is the state and nothing else.

Amounts are rao. Only :mod:`subnet.chain.local_rules` changes them.
"""

from __future__ import annotations

import blake3
import msgspec

from subnet.chain.base import Axon, Commitment, Hyperparameters, Metagraph, Neuron, WeightsReceipt
from subnet.chain.genesis import RAO_PER_TAO, Genesis, SubnetGenesis, to_rao


class StoredWeights(msgspec.Struct):
    uids: tuple[int, ...] = ()
    values: tuple[int, ...] = ()


class Slot(msgspec.Struct):
    """One uid of a subnet. ``last_updates`` and ``weights`` have an entry per mechanism."""

    hotkey: str
    coldkey: str
    registered_at: int
    last_updates: list[int]
    weights: list[StoredWeights | None]
    bonds: list[dict[int, int]]
    """Per mechanism: u16 by target."""
    permit: bool = False
    incentive: float = 0.0
    dividends: float = 0.0
    consensus: float = 0.0
    validator_trust: float = 0.0
    emission: int = 0
    """Of the last tempo."""
    axon: Axon | None = None
    axon_block: int = 0


class CommitmentSlot(msgspec.Struct):
    block: int
    data: bytes
    window: int
    """Tempo in which ``used_bytes`` were used."""
    used_bytes: int


class WeightCommit(msgspec.Struct, frozen=True):
    hotkey: str
    mechanism: int
    block: int
    window: int
    """Tempo it was made in; the chain reveals it ``reveal_period`` tempos later."""
    commit: bytes


class Ledger(msgspec.Struct):
    """Where a subnet's emission went, since block 0. ``earned`` is kept apart from stake: it isn't staked by itself."""

    emitted: int = 0
    owner: int = 0
    burned: int = 0
    pending: int = 0
    """Nobody to pay it to yet; paid with the next tempo."""
    earned: dict[str, int] = {}
    """By hotkey."""


class Subnet(msgspec.Struct):
    rules: SubnetGenesis
    slots: list[Slot]
    stakes: dict[str, dict[str, int]]
    """rao by hotkey, then by coldkey. Stake stays with a hotkey that loses its slot."""
    commitments: dict[str, CommitmentSlot]
    registrations_this_block: int = 0
    commits: list[WeightCommit] = []
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    last_epoch: int = 0

    def uid_of(self, hotkey: str) -> int | None:
        return next((uid for uid, slot in enumerate(self.slots) if slot.hotkey == hotkey), None)

    def stake_of(self, hotkey: str) -> int:
        return sum(self.stakes.get(hotkey, {}).values())


class ChainState(msgspec.Struct):
    """Everything an extrinsic can see. ``block`` is the one being built: the newest finished one is ``block - 1``."""

    genesis: Genesis
    genesis_hash: str
    seal_secret: bytes
    """Opens committed weights; never shown."""
    block: int
    anchor_block: int
    """Newest finished block that holds an extrinsic, or 0."""
    anchor_hash: bytes
    pending: list[bytes]
    """Digests of the extrinsics in the block being built."""
    nonces: dict[str, int]
    balances: dict[str, int]
    owners: dict[str, str]
    """coldkey by hotkey, for every hotkey ever registered."""
    faucet_given: dict[str, bool]
    subnets: dict[int, Subnet]


def new_slot(rules: SubnetGenesis, hotkey: str, coldkey: str, block: int) -> Slot:
    n = rules.mechanisms
    return Slot(
        hotkey=hotkey,
        coldkey=coldkey,
        registered_at=block,
        last_updates=[block] * n,
        weights=[None] * n,
        bonds=[{} for _ in range(n)],
    )


def genesis_state(genesis: Genesis, started_ns: int, seal_secret: bytes = bytes(32)) -> ChainState:
    """State at block 0, with block 1 being built. ``started_ns`` makes two chains of one genesis different chains."""
    encoded = msgspec.msgpack.encode((genesis, started_ns))
    root = blake3.blake3(b"iota-local-chain/genesis\n" + encoded).digest()
    state = ChainState(
        genesis=genesis,
        genesis_hash=root.hex(),
        seal_secret=seal_secret,
        block=1,
        anchor_block=0,
        anchor_hash=root,
        pending=[],
        nonces={},
        balances={address: to_rao(amount) for address, amount in sorted(genesis.balances.items())},
        owners={},
        faucet_given={},
        subnets={},
    )
    for rules in genesis.subnets:
        subnet = Subnet(rules=rules, slots=[], stakes={}, commitments={})
        if rules.owner_hotkey and all(neuron.hotkey != rules.owner_hotkey for neuron in rules.neurons):
            subnet.slots.append(new_slot(rules, rules.owner_hotkey, rules.owner_coldkey, 0))
            state.owners[rules.owner_hotkey] = rules.owner_coldkey
        for neuron in rules.neurons:
            subnet.slots.append(new_slot(rules, neuron.hotkey, neuron.coldkey, 0))
            state.owners[neuron.hotkey] = neuron.coldkey
            if neuron.stake > 0:
                subnet.stakes[neuron.hotkey] = {neuron.coldkey: to_rao(neuron.stake)}
        state.subnets[rules.netuid] = subnet
    return state


def empty_block_hash(anchor_hash: bytes, number: int) -> bytes:
    """Hash of a block without extrinsics: a function of the newest block before it that holds one, and its number."""
    return blake3.blake3(b"iota-local-chain/empty\n" + anchor_hash + number.to_bytes(8, "little")).digest()


def full_block_hash(previous: bytes, number: int, extrinsics: list[bytes]) -> bytes:
    body = blake3.blake3(b"".join(extrinsics)).digest()
    head = b"iota-local-chain/full\n" + previous + number.to_bytes(8, "little")
    return blake3.blake3(head + body).digest()


def view_metagraph(state: ChainState, netuid: int) -> Metagraph:
    subnet = state.subnets[netuid]
    neurons = tuple(
        Neuron(
            uid=uid,
            hotkey=slot.hotkey,
            coldkey=slot.coldkey,
            stake=subnet.stake_of(slot.hotkey) / RAO_PER_TAO,
            validator_permit=slot.permit,
            last_update=slot.last_updates[0],
            registered_at_block=slot.registered_at,
            axon=slot.axon,
            incentive=slot.incentive,
            dividends=slot.dividends,
            consensus=slot.consensus,
            validator_trust=slot.validator_trust,
            emission=slot.emission / RAO_PER_TAO,
        )
        for uid, slot in enumerate(subnet.slots)
    )
    rules = subnet.rules
    return Metagraph(
        netuid=netuid, block=state.block - 1, tempo=rules.tempo, owner_hotkey=rules.owner_hotkey, neurons=neurons
    )


def view_hyperparameters(state: ChainState, netuid: int) -> Hyperparameters:
    rules = state.subnets[netuid].rules
    return Hyperparameters(
        tempo=rules.tempo,
        immunity_period=rules.immunity_period,
        max_uids=rules.max_uids,
        min_allowed_weights=rules.min_allowed_weights,
        weights_rate_limit=rules.weights_rate_limit,
        weights_version_key=rules.weights_version_key,
        serving_rate_limit=rules.serving_rate_limit,
        max_validators=rules.max_validators,
        commit_reveal=rules.commit_reveal,
        registration_allowed=rules.registration_allowed,
        registration_cost=rules.registration_cost,
        stake_threshold=state.genesis.stake_threshold,
        mechanisms=rules.mechanisms,
    )


def view_weights(state: ChainState, netuid: int, uid: int, mechanism: int) -> WeightsReceipt | None:
    slots = state.subnets[netuid].slots
    if not (0 <= uid < len(slots) and 0 <= mechanism < len(slots[uid].weights)):
        return None
    stored = slots[uid].weights[mechanism]
    if stored is None:
        return None
    return WeightsReceipt(block=slots[uid].last_updates[mechanism], uids=stored.uids, values=stored.values)


def view_commitments(state: ChainState, netuid: int) -> dict[str, Commitment]:
    slots = state.subnets[netuid].commitments
    return {hotkey: Commitment(block=slot.block, data=slot.data) for hotkey, slot in sorted(slots.items())}
