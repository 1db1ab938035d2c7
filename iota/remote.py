"""A validator and its store from plain synchronous code: each call has a deadline and closes what it opens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from miner.blobs import Blobs
from subnet.errors import ConfigError, IotaError, NotFound
from subnet.net.client import SignedClient
from subnet.policy.api import PolicyRequest, PolicyView
from subnet.protocol.api import ControlRequest, ExportInfo, RunStatus, RunSubmission, RunSummary
from subnet.protocol.drain import DrainRequest, DrainView
from subnet.protocol.follow_api import FollowerStatus
from subnet.protocol.messages import Hello
from subnet.protocol.signing import Signer, sign_statement
from subnet.run.control_event import PURPOSE_CONTROL, control_statement
from subnet.score.api import ScoreDetail, ScoreList
from subnet.store.presigned import BlobClient
from subnet.timing import Deadline
from subnet.words import PROTOCOL_VERSION

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
BlobFile = tuple[str, Path | bytes, str]
"""(hash, where the bytes are, retention class)"""

DEFAULT_URL = "http://127.0.0.1:8091"
_BATCH_BYTES = 64 << 20
_BATCH_BLOBS = 256


class Remote:
    """One validator; ``signer`` is for blobs and submissions, ``hotkey`` (if given) must be the one that answers."""

    def __init__(self, url: str, signer: Signer | None = None, *, hotkey: str | None = None) -> None:
        self.url, self._signer, self._hotkey = url, signer, hotkey

    def hello(self, deadline: Deadline) -> Hello:
        return self._get("/v1/hello", Hello, deadline)

    def runs(self, deadline: Deadline) -> tuple[RunSummary, ...]:
        return self._get("/v1/runs", tuple[RunSummary, ...], deadline)

    def status(self, deadline: Deadline, *, run: str | None = None, steps: int = 20) -> RunStatus:
        """A :class:`FollowerStatus` where the validator follows."""
        query = urlencode({"steps": steps, **({"run": run} if run else {})})
        status = self._get(f"/v1/status?{query}", FollowerStatus, deadline)
        return status if status.role else status.led()

    def export_info(self, name: str, step: int | None, deadline: Deadline) -> ExportInfo:
        query = "" if step is None else f"?step={step}"
        return self._get(f"/v1/runs/{quote(name, safe='')}/export{query}", ExportInfo, deadline)

    def plan_info(self, name: str, deadline: Deadline) -> ExportInfo:
        """The run as its members compute it, whether it has begun or not; it has no snapshots."""
        return self._get(f"/v1/runs/{quote(name, safe='')}/plan", ExportInfo, deadline)

    def scores(self, deadline: Deadline) -> ScoreList:
        return self._get("/v1/scores", ScoreList, deadline)

    def score(self, hotkey: str, deadline: Deadline) -> ScoreDetail:
        return self._get(f"/v1/scores/{quote(hotkey, safe='')}", ScoreDetail, deadline)

    def policy(self, deadline: Deadline) -> PolicyView:
        return self._get("/v1/policy", PolicyView, deadline)

    def change_policy(self, request: PolicyRequest, deadline: Deadline) -> PolicyView:
        """From the next tempo on; the signer is the validator's own hotkey or the subnet owner's."""

        async def work() -> PolicyView:
            async with self._signed(deadline) as client:
                return await client.request("POST", "/v1/policy", request, PolicyView, deadline=deadline)

        return asyncio.run(work())

    def drain(self, within_s: float, deadline: Deadline) -> DrainView:
        """Have the validator end once its open step is sealed; the signer is its own hotkey."""

        async def work() -> DrainView:
            async with self._signed(deadline) as client:
                request = DrainRequest(PROTOCOL_VERSION, within_s)
                return await client.request("POST", "/v1/drain", request, DrainView, deadline=deadline)

        return asyncio.run(work())

    def submit(self, submission: RunSubmission, deadline: Deadline) -> RunSummary:
        async def work() -> RunSummary:
            async with self._signed(deadline) as client:
                return await client.request("POST", "/v1/runs", submission, RunSummary, deadline=deadline)

        return asyncio.run(work())

    def control(self, name: str, action: str, deadline: Deadline, argument: str = "") -> RunSummary:
        """Say a word (:mod:`subnet.run.control`) about a run that this signer submitted; how it stands then."""
        run_id = next((run.run_id for run in self.runs(deadline) if run.name == name), None)
        if run_id is None:
            raise NotFound(f"{self.url} has no run called {name!r}", hint="see: iota run list")

        async def work(run_id: str) -> RunSummary:
            async with self._signed(deadline) as client:
                assert self._signer is not None  # _signed has looked
                now_ns = time.time_ns()
                said = control_statement(run_id, action, now_ns, argument)
                signature = sign_statement(self._signer, PURPOSE_CONTROL, said)
                request = ControlRequest(action, now_ns, signature, argument)
                path = f"/v1/runs/{quote(name, safe='')}/control"
                return await client.request("POST", path, request, RunSummary, deadline=deadline)

        return asyncio.run(work(run_id))

    def put(
        self,
        run: str,
        blobs: Sequence[BlobFile],
        deadline: Deadline,
        *,
        done: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Store these blobs, a batch at a time; ``done`` is told how many bytes are there by now."""

        async def work() -> None:
            sent_bytes = 0
            async with self._blobs(run, deadline) as store:
                for batch in _batches(blobs):
                    by_class: dict[str, list[tuple[str, Buffer]]] = {}
                    for blob, source, retention in batch:
                        data = source if isinstance(source, bytes) else source.read_bytes()
                        by_class.setdefault(retention, []).append((blob, data))
                    for retention, items in by_class.items():
                        await store.put_many(items, retention, deadline)
                        sent_bytes += sum(len(data) for _, data in items)
                        done(sent_bytes)

        asyncio.run(_unwrapped(work()))

    def get(self, run: str, refs: Sequence[tuple[str, int]], deadline: Deadline) -> list[bytearray]:
        """Blobs by (hash, bytes), checked, in order."""

        async def work() -> list[bytearray]:
            async with self._blobs(run, deadline) as store:
                return await store.get_many(refs, deadline)

        return asyncio.run(_unwrapped(work()))

    # ---- how

    def _get(self, path: str, kind: type[T] | object, deadline: Deadline) -> T:
        async def work() -> T:
            async with SignedClient(self.url) as client:
                return await client.request("GET", path, None, kind, deadline=deadline, signed=False)

        return asyncio.run(work())

    @asynccontextmanager
    async def _signed(self, deadline: Deadline) -> AsyncGenerator[SignedClient]:
        if self._signer is None:
            raise ConfigError("this needs a wallet", hint="give --wallet.name, --wallet.hotkey and --wallet.path")
        async with SignedClient(self.url, self._signer) as client:
            hello: Hello = await client.request("GET", "/v1/hello", None, Hello, deadline=deadline, signed=False)
            if self._hotkey is not None and hello.hotkey != self._hotkey:
                raise ConfigError(
                    f"{self.url} is hotkey {hello.hotkey}, not {self._hotkey}",
                    hint="check --validator.url and --validator.hotkey",
                )
            client.receiver = hello.hotkey
            client.learn_clock(hello.time_ns)
            yield client

    @asynccontextmanager
    async def _blobs(self, run: str, deadline: Deadline) -> AsyncGenerator[Blobs]:
        async with self._signed(deadline) as client, BlobClient() as store:
            yield Blobs(client, store, run)


async def _unwrapped(work: Coroutine[Any, Any, T]) -> T:
    """The first error of ours out of a group of parallel transfers."""
    try:
        return await work
    except ExceptionGroup as group:
        ours = group.subgroup(IotaError)
        while ours is not None and isinstance(ours.exceptions[0], ExceptionGroup):
            ours = ours.exceptions[0]
        if ours is None:
            raise
        raise ours.exceptions[0] from group


def _batches(blobs: Sequence[BlobFile]) -> list[list[BlobFile]]:
    batches: list[list[BlobFile]] = [[]]
    size_bytes = 0
    for blob in blobs:
        source = blob[1]
        own_bytes = len(source) if isinstance(source, bytes) else source.stat().st_size
        if batches[-1] and (size_bytes + own_bytes > _BATCH_BYTES or len(batches[-1]) >= _BATCH_BLOBS):
            batches.append([])
            size_bytes = 0
        batches[-1].append(blob)
        size_bytes += own_bytes
    return batches
