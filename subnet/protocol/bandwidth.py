"""A bounded transfer that tells how fast the way between a machine and its validator is: ``POST /v1/bandwidth``, signed."""

from __future__ import annotations

import msgspec

LIMIT_PROBE_BYTES = 1 << 20
"""Of one request, each way."""
LIMIT_BODY_BYTES = LIMIT_PROBE_BYTES + 4096


class BandwidthProbe(msgspec.Struct, frozen=True):
    """``data`` travels up, ``answer_bytes`` of anything travel down."""

    data: bytes
    answer_bytes: int


class BandwidthAnswer(msgspec.Struct, frozen=True):
    received_bytes: int
    data: bytes
