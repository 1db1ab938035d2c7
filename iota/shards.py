"""Streams of tokens written as shards, each file durable before the next begins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy.typing as npt
from blake3 import blake3

from subnet.model.data import ROW_GROUP_BYTES, Shard, TokenStream
from subnet.words import BlobHash


class ShardWriter:
    """Writes one stream of tokens as shards, hashing row groups on the way."""

    def __init__(self, directory: Path, name: str, token_bytes: int, shard_bytes: int) -> None:
        self._directory, self._name = directory, name
        self._dtype = "<u2" if token_bytes == 2 else "<u4"
        self._shard_bytes = shard_bytes
        self._buffer = bytearray()
        self._file: BinaryIO | None = None
        self._shards: list[Shard] = []
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Added so far."""
        return self._num_tokens

    def add(self, tokens: npt.NDArray[Any]) -> None:
        self._num_tokens += tokens.size
        self._buffer += tokens.astype(self._dtype).tobytes()
        whole = len(self._buffer) // ROW_GROUP_BYTES * ROW_GROUP_BYTES
        for start in range(0, whole, ROW_GROUP_BYTES):
            self._write_group(bytes(self._buffer[start : start + ROW_GROUP_BYTES]))
        del self._buffer[:whole]

    def _write_group(self, group: bytes) -> None:
        if self._file is None:
            self._file = (self._directory / f"{self._name}-{len(self._shards):05d}.tokens").open("wb")
            self._hash, self._size = blake3(), 0
            self._groups: list[BlobHash] = []
        self._file.write(group)
        self._hash.update(group)
        self._groups.append(BlobHash(blake3(group).hexdigest()))
        self._size += len(group)
        if self._size >= self._shard_bytes:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._file is not None:
            with self._file as stream:
                stream.flush()
                os.fsync(stream.fileno())
            self._shards.append(Shard(BlobHash(self._hash.hexdigest()), self._size, tuple(self._groups)))
            self._file = None

    def finish(self) -> TokenStream:
        if self._buffer:
            self._write_group(bytes(self._buffer))
            self._buffer.clear()
        self._end_shard()
        return TokenStream(self._num_tokens, tuple(self._shards))

    def close(self) -> None:
        """Let go of an unfinished file; after :meth:`finish` it does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
