"""The local chain's tempos: every rao of the emission is accounted for, sealed weights open when due, gaps change nothing."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.chain.extrinsics import AddStake, BurnedRegister, Call, CommitWeights, Extrinsic, SetWeights
from subnet.chain.genesis import Genesis, GenesisNeuron, SubnetGenesis
from subnet.chain.local_epochs import advance, first_block_of_window, next_epoch_after, settle
from subnet.chain.local_rules import MAX_UNREVEALED_COMMITS, apply_extrinsic
from subnet.chain.local_state import ChainState, genesis_state
from subnet.chain.refusals import ChainRefused
from subnet.chain.sealed import SealedWeights, public_key, seal, unseal
from subnet.errors import InputError

OWNER, BOSS, VALIDATOR, RIVAL, MINER, OTHER = "owner", "boss", "validator", "rival", "miner", "other"
SECRET = bytes(range(32))


def start(**changes: object) -> ChainState:
    """uid 0 owner, 1 validator (1000), 2 rival (600), 3 miner, 4 other; each with a coldkey of its own."""
    rules: dict[str, object] = {
        "owner_hotkey": OWNER,
        "owner_coldkey": BOSS,
        "tempo": 9,
        "weights_rate_limit": 0,
        "emission_per_block": 1.0,
        "neurons": (
            GenesisNeuron(OWNER, BOSS),
            GenesisNeuron(VALIDATOR, "c1", 1000.0),
            GenesisNeuron(RIVAL, "c2", 600.0),
            GenesisNeuron(MINER, "c3"),
            GenesisNeuron(OTHER, "c4"),
        ),
    }
    balances = dict.fromkeys((BOSS, "c1", "c2", "c3", "c4", "c5"), 1e6)
    state = genesis_state(Genesis(balances=balances, subnets=(SubnetGenesis(**(rules | changes)),)), 0, SECRET)
    settle(state, state.subnets[1], 0)
    return state


def send(state: ChainState, signer: str, call: Call) -> None:
    nonce = state.nonces.get(signer, 0)
    extrinsic = Extrinsic(genesis=state.genesis_hash, signer=signer, nonce=nonce, call=call)
    apply_extrinsic(state, extrinsic, b"\0" * 32)


def set_weights(state: ChainState, signer: str, weights: dict[int, int]) -> None:
    call = SetWeights(netuid=1, mechanism=0, uids=tuple(weights), values=tuple(weights.values()), version_key=0)
    send(state, signer, call)


def to_next_epoch(state: ChainState) -> None:
    advance(state, next_epoch_after(state.subnets[1].rules, state.block))


def accounted(state: ChainState) -> bool:
    ledger = state.subnets[1].ledger
    return ledger.emitted == ledger.owner + ledger.burned + ledger.pending + sum(ledger.earned.values())


def test_a_tempo_pays_owner_miners_and_validators_by_hand():
    """10 blocks of 1: owner 18 %, the rest in halves; miner 3/4 and other 1/4 of one, validator and rival by dividends."""
    state = start(owner_cut=0.18)
    advance(state, 2)
    for validator in (VALIDATOR, RIVAL):
        set_weights(state, validator, {3: 3, 4: 1})
    to_next_epoch(state)
    subnet = state.subnets[1]
    first, ledger = subnet.last_epoch, subnet.ledger
    assert first == 8
    assert ledger.emitted == 8 * 10**9
    assert ledger.owner == int(0.18 * 8 * 10**9)
    half = (ledger.emitted - ledger.owner) / 2
    for hotkey, share in ((MINER, 0.75), (OTHER, 0.25), (VALIDATOR, 1000 / 1600), (RIVAL, 600 / 1600)):
        assert ledger.earned[hotkey] == pytest.approx(half * share, rel=1e-4)
    assert ledger.burned == 0
    assert ledger.pending < 10, "rounding only"
    assert accounted(state)
    assert [slot.emission for slot in subnet.slots][3] == ledger.earned[MINER]


def test_weight_on_the_owner_is_burned_and_so_is_that_on_its_other_hotkeys():
    state = start(owner_cut=0.0)
    send(state, BOSS, BurnedRegister(netuid=1, hotkey="boss's other"))
    advance(state, 2)
    set_weights(state, VALIDATOR, {0: 2, 3: 1, 5: 1})
    set_weights(state, RIVAL, {0: 2, 3: 1, 5: 1})
    to_next_epoch(state)
    ledger = state.subnets[1].ledger
    assert ledger.burned == pytest.approx(ledger.emitted / 2 * 0.75, rel=1e-4)
    assert ledger.earned[MINER] == pytest.approx(ledger.emitted / 2 * 0.25, rel=1e-4)
    assert "boss's other" not in ledger.earned
    assert accounted(state)


def test_without_weights_validators_get_all_and_without_stake_it_waits():
    state = start(owner_cut=0.0)
    to_next_epoch(state)
    ledger = state.subnets[1].ledger
    assert ledger.earned[VALIDATOR] == pytest.approx(ledger.emitted * 1000 / 1600, rel=1e-6)
    nobody = start(neurons=(GenesisNeuron(OWNER, BOSS),), owner_cut=0.0)
    to_next_epoch(nobody)
    assert nobody.subnets[1].ledger.pending == nobody.subnets[1].ledger.emitted > 0
    assert accounted(nobody)


def test_mechanisms_share_the_emission_evenly():
    state = start(mechanisms=2, owner_cut=0.0)
    advance(state, 2)
    for mechanism, target in ((0, 3), (1, 4)):
        for validator in (VALIDATOR, RIVAL):
            call = SetWeights(netuid=1, mechanism=mechanism, uids=(target,), values=(1,), version_key=0)
            send(state, validator, call)
    to_next_epoch(state)
    earned = state.subnets[1].ledger.earned
    assert earned[MINER] == pytest.approx(earned[OTHER], rel=1e-6)
    assert earned[MINER] == pytest.approx(state.subnets[1].ledger.emitted / 4, rel=1e-4)


def test_bonds_to_a_pruned_miner_do_not_pass_to_its_successor():
    state = start(max_uids=5, immunity_period=0, tempo=9)
    advance(state, 2)
    set_weights(state, VALIDATOR, {3: 1, 4: 65535})
    set_weights(state, RIVAL, {3: 1, 4: 65535})
    to_next_epoch(state)
    slots = state.subnets[1].slots
    assert slots[1].bonds[0][3] > 0
    send(state, "c5", BurnedRegister(netuid=1, hotkey="new"))
    (uid,) = [uid for uid, slot in enumerate(state.subnets[1].slots) if slot.hotkey == "new"]
    assert all(uid not in slot.bonds[0] for slot in state.subnets[1].slots)


# ---- sealed weights


def commit(state: ChainState, signer: str, weights: dict[int, int], *, inside: str | None = None) -> int:
    """The block at which they open. ``inside``: the hotkey that the seal names, where it isn't the signer."""
    content = SealedWeights(hotkey=inside or signer, uids=tuple(weights), values=tuple(weights.values()), version_key=0)
    sealed = seal(content, public_key(state.seal_secret))
    send(state, signer, CommitWeights(netuid=1, mechanism=0, commit=sealed, version=4))
    (newest,) = [c for c in state.subnets[1].commits if c.hotkey == signer][-1:]
    return first_block_of_window(state.subnets[1].rules, newest.window + state.subnets[1].rules.reveal_period)


@pytest.mark.parametrize("period", [1, 2])
def test_sealed_weights_open_when_due_and_count_from_then(period):
    state = start(commit_reveal=True, reveal_period=period)
    advance(state, 2)
    opens = commit(state, VALIDATOR, {3: 1, 4: 3})
    commit(state, RIVAL, {3: 1, 4: 3})
    advance(state, opens - 1)
    slots = state.subnets[1].slots
    assert slots[1].weights[0] is None
    assert sum(slot.incentive for slot in slots) == 0
    advance(state, opens)
    stored = slots[1].weights[0]
    assert stored is not None
    assert (stored.uids, stored.values) == ((3, 4), (21845, 65535))
    assert slots[1].last_updates[0] == 2, "the block of the commit"
    assert [round(slot.incentive, 3) for slot in slots] == [0, 0, 0, 0.25, 0.75]
    assert state.subnets[1].commits == []


def test_a_copied_commit_opens_to_nothing():
    state = start(commit_reveal=True)
    advance(state, 2)
    commit(state, VALIDATOR, {3: 1})
    opens = commit(state, RIVAL, {3: 1}, inside=VALIDATOR)
    advance(state, opens)
    assert state.subnets[1].slots[1].weights[0] is not None
    assert state.subnets[1].slots[2].weights[0] is None


def test_commits_are_refused_by_name_and_dropped_where_they_do_not_fit():
    state = start(commit_reveal=True)
    advance(state, 2)

    def refused(signer: str, call: Call) -> str:
        with pytest.raises(ChainRefused) as caught:
            send(state, signer, call)
        return caught.value.code

    good = CommitWeights(netuid=1, mechanism=0, commit=b"junk", version=4)
    assert refused("nobody", good) == "HotKeyNotRegisteredInSubNet"
    assert refused(VALIDATOR, msgspec.structs.replace(good, version=3)) == "IncorrectCommitRevealVersion"
    assert refused(VALIDATOR, msgspec.structs.replace(good, mechanism=2)) == "MechanismDoesNotExist"
    for _ in range(MAX_UNREVEALED_COMMITS):
        send(state, VALIDATOR, good)
    assert refused(VALIDATOR, good) == "TooManyUnrevealedCommits"
    opens = commit(state, MINER, {4: 1})  # no permit: taken, and dropped when it opens, as on the runtime
    advance(state, opens)
    assert all(slot.weights[0] is None for slot in state.subnets[1].slots)
    assert state.subnets[1].commits == []
    state = start()
    with pytest.raises(ChainRefused) as caught:
        send(state, VALIDATOR, good)
    assert caught.value.code == "CommitRevealDisabled"


def test_seals_open_only_with_the_key_and_only_whole():
    weights = SealedWeights(hotkey=VALIDATOR, uids=(1,), values=(2,), version_key=3)
    sealed = seal(weights, public_key(SECRET))
    assert unseal(sealed, SECRET) == weights
    assert unseal(sealed, bytes(32)) is None
    assert seal(weights, public_key(SECRET)) != sealed
    for broken in (b"", sealed[:31], sealed[:-1], sealed[:40] + b"\0" + sealed[41:]):
        assert unseal(broken, SECRET) is None
    with pytest.raises(InputError):
        seal(weights, b"short")


# ---- for any history

steps = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(1, 60)),
        st.tuples(st.just("weights"), st.sampled_from([VALIDATOR, RIVAL]), st.dictionaries(
            st.integers(0, 4), st.integers(1, 65535), min_size=1, max_size=5)),
        st.tuples(st.just("commit"), st.sampled_from([VALIDATOR, RIVAL]), st.integers(3, 4)),
        st.tuples(st.just("register"), st.integers(0, 5)),
        st.tuples(st.just("stake"), st.sampled_from([VALIDATOR, RIVAL, MINER]), st.integers(1, 2000)),
    ),
    max_size=12,
)  # fmt: skip
COLDKEYS = {VALIDATOR: "c1", RIVAL: "c2", MINER: "c3"}


def play(state: ChainState, story: list[tuple[object, ...]], pace: int) -> None:
    """Waits pass in strides of ``pace`` blocks."""
    for step in story:
        try:
            match step:
                case ("wait", int(blocks)):
                    end = state.block + blocks
                    while state.block < end:
                        advance(state, min(end, state.block + pace))
                case ("weights", str(who), dict(chosen)):
                    set_weights(state, who, chosen)
                case ("commit", str(who), int(target)):
                    content = SealedWeights(hotkey=who, uids=(target,), values=(1,), version_key=0)
                    blob = msgspec.msgpack.encode(content)
                    send(state, who, CommitWeights(netuid=1, mechanism=0, commit=blob, version=4))
                case ("register", int(number)):
                    send(state, "c5", BurnedRegister(netuid=1, hotkey=f"new{number}"))
                case ("stake", str(who), int(amount)):
                    send(state, COLDKEYS[who], AddStake(netuid=1, hotkey=who, amount=amount * 10**9))
                case _:
                    raise AssertionError(step)
        except ChainRefused:
            continue


@settings(max_examples=60, deadline=None)
@given(steps, st.booleans(), st.sampled_from([20, 5000]), st.booleans())
def test_all_of_the_emission_is_accounted_for(story, yuma3: bool, cutoff: int, sealed: bool):
    state = start(max_uids=7, immunity_period=20, yuma3=yuma3, activity_cutoff=cutoff, commit_reveal=sealed)
    play(state, story, pace=10_000)
    subnet = state.subnets[1]
    assert subnet.ledger.emitted == subnet.last_epoch * 10**9
    assert accounted(state)
    assert subnet.ledger.pending >= 0
    assert all(amount >= 0 for amount in subnet.ledger.earned.values())
    assert sum(slot.incentive for slot in subnet.slots) == pytest.approx(1.0) or not any(
        slot.incentive for slot in subnet.slots
    )


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(1, 13), st.booleans(), st.sampled_from([20, 35, 5000]), st.booleans())
def test_a_gap_is_what_many_short_ones_are(story, pace: int, yuma3: bool, cutoff: int, sealed: bool):
    """Epochs that are only counted come to what computing each would have."""
    at_once, slowly = (
        start(max_uids=7, immunity_period=20, yuma3=yuma3, activity_cutoff=cutoff, commit_reveal=sealed)
        for _ in range(2)
    )
    play(at_once, [*story, ("wait", 700)], pace=10_000)
    play(slowly, [*story, ("wait", 700)], pace=pace)
    assert msgspec.msgpack.encode(at_once) == msgspec.msgpack.encode(slowly)
