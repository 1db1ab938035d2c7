"""A run's scores recomputed from its journal in the log store: no validator is asked, and nothing of it is believed.

Every segment's hash chain and signature is checked and every record folded (:mod:`validator.log_reader`), as by a validator
that takes the run over; the book is made from the same records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import msgspec

from iota.store_check import StoreAddress
from subnet.errors import ConfigError, NotFound
from subnet.run.events import Record
from subnet.score.policy import ScorePolicy
from subnet.score.recompute import recompute
from subnet.score.score import Score
from subnet.store.base import OwnerStore
from subnet.timing import TIMEOUTS, Deadline
from validator.log_reader import read_log
from validator.run_archive import PREFIX, NamedStore, RunKeys, get_run, group_keys

LISTING_S = 120.0


class Recomputed(msgspec.Struct, frozen=True):
    """Best first, as they stood at ``time_s``."""

    run_id: str
    num_records: int
    head: str
    """Of the journal's hash chain: what a validator's answer can be compared by."""
    time_s: float
    policy: ScorePolicy
    scores: tuple[Score, ...]


def recompute_from_store(address: StoreAddress, run: str, policy: ScorePolicy, *, at_s: float | None) -> Recomputed:
    """``run``: its name or id. ``at_s``: None is the time of the journal's last record."""
    return asyncio.run(_recompute(address, run, policy, at_s))


async def _recompute(address: StoreAddress, run: str, policy: ScorePolicy, at_s: float | None) -> Recomputed:
    async with _Opened(address) as store:
        return await recompute_run(store, run, policy, at_s)


async def recompute_run(store: NamedStore, run: str, policy: ScorePolicy, at_s: float | None = None) -> Recomputed:
    keys = group_keys(await store.list_named(PREFIX, deadline=Deadline.after(LISTING_S)))
    log = await read_log(store, await _find(store, keys, run))
    decoder = msgspec.msgpack.Decoder(Record)
    time_s = log.last_ns / 1e9 if at_s is None else at_s
    scores = recompute((decoder.decode(data) for data in log.records), policy, time_s)
    best = sorted(scores.values(), key=lambda score: (-score.total, score.hotkey))
    return Recomputed(log.run_id, len(log.records), log.head, time_s, policy, tuple(best))


async def _find(store: NamedStore, keys: dict[str, RunKeys], run: str) -> RunKeys:
    if run in keys:
        return keys[run]
    named: Sequence[str] = ()
    for run_id, found in keys.items():
        if found.run is None:
            continue
        stored = await get_run(store, run_id, deadline=Deadline.after(TIMEOUTS.store_request_s))
        if stored.name == run:
            named = (*named, run_id)
    if len(named) == 1:
        return keys[named[0]]
    if named:
        raise ConfigError(
            f"{len(named)} runs in the log store are called {run!r}", hint=f"name one: {', '.join(named)}"
        )
    raise NotFound(f"the log store has no run {run!r}", hint=f"it has {', '.join(keys) or 'none'}")


class _Opened(AbstractAsyncContextManager[OwnerStore]):
    """The store at an address, without a validator: closed at the end, its index in a directory of its own."""

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        self._directory = TemporaryDirectory(prefix="iota-score-")
        self._store: OwnerStore | None = None

    async def __aenter__(self) -> OwnerStore:
        self._store = await self._make()
        return self._store

    async def _make(self) -> OwnerStore:
        from subnet.store.s3_place import S3Place, S3Signer, find_credentials, is_s3

        address = self._address
        if not is_s3(address.url):
            from subnet.store.embedded import EmbeddedStore
            from subnet.store.signed_urls import load_or_create_secret

            path = address.secret.expanduser()
            if not path.exists():
                raise ConfigError(
                    f"there is no store secret in {path}", hint="copy the store's file, see --store.secret"
                )
            return EmbeddedStore(address.url, load_or_create_secret(path))
        from subnet.store.s3 import S3Store

        place = S3Place.parse(address.url, endpoint=address.endpoint, region=address.region)
        credentials = await asyncio.to_thread(find_credentials, address.credentials)
        index = Path(self._directory.name) / "index.db"
        return await asyncio.to_thread(lambda: S3Store(S3Signer(place, credentials), index, owner="iota-score"))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._store is not None:
                await self._store.close()
        finally:
            self._directory.cleanup()
