"""Boundaries that an audit wants, from this machine's memory or disk into the store: several at a time, none read before its turn.

What a seal waits for goes first. A boundary is given by its maker; who only received it gives its copy a little later, if the
maker's hasn't come by then (the store answers that it is there, and nothing moves).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miner.batches import Batches
from miner.context import RunContext
from miner.owes import StoreEvidence, StoreUnusable
from miner.store_links import EVIDENCE
from subnet.errors import NotFound
from subnet.protocol.wire import Buffer
from subnet.timing import TIMEOUTS, Deadline

LANES = 2
MOST = 8
"""Boundaries in one request; so many, times the lanes, are in memory for it at most."""
RECEIVED_WAIT_S = 2.0


class EvidenceWork:
    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._puts: Batches[StoreEvidence, None] = Batches(self._put_all, lanes=LANES, most=MOST)

    async def close(self) -> None:
        await self._puts.close()

    async def store(self, owe: StoreEvidence) -> None:
        """Raises :class:`NotFound` where it is no longer held: then that is owed to be said."""
        context = self._context
        if not owe.own:
            await asyncio.sleep(RECEIVED_WAIT_S)
            if owe.audit not in context.run_state.audits.open:
                return
        await self._puts.ask(owe, (0 if owe.before_seal else 1, owe.audit))
        context.local.opened.add((owe.audit, owe.hash))
        context.wake()

    async def denounce(self, owe: StoreUnusable) -> None:
        """What can't be computed with, so that the validator sees it."""
        context = self._context
        data = context.unusable.get(owe.hash)
        if data is None:
            context.local.unusable.pop(owe.key, None)
            raise NotFound(f"boundary {owe.key} is no longer held")
        await context.blobs.put_many([(owe.hash, data)], EVIDENCE, Deadline.after(TIMEOUTS.store_request_s))
        context.local.denounced.add(owe.hash)
        context.wake()

    async def _put_all(self, owes: Sequence[StoreEvidence]) -> Sequence[Exception | None]:
        """One that is gone must not keep the others."""
        found: dict[str, Buffer] = {}
        answers: list[Exception | None] = []
        for owe in owes:
            data = await self._context.cache.get(owe.key)
            if data is None or self._context.cache.hash_of(owe.key) != owe.hash:
                answers.append(NotFound(f"boundary {owe.key} is no longer held"))
            else:
                found[owe.hash] = data
                answers.append(None)
        if found:
            deadline = Deadline.after(TIMEOUTS.store_request_s)
            await self._context.blobs.put_many(list(found.items()), EVIDENCE, deadline)
        return answers
