"""Claims on their way to the coordinator: batched, signed, repeated with growing waits until the fold shows their events.

Receipts that only drive clocks (a training forward) wait up to ``receipt_flush_s`` for company, or until nothing else is
left to do; everything else goes at once. One request is under way at a time, so claims keep their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from loguru import logger

from miner.context import RunContext
from subnet.errors import IotaError
from subnet.net.client import SignedClient
from subnet.protocol import wire
from subnet.protocol.messages import (
    SIGNED_CLAIMS,
    AnyClaim,
    ForwardReceipt,
    LaneClaim,
    LeavingClaim,
    Report,
    ReportAnswer,
    StoreUse,
)
from subnet.protocol.signing import sign_statement
from subnet.timing import TIMEOUTS, Backoff, Deadline
from subnet.words import PROTOCOL_VERSION

PURPOSE_RECEIPTS = "receipts/1"
REPEAT_S = 1.0
REPEAT_MAX_S = 8.0


@dataclass
class _Sent:
    at_s: float
    wait_s: float


class Reporter:
    def __init__(self, context: RunContext, client: SignedClient) -> None:
        self._context, self._client = context, client
        self._sent: dict[AnyClaim, _Sent] = {}
        self._due: list[AnyClaim] = []
        self._lazy_since_s: float | None = None
        self._said_use = StoreUse()
        self._wake = asyncio.Event()
        self.void = asyncio.Event()
        """Set when the coordinator doesn't know this incarnation (any more)."""

    def owe(self, claims: Sequence[AnyClaim], *, idle: bool) -> None:
        """The claims owed now, all of them; what is no longer owed has been seen and is forgotten."""
        now = asyncio.get_running_loop().time()
        owed = set(claims)
        self._sent = {claim: sent for claim, sent in self._sent.items() if claim in owed}
        due = [c for c in claims if (s := self._sent.get(c)) is None or now >= s.at_s + s.wait_s]
        urgent = [c for c in due if not _is_lazy(c)]
        self._due = due
        if not due:
            self._lazy_since_s = None
            return
        if self._lazy_since_s is None:
            self._lazy_since_s = now
        if urgent or idle or now - self._lazy_since_s >= TIMEOUTS.receipt_flush_s:
            self._wake.set()

    def next_due_s(self) -> float:
        """Seconds until something has to be said again."""
        now = asyncio.get_running_loop().time()
        waits = [sent.at_s + sent.wait_s - now for sent in self._sent.values()]
        if self._due and self._lazy_since_s is not None:
            waits.append(self._lazy_since_s + TIMEOUTS.receipt_flush_s - now)
        return max(0.01, min(waits, default=REPEAT_MAX_S))

    async def run(self) -> None:
        """Forever."""
        backoff = Backoff(0.1, 3.0)
        while True:
            await self._wake.wait()
            self._wake.clear()
            claims, self._due, self._lazy_since_s = self._due, [], None
            if not claims or self._context.member is None:
                continue
            try:
                await self.say(claims)
                backoff.reset()
            except IotaError as error:
                logger.log("DEBUG" if error.retryable else "WARNING", "report: {}", error)
                await asyncio.sleep(backoff.next_s())
                self._context.wake()

    async def say(self, claims: Sequence[AnyClaim]) -> None:
        context = self._context
        member = context.member
        if member is None:
            return
        receipts = [wire.encode(c) for c in claims if isinstance(c, SIGNED_CLAIMS)]
        root = wire.merkle_root(receipts) if receipts else b""
        signature = sign_statement(context.signer, PURPOSE_RECEIPTS, root) if receipts else b""
        cursor = context.directives.cursor
        used, process = context.blobs.used, context.blobs.process
        report = Report(
            version=PROTOCOL_VERSION,
            run=context.run_id,
            member=member,
            cursor=cursor,
            claims=tuple(claims),
            receipts_root=root,
            receipts_signature=signature,
            process=process,
            used=used if used != self._said_use else None,
        )
        answer = await self._client.request(
            "POST", "/v1/reports", report, ReportAnswer, deadline=Deadline.after(TIMEOUTS.http_request_s)
        )
        self._said_use = used
        if not answer.known:
            self.void.set()
            context.wake()
        now = asyncio.get_running_loop().time()
        for claim in claims:
            before = self._sent.get(claim)
            wait_s = REPEAT_S if before is None else min(REPEAT_MAX_S, 2 * before.wait_s)
            self._sent[claim] = _Sent(now, wait_s)

    async def leave(self) -> None:
        """Hand everything back; the validator may be gone too."""
        try:
            await self.say([LeavingClaim()])
        except IotaError as error:
            logger.info("could not say good-bye: {}", error)

    def forget(self) -> None:
        self._sent.clear()
        self._due.clear()
        self.void.clear()


def _is_lazy(claim: AnyClaim) -> bool:
    return isinstance(claim, LaneClaim) or (isinstance(claim, ForwardReceipt) and claim.loss_bits is None)
