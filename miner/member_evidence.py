"""Boundaries that an audit wants, from this machine's memory or disk into the store: several at a time, none read before its turn.

What a seal waits for goes first. A boundary is given by its maker; who only received it gives its copy a little later, if the
maker's hasn't come by then (the store answers that it is there, and nothing moves).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miner.batches import Batches
from miner.context import RunContext
from miner.local_view import BoundaryKey
from miner.owes import StoreEvidence, StoreUnusable
from miner.store_links import EVIDENCE
from subnet.errors import NotFound
from subnet.protocol.parts import decode_parts
from subnet.protocol.wire import Buffer
from subnet.run.state import num_parts
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
            parts = num_parts(self._context.run_state, owe.key.microbatch)
            held = data is not None and self._context.cache.hash_of(owe.key) == owe.hash
            if held and data is not None and parts:
                held = await self._put_parts(owe.key, decode_parts(data, parts))
            if not held or data is None:
                answers.append(NotFound(f"boundary {owe.key} is no longer held"))
            else:
                found[owe.hash] = data
                answers.append(None)
        await self._put(found)
        return answers

    async def _put_parts(self, key: BoundaryKey, hashes: Sequence[str]) -> bool:
        """The parts of a lane's boundary, before the list that names them; a few in memory at a time."""
        cache, some = self._context.cache, dict[str, Buffer]()
        for part, value in enumerate(hashes, 1):
            data = await cache.get(key.of(part))
            if data is None or cache.hash_of(key.of(part)) != value:
                cache.drop(key)  # the list is of no use without them
                return False
            some[value] = data
            if len(some) == MOST:
                await self._put(some)
                some = {}
        await self._put(some)
        return True

    async def _put(self, blobs: dict[str, Buffer]) -> None:
        if blobs:
            deadline = Deadline.after(TIMEOUTS.store_request_s)
            await self._context.blobs.put_many(list(blobs.items()), EVIDENCE, deadline)
