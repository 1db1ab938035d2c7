"""A run's scores counted anew from its journal: no validator is asked, and nothing of it is believed.

From a log store, or from a file of segments saved from one: every segment's hash chain and signature is checked and every record
folded (:mod:`validator.log_reader`), as by a validator that takes the run over. From a validator's own directory: its chain is
checked and its records folded; where they begin with a copy of the fold, what was earned before is as the copy says.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from iota.store_check import StoreAddress
from subnet.errors import ConfigError, Corrupt, InputError, NotFound
from subnet.protocol import wire
from subnet.score.book import RunBook, Told
from subnet.score.policy import ScorePolicy
from subnet.score.recompute import combined
from subnet.score.score import Score, Unpaid
from subnet.score.timeline import Counting, Timeline
from subnet.store.base import OwnerStore
from subnet.timing import TIMEOUTS, Deadline
from validator.log_publisher import LIMIT_SEGMENT_BYTES, SegmentFile
from validator.log_reader import FoldedSegments, get_segment
from validator.run_archive import PREFIX, NamedStore, RunKeys, get_run, group_keys
from validator.score_files import read_journal

LISTING_S = 120.0
AHEAD = 8
"""Segments that are fetched at a time."""
SAVED = b"iota/journal/1\n"
"""A file of segments begins with this; each segment follows its length in bytes (8, little-endian)."""
SQLITE = b"SQLite format 3\0"


Policy = ScorePolicy | Timeline | None
"""To count with, whatever the journal says of its leader's; None: with what the journal says."""


def _book(policy: Policy) -> RunBook:
    return RunBook(policy, own_policy=policy is not None)


class Recomputed(msgspec.Struct, frozen=True, kw_only=True):
    """Best first, as they stood at ``time_s``."""

    run_id: str
    num_records: int
    from_copy: int = 0
    """What was earned before this record is as a copy of the fold in the journal says; 0: everything was counted here."""
    head: str
    """Of the journal's hash chain: what a validator's answer can be compared by."""
    time_s: float
    policy: ScorePolicy
    """In force at ``time_s``."""
    policies: tuple[Counting, ...]
    """What was counted with, and since when; the first one from the beginning."""
    told: Told | None
    """The last change of policy that the journal tells of."""
    scores: tuple[Score, ...]
    unpaid: dict[str, tuple[Unpaid, ...]]
    """By hotkey, of those who have any."""


def recompute_journal(
    source: str, address: StoreAddress, run: str, policy: Policy = None, *, at_s: float | None, save: Path | None = None
) -> Recomputed:
    """``source``: a URL of a log store, a directory with a journal (of a run, or of a validator), a journal's file, or a file that
    ``save`` made. ``run``: its name or id, where there are several. ``at_s``: None is the time of the journal's last record."""
    if "://" in source:
        return asyncio.run(_from_store(address, run, policy, at_s, save))
    path = Path(source).expanduser()
    if save is not None:
        raise ConfigError("only a log store's journal can be saved", hint="name its URL")
    try:
        if path.is_dir():
            return _from_file(journal_in(path, run), policy, at_s)
        with path.open("rb") as file:
            head = file.read(max(len(SAVED), len(SQLITE)))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint="check path and rights") from error
    if head.startswith(SQLITE):
        return _from_file(path, policy, at_s)
    if head.startswith(SAVED):
        return _from_saved(path, policy, at_s)
    raise InputError(f"{path} is no journal", hint="a journal.db, or what --save wrote")


# --- a validator's own journal -----------------------------------------------------------------------------------


def journal_in(directory: Path, run: str) -> Path:
    """The journal of a run's directory, or of the run of this name in a validator's."""
    if (directory / "journal.db").exists():
        return directory / "journal.db"
    found = {path.parent.name: path for path in sorted(directory.glob("runs/*/journal.db"))}
    named = {name: path for name, path in found.items() if run in ("", name)}
    if len(named) == 1:
        return next(iter(named.values()))
    known = ", ".join(found) or "none"
    if not named:
        raise NotFound(f"{directory} has no journal{f' of run {run!r}' if run else ''}", hint=f"it has: {known}")
    raise ConfigError(f"{directory} has the journals of {len(named)} runs", hint=f"name one: {known}")


def _from_file(path: Path, policy: Policy, at_s: float | None) -> Recomputed:
    book = _book(policy)
    read = read_journal(path, book)
    return _result(book, read.run_id, read.number, read.head, read.last_ns, at_s, from_copy=read.from_copy)


# --- segments ----------------------------------------------------------------------------------------------------


def _from_saved(path: Path, policy: Policy, at_s: float | None) -> Recomputed:
    book, folded = _book(policy), None
    for segment in saved_segments(path):
        folded = folded if folded is not None else FoldedSegments(segment.run_id)
        folded.take(segment, lambda state, record: book.note(record))
    if folded is None:
        raise Corrupt(f"{path} has no segment", hint="save it again from the log store")
    return _result(book, folded.run_id, folded.number, folded.head, folded.last_ns, at_s)


def saved_segments(path: Path) -> Iterator[SegmentFile]:
    """Of a file that ``save`` made; unchecked, see :class:`FoldedSegments`."""
    with path.open("rb") as file:
        file.seek(len(SAVED))
        while length := file.read(8):
            size_bytes = int.from_bytes(length, "little")
            if len(length) < 8 or size_bytes > LIMIT_SEGMENT_BYTES:
                raise Corrupt(
                    f"{path}: {size_bytes} bytes can't be a segment's", hint="save it again from the log store"
                )
            data = file.read(size_bytes)
            if len(data) < size_bytes:
                raise Corrupt(f"{path} ends within a segment", hint="save it again from the log store")
            yield wire.decode(data, SegmentFile, limit_bytes=LIMIT_SEGMENT_BYTES, what=str(path))


async def _from_store(
    address: StoreAddress, run: str, policy: Policy, at_s: float | None, save: Path | None
) -> Recomputed:
    async with _opened(address) as store:
        return await recompute_run(store, run, policy, at_s, save=save)


async def recompute_run(
    store: NamedStore, run: str, policy: Policy = None, at_s: float | None = None, *, save: Path | None = None
) -> Recomputed:
    """From the log store, a few segments in memory at a time. ``save``: keep them in this file, for the next time."""
    keys = group_keys(await store.list_named(PREFIX, deadline=Deadline.after(LISTING_S)))
    found = await _find(store, keys, run)
    book, folded = _book(policy), FoldedSegments(found.run_id)
    with _saving(save) as keep:
        async for segment in _segments(store, found):
            folded.take(segment, lambda state, record: book.note(record))
            keep(segment)
    return _result(book, folded.run_id, folded.number, folded.head, folded.last_ns, at_s)


@contextmanager
def _saving(path: Path | None) -> Generator[Callable[[SegmentFile], None]]:
    """The file appears under its name when all segments are in it and on disk."""
    if path is None:
        yield lambda segment: None
        return
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as out:

            def keep(segment: SegmentFile) -> None:
                data = wire.encode(segment)
                out.write(len(data).to_bytes(8, "little") + data)

            out.write(SAVED)
            yield keep
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}", hint="check path, rights and room"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


async def _segments(store: NamedStore, keys: RunKeys) -> AsyncGenerator[SegmentFile]:
    for first in range(0, len(keys.segments), AHEAD):
        numbers = range(first, min(first + AHEAD, len(keys.segments)))
        reads = [asyncio.create_task(get_segment(store, keys.run_id, number)) for number in numbers]
        try:
            for number, read in zip(numbers, reads, strict=True):
                segment = await read
                if segment is None:
                    raise FoldedSegments(keys.run_id).corrupt(f"segment {number} is missing")
                yield segment
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)


async def _find(store: NamedStore, keys: dict[str, RunKeys], run: str) -> RunKeys:
    if run in keys or (not run and len(keys) == 1):
        return keys[run or next(iter(keys))]
    if not run:
        raise ConfigError(f"the log store has {len(keys)} runs", hint=f"name one: {', '.join(keys) or 'none'}")
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


def _result(
    book: RunBook, run_id: str, number: int, head: str, last_ns: int, at_s: float | None, *, from_copy: int = 0
) -> Recomputed:
    time_s = max(book.now_s, last_ns / 1e9 if at_s is None else at_s)
    scores = combined([book], book.timeline, time_s)
    best = sorted(scores.values(), key=lambda score: (-score.total, score.hotkey))
    unpaid = {hotkey: found for hotkey in scores if (found := book.unpaid(hotkey))}
    return Recomputed(
        run_id=run_id,
        num_records=number,
        from_copy=from_copy,
        head=head,
        time_s=time_s,
        policy=book.timeline.at(time_s),
        policies=book.timeline.entries,
        told=book.told,
        scores=tuple(best),
        unpaid=unpaid,
    )


@asynccontextmanager
async def _opened(address: StoreAddress) -> AsyncGenerator[OwnerStore]:
    """The store at an address, without a validator; its index lies in a directory of its own."""
    with TemporaryDirectory(prefix="iota-score-") as directory:
        store = await _make_store(address, Path(directory) / "index.db")
        try:
            yield store
        finally:
            await store.close()


async def _make_store(address: StoreAddress, index: Path) -> OwnerStore:
    from subnet.store.s3_place import S3Place, S3Signer, find_credentials, is_s3

    if not is_s3(address.url):
        from subnet.store.embedded import EmbeddedStore
        from subnet.store.signed_urls import load_or_create_secret

        path = address.secret.expanduser()
        if not path.exists():
            raise ConfigError(f"there is no store secret in {path}", hint="copy the store's file, see --store.secret")
        return EmbeddedStore(address.url, load_or_create_secret(path))
    from subnet.store.s3 import S3Store

    place = S3Place.parse(address.url, endpoint=address.endpoint, region=address.region)
    credentials = await asyncio.to_thread(find_credentials, address.credentials)
    return await asyncio.to_thread(lambda: S3Store(S3Signer(place, credentials), index, owner="iota-score"))
