"""What a fleet of simulated miners is told: where the validator is, who they are, how much they do."""

from __future__ import annotations

import msgspec


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    receiver: str
    run: str
    hotkeys: tuple[str, ...]
    """URIs of the hotkeys, one a member."""
    hardware_class: tuple[str, ...]
    item_s: float
    warm_s: float
    measure_s: float
    churn_per_minute: float = 0.05
    view: str = "&view=new"
    """Added to the path of each member's stream; empty for one that takes the whole stream."""
    samples: int = 3
    start_s: float = 120.0
