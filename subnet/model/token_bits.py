"""The two bits beside a token of a dialogue as it lies in a shard of 32-bit numbers. No torch."""

from __future__ import annotations

STARTS, LEARNT = 1 << 30, 1 << 31
"""A dialogue starts with the token; it is (part of) an answer, so its prediction counts."""
TOKEN_BITS = STARTS - 1
