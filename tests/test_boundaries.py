"""The boundary cache gives back what was put, or nothing; it keeps to its budgets, oldest steps first."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3
from loguru import logger

from miner import boundaries
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


async def test_the_same_again_changes_nothing_and_another_value_takes_its_place(tmp_path: Path) -> None:
    cache = BoundaryCache(tmp_path / "b", memory_bytes=1000, disk_bytes=1000)
    key = _put(cache, 0, 0)
    first = cache.peek(key)
    cache.put(key, bytes([0, 0]) * 50, cache.kept[key])
    assert cache.peek(key) is first
    cache.put(key, b"other" * 10, "0" * 64)
    assert bytes(await cache.get(key) or b"") == b"other" * 10
    assert cache.kept[key] == "0" * 64, "what is said of it is said of its bytes"
    assert cache.memory_used == 50


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
    cache.rewind(2, 1)
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


# --- what the next process finds ----------------------------------------------------------------------------------


def _durable(directory: Path, *, memory_bytes: int = 10_000, disk_bytes: int = 10_000) -> BoundaryCache:
    return BoundaryCache(directory, memory_bytes=memory_bytes, disk_bytes=disk_bytes, durable=True)


def _made(cache: BoundaryCache, step: int, m: int = 0, *, own: bool = True, salt: int = 0) -> BoundaryKey:
    key, data = BoundaryKey(step, m, 1, True), bytes([step + 1, m, salt, 0]) * 25
    cache.put(key, data, blake3(data).hexdigest(), own=own)
    return key


async def test_what_was_made_here_of_past_steps_is_found_by_the_next_process(tmp_path: Path) -> None:
    cache = _durable(tmp_path / "b")
    keys = [_made(cache, step) for step in (-1, 0, 1)]
    received = _made(cache, 0, 7, own=False)
    await cache.spill(keep_step=1)
    assert (cache.disk_used, cache.memory_used) == (200, 200)
    (tmp_path / "b" / "being-written.tmp").write_bytes(b"half")
    (tmp_path / "b" / "0.0.7.0.x").write_bytes(b"of an older version")
    again = _durable(tmp_path / "b")
    assert set(again.kept) == {keys[0], keys[1]}, "nothing of the open step, and nothing received"
    assert received not in again
    assert again.kept == {key: cache.kept[key] for key in keys[:2]}
    assert again.disk_used == 200
    assert bytes(await again.get(keys[1]) or b"") == bytes([1, 0, 0, 0]) * 25
    assert len(list((tmp_path / "b").iterdir())) == 2
    again.drop_received(step=0, num_training=8)
    assert keys[1] in again, "it is still its maker's"
    again.drop_before(1)
    assert not list((tmp_path / "b").iterdir())


async def test_without_audits_nothing_is_written_that_fits_into_memory_nor_found_again(tmp_path: Path) -> None:
    cache = BoundaryCache(tmp_path / "b", memory_bytes=150, disk_bytes=10_000)
    keys = [_made(cache, step) for step in range(2)]
    await cache.spill(keep_step=2)
    assert [cache.peek(key) is None for key in keys] == [True, False]
    assert not BoundaryCache(tmp_path / "b", memory_bytes=150, disk_bytes=10_000).kept
    assert not list((tmp_path / "b").iterdir())


async def test_a_step_done_again_on_another_branch_takes_the_place_of_the_first(tmp_path: Path) -> None:
    cache = _durable(tmp_path / "b")
    keys = [_made(cache, step) for step in range(3)]
    await cache.spill(keep_step=3)
    cache.rewind(2, 1)
    again = _made(cache, 2, salt=1)
    later = _made(cache, 3, salt=1)
    await cache.spill(keep_step=4)
    found = _durable(tmp_path / "b")
    assert set(found.kept) == {*keys, later}
    assert found.kept[again] == cache.kept[again]
    found.rewind(2, 1)
    assert set(found.kept) == {*keys, later}, "the journal is folded again from its start: what came of it stays"
    found.rewind(1, 2)
    assert set(found.kept) == {keys[0]}


async def test_a_key_of_a_branch_that_was_left_without_being_seen_is_made_anew(tmp_path: Path) -> None:
    cache = _durable(tmp_path / "b")
    key = _made(cache, 2)
    await cache.spill(keep_step=3)
    found = _durable(tmp_path / "b")
    found.branch = 1
    assert _made(found, 2, salt=1) == key
    assert bytes(await found.get(key) or b"") == bytes([3, 0, 1, 0]) * 25
    assert (found.memory_used, found.disk_used) == (100, 0)
    assert not list((tmp_path / "b").iterdir())


async def test_a_full_or_failing_disk_keeps_evidence_in_memory_while_that_has_room(tmp_path: Path) -> None:
    cache = _durable(tmp_path / "b", disk_bytes=250)
    keys = [_made(cache, step) for step in range(4)]
    await cache.spill(keep_step=9)
    assert (cache.disk_used, cache.memory_used) == (200, 200)
    assert set(cache.kept) == set(keys), "nothing older had to go for it"
    (tmp_path / "c").write_bytes(b"a file where a directory is needed")
    cache._directory = tmp_path / "c"
    cache._disk_budget = 10_000
    await cache.spill(keep_step=9)
    assert (cache.disk_used, cache.memory_used) == (200, 200)
    assert set(cache.kept) == set(keys)


async def test_a_smaller_budget_than_the_last_process_had_drops_the_oldest(tmp_path: Path) -> None:
    cache = _durable(tmp_path / "b")
    keys = [_made(cache, step) for step in range(4)]
    await cache.spill(keep_step=9)
    assert set(_durable(tmp_path / "b", disk_bytes=250).kept) == set(keys[2:])
    assert len(list((tmp_path / "b").iterdir())) == 2


async def test_many_blobs_are_written_a_bounded_number_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = boundaries._write_all

    def counted(temp: Path, files: list[tuple[Path, memoryview | None]]) -> None:
        sizes.append(len(files))
        write(temp, files)

    monkeypatch.setattr(boundaries, "_write_all", counted)
    cache = _durable(tmp_path / "b", disk_bytes=1 << 20)
    keys = [_made(cache, 0, m % 256, salt=0) for m in range(150)]
    await cache.spill(keep_step=1)
    assert sizes == [64, 64, 22]
    assert all(cache.peek(key) is None for key in keys)


def test_only_one_runs_boundaries_are_on_the_disk(tmp_path: Path) -> None:
    directory = tmp_path / "boundaries"
    (directory / "old-run").mkdir(parents=True)
    (directory / "old-run" / "x").write_bytes(b"x")
    (directory / "0.0.0.x").write_bytes(b"of an older version")
    cache = boundaries.boundaries_of_run(directory, "run", memory_bytes=1, disk_bytes=1, durable=True)
    assert not cache.kept
    assert [path.name for path in directory.iterdir()] == ["run"]


async def test_the_disk_keeps_its_reserve_and_memory_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = 1000
    cache = BoundaryCache(tmp_path / "b", memory_bytes=250, disk_bytes=10_000, durable=True, reserve_bytes=850)
    monkeypatch.setattr(boundaries, "free_bytes", lambda directory: free_bytes - cache.disk_used)
    keys = [_made(cache, step) for step in range(4)]
    await cache.spill(keep_step=9)
    assert (cache.disk_used, cache.memory_used) == (100, 200)
    assert set(cache.kept) == set(keys[1:]), "the oldest had to go"
    free_bytes = 860
    _made(cache, 4)
    await cache.spill(keep_step=9)
    assert cache.disk_used == 0
    assert cache.memory_used == 200

    def fails(directory: Path) -> int:
        raise OSError(5, "the disk has left")

    monkeypatch.setattr(boundaries, "free_bytes", fails)
    _made(cache, 5)
    await cache.spill(keep_step=9)
    assert cache.memory_used <= 250
