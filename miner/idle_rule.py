"""What an operator says of ``--idle.only``; checked when it is made."""

from __future__ import annotations

import msgspec

from subnet.errors import ConfigError


class IdleRule(msgspec.Struct, frozen=True):
    """``load``: share of all processors that other programs may have while this miner works."""

    only: bool = False
    after_s: float = 300.0
    load: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.after_s <= 86400:
            raise ConfigError(f"--idle.after = {self.after_s:g} is not allowed", hint="allowed: 0 to 86400 seconds")
        if not 0 < self.load <= 1:
            raise ConfigError(
                f"--idle.load = {self.load:g} is not allowed", hint="allowed: above 0, up to 1 (all processors)"
            )
