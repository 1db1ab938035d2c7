"""Downloads the bundle of a case from a validator and its store: anyone may, and every byte is checked on arrival.

What is there already is not fetched again, so a download that was cut short goes on. The validator isn't trusted: names that
are no hashes, and more bytes than asked for, are refused before anything is written.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from subnet.audit.bundle import BLOBS_NAME, CASE_NAME, LIMIT_NAMED
from subnet.audit.case import LIMIT_CASE_BYTES
from subnet.errors import ConfigError, InputError, OutOfSpace, TooLarge
from subnet.net.client import SignedClient
from subnet.protocol import wire
from subnet.protocol.audit_api import Accepted, AppealRequest, CaseDetail, CaseView
from subnet.protocol.messages import Hello
from subnet.protocol.signing import Signer
from subnet.store.base import Grant
from subnet.store.disk import atomic_write
from subnet.store.presigned import BlobClient
from subnet.store.together import all_of
from subnet.timing import TIMEOUTS, Deadline

MAX_PARALLEL = 8
LIMIT_BYTES = 64 << 30
"""Of a bundle, unless another limit is given."""
Tick = Callable[[str, int, int], None]
"""(what, done, of how many)."""


def no_tick(what: str, done: int, total: int) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Fetched:
    """``directory`` holds a whole bundle, as ``iota audit replay`` takes it."""

    detail: CaseDetail
    directory: Path
    fetched_bytes: int


def list_cases(url: str, deadline: Deadline, *, run: str = "") -> tuple[CaseView, ...]:
    """Every accusation of the run, the oldest first."""

    async def work() -> tuple[CaseView, ...]:
        async with SignedClient(url) as client:
            path = f"/v1/cases{_query(run=run)}"
            return await client.request("GET", path, None, tuple[CaseView, ...], deadline=deadline, signed=False)

    return asyncio.run(work())


def fetch_case(
    url: str,
    case: int,
    out: Path,
    deadline: Deadline,
    *,
    run: str = "",
    limit_bytes: int = LIMIT_BYTES,
    tick: Tick = no_tick,
) -> Fetched:
    """The bundle of case ``case`` in ``out``: an empty or new directory, or one with part of this very bundle."""
    return asyncio.run(_fetch(url, case, out, deadline, run, limit_bytes, tick))


def appeal_case(
    url: str, case: int, signer: Signer, deadline: Deadline, *, run: str = "", hotkey: str | None = None
) -> Accepted:
    """Ask for a new run of the case's bundle, as the hotkey that the case is about; ``hotkey``: who must answer there."""

    async def work() -> Accepted:
        async with SignedClient(url, signer) as client:
            hello: Hello = await client.request("GET", "/v1/hello", None, Hello, deadline=deadline, signed=False)
            if hotkey is not None and hello.hotkey != hotkey:
                raise ConfigError(f"{url} is hotkey {hello.hotkey}, not {hotkey}", hint="check --validator.url")
            client.receiver = hello.hotkey
            client.learn_clock(hello.time_ns)
            return await client.request("POST", "/v1/appeals", AppealRequest(case, run), Accepted, deadline=deadline)

    return asyncio.run(work())


async def _fetch(
    url: str,
    case: int,
    out: Path,
    deadline: Deadline,
    run: str = "",
    limit_bytes: int = LIMIT_BYTES,
    tick: Tick = no_tick,
) -> Fetched:
    async with _clients(url) as (validator, store):
        path = f"/v1/cases/{case}"
        detail: CaseDetail = await validator.request(
            "GET", path + _query(run=run), None, CaseDetail, deadline=deadline, signed=False
        )
        _check_detail(detail, case, limit_bytes)
        _check_directory(out, detail)
        places = [out / CASE_NAME, *(out / BLOBS_NAME / blob for blob, _ in detail.blobs)]
        refs = [(detail.view.bundle, 0), *detail.blobs]
        slots, fetched_bytes, num_there = asyncio.Semaphore(MAX_PARALLEL), 0, 0

        async def fetch(grant: Grant, place: Path) -> int:
            nonlocal num_there
            async with slots:
                limit = deadline.sooner(TIMEOUTS.url_ttl_s)
                data = await store.get(grant, deadline=limit)
                await asyncio.to_thread(atomic_write, place, data, durable=False)
                num_there += 1
                tick("blobs", num_there, len(refs))
                return len(data)

        start = 0
        while start < len(refs):
            grants: tuple[Grant, ...] = await validator.request(
                "GET",
                f"{path}/bundle{_query(run=run, start=str(start))}",
                None,
                tuple[Grant, ...],
                deadline=deadline,
                signed=False,
            )
            _check_grants(url, case, grants, refs[start : start + len(grants)])
            pairs = list(zip(grants, places[start:], strict=False))
            lacking = await asyncio.to_thread(_not_there, pairs)
            num_there += len(pairs) - len(lacking)
            fetched_bytes += sum(await all_of([fetch(grant, place) for grant, place in lacking]))
            start += len(grants)
        return Fetched(detail, out, fetched_bytes)


def _check_detail(detail: CaseDetail, case: int, limit_bytes: int) -> None:
    """Whether it names blobs, and not too much of them."""
    view = detail.view
    if not view.bundle:
        raise InputError(f"case {case} has no bundle: {view.hotkey} is accused of opening nothing ({view.charge})")
    if not all(map(wire.is_blob_hash, (view.bundle, *(blob for blob, _ in detail.blobs)))):
        raise InputError(f"the validator names blobs of case {case} by what is no hash")
    size_bytes = sum(max(0, size) for _, size in detail.blobs)
    if len(detail.blobs) > LIMIT_NAMED or size_bytes > limit_bytes:
        raise TooLarge(
            f"the bundle of case {case} has {len(detail.blobs)} blobs of {size_bytes} bytes, the limit is {limit_bytes}",
            hint="raise --disk",
        )


def _check_grants(url: str, case: int, grants: tuple[Grant, ...], refs: list[tuple[str, int]]) -> None:
    """Whether they are for what was named before: the case itself (of unknown size, 0), then its blobs."""
    same = bool(grants) and [grant.hash for grant in grants] == [blob for blob, _ in refs]
    sizes = [(grant.size_bytes, size or grant.size_bytes) for grant, (_, size) in zip(grants, refs, strict=False)]
    if not same or any(granted != named for granted, named in sizes):
        raise InputError(f"{url} names other blobs of case {case} than it did a moment ago")
    if not refs[0][1] and grants[0].size_bytes > LIMIT_CASE_BYTES:
        raise TooLarge(f"case {case} has {grants[0].size_bytes} bytes, more than {LIMIT_CASE_BYTES}")


@asynccontextmanager
async def _clients(url: str) -> AsyncGenerator[tuple[SignedClient, BlobClient]]:
    async with SignedClient(url) as validator, BlobClient() as store:
        yield validator, store


def _check_directory(out: Path, detail: CaseDetail) -> None:
    """Nothing of anybody else's is overwritten, and there is room."""
    parent = next(place for place in (out, *out.absolute().parents) if place.exists())
    size_bytes, free_bytes = sum(size for _, size in detail.blobs), shutil.disk_usage(parent).free
    if size_bytes > free_bytes:
        raise OutOfSpace(
            f"the bundle takes {size_bytes} bytes, {parent} has {free_bytes} free", hint="choose another --out"
        )
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out} is not a directory", hint="choose another --out")
    known = {CASE_NAME, BLOBS_NAME}
    others = [path.name for path in out.iterdir() if path.name not in known and not path.name.startswith(".tmp-")]
    case = out / CASE_NAME
    other_case = case.exists() and wire.blob_hash(case.read_bytes()) != detail.view.bundle
    if others or other_case:
        raise ConfigError(f"{out} is not an empty directory", hint="choose another --out")


def _not_there(pairs: list[tuple[Grant, Path]]) -> list[tuple[Grant, Path]]:
    return [pair for pair in pairs if not _is_there(*pair)]


def _is_there(grant: Grant, place: Path) -> bool:
    try:
        return place.stat().st_size == grant.size_bytes and wire.blob_hash(place.read_bytes()) == grant.hash
    except FileNotFoundError:
        return False


def _query(**values: str) -> str:
    given = {name: value for name, value in values.items() if value}
    return f"?{urlencode(given)}" if given else ""
