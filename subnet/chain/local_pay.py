"""Who gets a tempo's emission on the local chain: the owner's cut, then half to miners, half to validators.

What miners' weight gives to the owner, or to another hotkey of the owner's coldkey, is burned. Where nobody has an
incentive, validators get the miners' half too; where nobody validates, by stake; where nobody has stake, it waits.
All in whole rao; what rounding leaves waits too. So always: emitted = owner + burned + earned + pending.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from subnet.chain.genesis import to_rao
from subnet.chain.local_state import Subnet
from subnet.chain.yuma import YumaEpoch


class Payment(msgspec.Struct, frozen=True):
    """One tempo's, in rao."""

    emitted: int
    owner: int
    burned: int
    earned: dict[str, int]


def pay(subnet: Subnet, epochs: Sequence[YumaEpoch], blocks: int) -> Payment:
    """Pay for ``blocks`` blocks by what the mechanisms' epochs came to, in equal parts."""
    rules, ledger = subnet.rules, subnet.ledger
    emitted = to_rao(rules.emission_per_block) * blocks
    owner = int(emitted * rules.owner_cut) if rules.owner_hotkey else 0
    rest = emitted - owner + ledger.pending
    earned: dict[str, int] = {}
    burned = 0
    for part in _parts(rest, len(epochs)):
        epoch = epochs[part[0]]
        burned += _pay_mechanism(subnet, epoch, part[1], earned)
    paid = Payment(emitted=emitted, owner=owner, burned=burned, earned=earned)
    for slot in subnet.slots:
        slot.emission = earned.get(slot.hotkey, 0)
    ledger.pending = rest - burned - sum(earned.values())
    _book(subnet, paid, 1)
    return paid


def repeat_payment(subnet: Subnet, payment: Payment, times: int) -> None:
    """The same again; only where an epoch changed nothing, ``pending`` included."""
    _book(subnet, payment, times)


def _book(subnet: Subnet, payment: Payment, times: int) -> None:
    ledger = subnet.ledger
    ledger.emitted += payment.emitted * times
    ledger.owner += payment.owner * times
    ledger.burned += payment.burned * times
    for hotkey, amount in payment.earned.items():
        ledger.earned[hotkey] = ledger.earned.get(hotkey, 0) + amount * times


def _parts(whole: int, count: int) -> list[tuple[int, int]]:
    return [(index, whole // count + (1 if index < whole % count else 0)) for index in range(count)]


def _pay_mechanism(subnet: Subnet, epoch: YumaEpoch, amount: int, earned: dict[str, int]) -> int:
    """Adds to ``earned``; returns what was burned."""
    miners = amount // 2 if epoch.incentive_N.any() else 0
    burned = 0
    for uid, share in _shares(epoch.incentive_N, miners):
        if _is_the_owners(subnet, uid):
            burned += share
        else:
            _add(earned, subnet.slots[uid].hotkey, share)
    for candidates_N in (epoch.dividends_N, epoch.active_stake_N, epoch.stake_share_N):
        if candidates_N.any():
            for uid, share in _shares(candidates_N, amount - miners):
                _add(earned, subnet.slots[uid].hotkey, share)
            break
    return burned


def _add(earned: dict[str, int], hotkey: str, amount: int) -> None:
    earned[hotkey] = earned.get(hotkey, 0) + amount


def _shares(shares_N: NDArray[np.float64], amount: int) -> list[tuple[int, int]]:
    """Whole rao by uid, rounded down."""
    return [(int(uid), int(float(shares_N[uid]) * amount)) for uid in np.nonzero(shares_N)[0]]


def _is_the_owners(subnet: Subnet, uid: int) -> bool:
    slot, rules = subnet.slots[uid], subnet.rules
    return bool(rules.owner_hotkey) and (slot.hotkey == rules.owner_hotkey or slot.coldkey == rules.owner_coldkey)
