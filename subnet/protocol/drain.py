"""``POST /v1/drain``: a validator is to end once the open step is sealed. Signed by its own hotkey; nobody else may."""

from __future__ import annotations

import msgspec


class DrainRequest(msgspec.Struct, frozen=True):
    """``within_s``: after so long it ends all the same, and the open step goes on when it is started again. The last one asked
    for counts."""

    version: int
    within_s: float


class DrainView(msgspec.Struct, frozen=True):
    """``waits``: for what, in words; empty where nothing is open any more."""

    within_s: float
    waits: str
