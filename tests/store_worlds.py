"""Stores as the contract's tests want them: fresh, with a way to let grants grow old, and to put raw bytes by a grant."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from seaweed import Seaweed

from subnet.protocol.wire import blob_hash
from subnet.store.base import Grant, Hold, OwnerStore, PutWant, part_digests
from subnet.store.embedded import EmbeddedStore
from subnet.store.s3 import S3Store
from subnet.store.server import start_store
from subnet.timing import SYSTEM_CLOCK, Deadline, ManualClock

SECRET = b"s" * 32
LOG = Hold("log", "run-1", 3)


def soon() -> Deadline:
    return Deadline.after(60)


def want(data: bytes) -> PutWant:
    return PutWant(blob_hash(data), len(data), part_digests(data))


async def raw(method: str, grant: Grant, data: bytes | None = None, **headers: str) -> int:
    """The status of a request by a grant, with what of its headers isn't replaced."""
    sent = {name: value for name, value in grant.headers.items() if name != "Content-Length"} | headers
    async with (
        aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as session,
        session.request(method, grant.url, data=data, headers=sent) as response,
    ):
        await response.read()
        return response.status


class ShiftedClock:
    """The system's clock, off by ``shift_s``."""

    def __init__(self) -> None:
        self.shift_s = 0.0

    def now_s(self) -> float:
        return SYSTEM_CLOCK.now_s()

    def wall_ns(self) -> int:
        return SYSTEM_CLOCK.wall_ns() + int(self.shift_s * 1e9)


class EmbeddedWorld:
    name = "embedded"
    store: EmbeddedStore

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self._directory = directory

    async def start(self) -> OwnerStore:
        self._listener = await start_store(self._directory, "127.0.0.1", 0, SECRET, 512 << 20, clock=self.clock)
        self.store = EmbeddedStore(self._listener.url, SECRET, clock=self.clock)
        return self.store

    async def stop(self) -> None:
        await self.store.close()
        await self._listener.close()

    @contextmanager
    def minted_ago(self, seconds: float) -> Iterator[None]:
        """What is granted inside is so old outside."""
        yield
        self.clock.advance(seconds)


class S3World:
    name = "s3"
    store: S3Store

    def __init__(self, seaweed: Seaweed, directory: Path, *, endpoint: str = "") -> None:
        self.clock = ShiftedClock()
        self.prefix = f"test/{secrets.token_hex(6)}"
        self._seaweed, self._directory, self._endpoint = seaweed, directory, endpoint

    def new_store(self, owner: str = "owner") -> S3Store:
        signer = self._seaweed.signer(self.prefix, endpoint=self._endpoint, clock=self.clock)
        return S3Store(signer, self._directory / f"{owner}.db", owner=owner)

    async def start(self, owner: str = "owner") -> S3Store:
        self.store = self.new_store(owner)
        await self.store.open(deadline=soon())
        return self.store

    async def stop(self) -> None:
        await self.store.close()

    @contextmanager
    def minted_ago(self, seconds: float) -> Iterator[None]:
        self.clock.shift_s = -seconds
        yield
        self.clock.shift_s = 0.0
