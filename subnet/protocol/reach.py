"""``POST /v1/reach``: a miner asks to be connected to where it says it listens, and learns what came of it."""

from __future__ import annotations

import msgspec

LIMIT_REACH_BYTES = 1024


class ReachRequest(msgspec.Struct, frozen=True):
    """Signed by the hotkey that listens there."""

    version: int
    host: str
    port: int


class ReachAnswer(msgspec.Struct, frozen=True):
    """``code``: ``reachable``, ``refused``, ``no_answer``, ``other_hotkey``, ``not_public`` or ``unknown_host``."""

    reachable: bool
    code: str
    reason: str
    host: str
    """The IP address that was tried, or would have been."""
    source: str
    """Where the request came from."""
