"""The loopback node's chain: blocks, extrinsics checked as a runtime checks them, dispatch, events, storage by block."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import bittensor_core

from loopback.metadata import RecordedRuntime
from loopback.pallets import ZeroValues, entries, local_call, metagraph_value
from subnet.chain.extrinsics import Extrinsic
from subnet.chain.genesis import Genesis
from subnet.chain.local_epochs import advance, settle
from subnet.chain.local_rules import apply_extrinsic
from subnet.chain.local_state import ChainState, genesis_state
from subnet.chain.refusals import ChainRefused
from subnet.protocol.signing import verify_signature

KEEP_BLOCKS = 300
SS58_FORMAT = 42
WEIGHT = {"ref_time": 1_000_000, "proof_size": 1000}
POOL_REFUSALS = {
    "NotEnoughStakeToSetWeights": 1,
    "SubnetNotExists": 3,
    "SettingWeightsTooFast": 6,
    "CommittingWeightsTooFast": 6,
    "HotKeyNotRegisteredInNetwork": 10,
    "InvalidIpAddress": 11,
    "ServingRateLimitExceeded": 12,
    "InvalidPort": 13,
    "AccountNotAllowedCommit": 19,
}
"""What the runtime's transaction extension refuses before inclusion, as ``Custom(n)``; the rest fails in dispatch."""


class RpcError(Exception):
    def __init__(self, code: int, message: str, data: object = None) -> None:
        super().__init__(message)
        self.code, self.message, self.data = code, message, data

    @property
    def body(self) -> dict[str, object]:
        return {"code": self.code, "message": self.message} | ({} if self.data is None else {"data": self.data})


def invalid(sentence: str) -> RpcError:
    return RpcError(1010, "Invalid Transaction", sentence)


@dataclass
class Block:
    number: int
    hash: str
    parent: str
    storage: Mapping[str, str]
    extrinsics: list[str] = field(default_factory=list)
    spec_version: int = 0


@functools.lru_cache(maxsize=8)
def _decoded(metadata: bytes, spec_version: int, transaction_version: int) -> bittensor_core.Runtime:
    return bittensor_core.Runtime(metadata, spec_version, transaction_version, SS58_FORMAT)


class LoopbackNode:
    """One chain in memory. Blocks pass when a test says so, and when an extrinsic is included."""

    def __init__(self, recorded: RecordedRuntime, genesis: Genesis, *, spec_version: int | None = None) -> None:
        self.spec_version = spec_version if spec_version is not None else recorded.spec_version
        self.transaction_version = recorded.transaction_version
        self.metadata_v14, self.metadata_v15 = recorded.v14, recorded.v15
        self.runtime = self._runtime()
        self._zero = _zero_values(recorded)
        self._indices = _error_indices(recorded)
        self.state: ChainState = genesis_state(genesis, 0)
        for subnet in self.state.subnets.values():
            settle(self.state, subnet, 0)
        self.finality_lag = 0
        self.blocks: list[Block] = []
        self.refuse_next: list[str] = []
        """Names to refuse the next calls with, whatever they are."""
        self.submitted: list[str] = []
        """Every call that was included, by name."""
        self._seal([], [])

    def _runtime(self) -> bittensor_core.Runtime:
        return _decoded(self.metadata_v15, self.spec_version, self.transaction_version)

    def upgrade(self, spec_version: int) -> None:
        """The runtime gets another version number, metadata unchanged: what was signed before is worth nothing."""
        self.spec_version = spec_version
        self.runtime = self._runtime()
        self._seal([], [])

    # ---- blocks

    @property
    def head(self) -> Block:
        return self.blocks[-1]

    @property
    def finalized(self) -> Block:
        return self.blocks[max(0, len(self.blocks) - 1 - self.finality_lag)]

    @property
    def genesis_hash(self) -> str:
        return "0x" + self.state.genesis_hash

    def block_at(self, block_hash: str | None) -> Block:
        if block_hash is None:
            return self.head
        found = next((block for block in reversed(self.blocks) if block.hash == block_hash), None)
        if found is None:
            raise RpcError(4003, "Client error: UnknownBlock: State already discarded for " + block_hash)
        return found

    def advance(self, blocks: int) -> None:
        for _ in range(blocks):
            self._seal([], [])

    def _seal(self, extrinsics: list[str], events: list[Any]) -> Block:
        """Finish the block that is being built, and begin the next."""
        number = self.state.block if self.blocks else 0
        parent = self.head.hash if self.blocks else "0x" + "0" * 64
        digest = blake2b(bytes.fromhex(parent[2:]) + number.to_bytes(8, "little"), digest_size=32).hexdigest()
        block_hash = self.genesis_hash if not self.blocks else "0x" + digest
        block = Block(number, block_hash, parent, self._storage(events), extrinsics, self.spec_version)
        self.blocks = [*self.blocks[-KEEP_BLOCKS:], block]
        if number > 0:
            advance(self.state, number + 1)
        return block

    def _storage(self, events: list[Any]) -> dict[str, str]:
        runtime = self.runtime
        stored: dict[str, str] = {}
        for pallet, name, keys, value in [*entries(self.state), ("System", "Events", (), events)]:
            try:
                kind = runtime.storage_entry(pallet, name).value_type
            except KeyError:
                continue  # a runtime without it
            key = bytes(runtime.storage_key(pallet, name, list(keys)))
            stored["0x" + key.hex()] = "0x" + bytes(runtime.encode(kind, value)).hex()
        return stored

    # ---- reports

    def metagraph(self, netuid: int) -> bytes:
        """Of the newest block, SCALE-encoded."""
        output = self.runtime.runtime_api_map()["SubnetInfoRuntimeApi"]["get_metagraph"]["output"]
        if netuid not in self.state.subnets:
            return bytes(self.runtime.encode(output, None))
        zero = self._zero.some_of(int(output.removeprefix("scale_info::")))
        value = metagraph_value(self.state, netuid, zero) | {"block": self.head.number}
        return bytes(self.runtime.encode(output, value))

    # ---- extrinsics

    def submit(self, data: bytes) -> Block:
        """Check, dispatch, include. A pool refusal raises and includes nothing."""
        decoded = self._decoded(data)
        signer, call = decoded["address"], decoded["call"]
        self._check_signature(data, decoded)
        args = {arg["name"]: arg["value"] for arg in call["call_args"]}
        function = call["call_function"]
        error = self._dispatch(signer, decoded["nonce"], function, args)
        if error in POOL_REFUSALS:
            raise invalid(f"Custom error: {POOL_REFUSALS[error]}")
        self.state.nonces[signer] = decoded["nonce"] + 1
        self.submitted.append(function)
        return self._seal(["0x" + data.hex()], [self._event(error)])

    def _decoded(self, data: bytes) -> dict[str, Any]:
        try:
            return self.runtime.decode_extrinsic(data, True)
        except ValueError as error:
            raise RpcError(1002, f"Verification Error: Codec error: {error}") from error

    def _check_signature(self, data: bytes, decoded: dict[str, Any]) -> None:
        """The payload is rebuilt from this node's own genesis, blocks and version."""
        call = decoded["call"]
        args = {arg["name"]: arg["value"] for arg in call["call_args"]}
        call_data = bytes(self.runtime.compose_call(call["call_module"], call["call_function"], args))
        if not data.endswith(call_data):
            raise RpcError(1002, "Verification Error: the call isn't encoded as this runtime encodes it")
        signer, expected = decoded["address"], self.state.nonces.get(decoded["address"], 0)
        era, era_hash = self._era(decoded["era"])
        payload = self.runtime.signature_payload(
            call_data,
            era=era,
            nonce=decoded["nonce"],
            tip=decoded["tip"],
            tip_asset_id=None,
            genesis_hash=bytes.fromhex(self.state.genesis_hash),
            era_block_hash=bytes.fromhex(era_hash[2:]),
            metadata_hash=None,
        )
        signature = bytes.fromhex(decoded["signature"]["Sr25519"].removeprefix("0x"))
        if not verify_signature(signer, bytes(payload), signature):
            raise invalid("Transaction has a bad signature")
        if decoded["nonce"] < expected:
            raise invalid("Transaction is outdated")
        if decoded["nonce"] > expected:
            raise invalid("Transaction will be valid in the future")

    def _era(self, era: Any) -> tuple[Any, str]:
        if era in ("00", "0x00", None):
            return "00", self.genesis_hash
        period, phase = era
        now = self.head.number
        birth = (max(now, phase) - phase) // period * period + phase
        known = next((block for block in self.blocks if block.number == birth), None)
        if known is None or now >= birth + period:
            raise invalid("Transaction has an ancient birth block")
        return {"period": period, "phase": phase}, known.hash

    def _dispatch(self, signer: str, nonce: int, function: str, args: dict[str, Any]) -> str | None:
        """The name of the error, or None. Nothing of a refused call stays in the state."""
        if self.refuse_next:
            return self.refuse_next.pop(0)
        call = local_call(function, args)
        extrinsic = Extrinsic(genesis=self.state.genesis_hash, signer=signer, nonce=nonce, call=call)
        try:
            apply_extrinsic(self.state, extrinsic, b"\0" * 32)
        except ChainRefused as refused:
            self.state.nonces[signer] = nonce
            return refused.code
        return None

    def _event(self, error: str | None) -> dict[str, Any]:
        info = {"weight": WEIGHT, "class": "Normal", "pays_fee": "No"}
        if error is None:
            event = {"System": {"ExtrinsicSuccess": {"dispatch_info": info}}}
        else:
            pallet, index = self._indices[error]
            module = {"index": pallet, "error": [index, 0, 0, 0]}
            event = {"System": {"ExtrinsicFailed": {"dispatch_error": {"Module": module}, "dispatch_info": info}}}
        return {"phase": {"ApplyExtrinsic": 0}, "event": event, "topics": []}


@functools.cache
def _plain(recorded: RecordedRuntime) -> bittensor_core.Runtime:
    return bittensor_core.Runtime(recorded.v15, recorded.spec_version, recorded.transaction_version, SS58_FORMAT)


@functools.cache
def _zero_values(recorded: RecordedRuntime) -> ZeroValues:
    return ZeroValues(_plain(recorded))


@functools.cache
def _error_indices(recorded: RecordedRuntime) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for pallet in _plain(recorded).metadata_ir()["pallets"]:
        if pallet["name"] in ("SubtensorModule", "Commitments", "System"):
            for error in pallet["errors"]:
                found.setdefault(error["name"], (pallet["index"], error["index"]))
    return found
