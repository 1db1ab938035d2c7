"""Tokens of an item's rows: only the row groups needed are fetched, each checked once against the manifest and kept on disk.

What lies in memory is bounded to the last ``MEMORY_GROUPS`` row groups (64 KiB each).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
from loguru import logger

from miner.blobs import Blobs
from subnet.errors import OutOfSpace
from subnet.model.data import SampleOrder, Shard
from subnet.store.disk import BlobCache
from subnet.timing import Deadline
from subnet.words import BlobHash, ItemKey

MEMORY_GROUPS = 512


class TokenSource:
    def __init__(self, order: SampleOrder, blobs: Blobs, cache: BlobCache) -> None:
        self._order, self._blobs, self._cache = order, blobs, cache
        self._groups: OrderedDict[tuple[BlobHash, int], bytes] = OrderedDict()
        self._coming: dict[tuple[BlobHash, int], asyncio.Task[bytes]] = {}

    async def rows(self, item: ItemKey, deadline: Deadline, part: int = 0) -> npt.NDArray[np.integer[Any]]:
        """(rows, sequence_length + 1) tokens, of a lane those of one part; a row group that can't be had raises the store's
        error."""
        needed = self._order.ranges_for(item, part)
        groups: dict[tuple[BlobHash, int], bytes | memoryview] = {}
        for shard, index in needed:
            groups[(shard.blob, index)] = await self._group(shard, index, deadline)
        return self._order.assemble(item, groups, part)

    async def _group(self, shard: Shard, index: int, deadline: Deadline) -> bytes:
        key = (shard.blob, index)
        held = self._groups.get(key)
        if held is not None:
            self._groups.move_to_end(key)
            return held
        task = self._coming.get(key)
        if task is None:
            task = asyncio.create_task(self._fetch(shard, index, deadline), name=f"row group {index}")
            self._coming[key] = task
            task.add_done_callback(lambda done: self._came(key, done))
        data = await asyncio.shield(task)
        self._groups[key] = data
        while len(self._groups) > MEMORY_GROUPS:
            self._groups.popitem(last=False)
        return data

    async def _fetch(self, shard: Shard, index: int, deadline: Deadline) -> bytes:
        hash_ = shard.row_group_hashes[index]
        cached = await asyncio.to_thread(self._cache.get, hash_)
        if cached is not None:
            return bytes(cached)
        start, end = shard.row_group_range(index)
        data = bytes(await self._blobs.get_range((shard.blob, shard.size_bytes), start, end - start, deadline))
        self._order.check_row_group(shard.blob, index, data)
        try:
            await asyncio.to_thread(self._cache.put, hash_, data)
        except (OutOfSpace, OSError) as error:
            logger.debug("row group not cached: {}", error)  # the cache's owner says it once
        return data

    def _came(self, key: tuple[BlobHash, int], task: asyncio.Task[bytes]) -> None:
        """Whoever waits has the error; it is looked at here for those that gave up waiting."""
        self._coming.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("{}: {}", task.get_name(), error)

    async def close(self) -> None:
        """End what is still coming."""
        tasks = set(self._coming.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
