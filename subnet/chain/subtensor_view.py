"""From what a Subtensor node stores to this project's words: metagraph, hyperparameters, weights, commitments.

Pure. What isn't of the expected shape raises :class:`~subnet.chain.subtensor_link.RuntimeMismatch` naming the item: a
runtime that changed a type is said as such, not guessed at.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import cast

from subnet.chain.base import Axon, Commitment, Hyperparameters, Metagraph, Neuron, WeightsReceipt
from subnet.chain.genesis import RAO_PER_TAO
from subnet.chain.subtensor_link import SUBTENSOR, Item, RuntimeMismatch

MAX_SUBNETS = 4096
"""Weights of mechanism m lie under ``m * 4096 + netuid``."""
NOBODY = "5C4hrfjw9DjXZTzV3MwzrrAr9P1MJhSrvWGWqi1eSuyUpnhM"
"""The address of 32 zero bytes, which stands for nobody."""
U64_MAX = 2**64 - 1

HYPERPARAMETER_NAMES: tuple[str, ...] = (
    "Tempo",
    "ImmunityPeriod",
    "MaxAllowedUids",
    "MinAllowedWeights",
    "WeightsSetRateLimit",
    "WeightsVersionKey",
    "ServingRateLimit",
    "MaxAllowedValidators",
    "CommitRevealWeightsEnabled",
    "NetworkRegistrationAllowed",
    "Burn",
    "MechanismCountCurrent",
)
"""One storage item per subnet each."""
SUBNET_NAMES = ("SubnetOwnerHotkey", "Tempo", "ValidatorPermit", "LastUpdate", "Incentive", "Dividends", "Emission")


def storage_index(netuid: int, mechanism: int) -> int:
    return mechanism * MAX_SUBNETS + netuid


def per_subnet(names: Sequence[str], netuid: int) -> list[Item]:
    return [Item(SUBTENSOR, name, (netuid,)) for name in names]


def whole(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RuntimeMismatch(f"{what} is {value!r}, not a whole number")
    return value


def flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise RuntimeMismatch(f"{what} is {value!r}, neither true nor false")
    return value


def address(value: object, what: str) -> str:
    """An account's address; empty for nobody."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RuntimeMismatch(f"{what} is {value!r}, not an address")
    return "" if value == NOBODY else value


def row(value: object, what: str) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise RuntimeMismatch(f"{what} is {value!r}, not a list")
    return cast("Sequence[object]", value)


def fields(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise RuntimeMismatch(f"{what} is {value!r}, not a struct")
    return cast("Mapping[str, object]", value)


def view_hyperparameters(values: Sequence[object], stake_threshold: object) -> Hyperparameters:
    """``values`` of :data:`HYPERPARAMETER_NAMES`, in that order."""
    named = dict(zip(HYPERPARAMETER_NAMES, values, strict=True))

    def number(name: str) -> int:
        return whole(named[name], name)

    return Hyperparameters(
        tempo=number("Tempo"),
        immunity_period=number("ImmunityPeriod"),
        max_uids=number("MaxAllowedUids"),
        min_allowed_weights=number("MinAllowedWeights"),
        weights_rate_limit=number("WeightsSetRateLimit"),
        weights_version_key=number("WeightsVersionKey"),
        serving_rate_limit=number("ServingRateLimit"),
        max_validators=number("MaxAllowedValidators"),
        commit_reveal=flag(named["CommitRevealWeightsEnabled"], "CommitRevealWeightsEnabled"),
        registration_allowed=flag(named["NetworkRegistrationAllowed"], "NetworkRegistrationAllowed"),
        registration_cost=number("Burn") / RAO_PER_TAO,
        stake_threshold=whole(stake_threshold, "StakeThreshold") / RAO_PER_TAO,
        mechanisms=number("MechanismCountCurrent"),
    )


def view_axon(info: object) -> Axon | None:
    """None where nothing is announced."""
    if info is None:
        return None
    shown = fields(info, "Axons")
    ip = whole(shown.get("ip"), "Axons.ip")
    if ip == 0:
        return None
    version = whole(shown.get("ip_type"), "Axons.ip_type")
    host = ipaddress.IPv6Address(ip) if version == 6 else ipaddress.IPv4Address(ip)
    return Axon(host=str(host), port=whole(shown.get("port"), "Axons.port"))


def view_neurons(
    columns: Sequence[object],
    hotkeys: Sequence[str],
    registered: Mapping[int, int],
    axons: Mapping[str, object],
    owners: Sequence[object],
    stakes: Sequence[float],
) -> tuple[Neuron, ...]:
    """``columns``: those of :data:`SUBNET_NAMES` from the permits on, a value per uid each; the rest in uid order or by key."""
    permits, updates, *paid = (row(column, "a column of the metagraph") for column in columns)
    incentives, dividends, emissions = (
        [whole(column[uid], name) if uid < len(column) else 0 for uid in range(len(hotkeys))]
        for column, name in zip(paid, SUBNET_NAMES[4:], strict=True)
    )
    return tuple(
        Neuron(
            uid=uid,
            hotkey=hotkey,
            coldkey=address(owners[uid], "Owner"),
            stake=stakes[uid],
            validator_permit=uid < len(permits) and flag(permits[uid], "ValidatorPermit"),
            last_update=whole(updates[uid], "LastUpdate") if uid < len(updates) else 0,
            registered_at_block=registered.get(uid, 0),
            axon=view_axon(axons.get(hotkey)),
            incentive=incentives[uid] / 65_535,
            dividends=dividends[uid] / 65_535,
            emission=emissions[uid] / RAO_PER_TAO,
        )
        for uid, hotkey in enumerate(hotkeys)
    )


def by_uid(pairs: Sequence[tuple[object, object]], what: str) -> list[str]:
    """Hotkeys in uid order; the uids must be 0, 1, 2, ..."""
    named = {whole(uid, what): address(hotkey, what) for uid, hotkey in pairs}
    if sorted(named) != list(range(len(named))):
        raise RuntimeMismatch(f"{what} has gaps: {len(named)} uids up to {max(named, default=0)}")
    return [named[uid] for uid in range(len(named))]


def total_stake(alpha: object, root: object, tao_weight: object) -> float:
    """Stake of a hotkey on a subnet: its alpha, and its root stake at the network's weight for it."""
    share = whole(tao_weight, "TaoWeight") / U64_MAX
    return (whole(alpha, "TotalHotkeyAlpha") + share * whole(root, "TotalHotkeyAlpha")) / RAO_PER_TAO


def view_metagraph(
    netuid: int, block: int, tempo: object, owner_hotkey: object, neurons: tuple[Neuron, ...]
) -> Metagraph:
    return Metagraph(
        netuid=netuid,
        block=block,
        tempo=whole(tempo, "Tempo"),
        owner_hotkey=address(owner_hotkey, "SubnetOwnerHotkey"),
        neurons=neurons,
    )


def view_weights(stored: object, last_updates: object, uid: int) -> WeightsReceipt | None:
    """None where the uid has set none."""
    pairs = [row(pair, "Weights") for pair in row(stored, "Weights")]
    updates = row(last_updates, "LastUpdate")
    if not pairs or uid >= len(updates):
        return None
    uids = tuple(whole(pair[0], "Weights") for pair in pairs)
    values = tuple(whole(pair[1], "Weights") for pair in pairs)
    return WeightsReceipt(block=whole(updates[uid], "LastUpdate"), uids=uids, values=values)


def view_commitment(registration: object) -> Commitment | None:
    """The raw bytes of a commitment, its fields one after another; None where it holds none (a hash, a sealed one)."""
    shown = fields(registration, "CommitmentOf")
    info = fields(shown.get("info"), "CommitmentOf.info")
    data = b"".join(_field_bytes(field) for field in row(info.get("fields"), "CommitmentOf.info.fields"))
    if not data:
        return None
    return Commitment(block=whole(shown.get("block"), "CommitmentOf.block"), data=data)


def _field_bytes(field: object) -> bytes:
    if isinstance(field, (list, tuple)):  # a one-tuple around the variant
        inner = cast("Sequence[object]", field)
        return b"".join(_field_bytes(part) for part in inner)
    if not isinstance(field, dict):
        return b""
    for name, value in cast("dict[str, object]", field).items():
        if name == "BigRaw" or name.startswith("Raw"):
            return _bytes(value, f"CommitmentOf {name}")
    return b""


def _bytes(value: object, what: str) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, str) and value.startswith("0x"):
        try:
            return bytes.fromhex(value[2:])
        except ValueError:
            return value.encode()
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (list, tuple)):
        return bytes(whole(part, what) for part in cast("Sequence[object]", value))
    raise RuntimeMismatch(f"{what} is {value!r}, not bytes")
