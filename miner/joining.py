"""Asks the validator to be let in until this process is a member: with growing waits, or as long as a refusal says.

A hotkey in quarantine waits until its case is closed, and says once which case it is and where to read about it. A convicted
one says so, asks once more after a while (audits of others may want what it holds, a verdict may be about to fall), and then
:class:`Convicted` ends the process; while the validator names a time to ask again, it asks then. Whatever else is refused is
said once, and asked for again.
"""

from __future__ import annotations

import asyncio
import secrets

from loguru import logger

from miner.context import RunContext
from miner.heartbeat import HeartbeatHandle, Target
from subnet.errors import IotaError, Refusal
from subnet.logs import ReasonLog
from subnet.net.client import SignedClient
from subnet.protocol.messages import JoinAnswer, JoinRequest
from subnet.timing import TIMEOUTS, Backoff, Deadline
from subnet.words import PROTOCOL_VERSION

CONVICTED_ASKS_S = 60.0
"""A convicted hotkey asks at most this often, whatever it is told."""


class Convicted(IotaError):
    """This hotkey is out of the run; only an appeal that clears it lets it in again. Ends the process with status 4."""

    code = "convicted"


HOW_TO_APPEAL = "`iota audit appeal CASE` has it done again in a fresh process"


class Joiner:
    """``boot`` names this process's present try to be a member; each incarnation has its own."""

    def __init__(
        self, context: RunContext, client: SignedClient, heartbeat: HeartbeatHandle, hardware_class: tuple[str, ...]
    ) -> None:
        self._context, self._client, self._heartbeat = context, client, heartbeat
        self._hardware_class = hardware_class
        self._reasons = ReasonLog()
        self._convicted = False
        self.boot = secrets.token_hex(8)

    def renew(self) -> None:
        """The next incarnation's."""
        self.boot = secrets.token_hex(8)

    async def run(self, peer_port: int) -> None:
        """Forever; raises :class:`Convicted`."""
        backoff = Backoff(0.1, 2.0)
        while True:
            context = self._context
            if context.member is not None or context.run_state.finished is not None:
                backoff.reset()
                await asyncio.sleep(0.1)
                continue
            wait_s = backoff.next_s()
            client = self._client
            target = Target(client.base_url, client.receiver, self.boot, client.offset_ns, context.peak_flops_per_s)
            self._heartbeat.aim(target)
            request = JoinRequest(
                version=PROTOCOL_VERSION,
                run=context.run_id,
                boot=self.boot,
                host=context.settings.host,
                port=context.settings.announce_port or peer_port,
                hardware_class=self._hardware_class,
                seen=context.directives.cursor,
                reachable=context.reachable,
            )
            try:
                answer = await self._client.request(
                    "POST", "/v1/join", request, JoinAnswer, deadline=Deadline.after(TIMEOUTS.http_request_s)
                )
            except IotaError as error:
                self._reasons.note("join", error.code, str(error))
            else:
                wait_s = max(wait_s, self.wait_after(answer.refusal))
            await _sleep_until_member(context, wait_s)

    def wait_after(self, refusal: Refusal | None) -> float:
        """Seconds to wait before asking again; raises :class:`Convicted` where that is of no use any more."""
        convicted_before, self._convicted = self._convicted, refusal is not None and refusal.code == Convicted.code
        if refusal is None:
            self._reasons.forget("join")
            self._context.on_let_in()
            return 0.5
        self._context.on_refused(refusal)
        if convicted_before and self._convicted and refusal.retry_after is None:
            raise Convicted(refusal.reason, hint=f"{refusal.hint or HOW_TO_APPEAL}; then start this miner again")
        said_now = self._reasons.note("join", refusal.code, refusal.reason)
        match refusal.code:
            case "boot_seen":
                self.boot = secrets.token_hex(8)
                return 0.0
            case "quarantined" | "convicted":
                if said_now:
                    self._say_why_out(refusal)
                least_s = CONVICTED_ASKS_S if refusal.code == "convicted" else 1.0
                return max(least_s, refusal.retry_after or 0.0)
            case _:
                return refusal.retry_after or 1.0

    def _say_why_out(self, refusal: Refusal) -> None:
        """In full, with where to read about it: the reason names the case."""
        hint = f"{refusal.hint}. " if refusal.hint else ""
        where = (
            f"`iota score explain {self._context.signer.hotkey}` says what is held against this hotkey, "
            f"`iota audit fetch CASE --out DIR` gets the evidence, `iota audit replay DIR` runs it here, {HOW_TO_APPEAL}"
        )
        again_s = refusal.retry_after
        if refusal.code == "quarantined":
            until = f"Asking again every {again_s or 1.0:.0f} s until the case is closed"
        elif again_s is not None:
            until = f"Asking again in {max(again_s, CONVICTED_ASKS_S):.0f} s"
        else:
            until = f"This process asks once more in {CONVICTED_ASKS_S:.0f} s, then it ends"
        logger.warning("this hotkey is {}: {}. {}{}. {}", refusal.code, refusal.reason, hint, where, until)


async def _sleep_until_member(context: RunContext, seconds: float) -> None:
    """So long, or until this process is a member."""
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end and context.member is None:
        await asyncio.sleep(min(0.05, seconds))
