"""The boundary cache gives back what was put, or nothing; it keeps to its budgets, oldest steps first."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3
from loguru import logger

from miner.boundaries import BoundaryCache
from miner.local_view import BoundaryKey


def _put(cache: BoundaryCache, step: int, m: int, size: int = 100) -> BoundaryKey:
    key, data = BoundaryKey(step, m, 0, False), bytes([step % 256, m]) * (size // 2)
    cache.put(key, data, blake3(data).hexdigest())
    return key


async def test_spills_to_disk_and_comes_back(tmp_path: Path) -> None:
    cache = BoundaryCache(tmp_path / "b", memory_bytes=150, disk_bytes=10_000)
    old, new = _put(cache, 0, 0), _put(cache, 1, 0)
    await cache.spill(keep_step=1)
    assert cache.memory_used == 100
    assert cache.disk_used == 100
    assert cache.peek(old) is None
    assert bytes(await cache.get(old) or b"") == bytes([0, 0]) * 50
    assert cache.peek(new) is not None


async def test_the_open_step_never_leaves_memory(tmp_path: Path) -> None:
    cache = BoundaryCache(tmp_path / "b", memory_bytes=10, disk_bytes=10_000)
    keys = [_put(cache, 5, m) for m in range(3)]
    await cache.spill(keep_step=5)
    assert all(cache.peek(key) is not None for key in keys)


async def test_a_full_disk_budget_drops_the_oldest_steps(tmp_path: Path) -> None:
    cache = BoundaryCache(tmp_path / "b", memory_bytes=0, disk_bytes=250)
    keys = [_put(cache, step, 0) for step in range(4)]
    await cache.spill(keep_step=9)
    assert cache.disk_used <= 250
    assert [key in cache for key in keys] == [False, False, True, True]


async def test_a_damaged_file_is_absent(tmp_path: Path) -> None:
    cache = BoundaryCache(tmp_path / "b", memory_bytes=0, disk_bytes=1000)
    key = _put(cache, 0, 0)
    await cache.spill(keep_step=1)
    (file,) = (tmp_path / "b").iterdir()
    file.write_bytes(b"x" * 100)
    assert await cache.get(key) is None
    assert key not in cache


async def test_the_horizon_forgets(tmp_path: Path) -> None:
    cache = BoundaryCache(tmp_path / "b", memory_bytes=0, disk_bytes=1000)
    keys = [_put(cache, step, 0) for step in range(3)]
    await cache.spill(keep_step=2)
    cache.drop_before(2)
    assert [key in cache for key in keys] == [False, False, True]
    assert not list((tmp_path / "b").iterdir())
    assert (cache.memory_used, cache.disk_used) == (100, 0)


async def test_first_value_of_a_key_stays(tmp_path: Path) -> None:
    cache = BoundaryCache(tmp_path / "b", memory_bytes=1000, disk_bytes=1000)
    key = _put(cache, 0, 0)
    cache.put(key, b"other" * 20, "0" * 64)
    assert bytes(await cache.get(key) or b"") == bytes([0, 0]) * 50
    assert cache.memory_used == 100


async def test_received_boundaries_and_those_of_evaluations_go_with_their_step(tmp_path: Path) -> None:
    cache = BoundaryCache(tmp_path / "b", memory_bytes=1000, disk_bytes=1000)
    own, received = BoundaryKey(3, 0, 1, True), BoundaryKey(3, 0, 0, False)
    evaluated, later = BoundaryKey(3, 8, 1, False), BoundaryKey(4, 0, 0, False)
    for key in (own, received, evaluated, later):
        cache.put(key, b"x" * 10, blake3(b"x" * 10).hexdigest(), own=key.stage == 1)
    cache.drop_received(step=3, num_training=8)
    assert [key in cache for key in (own, received, evaluated, later)] == [True, False, False, True]
    assert cache.memory_used == 20
    assert set(cache.kept) == {own, later}


async def test_a_branch_that_was_left_leaves_nothing_of_its_steps(tmp_path: Path) -> None:
    cache = BoundaryCache(tmp_path / "b", memory_bytes=0, disk_bytes=1000)
    keys = [_put(cache, step, 0) for step in range(4)]
    await cache.spill(keep_step=3)
    cache.drop_from(2)
    assert [key in cache for key in keys] == [True, True, False, False]
    assert len(list((tmp_path / "b").iterdir())) == 2
    assert (cache.memory_used, cache.disk_used) == (0, 200)
    again = _put(cache, 2, 0, size=50)
    assert len(await cache.get(again) or b"") == 50, "the step is done again, with other bytes"


async def test_evidence_that_finds_no_room_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    sink = logger.add(lambda message: said.append(str(message)), level="INFO")
    cache = BoundaryCache(tmp_path / "b", memory_bytes=0, disk_bytes=250)
    keys = [_put(cache, step, 0) for step in range(8)]
    await cache.spill(keep_step=9)
    logger.remove(sink)
    assert set(cache.kept) == {key for key in keys if key in cache}
    assert len(cache.kept) == 2
    assert len([line for line in said if "not enough for all that an audit may want" in line]) == 1
