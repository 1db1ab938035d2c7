"""How the local chain's blocks pass: blocks are closed, and each tempo weights are revealed, consensus is run, all is paid.

The consensus is :mod:`subnet.chain.yuma`, the payment :mod:`subnet.chain.local_pay`. A long gap gives what many short
ones do: epochs that would only repeat the one before are counted, not computed.
"""

from __future__ import annotations

import msgspec
import numpy as np

from subnet.chain.base import upscale_u16
from subnet.chain.genesis import RAO_PER_TAO, SubnetGenesis
from subnet.chain.local_pay import Payment, pay, repeat_payment
from subnet.chain.local_state import ChainState, StoredWeights, Subnet, empty_block_hash, full_block_hash
from subnet.chain.sealed import unseal
from subnet.chain.yuma import YumaEpoch, YumaRules, YumaState, run_epoch

U16_MAX = 65_535


def last_epoch_at_or_before(rules: SubnetGenesis, block: int) -> int:
    """Newest block in which the subnet settles: where ``(block + netuid + 1) % (tempo + 1) == 0``, or block 0."""
    return max(0, block - (block + rules.netuid + 1) % (rules.tempo + 1))


def next_epoch_after(rules: SubnetGenesis, block: int) -> int:
    period = rules.tempo + 1
    return block + period - (block + rules.netuid + 1) % period


def current_window(rules: SubnetGenesis, block: int) -> tuple[int, int]:
    """The tempo that ``block`` lies in, and the blocks left until the next."""
    period = rules.tempo + 1
    position = block + rules.netuid + 1
    return position // period, period - position % period


def first_block_of_window(rules: SubnetGenesis, window: int) -> int:
    return window * (rules.tempo + 1) - rules.netuid - 1


def advance(state: ChainState, block: int) -> bytes | None:
    """Close the block being built and let blocks pass until ``block`` is being built.

    Returns the hash of the block that was closed when it holds an extrinsic.
    """
    if block <= state.block:
        return None
    closed = None
    if state.pending:
        previous = empty_block_hash(state.anchor_hash, state.block - 1)
        if state.anchor_block == state.block - 1:
            previous = state.anchor_hash
        closed = full_block_hash(previous, state.block, state.pending)
        state.anchor_block, state.anchor_hash, state.pending = state.block, closed, []
    for subnet in state.subnets.values():
        subnet.registrations_this_block = 0
        _pass_epochs(state, subnet, state.block, block)
    state.block = block
    return closed


def _pass_epochs(state: ChainState, subnet: Subnet, after: int, until: int) -> None:
    period = subnet.rules.tempo + 1
    due = next_epoch_after(subnet.rules, after)
    while due <= until:
        newest_registration = max((slot.registered_at for slot in subnet.slots), default=0)
        settled_before, before = subnet.last_epoch, _what_repeats(subnet)
        _reveal(state, subnet, due)
        payment = settle(state, subnet, due)
        due += period
        if before == _what_repeats(subnet) and newest_registration < settled_before and not subnet.commits:
            alike = max(0, min(until, _active_until(subnet, due - period)) - due + period) // period
            repeat_payment(subnet, payment, alike)
            subnet.last_epoch += alike * period
            due += alike * period


def _what_repeats(subnet: Subnet) -> bytes:
    """All that an epoch changes, but for sums and block numbers."""
    shown = [
        (s.permit, s.incentive, s.dividends, s.consensus, s.validator_trust, s.emission, s.bonds) for s in subnet.slots
    ]
    return msgspec.msgpack.encode((shown, subnet.ledger.pending))


def _active_until(subnet: Subnet, block: int) -> int:
    """Last block at which all who are active now still are, if nobody sets weights."""
    cutoff = subnet.rules.activity_cutoff
    ends = [update + cutoff for slot in subnet.slots for update in slot.last_updates if update + cutoff >= block]
    return min(ends, default=2**62)


def _reveal(state: ChainState, subnet: Subnet, block: int) -> None:
    """Weights whose time has come are opened and take effect; their block is that of the commit, as on the runtime."""
    window, _ = current_window(subnet.rules, block)
    ripe = window - subnet.rules.reveal_period
    due = [commit for commit in subnet.commits if commit.window <= ripe]
    subnet.commits = [commit for commit in subnet.commits if commit.window > ripe]
    for commit in due:
        opened, uid = unseal(commit.commit, state.seal_secret), subnet.uid_of(commit.hotkey)
        if opened is None or uid is None or opened.hotkey != commit.hotkey or not _fits(subnet, uid, opened.uids):
            continue
        if len(opened.uids) != len(opened.values) or opened.version_key < subnet.rules.weights_version_key:
            continue
        values = upscale_u16(opened.values)
        subnet.slots[uid].weights[commit.mechanism] = StoredWeights(uids=opened.uids, values=values)


def _fits(subnet: Subnet, uid: int, uids: tuple[int, ...]) -> bool:
    """What setting them in the open would have asked for; a commit that fails this is dropped in silence."""
    rules, slot = subnet.rules, subnet.slots[uid]
    itself = uids == (uid,)
    enough = len(uids) >= min(rules.min_allowed_weights, len(subnet.slots)) or itself
    allowed = slot.permit or slot.hotkey == rules.owner_hotkey or itself
    return enough and allowed and len(set(uids)) == len(uids) and all(target < len(subnet.slots) for target in uids)


def settle(state: ChainState, subnet: Subnet, block: int) -> Payment:
    """What happens once per tempo: incentives, dividends and bonds from the permit holders so far, then new permits."""
    rules = yuma_rules(subnet.rules, state.genesis.stake_threshold)
    epochs = [run_epoch(yuma_state(subnet, mechanism, block), rules) for mechanism in range(subnet.rules.mechanisms)]
    main = epochs[0]
    for uid, slot in enumerate(subnet.slots):
        slot.permit = bool(main.permit_N[uid])
        slot.incentive = float(main.incentive_N[uid])
        slot.consensus = float(main.consensus_N[uid])
        slot.dividends = float(np.mean([epoch.dividends_N[uid] for epoch in epochs]))
        slot.validator_trust = 0.0
    for mechanism, epoch in enumerate(epochs):
        _store_bonds(subnet, mechanism, epoch)
    for row, uid in enumerate(main.rows_V):
        subnet.slots[int(uid)].validator_trust = float(main.trust_V[row])
    payment = pay(subnet, epochs, block - subnet.last_epoch)
    subnet.last_epoch = block
    return payment


def yuma_rules(rules: SubnetGenesis, stake_threshold: float) -> YumaRules:
    return YumaRules(
        kappa=rules.kappa,
        bonds_penalty=rules.bonds_penalty,
        bonds_moving_average=rules.bonds_moving_average,
        yuma3=rules.yuma3,
        liquid_alpha=rules.liquid_alpha,
        max_validators=rules.max_validators,
        stake_threshold=stake_threshold,
        activity_cutoff=rules.activity_cutoff,
        owner_permit=rules.owner_permit,
    )


def _rows(subnet: Subnet) -> list[int]:
    rules = subnet.rules
    return [
        uid
        for uid, slot in enumerate(subnet.slots)
        if slot.permit or (rules.owner_permit and slot.hotkey == rules.owner_hotkey)
    ]


def yuma_state(subnet: Subnet, mechanism: int, block: int) -> YumaState:
    slots, rows = subnet.slots, _rows(subnet)
    weights_VN = np.zeros((len(rows), len(slots)))
    bonds_VN = np.zeros((len(rows), len(slots)))
    for row, uid in enumerate(rows):
        stored = slots[uid].weights[mechanism]
        if stored is not None:
            weights_VN[row, list(stored.uids)] = stored.values
        for target, value in slots[uid].bonds[mechanism].items():
            bonds_VN[row, target] = value / U16_MAX
    return YumaState(
        block=block,
        last_epoch=subnet.last_epoch,
        stake_N=np.array([subnet.stake_of(slot.hotkey) / RAO_PER_TAO for slot in slots], dtype=np.float64),
        permit_N=np.array([slot.permit for slot in slots], dtype=np.bool_),
        registered_N=np.array([slot.registered_at for slot in slots], dtype=np.int64),
        last_update_N=np.array([slot.last_updates[mechanism] for slot in slots], dtype=np.int64),
        rows_V=np.array(rows, dtype=np.int64),
        weights_VN=weights_VN,
        bonds_VN=bonds_VN,
        owner_uid=subnet.uid_of(subnet.rules.owner_hotkey) if subnet.rules.owner_hotkey else None,
        commit_block_N=_commit_blocks(subnet, mechanism),
    )


def _commit_blocks(subnet: Subnet, mechanism: int) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    if not subnet.rules.commit_reveal:
        return None
    first = {slot.hotkey: 2**62 for slot in subnet.slots}
    for commit in subnet.commits:
        if commit.mechanism == mechanism and commit.hotkey in first:
            first[commit.hotkey] = min(first[commit.hotkey], commit.block)
    return np.array([first[slot.hotkey] for slot in subnet.slots], dtype=np.int64)


def _store_bonds(subnet: Subnet, mechanism: int, epoch: YumaEpoch) -> None:
    for slot in subnet.slots:
        slot.bonds[mechanism] = {}
    stored_VN = np.floor(epoch.bonds_VN * U16_MAX + 1e-6).astype(np.int64)
    for row, target in zip(*np.nonzero(stored_VN), strict=True):
        uid = int(epoch.rows_V[row])
        subnet.slots[uid].bonds[mechanism][int(target)] = int(stored_VN[row, target])
