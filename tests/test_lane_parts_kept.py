"""A lane's parts on a member's disk and as evidence: named by their part, not given up while their round is open."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from miner.boundaries import BoundaryCache
from miner.local_view import BoundaryKey, LocalView
from subnet.protocol.parts import encode_parts, parts_hash
from subnet.words import Member, Want
from validator.audit_evidence import wait_for_evidence

BYTES = 1000
WHOLE = BoundaryKey(3, 1, 0, False)


def part_of(number: int) -> tuple[BoundaryKey, bytes, str]:
    data = bytes([number]) * BYTES
    return WHOLE.of(number), data, blake3(data).hexdigest()


def filled(directory: Path, disk_bytes: int) -> BoundaryCache:
    cache = BoundaryCache(directory, memory_bytes=BYTES, disk_bytes=disk_bytes, durable=True)
    for number in (1, 2, 3):
        key, data, hash_ = part_of(number)
        cache.put(key, data, hash_, own=True)
    return cache


async def test_parts_of_the_open_round_go_to_disk_and_are_found_again(tmp_path: Path) -> None:
    cache = filled(tmp_path, 1 << 20)
    await cache.spill(4, needed_from=3)
    assert cache.memory_used == 0
    again = BoundaryCache(tmp_path, memory_bytes=BYTES, disk_bytes=1 << 20, durable=True)
    for number in (1, 2, 3):
        key, data, hash_ = part_of(number)
        assert again.hash_of(key) == hash_
        assert bytes(await again.get(key) or b"") == data


async def test_without_room_on_disk_an_open_rounds_parts_stay_in_memory(tmp_path: Path) -> None:
    """Of a step that is over they would be given up."""
    cache = filled(tmp_path, BYTES)
    await cache.spill(4, needed_from=3)
    assert all(part_of(number)[0] in cache for number in (1, 2, 3))
    await cache.spill(4)
    assert not all(part_of(number)[0] in cache for number in (1, 2, 3))


class Store:
    """What an auditor asks of the object store."""

    def __init__(self, *blobs: bytes) -> None:
        self.blobs = {blake3(data).hexdigest(): data for data in blobs}

    async def sizes(self, blobs: Any, **_: Any) -> dict[str, int]:
        return {blob: len(self.blobs[blob]) for blob in blobs if blob in self.blobs}

    async def get_blob(self, blob: str, size_bytes: int, **_: Any) -> bytes:
        return self.blobs[blob]


PARTS = [part_of(number)[1] for number in (1, 2)]
HASHES = [blake3(data).hexdigest() for data in PARTS]
WANT = Want(0, 1, False, parts_hash(HASHES))


@pytest.mark.parametrize(
    ("stored", "is_there"),
    [
        ((encode_parts(HASHES), *PARTS), True),
        ((encode_parts(HASHES), PARTS[0]), False),  # the list alone opens nothing
        ((encode_parts(HASHES),), False),
        (tuple(PARTS), False),
    ],
)
async def test_a_lanes_evidence_is_there_when_its_list_and_all_parts_are(
    stored: tuple[bytes, ...], is_there: bool
) -> None:
    waited = iter([0.0, 10.0, 10.0])
    arrived = await wait_for_evidence(
        Store(*stored),  # type: ignore[arg-type]
        [WANT],
        given_up=lambda want: False,
        waited_s=lambda: next(waited),
        limit_s=5.0,
        parts=lambda want: 2,
    )
    assert arrived.missing == (() if is_there else (WANT,))
    assert not is_there or arrived.evidence_bytes == 2 * BYTES + 64


async def test_a_list_of_something_else_is_no_evidence() -> None:
    want = Want(0, 1, False, blake3(PARTS[0]).hexdigest())
    waited = iter([10.0])
    arrived = await wait_for_evidence(
        Store(*PARTS),  # type: ignore[arg-type]
        [want],
        given_up=lambda want: False,
        waited_s=lambda: next(waited),
        limit_s=5.0,
        parts=lambda want: 2,
    )
    assert arrived.missing == (want,)


def test_what_was_pushed_in_order_is_one_number_a_receiver() -> None:
    local, to = LocalView(), Member("hot", 1, 1)
    for number in (2, 1, 3):
        assert not local.was_pushed(WHOLE.of(number), to)
        local.note_pushed(WHOLE.of(number), to)
        assert local.was_pushed(WHOLE.of(number), to)
    assert local.push_from == {(WHOLE, to): 4}
    assert not local.pushed
    local.boundaries = {WHOLE: "list", WHOLE.of(2): "two"}
    local.lose(WHOLE.of(2))
    assert not local.boundaries, "a list that names lost bytes is of no use"


async def test_evidence_of_a_lane_is_its_parts_and_then_its_list(tmp_path: Path) -> None:
    from miner.member_evidence import EvidenceWork
    from miner.owes import StoreEvidence
    from subnet.run.lanes import LanesSection

    cache, order = filled(tmp_path, 1 << 20), list[str]()
    hashes = [part_of(number)[2] for number in (1, 2, 3)]
    cache.put(WHOLE, encode_parts(hashes), parts_hash(hashes), own=True)

    async def put_many(blobs: list[tuple[str, Any]], retention: str, deadline: object) -> None:
        order.extend(hash_ for hash_, _ in blobs)

    config = SimpleNamespace(lanes=LanesSection(count=4, inner_steps=3), num_items=4, parts_per_item=3)
    state = SimpleNamespace(run=SimpleNamespace(config=config), audits=SimpleNamespace(open={1: None}))
    context: Any = SimpleNamespace(
        cache=cache, run_state=state, local=LocalView(), blobs=SimpleNamespace(put_many=put_many), wake=lambda: None
    )
    work = EvidenceWork(context)
    owe = StoreEvidence(1, WHOLE, parts_hash(hashes), own=True, before_seal=True)
    await work.store(owe)
    assert order == [*hashes, parts_hash(hashes)]
    assert (1, owe.hash) in context.local.opened
    cache.drop(WHOLE.of(2))
    with pytest.raises(Exception, match="no longer held"):
        await work.store(owe)
    assert WHOLE not in cache, "so that it is said to be lost"
    await asyncio.wait_for(work.close(), 5)
