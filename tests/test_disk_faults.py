"""Full disks, half-written files and a store without room: refused with the reason, nothing half-done left, evidence kept."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_faults import (
    SECRET,
    FaultyStore,
)
from test_decide import Desk

from miner.boundaries import BoundaryCache
from miner.local_view import BoundaryKey
from subnet.errors import (
    OutOfSpace,
)
from subnet.protocol.wire import blob_hash
from subnet.store.base import Hold
from subnet.store.disk import BlobCache, atomic_write
from subnet.store.embedded import EmbeddedStore
from subnet.store.folder import FolderStore
from subnet.timing import Deadline
from validator.decide import waiting_for
from validator.retention import expiries
from validator.tasks import RunTasks

LOG = Hold("log", "run-1", 3)


def soon() -> Deadline:
    return Deadline.after(20)


async def test_a_full_store_says_so_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    faulty = await FaultyStore(tmp_path / "store", budget_bytes=10_000).start()
    async with EmbeddedStore(faulty.url, SECRET) as owner:
        evidence = Hold("evidence", "run-1", 5)
        kept = await owner.put_blob(b"e" * 6000, evidence, deadline=soon())
        assert (await owner.usage(deadline=soon())).lacks_bytes == 0
        with pytest.raises(OutOfSpace, match="left of 10000, not 5000"):
            await owner.put_blob(b"n" * 5000, LOG, deadline=soon())
        usage = await owner.usage(deadline=soon())
        assert usage.lacks_bytes == 5000
        assert await owner.get_blob(kept, 6000, deadline=soon()) == b"e" * 6000, "no evidence goes to make room"
        await owner.expire("evidence", "run-1", 6, deadline=soon())
        assert (await owner.usage(deadline=soon())).lacks_bytes == 0
        await owner.put_blob(b"n" * 5000, LOG, deadline=soon())
    await faulty.close()


async def test_the_coordinator_is_told_what_is_wrong_with_the_store(tmp_path: Path) -> None:
    faulty = await FaultyStore(tmp_path / "store", budget_bytes=1000).start()
    async with EmbeddedStore(faulty.url, SECRET) as owner:
        tasks = RunTasks(None, owner)  # type: ignore[arg-type]
        assert await tasks.probe_store() == ""
        with pytest.raises(OutOfSpace):
            await owner.put_blob(b"n" * 5000, LOG, deadline=soon())
        assert await tasks.probe_store() == "full: an upload of 5000 bytes was refused, 0 of 1000 bytes are used"
        await faulty.close()
        assert (await tasks.probe_store()).startswith(("unreachable:", "deadline:"))
    desk = Desk(1)
    desk.watch.store.failed("full: no room", desk.now)
    assert waiting_for(desk.state, desk.watch, desk.now) == "the store (full: no room)"


def test_retention_looks_at_steps_and_never_at_room() -> None:
    desk = Desk(1)
    assert expiries(desk.state) == {}
    desk.state.next_step = 20
    assert set(expiries(desk.state)) == {"evidence"}
    assert expiries(desk.state)["evidence"] < 20


@pytest.fixture
def small_files() -> Iterator[int]:
    """The kernel refuses files beyond this size, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield 20_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_disk_that_takes_no_more(tmp_path: Path, small_files: int) -> None:
    big = os.urandom(3 * small_files)
    store = FolderStore(tmp_path / "store", 1 << 30)
    upload = store.begin(len(big), blob_hash(big))
    with pytest.raises(OutOfSpace):
        upload.write(big)
    upload.abort()
    assert store.usage().used_bytes == 0
    assert not list((tmp_path / "store" / "tmp").iterdir())
    cache = BlobCache(tmp_path / "cache", 1 << 30)
    with pytest.raises(OutOfSpace):
        cache.put(blob_hash(big), big)
    with pytest.raises(OutOfSpace):
        atomic_write(tmp_path / "cache" / "file", big)
    boundaries = BoundaryCache(tmp_path / "boundaries", memory_bytes=0, disk_bytes=1 << 30)
    key = BoundaryKey(0, 0, 0, False)
    boundaries.put(key, big, blob_hash(big))
    await boundaries.spill(keep_step=1)
    assert key not in boundaries, "what can't be kept is let go, and made again when it is asked for"
    assert (boundaries.memory_used, boundaries.disk_used) == (0, 0)
    for directory in ("cache", "boundaries"):
        assert not list((tmp_path / directory).iterdir()), "no half-written file stays"


def test_a_cache_leaves_the_reserve_free(tmp_path: Path) -> None:
    free = [10_000]
    cache = BlobCache(tmp_path / "cache", 1 << 20, reserve_bytes=8000, free=lambda _: free[0])
    cache.put(blob_hash(b"a" * 1000), b"a" * 1000)
    free[0] = 8500
    with pytest.raises(OutOfSpace, match="leave 7500 bytes free"):
        cache.put(blob_hash(b"b" * 1000), b"b" * 1000)
    assert cache.used_bytes == 1000
    free[0] = 9500
    cache.put(blob_hash(b"b" * 1000), b"b" * 1000)


def test_what_a_kill_left_half_written_is_swept(tmp_path: Path) -> None:
    for directory, name in (("store/tmp", "upload"), ("cache", ".tmp-x"), ("boundaries", "3.1.0.x")):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / name).write_bytes(b"half")
    FolderStore(tmp_path / "store", 1 << 20)
    BlobCache(tmp_path / "cache", 1 << 20)
    BoundaryCache(tmp_path / "boundaries", memory_bytes=1, disk_bytes=1)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_blob_whose_own_link_was_lost_comes_back_from_its_hold(tmp_path: Path) -> None:
    """Only the hold's directory is synced: without power the blob's may have forgotten what it was told last."""
    store, data = FolderStore(tmp_path, 1 << 20), b"sum" * 100
    hash_ = blob_hash(data)
    for hold in (Hold("log", "run", 3), Hold("log", "run", 5)):
        upload = store.begin(len(data), hash_)
        upload.write(data)
        store.commit_blob(upload, hold)
    path, _ = store.find_blob(hash_)
    path.unlink()
    again = FolderStore(tmp_path, 1 << 20)
    assert again.find_blob(hash_)[0].read_bytes() == data
    assert (again.usage().used_bytes, again.usage().num_blobs) == (len(data), 1)
    assert again.expire("log", "run", 4).num_blobs == 0, "the other hold keeps it"
    assert again.expire("log", "run", 6).num_blobs == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
