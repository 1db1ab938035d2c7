"""How the local chain's blocks pass: blocks are closed, and each tempo permits and incentives are settled.

Incentives are for now the stake-weighted mean of the validators' weight rows, each scaled to sum 1:
I_j = sum_i(stake_i · w_ij) / sum over j. There is no clipping to consensus, no bonds and no emission as in the
runtime's Yuma; as there, a weight given before its target registered doesn't count, nor one given to oneself (but
for the owner), nor the row of a validator without permit or silent for longer than ``activity_cutoff``.
"""

from __future__ import annotations

from subnet.chain.genesis import SubnetGenesis, to_rao
from subnet.chain.local_state import ChainState, Subnet, empty_block_hash, full_block_hash


def last_epoch_at_or_before(rules: SubnetGenesis, block: int) -> int:
    """Newest block in which the subnet settles: where ``(block + netuid + 1) % (tempo + 1) == 0``, or block 0."""
    return max(0, block - (block + rules.netuid + 1) % (rules.tempo + 1))


def current_window(rules: SubnetGenesis, block: int) -> tuple[int, int]:
    """The tempo that ``block`` lies in, and the blocks left until the next."""
    period = rules.tempo + 1
    position = block + rules.netuid + 1
    return position // period, period - position % period


def advance(state: ChainState, block: int) -> bytes | None:
    """Close the block being built and let blocks pass until ``block`` is being built.

    Returns the hash of the block that was closed when it holds an extrinsic. However long the gap, the newest two
    settlements in it are enough: the first may change permits, the second what they weigh, a third nothing.
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
        epoch = last_epoch_at_or_before(subnet.rules, block)
        for due in (epoch - subnet.rules.tempo - 1, epoch):
            if due > state.block:
                settle(state, subnet, due)
    state.block = block
    return closed


def settle(state: ChainState, subnet: Subnet, block: int) -> None:
    """What happens once per tempo: incentives from the weights of the permit holders so far, then new permits."""
    incentives = _incentives(subnet, block)
    permits = _permits(subnet, to_rao(state.genesis.stake_threshold))
    for uid, slot in enumerate(subnet.slots):
        slot.incentive = incentives[uid]
        slot.permit = uid in permits


def _permits(subnet: Subnet, threshold: int) -> set[int]:
    """The ``max_validators`` largest stakes, above zero and not below the threshold; equal stakes by uid."""
    staked = [(-subnet.stake_of(slot.hotkey), uid) for uid, slot in enumerate(subnet.slots)]
    eligible = sorted(pair for pair in staked if pair[0] < 0 and -pair[0] >= threshold)
    return {uid for _, uid in eligible[: subnet.rules.max_validators]}


def _incentives(subnet: Subnet, block: int) -> list[float]:
    totals = [0.0] * len(subnet.slots)
    for uid, slot in enumerate(subnet.slots):
        row, last = slot.weights[0], slot.last_updates[0]
        stake = subnet.stake_of(slot.hotkey)
        if row is None or not slot.permit or stake == 0 or block - last > subnet.rules.activity_cutoff:
            continue
        is_owner = slot.hotkey == subnet.rules.owner_hotkey
        counted = [
            (target, value)
            for target, value in zip(row.uids, row.values, strict=True)
            if subnet.slots[target].registered_at < last and (target != uid or is_owner)
        ]
        row_sum = sum(value for _, value in counted)
        for target, value in counted:
            totals[target] += stake * (value / row_sum)
    whole = sum(totals)
    return [total / whole for total in totals] if whole > 0 else totals
