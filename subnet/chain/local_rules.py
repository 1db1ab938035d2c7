"""The local chain's rules: what each call does or why it is refused, in the order in which the runtime checks.

Pure: state in, state changed or :class:`ChainRefused` raised with the state untouched; no clock, no disk. The same
log of extrinsics always gives the same state.
"""

from __future__ import annotations

import ipaddress

from subnet.chain.base import Axon, upscale_u16
from subnet.chain.extrinsics import (
    AddStake,
    BurnedRegister,
    CommitWeights,
    Extrinsic,
    Faucet,
    Outcome,
    ServeAxon,
    SetCommitment,
    SetWeights,
)
from subnet.chain.genesis import RAO_PER_TAO, SubnetGenesis, to_rao
from subnet.chain.local_epochs import current_window, first_block_of_window
from subnet.chain.local_state import ChainState, CommitmentSlot, StoredWeights, Subnet, WeightCommit, new_slot
from subnet.chain.refusals import ChainRefused

COMMITMENT_MAX_BYTES = 512
COMMITMENT_MIN_CHARGE_BYTES = 100
COMMITMENT_WINDOW_BYTES = 3100
COMMIT_MAX_BYTES = 5000
COMMIT_VERSION = 4
MAX_UNREVEALED_COMMITS = 10


def admit(state: ChainState, extrinsic: Extrinsic) -> None:
    """What the transaction pool checks once the signature is known to be good. A used nonce never works again."""
    if extrinsic.genesis != state.genesis_hash:
        raise ChainRefused("AncientBirthBlock")
    expected = state.nonces.get(extrinsic.signer, 0)
    if extrinsic.nonce < expected:
        raise ChainRefused("Stale", f"nonce {extrinsic.nonce} was used; the next is {expected}")
    if extrinsic.nonce > expected:
        raise ChainRefused("Future", f"nonce {extrinsic.nonce} is ahead; the next is {expected}")


def apply_extrinsic(state: ChainState, extrinsic: Extrinsic, digest: bytes) -> Outcome:
    """Put an admitted extrinsic into the block being built. It costs its nonce even when its call is refused."""
    state.nonces[extrinsic.signer] = extrinsic.nonce + 1
    state.pending.append(digest)
    signer, call = extrinsic.signer, extrinsic.call
    match call:
        case SetWeights():
            return set_weights(state, signer, call)
        case CommitWeights():
            return commit_weights(state, signer, call)
        case BurnedRegister():
            return burned_register(state, signer, call)
        case AddStake():
            return add_stake(state, signer, call)
        case Faucet():
            return faucet(state, signer)
        case ServeAxon():
            return serve_axon(state, signer, call)
        case SetCommitment():
            return set_commitment(state, signer, call)


def _blocks_left(state: ChainState, blocks: int) -> float:
    return blocks * state.genesis.block_time_s


def _subnet(state: ChainState, netuid: int) -> Subnet:
    subnet = state.subnets.get(netuid)
    if subnet is None:
        raise ChainRefused("SubnetNotExists", f"there is no subnet {netuid}")
    return subnet


# ---- weights


def set_weights(state: ChainState, hotkey: str, call: SetWeights) -> Outcome:
    subnet, uid = _check_weights(state, hotkey, call)
    slot = subnet.slots[uid]
    values = upscale_u16(call.values)
    slot.weights[call.mechanism] = StoredWeights(uids=call.uids, values=values)
    slot.last_updates[call.mechanism] = state.block
    return Outcome(block=state.block, uid=uid, uids=call.uids, values=values)


def commit_weights(state: ChainState, hotkey: str, call: CommitWeights) -> Outcome:
    """Like the runtime this asks for stake and pace but not for a permit: that is asked at the reveal."""
    subnet = _subnet(state, call.netuid)
    rules = subnet.rules
    if call.mechanism >= rules.mechanisms:
        raise ChainRefused("MechanismDoesNotExist", f"mechanism {call.mechanism} of {rules.mechanisms}")
    if not rules.commit_reveal:
        raise ChainRefused("CommitRevealDisabled")
    if call.version != COMMIT_VERSION:
        raise ChainRefused(
            "IncorrectCommitRevealVersion", f"version {call.version}, the chain reveals {COMMIT_VERSION}"
        )
    uid = subnet.uid_of(hotkey)
    if uid is None:
        raise ChainRefused("HotKeyNotRegisteredInSubNet", f"{hotkey} isn't registered on subnet {call.netuid}")
    _check_stake(state, subnet, uid)
    _check_pace(state, subnet, uid, call.mechanism, "CommittingWeightsTooFast")
    waiting = [c for c in subnet.commits if c.hotkey == hotkey and c.mechanism == call.mechanism]
    if len(waiting) >= MAX_UNREVEALED_COMMITS or len(call.commit) > COMMIT_MAX_BYTES:
        raise ChainRefused("TooManyUnrevealedCommits", f"{len(waiting)} commits wait for their reveal")
    window, _ = current_window(rules, state.block)
    subnet.commits.append(
        WeightCommit(hotkey=hotkey, mechanism=call.mechanism, block=state.block, window=window, commit=call.commit)
    )
    subnet.slots[uid].last_updates[call.mechanism] = state.block
    reveal_block = first_block_of_window(rules, window + rules.reveal_period)
    return Outcome(block=state.block, uid=uid, reveal_block=reveal_block)


def _check_weights(state: ChainState, hotkey: str, call: SetWeights) -> tuple[Subnet, int]:
    """The runtime's order: a call with several faults is refused for the first."""
    known = state.subnets.get(call.netuid)
    if known is not None and known.rules.commit_reveal:
        raise ChainRefused("CommitRevealEnabled")
    if call.netuid == 0:
        raise ChainRefused("CanNotSetRootNetworkWeights")
    if len(call.uids) != len(call.values):
        raise ChainRefused("WeightVecNotEqualSize", f"{len(call.uids)} uids, {len(call.values)} values")
    subnet = _subnet(state, call.netuid)
    rules, n = subnet.rules, len(subnet.slots)
    if call.mechanism >= rules.mechanisms:
        raise ChainRefused("MechanismDoesNotExist", f"mechanism {call.mechanism} of {rules.mechanisms}")
    if len(call.uids) > n:
        raise ChainRefused("UidsLengthExceedUidsInSubNet", f"{len(call.uids)} weights for {n} neurons")
    uid = subnet.uid_of(hotkey)
    if uid is None:
        raise ChainRefused("HotKeyNotRegisteredInSubNet", f"{hotkey} isn't registered on subnet {call.netuid}")
    _check_standing(state, subnet, uid, call)
    _check_targets(rules, n, uid, call)
    return subnet, uid


def _check_standing(state: ChainState, subnet: Subnet, uid: int, call: SetWeights) -> None:
    """Whether this neuron may set weights now: stake, version, pace, permit."""
    rules, hotkey = subnet.rules, subnet.slots[uid].hotkey
    _check_stake(state, subnet, uid)
    if rules.weights_version_key and call.version_key < rules.weights_version_key:
        reason = f"version key {call.version_key}, the subnet wants {rules.weights_version_key}"
        raise ChainRefused("IncorrectWeightVersionKey", reason)
    _check_pace(state, subnet, uid, call.mechanism, "SettingWeightsTooFast")
    if not (subnet.slots[uid].permit or hotkey == rules.owner_hotkey or call.uids == (uid,)):
        raise ChainRefused("NeuronNoValidatorPermit", f"uid {uid} holds no validator permit")


def _check_stake(state: ChainState, subnet: Subnet, uid: int) -> None:
    hotkey = subnet.slots[uid].hotkey
    stake, threshold = subnet.stake_of(hotkey), to_rao(state.genesis.stake_threshold)
    if stake < threshold and hotkey != subnet.rules.owner_hotkey:
        need = f"{stake / RAO_PER_TAO:g} TAO staked, {threshold / RAO_PER_TAO:g} needed"
        raise ChainRefused("NotEnoughStakeToSetWeights", need)


def _check_pace(state: ChainState, subnet: Subnet, uid: int, mechanism: int, code: str) -> None:
    last, limit = subnet.slots[uid].last_updates[mechanism], subnet.rules.weights_rate_limit
    left = limit - (state.block - last)
    if last != 0 and left > 0:
        reason = f"set at block {last}, this is {state.block}, the limit is {limit} blocks"
        raise ChainRefused(code, reason, retry_after_s=_blocks_left(state, left))


def _check_targets(rules: SubnetGenesis, n: int, uid: int, call: SetWeights) -> None:
    if len(set(call.uids)) != len(call.uids):
        raise ChainRefused("DuplicateUids")
    unknown = [target for target in call.uids if target >= n]
    if unknown:
        raise ChainRefused("UidVecContainInvalidOne", f"uids {unknown[:5]} don't exist; there are {n}")
    needed = min(rules.min_allowed_weights, n)
    if len(call.uids) < needed and call.uids != (uid,):
        raise ChainRefused("WeightVecLengthIsLow", f"{len(call.uids)} weights, at least {needed} needed")


# ---- registration and stake


def burned_register(state: ChainState, coldkey: str, call: BurnedRegister) -> Outcome:
    if call.netuid == 0:
        raise ChainRefused("RegistrationNotPermittedOnRootSubnet")
    subnet = _subnet(state, call.netuid)
    rules = subnet.rules
    if not rules.registration_allowed:
        raise ChainRefused("SubNetRegistrationDisabled")
    if subnet.registrations_this_block >= rules.max_registrations_per_block:
        raise ChainRefused("TooManyRegistrationsThisBlock", retry_after_s=_blocks_left(state, 1))
    uid = subnet.uid_of(call.hotkey)
    if uid is not None:
        raise ChainRefused("HotKeyAlreadyRegisteredInSubNet", f"{call.hotkey} is uid {uid} already")
    cost, balance = to_rao(rules.registration_cost), state.balances.get(coldkey, 0)
    if balance < cost:
        have = f"{balance / RAO_PER_TAO:g} TAO on the coldkey, {cost / RAO_PER_TAO:g} needed"
        raise ChainRefused("NotEnoughBalanceToStake", have)
    if state.owners.get(call.hotkey, coldkey) != coldkey:
        raise ChainRefused("NonAssociatedColdKey", f"{call.hotkey} belongs to another coldkey")
    slot = new_slot(rules, call.hotkey, coldkey, state.block)
    if len(subnet.slots) < rules.max_uids:
        uid = len(subnet.slots)
        subnet.slots.append(slot)
    else:
        uid = _slot_to_prune(subnet, state.block)
        if uid is None:
            raise ChainRefused("NoNeuronIdAvailable")
        _forget(subnet, uid)
        subnet.slots[uid] = slot
    state.balances[coldkey] = balance - cost
    state.owners[call.hotkey] = coldkey
    subnet.registrations_this_block += 1
    return Outcome(block=state.block, uid=uid)


def _forget(subnet: Subnet, uid: int) -> None:
    """What a pruned neuron leaves behind goes with it: its commitment, its commits, and bonds to it."""
    hotkey = subnet.slots[uid].hotkey
    subnet.commitments.pop(hotkey, None)
    subnet.commits = [commit for commit in subnet.commits if commit.hotkey != hotkey]
    for slot in subnet.slots:
        for bonds in slot.bonds:
            bonds.pop(uid, None)


def _slot_to_prune(subnet: Subnet, block: int) -> int | None:
    """Who earned least in the last tempo, then the oldest, then the lowest uid; those past immunity first, the owner never.

    As in the runtime, newcomers are replaced only when no more than ``min_non_immune_uids`` are past immunity.
    """
    rules = subnet.rules
    candidates = [
        (s.emission, s.registered_at, u) for u, s in enumerate(subnet.slots) if s.hotkey != rules.owner_hotkey
    ]
    free = [c for c in candidates if block - c[1] >= rules.immunity_period]
    immune = [c for c in candidates if block - c[1] < rules.immunity_period]
    if len(free) > rules.min_non_immune_uids:
        return min(free)[2]
    return min(immune)[2] if immune else None


def add_stake(state: ChainState, coldkey: str, call: AddStake) -> Outcome:
    subnet = _subnet(state, call.netuid)
    if call.hotkey not in state.owners:
        raise ChainRefused("HotKeyAccountNotExists", f"no hotkey {call.hotkey} was ever registered")
    if call.amount == 0:
        raise ChainRefused("AmountTooLow")
    balance = state.balances.get(coldkey, 0)
    if balance < call.amount:
        have = f"{balance / RAO_PER_TAO:g} TAO on the coldkey, {call.amount / RAO_PER_TAO:g} asked for"
        raise ChainRefused("NotEnoughBalanceToStake", have)
    state.balances[coldkey] = balance - call.amount
    stakes = subnet.stakes.setdefault(call.hotkey, {})
    stakes[coldkey] = stakes.get(coldkey, 0) + call.amount
    return Outcome(block=state.block)


def faucet(state: ChainState, coldkey: str) -> Outcome:
    amount = to_rao(state.genesis.faucet)
    if amount == 0 or coldkey in state.faucet_given:
        raise ChainRefused("FaucetDisabled")
    state.faucet_given[coldkey] = True
    state.balances[coldkey] = state.balances.get(coldkey, 0) + amount
    return Outcome(block=state.block)


# ---- addresses and commitments


def serve_axon(state: ChainState, hotkey: str, call: ServeAxon) -> Outcome:
    subnet = _subnet(state, call.netuid)
    uid = subnet.uid_of(hotkey)
    if uid is None:
        raise ChainRefused("HotKeyNotRegisteredInNetwork", f"{hotkey} isn't registered on subnet {call.netuid}")
    try:
        address = ipaddress.ip_address(call.host)
    except ValueError:
        raise ChainRefused("InvalidIpType", f"{call.host!r} isn't an IP address") from None
    loopback = address.is_loopback and not state.genesis.allow_loopback_addresses
    if loopback or address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise ChainRefused("InvalidIpAddress", f"An invalid IP address: {address}")
    slot, limit = subnet.slots[uid], subnet.rules.serving_rate_limit
    left = limit - (state.block - slot.axon_block)
    if slot.axon is not None and left > 0:
        reason = f"served at block {slot.axon_block}, this is {state.block}, the limit is {limit} blocks"
        raise ChainRefused("ServingRateLimitExceeded", reason, retry_after_s=_blocks_left(state, left))
    if not 1 <= call.port <= 65_535:
        raise ChainRefused("InvalidPort", f"{call.port} isn't a port")
    slot.axon = Axon(host=str(address), port=call.port)
    slot.axon_block = state.block
    return Outcome(block=state.block, uid=uid)


def set_commitment(state: ChainState, hotkey: str, call: SetCommitment) -> Outcome:
    subnet = _subnet(state, call.netuid)
    if subnet.uid_of(hotkey) is None:
        raise ChainRefused("AccountNotAllowedCommit", f"{hotkey} isn't registered on subnet {call.netuid}")
    if not 1 <= len(call.data) <= COMMITMENT_MAX_BYTES:
        raise ChainRefused("TooManyFieldsInCommitmentInfo", f"{len(call.data)} bytes; 1 to {COMMITMENT_MAX_BYTES} fit")
    window, blocks_left = current_window(subnet.rules, state.block)
    before = subnet.commitments.get(hotkey)
    used = before.used_bytes if before is not None and before.window == window else 0
    used += max(COMMITMENT_MIN_CHARGE_BYTES, len(call.data))
    if used > COMMITMENT_WINDOW_BYTES:
        raise ChainRefused("SpaceLimitExceeded", retry_after_s=_blocks_left(state, blocks_left))
    subnet.commitments[hotkey] = CommitmentSlot(block=state.block, data=call.data, window=window, used_bytes=used)
    return Outcome(block=state.block)
