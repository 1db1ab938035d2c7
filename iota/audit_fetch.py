"""Downloads the bundle of a case from a validator and its store: anyone may, and every byte is checked on arrival.

What is there already is not fetched again, so a download that was cut short goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from subnet.audit.bundle import BLOBS_NAME, CASE_NAME
from subnet.errors import ConfigError, InputError
from subnet.net.client import SignedClient
from subnet.protocol import wire
from subnet.protocol.audit_api import CaseDetail, CaseView
from subnet.store.base import Grant
from subnet.store.disk import atomic_write
from subnet.store.presigned import BlobClient
from subnet.store.together import all_of
from subnet.timing import TIMEOUTS, Deadline

MAX_PARALLEL = 8


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


def fetch_case(url: str, case: int, out: Path, deadline: Deadline, *, run: str = "") -> Fetched:
    """The bundle of case ``case`` in ``out``: an empty or new directory, or one with part of this very bundle."""
    return asyncio.run(_fetch(url, case, out, deadline, run))


async def _fetch(url: str, case: int, out: Path, deadline: Deadline, run: str) -> Fetched:
    async with _clients(url) as (validator, store):
        path = f"/v1/cases/{case}"
        detail: CaseDetail = await validator.request(
            "GET", path + _query(run=run), None, CaseDetail, deadline=deadline, signed=False
        )
        if not detail.view.bundle:
            raise InputError(
                f"case {case} has no bundle: {detail.view.hotkey} is accused of opening nothing ({detail.view.charge})"
            )
        _check_directory(out, detail)
        places = [out / CASE_NAME, *(out / BLOBS_NAME / blob for blob, _ in detail.blobs)]
        hashes = [detail.view.bundle, *(blob for blob, _ in detail.blobs)]
        slots, fetched_bytes = asyncio.Semaphore(MAX_PARALLEL), 0

        async def fetch(grant: Grant, place: Path) -> int:
            async with slots:
                limit = deadline.sooner(TIMEOUTS.url_ttl_s)
                data = await store.get(grant, deadline=limit)
                await asyncio.to_thread(atomic_write, place, data, durable=False)
                return len(data)

        start = 0
        while start < len(hashes):
            grants: tuple[Grant, ...] = await validator.request(
                "GET",
                f"{path}/bundle{_query(run=run, start=str(start))}",
                None,
                tuple[Grant, ...],
                deadline=deadline,
                signed=False,
            )
            if not grants or [grant.hash for grant in grants] != hashes[start : start + len(grants)]:
                raise InputError(f"{url} names other blobs of case {case} than it did a moment ago")
            pairs = list(zip(grants, places[start:], strict=False))
            lacking = await asyncio.to_thread(_not_there, pairs)
            fetched_bytes += sum(await all_of([fetch(grant, place) for grant, place in lacking]))
            start += len(grants)
        return Fetched(detail, out, fetched_bytes)


@asynccontextmanager
async def _clients(url: str) -> AsyncGenerator[tuple[SignedClient, BlobClient]]:
    async with SignedClient(url) as validator, BlobClient() as store:
        yield validator, store


def _check_directory(out: Path, detail: CaseDetail) -> None:
    """Nothing of anybody else's is overwritten."""
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
