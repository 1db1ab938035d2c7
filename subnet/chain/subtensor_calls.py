"""The calls of a Subtensor runtime that this project makes, with their parameters by the metadata's names. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from subnet.chain.refusals import ChainRefused
from subnet.chain.subtensor_link import SUBTENSOR, RawCall
from subnet.errors import InputError

RAW_MAX_BYTES = 128
COMMITMENT_MAX_BYTES = 512
COMMIT_REVEAL_VERSION = 4
"""Of timelocked commits; a chain of another version refuses them (``IncorrectCommitRevealVersion``)."""


def serve_axon(netuid: int, host: str, port: int) -> RawCall:
    """``host`` is an IP address; refusals are the runtime's own, made here because the call couldn't carry the value."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ChainRefused("InvalidIpType", f"{host!r} isn't an IP address") from None
    if not 1 <= port <= 65_535:
        raise ChainRefused("InvalidPort", f"{port} isn't a port")
    params = {
        "netuid": netuid,
        "version": 1,
        "ip": int(address),
        "port": port,
        "ip_type": address.version,
        "protocol": 4,
        "placeholder1": 0,
        "placeholder2": 0,
    }
    return RawCall(SUBTENSOR, "serve_axon", params)


def set_weights(netuid: int, mechanism: int, uids: Sequence[int], values: Sequence[int], version_key: int) -> RawCall:
    params = {
        "netuid": netuid,
        "mecid": mechanism,
        "dests": list(uids),
        "weights": list(values),
        "version_key": version_key,
    }
    return RawCall(SUBTENSOR, "set_mechanism_weights", params)


def commit_weights(netuid: int, mechanism: int, commit: bytes, reveal_round: int) -> RawCall:
    params = {
        "netuid": netuid,
        "mecid": mechanism,
        "commit": commit,
        "reveal_round": reveal_round,
        "commit_reveal_version": COMMIT_REVEAL_VERSION,
    }
    return RawCall(SUBTENSOR, "commit_timelocked_mechanism_weights", params)


def register(netuid: int, hotkey: str, limit_rao: int) -> RawCall:
    """Burned registration that the chain refuses where the price has risen above ``limit_rao``."""
    return RawCall(SUBTENSOR, "register_limit", {"netuid": netuid, "hotkey": hotkey, "limit_price": limit_rao})


def set_commitment(netuid: int, data: bytes) -> RawCall:
    if not 1 <= len(data) <= COMMITMENT_MAX_BYTES:
        reason = f"{len(data)} bytes; 1 to {COMMITMENT_MAX_BYTES} fit"
        raise ChainRefused("TooManyFieldsInCommitmentInfo", reason)
    variant = f"Raw{len(data)}" if len(data) <= RAW_MAX_BYTES else "BigRaw"
    if variant == "BigRaw" and data.startswith(b"0x"):
        raise InputError(
            "a long commitment that starts with 0x can't be told from hex", hint="commit the bytes it means"
        )
    return RawCall("Commitments", "set_commitment", {"netuid": netuid, "info": {"fields": [[{variant: data}]]}})


EXAMPLES = (
    serve_axon(1, "192.0.2.1", 8091),
    set_weights(1, 0, (0,), (65_535,), 0),
    commit_weights(1, 0, b"\0", 1),
    register(1, "5C4hrfjw9DjXZTzV3MwzrrAr9P1MJhSrvWGWqi1eSuyUpnhM", 1),
    set_commitment(1, b"\0"),
)
"""One of each kind: what a runtime must know."""
