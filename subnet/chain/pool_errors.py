"""What a node answers to a submission it doesn't take, as the runtime's own names.

A node refuses before inclusion with a sentence or with a number; after it, with the name of a pallet's error. The
first two are translated here, for libraries that pass them on as they are. What isn't known stays unnamed: the caller
treats it as no verdict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from subnet.chain.refusals import CHAIN_ERRORS, ChainRefused

CUSTOM_ERRORS: dict[int, str] = {
    1: "StakeAmountTooLow",
    2: "NotEnoughBalanceToStake",
    3: "SubnetNotExists",
    4: "HotKeyAccountNotExists",
    6: "RateLimitExceeded",
    10: "HotKeyNotRegisteredInNetwork",
    11: "InvalidIpAddress",
    12: "ServingRateLimitExceeded",
    13: "InvalidPort",
    15: "InvalidRevealRound",
    19: "HotKeyNotRegisteredInSubNet",
    25: "NonAssociatedColdKey",
    255: "BadRequest",
}
"""``InvalidTransaction::Custom`` of a Subtensor runtime, as far as this project's calls can meet them."""

SENTENCES: tuple[tuple[str, str], ...] = (
    ("inability to pay some fees", "Payment"),
    ("will be valid in the future", "Future"),
    ("transaction is outdated", "Stale"),
    ("has a bad signature", "BadProof"),
    ("ancient birth block", "AncientBirthBlock"),
    ("exhaust the resources", "ExhaustsResources"),
    ("priority is too low", "PriorityTooLow"),
    ("already imported", "AlreadyImported"),
)
STATUSES = {"dropped": "Dropped", "usurped": "Usurped", "invalid": "Invalid", "retracted": "Retracted"}
"""Of a watched call, after which it won't be included."""
TRY_SOON = frozenset({"PriorityTooLow", "AlreadyImported", "ExhaustsResources", *STATUSES.values()})
"""Names of refusals that a block's time may cure."""
SIGN_ANEW = frozenset({"Stale", "BadProof", "AncientBirthBlock"})
"""Refusals that a fresh nonce, era or runtime version may cure; the call wasn't and won't be included as it is."""

_CUSTOM = re.compile(r"custom error:?\s*(\d+)", re.IGNORECASE)


def pool_error_name(error: object) -> str | None:
    """The name for a JSON-RPC error object (``code``, ``message``, ``data``), a string, or None where it has none."""
    text = str(error)
    if isinstance(error, Mapping):
        shown = cast("Mapping[str, object]", error)
        data = shown.get("data")
        if isinstance(data, Mapping):
            custom = cast("Mapping[str, object]", data).get("Custom")
            if isinstance(custom, int):
                return CUSTOM_ERRORS.get(custom)
        text = f"{shown.get('message', '')}: {data if data is not None else ''}"
    found = _CUSTOM.search(text)
    if found is not None:
        return CUSTOM_ERRORS.get(int(found.group(1)))
    lowered = text.lower()
    return next((name for sentence, name in SENTENCES if sentence in lowered), None)


def refusal_named(name: str, text: str, block_time_s: float) -> ChainRefused:
    """``text`` is what the runtime's metadata says of the error; our own words go first where there are some."""
    reason = "" if name in CHAIN_ERRORS else " ".join(text.split())
    return ChainRefused(name, reason, retry_after_s=block_time_s if name in TRY_SOON else None)
