"""The local chain's state as a Subtensor runtime would store and report it, and its calls as the local chain's."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from typing import Any

import bittensor_core

from subnet.chain.extrinsics import BurnedRegister, Call, CommitWeights, ServeAxon, SetCommitment, SetWeights
from subnet.chain.local_epochs import current_window, last_epoch_at_or_before
from subnet.chain.local_state import ChainState, Slot, Subnet

NOBODY = "5C4hrfjw9DjXZTzV3MwzrrAr9P1MJhSrvWGWqi1eSuyUpnhM"
MAX_SUBNETS = 4096
GENESIS_MS = 1_700_000_000_000
Entry = tuple[str, str, tuple[Any, ...], Any]
"""Pallet, item, keys, value."""


def entries(state: ChainState) -> Iterator[Entry]:
    """All that the adapters read."""
    newest = state.block
    yield ("System", "Number", (), newest)
    yield ("Timestamp", "Now", (), GENESIS_MS + round(newest * state.genesis.block_time_s * 1000))
    yield ("SubtensorModule", "StakeThreshold", (), round(state.genesis.stake_threshold * 1e9))
    yield ("SubtensorModule", "TaoWeight", (), 0)
    yield ("SubtensorModule", "CommitRevealWeightsVersion", (), 4)
    for address in {*state.nonces, *state.balances}:
        account = {"free": state.balances.get(address, 0), "reserved": 0, "frozen": 0, "flags": 0}
        counts = {"consumers": 0, "providers": 1, "sufficients": 0}
        yield ("System", "Account", (address,), {"nonce": state.nonces.get(address, 0), **counts, "data": account})
    for hotkey, coldkey in state.owners.items():
        yield ("SubtensorModule", "Owner", (hotkey,), coldkey)
    for netuid, subnet in state.subnets.items():
        yield from _subnet(netuid, subnet, newest)


def _subnet(netuid: int, subnet: Subnet, block: int) -> Iterator[Entry]:
    rules, slots = subnet.rules, subnet.slots
    named: dict[str, Any] = {
        "NetworksAdded": True,
        "Tempo": rules.tempo,
        "ImmunityPeriod": rules.immunity_period,
        "MaxAllowedUids": rules.max_uids,
        "MinAllowedWeights": rules.min_allowed_weights,
        "WeightsSetRateLimit": rules.weights_rate_limit,
        "WeightsVersionKey": rules.weights_version_key,
        "ServingRateLimit": rules.serving_rate_limit,
        "MaxAllowedValidators": rules.max_validators,
        "CommitRevealWeightsEnabled": rules.commit_reveal,
        "RevealPeriodEpochs": rules.reveal_period,
        "NetworkRegistrationAllowed": rules.registration_allowed,
        "Burn": round(rules.registration_cost * 1e9),
        "MechanismCountCurrent": rules.mechanisms,
        "SubnetworkN": len(slots),
        "SubnetOwnerHotkey": rules.owner_hotkey or NOBODY,
        "SubnetOwner": rules.owner_coldkey or NOBODY,
        "ValidatorPermit": [slot.permit for slot in slots],
        "LastEpochBlock": last_epoch_at_or_before(rules, block),
        "PendingEpochAt": 0,
        "SubnetEpochIndex": current_window(rules, block)[0],
        "BlocksSinceLastStep": block - last_epoch_at_or_before(rules, block),
    }
    for name, value in named.items():
        yield ("SubtensorModule", name, (netuid,), value)
    yield ("SubtensorModule", "Dividends", (netuid,), [int(slot.dividends * 65_535) for slot in slots])
    yield ("SubtensorModule", "Emission", (netuid,), [slot.emission for slot in slots])
    for uid, slot in enumerate(slots):
        yield ("SubtensorModule", "Keys", (netuid, uid), slot.hotkey)
        yield ("SubtensorModule", "Uids", (netuid, slot.hotkey), uid)
        yield ("SubtensorModule", "BlockAtRegistration", (netuid, uid), slot.registered_at)
        yield ("SubtensorModule", "TotalHotkeyAlpha", (slot.hotkey, netuid), subnet.stake_of(slot.hotkey))
        if slot.axon is not None:
            yield ("SubtensorModule", "Axons", (netuid, slot.hotkey), axon_value(slot))
    for mechanism in range(rules.mechanisms):
        yield from _mechanism(netuid, subnet, mechanism)
    for hotkey, kept in subnet.commitments.items():
        variant = f"Raw{len(kept.data)}" if len(kept.data) <= 128 else "BigRaw"
        info = {"fields": [[{variant: kept.data}]]}
        yield ("Commitments", "CommitmentOf", (netuid, hotkey), {"deposit": 0, "block": kept.block, "info": info})


def _mechanism(netuid: int, subnet: Subnet, mechanism: int) -> Iterator[Entry]:
    index, slots = mechanism * MAX_SUBNETS + netuid, subnet.slots
    yield ("SubtensorModule", "LastUpdate", (index,), [slot.last_updates[mechanism] for slot in slots])
    yield ("SubtensorModule", "Incentive", (index,), [int(slot.incentive * 65_535) for slot in slots])
    for uid, slot in enumerate(slots):
        stored = slot.weights[mechanism]
        if stored is not None:
            pairs = list(zip(stored.uids, stored.values, strict=True))
            yield ("SubtensorModule", "Weights", (index, uid), pairs)
    commits = [commit for commit in subnet.commits if commit.mechanism == mechanism]
    for window in sorted({commit.window for commit in commits}):
        # The local chain's commits here are the runtime's own: reveal round, then the ciphertext.
        queue = [
            (c.hotkey, c.block, c.commit[8:], int.from_bytes(c.commit[:8], "little"))
            for c in commits
            if c.window == window
        ]
        yield ("SubtensorModule", "TimelockedWeightCommits", (index, window), queue)


def axon_value(slot: Slot) -> dict[str, int]:
    base = {"block": slot.axon_block, "version": 1, "protocol": 4, "placeholder1": 0, "placeholder2": 0}
    if slot.axon is None:
        return base | {"ip": 0, "port": 0, "ip_type": 0}
    address = ipaddress.ip_address(slot.axon.host)
    return base | {"ip": int(address), "port": slot.axon.port, "ip_type": address.version}


def metagraph_value(state: ChainState, netuid: int, zero: dict[str, Any]) -> dict[str, Any]:
    """The runtime API's report; ``zero`` fills what the local chain has no notion of."""
    subnet = state.subnets[netuid]
    rules, slots = subnet.rules, subnet.slots
    stakes = [subnet.stake_of(slot.hotkey) for slot in slots]
    return zero | {
        "netuid": netuid,
        "owner_hotkey": rules.owner_hotkey or NOBODY,
        "owner_coldkey": rules.owner_coldkey or NOBODY,
        "block": state.block,
        "tempo": rules.tempo,
        "num_uids": len(slots),
        "max_uids": rules.max_uids,
        "hotkeys": [slot.hotkey for slot in slots],
        "coldkeys": [slot.coldkey for slot in slots],
        "identities": [None] * len(slots),
        "axons": [axon_value(slot) for slot in slots],
        "active": [True] * len(slots),
        "validator_permit": [slot.permit for slot in slots],
        "last_update": [slot.last_updates[0] for slot in slots],
        "incentives": [int(slot.incentive * 65_535) for slot in slots],
        "dividends": [int(slot.dividends * 65_535) for slot in slots],
        "consensus": [int(slot.consensus * 65_535) for slot in slots],
        "trust": [0] * len(slots),
        "rank": [0] * len(slots),
        "pruning_score": [0] * len(slots),
        "emission": [slot.emission for slot in slots],
        "block_at_registration": [slot.registered_at for slot in slots],
        "alpha_stake": stakes,
        "tao_stake": [0] * len(slots),
        "total_stake": stakes,
        "collateral_locked": [0] * len(slots),
        "collateral_min": [0] * len(slots),
        "collateral_earned": [0] * len(slots),
    }


def local_call(function: str, args: dict[str, Any]) -> Call:
    """What the local chain makes of a decoded call."""
    netuid = args["netuid"]
    if function in ("set_mechanism_weights", "set_weights"):
        uids, values = tuple(args["dests"]), tuple(args["weights"])
        key, mechanism = args["version_key"], args.get("mecid", 0)
        return SetWeights(netuid=netuid, mechanism=mechanism, uids=uids, values=values, version_key=key)
    if function == "commit_timelocked_mechanism_weights":
        commit = args["reveal_round"].to_bytes(8, "little") + bytes.fromhex(args["commit"].removeprefix("0x"))
        version = args["commit_reveal_version"]
        return CommitWeights(netuid=netuid, mechanism=args["mecid"], commit=commit, version=version)
    if function in ("burned_register", "register_limit"):
        return BurnedRegister(netuid=netuid, hotkey=args["hotkey"])
    if function == "serve_axon":
        kind = ipaddress.IPv6Address if args["ip_type"] == 6 else ipaddress.IPv4Address
        return ServeAxon(netuid=netuid, host=str(kind(args["ip"])), port=args["port"])
    if function == "set_commitment":
        return SetCommitment(netuid=netuid, data=_raw(args["info"]["fields"]))
    raise NotImplementedError(f"the loopback node has no call {function}")


def _raw(fields: list[Any]) -> bytes:
    data = b""
    for field in fields:
        for value in (field if isinstance(field, dict) else field[0]).values():
            text = isinstance(value, str)  # the codec shows bytes as text where they are text, else as hex
            data += (
                bytes.fromhex(value[2:])
                if text and value.startswith("0x")
                else value.encode()
                if text
                else bytes(value)
            )
    return data


class ZeroValues:
    """A value of any type of the registry, all zero, so that reports can be built from the parts that matter."""

    def __init__(self, runtime: bittensor_core.Runtime) -> None:
        self._types = {entry["id"]: entry["type"] for entry in json.loads(runtime.registry_json())["types"]}

    def of(self, type_id: int) -> Any:
        definition = self._types[type_id]["def"]
        kind, body = next(iter(definition.items()))
        if kind == "composite":
            fields = body.get("fields", [])
            if self._types[type_id].get("path", [])[-1:] == ["AccountId32"]:
                return NOBODY
            if all("name" in field for field in fields):
                return {field["name"]: self.of(field["type"]) for field in fields}
            return self.of(fields[0]["type"]) if len(fields) == 1 else [self.of(field["type"]) for field in fields]
        if kind == "sequence":
            return []
        if kind == "array":
            return [self.of(body["type"])] * body["len"]
        if kind == "tuple":
            return [self.of(part) for part in body]
        if kind == "compact":
            return self.of(body["type"])
        if kind == "variant":
            names = [variant["name"] for variant in body.get("variants", [])]
            return None if "None" in names else names[0]
        return False if body == "bool" else 0

    def some_of(self, type_id: int) -> Any:
        """The zero of what an ``Option`` holds."""
        variants = self._types[type_id]["def"]["variant"]["variants"]
        inner = next(variant for variant in variants if variant["name"] == "Some")
        return self.of(inner["fields"][0]["type"])
