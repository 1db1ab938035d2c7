"""Ending for an upgrade: no step begins, the open one is sealed and in the log store, joiners wait, then the process ends.

Asked for by ``iota validator drain`` or SIGUSR1. Nothing about it is journaled: whoever is started in the same directory goes
on in the same term with the step that is due, so that a drain costs the fleet the time of the restart.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, NoReturn

from aiohttp import web
from loguru import logger

from subnet.errors import AuthFailed, InputError, Refusal
from subnet.net.http import Call, Route, answer
from subnet.protocol.drain import DrainRequest, DrainView
from subnet.protocol.versions import require_version
from subnet.run.state import works
from subnet.service import Service
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock, Deadline

if TYPE_CHECKING:
    from validator.run_session import RunSession

LOOK_S = 0.1
RETRY_AFTER_S = 10.0
MAX_WITHIN_S = 86_400.0
WORDS = "the validator to be started anew: it takes no new step"


class Draining:
    """Whether the validator is about to end; the active session is told, and those that come."""

    def __init__(self, hotkey: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._hotkey, self._clock = hotkey, clock
        self._asked = asyncio.Event()
        self._deadline = Deadline(math.inf, clock)
        self._session: RunSession | None = None

    @property
    def on(self) -> bool:
        return self._asked.is_set()

    def ask(self, within_s: float = TIMEOUTS.drain_s, who: str = "SIGUSR1") -> None:
        if not self.on:
            logger.info("draining ({}): no step begins, the process ends once the open one is sealed", who)
        self._deadline = Deadline.after(within_s, self._clock)
        self._asked.set()
        self._tell()

    def take(self, session: RunSession | None) -> None:
        """The run that is led from now on."""
        self._session = session
        self._tell()

    def _tell(self) -> None:
        if self.on and self._session is not None:
            self._session.coordinator.watch.held = WORDS
            self._session.wake()

    def refusal(self) -> Refusal | None:
        """What a joiner is told."""
        if not self.on:
            return None
        return Refusal("draining", f"waits for {WORDS}", RETRY_AFTER_S, "nothing to do: it is asked again")

    def waits(self) -> str:
        """For what; empty when the process may end."""
        session = self._session
        if not self.on or session is None or session.over:
            return ""
        coordinator, journal = session.coordinator, session.journal
        open_works = works(coordinator.state)
        if open_works and coordinator.state.finished is None:
            return f"the seal of step {open_works[0].step}"
        if coordinator.core.first_unacknowledged is not None:
            return "the log store"
        return "the journal" if journal.committed < len(journal) else ""

    async def run(self, service: Service) -> NoReturn:
        """Stops the service when it is time; then it waits to be cancelled."""
        await self._asked.wait()
        while self.waits() and not self._deadline.expired:
            await asyncio.sleep(LOOK_S)
        if left := self.waits():
            logger.warning(
                "drained as far as it went in its time: {} is still open and goes on after the restart", left
            )
        service.stop("drained")
        while True:
            await asyncio.sleep(3600.0)

    def asked_by(self, hotkey: str, request: DrainRequest) -> DrainView:
        require_version(request.version)
        if hotkey != self._hotkey:
            raise AuthFailed(f"{hotkey} may not end this validator", hint=f"its own hotkey {self._hotkey} may")
        if not 0 <= request.within_s <= MAX_WITHIN_S:
            raise InputError(f"within_s = {request.within_s} is not allowed", hint=f"allowed: 0 to {MAX_WITHIN_S:g}")
        self.ask(request.within_s, hotkey)
        return DrainView(request.within_s, self.waits())


def drain_routes(draining: Draining) -> list[Route]:
    async def drain(call: Call) -> web.StreamResponse:
        return answer(draining.asked_by(call.hotkey, call.decode(DrainRequest)))

    return [Route("POST", "/v1/drain", drain, body_limit_bytes=4096)]
