"""Files appear whole or not at all, the cache keeps to its bytes, and a secret must be one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from subnet.errors import ConfigError, OutOfSpace
from subnet.protocol.wire import blob_hash
from subnet.store.disk import BlobCache, GroupSync, atomic_write
from subnet.store.signed_urls import StoreSigner, load_or_create_secret


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutOfSpace):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_sync_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = GroupSync()
    group.sync([tmp_path, tmp_path / "gone"])

    def broken(directory: Path) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr("subnet.store.disk.sync_directory", broken)
    for _ in range(2):
        with pytest.raises(OSError, match="I/O"):
            group.sync([tmp_path])


def test_the_cache_keeps_to_its_bytes(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache", 1000)
    data = [bytes([i]) * 300 for i in range(6)]
    hashes = [blob_hash(part) for part in data]
    for i in range(3):
        cache.put(hashes[i], data[i])
    assert cache.get(hashes[0]) == data[0]  # now 1 is the oldest
    cache.put(hashes[3], data[3])
    assert hashes[1] not in cache
    assert cache.get(hashes[0]) == data[0]
    assert cache.pin(hashes[0], 7)
    assert not cache.pin(hashes[1], 7)
    cache.put(hashes[4], data[4], pin=8)
    cache.put(hashes[5], data[5], pin=9)
    with pytest.raises(OutOfSpace):
        cache.put(hashes[1], data[1])
    assert cache.used_bytes == 900
    cache.release(below=8)
    cache.put(hashes[1], data[1])
    assert hashes[0] not in cache
    assert hashes[4] in cache


def test_the_cache_survives_a_restart_and_drops_what_is_damaged(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, 1000)
    good, bad = blob_hash(b"good"), blob_hash(b"bad")
    cache.put(good, b"good")
    cache.put(bad, b"bad")
    (tmp_path / bad).write_bytes(b"BAD")
    (tmp_path / ".tmp-left").write_bytes(b"half")
    again = BlobCache(tmp_path, 1000)
    assert again.get(good) == b"good"
    assert again.get(bad) is None
    assert bad not in again
    assert again.used_bytes == 4
    assert not (tmp_path / ".tmp-left").exists()


def test_the_secret_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="secret has 5 bytes"):
        StoreSigner(b"short", "http://x")
    (tmp_path / "secret").write_text("not hex")
    with pytest.raises(ConfigError, match="can't be used"):
        load_or_create_secret(tmp_path / "secret")
