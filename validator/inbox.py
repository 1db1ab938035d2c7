"""What waits for the coordinator's main task, and what the owner of a run derives from its records: plain containers."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from subnet.protocol.messages import AnyClaim, JoinAnswer, JoinRequest
from subnet.run.events import AnyEvent
from subnet.words import Member
from validator.tasks import Completion


@dataclass
class Join:
    request: JoinRequest
    hotkey: str
    coldkey: str
    answer: asyncio.Future[JoinAnswer]


@dataclass
class Inbox:
    claims: deque[tuple[Member, AnyClaim]] = field(default_factory=lambda: deque())
    joins: deque[Join] = field(default_factory=lambda: deque())
    completions: deque[Completion] = field(default_factory=lambda: deque())
    told: deque[AnyEvent] = field(default_factory=lambda: deque())
    """Events that come from outside the run."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Projection(Protocol):
    """What the owner of a run derives from its records by ``on_record``: it goes with each copy of the fold."""

    def dump(self) -> bytes: ...

    def load(self, data: bytes) -> None: ...
