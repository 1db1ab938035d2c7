"""What is said between :mod:`subnet.audit.process` and the worker that it supervises. No torch, no asyncio."""

from __future__ import annotations

import msgspec

from subnet.audit.case import Findings

LIMIT_MESSAGE_BYTES = 64 << 20
DEFAULT_GRAPH_BYTES = 1 << 30

OTHER_SETTINGS = "other_settings"
OTHER_HARDWARE = "other_hardware"


class ReplayRequest(msgspec.Struct, frozen=True):
    """Replay the bundle in this directory."""

    directory: str
    budget_bytes: int
    """Of memory above the level after import: the stage states that are kept, and the work on one."""
    device: str = "cpu"
    graph_bytes: int = DEFAULT_GRAPH_BYTES
    tolerant: bool = False
    """On a machine of another hardware class: say how far apart things are, instead of :data:`OTHER_HARDWARE`."""


class ReplayAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Findings, or why there are none."""

    findings: Findings | None = None
    code: str = ""
    reason: str = ""
    hint: str = ""
    retryable: bool = False
    held: tuple[tuple[int, int], ...] = ()
    """(stage, version) of the states kept now."""
