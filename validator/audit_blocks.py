"""Keeps what audits need of the chain: the newest block, and the hashes of blocks that closed windows wait for.

The only reader of block hashes; a chain that is away delays draws and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from subnet.chain.base import CALL_TIMEOUT_S
from subnet.errors import IotaError, NotFound
from subnet.logs import ReasonLog
from subnet.timing import Backoff

EVERY_S = 1.0
"""Between two looks: a block takes twelve seconds where it isn't a local chain's."""


class Blocks(Protocol):
    """What is asked of a chain (:class:`subnet.chain.base.Chain`)."""

    async def block(self, *, timeout_s: float = CALL_TIMEOUT_S) -> int: ...

    async def block_hash(self, number: int, *, timeout_s: float = CALL_TIMEOUT_S) -> str: ...


class BlockBook(Protocol):
    """Where it is noted (:class:`validator.audit_watch.AuditWatch`)."""

    block: int | None
    block_hashes: dict[int, str]


async def follow_blocks(
    chain: Blocks,
    book: BlockBook,
    wanted: Callable[[], Collection[int]],
    changed: Callable[[], None] = lambda: None,
    *,
    every_s: float = EVERY_S,
) -> None:
    """Forever: note the newest block and the hashes of the ``wanted`` ones; ``changed`` after each news. Hashes that nobody
    wants any more are forgotten."""
    pause, reasons = Backoff(every_s, 30.0), ReasonLog()
    while True:
        try:
            if await look(chain, book, wanted()):
                changed()
            pause.reset()
            await asyncio.sleep(every_s)
        except IotaError as error:
            reasons.note("blocks for audits", error.code, str(error))
            await asyncio.sleep(pause.next_s())


async def look(chain: Blocks, book: BlockBook, wanted: Collection[int]) -> bool:
    """One look; whether there is news."""
    newest = await chain.block()
    news = newest != book.block
    book.block = newest if book.block is None else max(newest, book.block)
    for number in [number for number in book.block_hashes if number not in wanted]:
        del book.block_hashes[number]
    for number in sorted(set(wanted) - set(book.block_hashes)):
        if number > newest:
            break
        try:
            book.block_hashes[number] = await chain.block_hash(number)
        except NotFound:  # not finished yet
            break
        news = True
    return news
