"""A big blob goes up in parts, each by a grant signed just before it leaves; what has arrived never goes again.

A part's expired grant is replaced like any other. When the whole is put together the owner says what is lacking, and only that
is sent again; a broken transfer that begins anew learns the same from its first grant.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from subnet.errors import NotFound, Unreachable
from subnet.protocol.wire import Buffer, byte_views
from subnet.store.base import Grant
from subnet.store.presigned import BlobClient
from subnet.store.together import all_of
from subnet.timing import Deadline

MAX_PARALLEL_PARTS = 4
MAX_ROUNDS = 3
"""How often the parts that are lacking are sent before the store is given up."""

SignPart = Callable[[int, Deadline], Awaitable[Grant]]
Complete = Callable[[Deadline], Awaitable[Grant]]


async def put_parts(
    client: BlobClient,
    grant: Grant,
    data: Buffer | Sequence[Buffer],
    sign: SignPart,
    complete: Complete,
    *,
    deadline: Deadline,
) -> None:
    """Send the parts that ``grant`` says are lacking, then have them put together."""
    views = byte_views(data)
    for _ in range(MAX_ROUNDS):
        with suppress(NotFound):  # another has put the same parts together meanwhile, or the upload was given up
            await _send(client, grant, views, sign, deadline)
        grant = await complete(deadline)
        if not grant.parts:
            return
    raise Unreachable(
        f"blob {grant.hash[:10]}…: the store still lacks {len(grant.parts)} parts, sent {MAX_ROUNDS} times"
    )


async def _send(
    client: BlobClient, grant: Grant, views: Sequence[memoryview], sign: SignPart, deadline: Deadline
) -> None:
    numbers = iter(grant.parts)

    async def send_some() -> None:
        for number in numbers:

            async def renew(limit: Deadline, number: int = number) -> Grant:
                return await sign(number, limit)

            start = (number - 1) * grant.part_bytes
            part = cut(views, start, min(grant.size_bytes, start + grant.part_bytes))
            await client.put(await sign(number, deadline), part, deadline=deadline, renew=renew)

    await all_of([send_some() for _ in range(min(MAX_PARALLEL_PARTS, len(grant.parts)))])


def cut(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Bytes ``[start, stop)`` of the buffers one after the other, nothing copied."""
    found: list[memoryview] = []
    for view in views:
        if start < view.nbytes and stop > 0:
            found.append(view[max(0, start) : stop])
        start, stop = start - view.nbytes, stop - view.nbytes
    return found
