"""A bundle: ``case.msgpack`` and the blobs it names, in a directory that anyone can replay; nothing in it is believed unhashed.

Sizes are bounded before anything is read, every blob is checked against its name each time it is read, and whatever is
lacking is named at once. No torch, no network: whoever fetches asks :func:`needed_blobs` what is still to be had.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from subnet.audit.case import LIMIT_CASE_BYTES, Case
from subnet.audit.check import can_update, check_case, plan_of, shared_partitions
from subnet.audit.signed import verify_claims
from subnet.errors import HashMismatch, InputError, NotFound, OutOfSpace, TooLarge
from subnet.model.data import SampleOrder, decode_manifest
from subnet.model.memory import boundary_bytes
from subnet.model.plan import ModelPlan
from subnet.model.snapshots import LIMIT_MANIFEST_BYTES, ChunkRef, select_entries
from subnet.model.snapshots import decode_manifest as decode_snapshot
from subnet.protocol import wire
from subnet.protocol.parts import PART_BYTES, decode_parts
from subnet.protocol.wire import Buffer, is_blob_hash
from subnet.words import ItemKey, short

__all__ = [
    "BLOBS_NAME",
    "CASE_NAME",
    "Bundle",
    "Needed",
    "decode_case",
    "encode_case",
    "needed_blobs",
    "open_bundle",
    "put_blob",
    "read_bundle",
    "useful_blobs",
    "verify_claims",
    "write_bundle",
]

CASE_NAME = "case.msgpack"
BLOBS_NAME = "blobs"
LIMIT_DATA_BYTES = 512 << 20
"""Of a data manifest: 67 bytes for each 64 KiB of tokens."""
LIMIT_BLOB_BYTES = 1 << 30
"""Of a blob whose size nothing says."""
LIMIT_NAMED = 1 << 22
"""Blobs of one bundle."""

Read = Callable[[str], Buffer | None]

_ORDERS: dict[str, tuple[ModelPlan, SampleOrder]] = {}
"""Of the last run that was asked about, by the hash of its data manifest."""


class Needed(msgspec.Struct, frozen=True, order=True):
    """A blob of a bundle. With ``shard``: the bytes from ``start`` on of that blob, kept in the bundle under their own hash."""

    hash: str
    size_bytes: int
    """0: not known beforehand."""
    shard: str = ""
    shard_bytes: int = 0
    start: int = 0


def encode_case(case: Case) -> bytes:
    return wire.encode(case)


def decode_case(data: Buffer) -> Case:
    """Foreign bytes to a case; whether it makes sense is :func:`~subnet.audit.check.check_case`'s to say."""
    return wire.decode(data, Case, limit_bytes=LIMIT_CASE_BYTES, what="a case")


# --- what belongs to it ------------------------------------------------------------------------------------------


def needed_blobs(
    case: Case, read: Read, *, has: Callable[[str], bool] | None = None, held: int | None = None
) -> list[Needed]:
    """What is still lacking: ask again once it is there, for manifests name more, until nothing is.

    ``read`` gives what is there of manifests (and, without ``has``, says of other blobs whether they are there). ``held``:
    the state that whoever replays keeps of the stage already, as the number of its updates; what led to it isn't needed.
    """
    check_case(case)

    def is_read(blob: str) -> bool:
        return read(blob) is not None

    there = has or is_read
    named = {need.hash: need for need in _all_named(case, read, held)}
    if len(named) > LIMIT_NAMED:
        raise TooLarge(f"the case names {len(named)} blobs, more than {LIMIT_NAMED}")
    return [need for need in named.values() if not there(need.hash)]


def useful_blobs(case: Case) -> tuple[Needed, ...]:
    """Claimed outputs: no replay on a machine of the class needs them, one on another compares with those that are there."""
    items = [hash_ for partial in case.partials for item in partial.items for hash_ in (item.forward, item.backward)]
    slices = [hash_ for partial in case.partials for _, hash_ in partial.commitment.hashes]
    merged = [] if case.merge is None or not case.merge.whole else case.merge.merged
    found = [Needed(hash_, 0) for hash_ in dict.fromkeys((*items, *slices)) if hash_]
    return (*found, *(Needed(one.blob, one.size_bytes) for one in merged))


def _all_named(case: Case, read: Read, held: int | None) -> Iterator[Needed]:
    plan = plan_of(case.planned)
    yield from _of_state(case, plan, read, held)
    for partial in case.partials:
        for item in partial.items:
            for hash_ in (item.x, item.gradient):
                yield from _of_boundary(plan, hash_, read)
    if can_update(case) and case.update is not None:
        shared = shared_partitions(plan, case.stage)
        yield from (Needed(blob, size) for index, _, blob, size in case.update.partitions if index in shared)
    if case.partials and plan.needs_tokens(case.stage):
        yield from _of_tokens(case, plan, read)


def _of_boundary(plan: ModelPlan, hash_: str, read: Read) -> Iterator[Needed]:
    """A boundary; of a lane the list of its parts and what that names."""
    if not hash_:
        return
    parts = num_parts(plan)
    yield Needed(hash_, parts * PART_BYTES)
    data = read(hash_) if parts else None
    if data is not None:
        yield from (Needed(part, 0) for part in decode_parts(data, parts))


def num_parts(plan: ModelPlan) -> int:
    """Of an item's boundaries; 0: they are whole."""
    return plan.config.parts_per_item if plan.config.lanes.on else 0


def _of_state(case: Case, plan: ModelPlan, read: Read, held: int | None) -> Iterator[Needed]:
    ref = case.state
    goes_on = held is not None and ref.version <= held <= ref.version + len(ref.log)
    if not goes_on:
        yield Needed(ref.manifest, 0)
        data = read(ref.manifest)
        if data is not None:
            manifest = select_entries(decode_snapshot(memoryview(data)), plan.stage_tensors[case.stage])
            yield from map(_chunk, manifest.chunks)
    for log in ref.log:
        if not goes_on or (held is not None and log.step >= held):
            yield from (Needed(blob, size) for _, _, blob, size in log.partitions)


def _chunk(ref: ChunkRef) -> Needed:
    if not is_blob_hash(ref.hash) or ref.size_bytes <= 0:
        raise InputError(f"the snapshot names {ref.hash[:80]!r} of {ref.size_bytes} bytes")
    return Needed(ref.hash, ref.size_bytes)


def _of_tokens(case: Case, plan: ModelPlan, read: Read) -> Iterator[Needed]:
    yield Needed(case.planned.data, 0)
    order = _order_of(case, plan, read)
    if order is None:
        return
    for partial in case.partials:
        for item in partial.items:
            key = ItemKey(case.step, item.microbatch, case.stage)
            for part in range(1, num_parts(plan) + 1) or (0,):
                yield from _of_rows(order, key, part)


def _of_rows(order: SampleOrder, item: ItemKey, part: int) -> Iterator[Needed]:
    for shard, group in order.ranges_for(item, part):
        start, end = shard.row_group_range(group)
        hash_ = shard.row_group_hashes[group]
        if not is_blob_hash(hash_) or not is_blob_hash(shard.blob):
            raise InputError("the data manifest names tokens by what is no hash")
        yield Needed(hash_, end - start, shard.blob, shard.size_bytes, start)


def _order_of(case: Case, plan: ModelPlan, read: Read) -> SampleOrder | None:
    """Of the run's data, which is read once for all cases of a run; None where its manifest isn't there."""
    known = _ORDERS.get(case.planned.data)
    if known is not None and known[0] is plan:
        return known[1]
    data = read(case.planned.data)
    if data is None:
        return None
    size_bytes = memoryview(data).nbytes
    if size_bytes > LIMIT_DATA_BYTES:
        raise TooLarge(f"a data manifest of {size_bytes} bytes, more than {LIMIT_DATA_BYTES}")
    if wire.blob_hash(data) != case.planned.data:
        raise HashMismatch(f"the data manifest is not what its hash {short(case.planned.data)} says")
    order = SampleOrder(plan.config, decode_manifest(bytes(data)))
    _ORDERS.clear()
    _ORDERS[case.planned.data] = (plan, order)
    return order


# --- writing -----------------------------------------------------------------------------------------------------


def write_bundle(directory: Path, case: Case, blobs: Mapping[str, Buffer]) -> None:
    """The case and these blobs; each must have the hash that it goes by. The case is written last."""
    (directory / BLOBS_NAME).mkdir(parents=True, exist_ok=True)
    for hash_, data in blobs.items():
        put_blob(directory, hash_, data)
    _write_file(directory / CASE_NAME, encode_case(case))


def put_blob(directory: Path, hash_: str, data: Buffer) -> None:
    """One more blob of a bundle."""
    if not is_blob_hash(hash_) or wire.blob_hash(data) != hash_:
        raise HashMismatch(f"{memoryview(data).nbytes} bytes are not those of hash {hash_[:80]}")
    _write_file(directory / BLOBS_NAME / hash_, data)


def _write_file(path: Path, data: Buffer) -> None:
    """Whole or not at all; not durable, since every blob is hashed when it is read."""
    temp = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        temp.write_bytes(data)
        temp.replace(path)
    except OSError as error:
        temp.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(f"{path}: the disk is full", hint="free some space") from error
        raise


# --- reading -----------------------------------------------------------------------------------------------------


class Bundle:
    """A bundle as it lies on disk; ``case`` has passed :func:`~subnet.audit.check.check_case`. ``name``: hash of its file."""

    def __init__(self, directory: Path, case: Case, name: str) -> None:
        self.directory, self.case, self.name = directory, case, name
        self.plan = plan_of(case.planned)
        self.read_bytes = 0
        self._sizes: dict[str, int] = {}

    def blob(self, hash_: str) -> memoryview:
        """The bytes of a blob, checked against its hash."""
        path, limit = self._path(hash_), max(LIMIT_BLOB_BYTES, boundary_bytes(self.plan))
        expected = self._sizes.get(hash_, 0)
        data = _read_file(path, expected or limit, f"blob {short(hash_)}")
        if (expected and len(data) != expected) or wire.blob_hash(data) != hash_:
            raise HashMismatch(f"{path} is damaged: its bytes are not those of its name", hint="fetch that blob again")
        self.read_bytes += len(data)
        return memoryview(data)

    def find(self, hash_: str) -> memoryview | None:
        """The same, or None where it isn't there."""
        return self.blob(hash_) if self.has(hash_) else None

    def has(self, hash_: str) -> bool:
        return self._path(hash_).is_file()

    def tokens(self, item: ItemKey, part: int = 0) -> NDArray[np.integer[Any]]:
        """The rows of an item, or of one part of it, from row groups that are checked against the data manifest."""
        order = _order_of(self.case, self.plan, self.blob)
        if order is None:
            raise NotFound(f"the data manifest {short(self.case.planned.data)} isn't there")
        groups = {
            (shard.blob, index): self.blob(shard.row_group_hashes[index])
            for shard, index in order.ranges_for(item, part)
        }
        return order.assemble(item, groups, part)

    def missing(self, held: int | None = None) -> list[Needed]:
        """What it lacks; ``held`` as for :func:`needed_blobs`."""

        def read(hash_: str) -> memoryview | None:
            if not self.has(hash_):
                return None
            limit = LIMIT_DATA_BYTES if hash_ == self.case.planned.data else LIMIT_MANIFEST_BYTES
            size = self._path(hash_).stat().st_size
            if size > limit:
                raise TooLarge(f"{self._path(hash_)} has {size} bytes, a manifest at most {limit}")
            return self.blob(hash_)

        named = needed_blobs(self.case, read, has=lambda _: False, held=held)
        self._sizes.update({need.hash: need.size_bytes for need in named if need.size_bytes})
        return [need for need in named if not self.has(need.hash)]

    def require(self, held: int | None = None) -> None:
        """Raises :class:`NotFound`, naming every blob that is lacking."""
        lacking = self.missing(held)
        if not lacking:
            return
        names = ", ".join(need.hash for need in lacking[:16]) + (f" and {len(lacking) - 16} more" * (len(lacking) > 16))
        raise NotFound(
            f"{self.directory} lacks {len(lacking)} of the blobs that its case names: {names}",
            hint=f"put each into {BLOBS_NAME}/ under its hash; the validator that made the case holds them for the run's life",
        )

    def _path(self, hash_: str) -> Path:
        if not is_blob_hash(hash_):
            raise InputError(f"{hash_[:80]!r} is no hash of a blob")
        return self.directory / BLOBS_NAME / hash_


def open_bundle(directory: Path) -> Bundle:
    """The bundle in this directory, its case decoded and found sound; blobs may be lacking."""
    path = directory / CASE_NAME
    data = _read_file(path, LIMIT_CASE_BYTES, str(path))
    case = decode_case(data)
    check_case(case)
    return Bundle(directory, case, wire.blob_hash(data))


def read_bundle(directory: Path) -> Bundle:
    """The whole bundle: :func:`open_bundle`, and nothing is lacking."""
    bundle = open_bundle(directory)
    bundle.require()
    return bundle


def _read_file(path: Path, limit_bytes: int, what: str) -> bytearray:
    """An ordinary file, whole, if it isn't too large."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(
            f"{path} is not there", hint=f"a bundle is a directory with {CASE_NAME} and {BLOBS_NAME}/"
        ) from None
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{path} is no ordinary file")
        if found.st_size > limit_bytes:
            raise TooLarge(f"{what}: {found.st_size} bytes, more than {limit_bytes}")
        data = bytearray(found.st_size)
        view, at = memoryview(data), 0
        with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
            while at < len(data) and (got := file.readinto(view[at:])):
                at += got
    finally:
        os.close(descriptor)
    if at != len(data):
        raise InputError(f"{path} became shorter while it was read")
    return data
