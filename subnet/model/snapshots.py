"""A state as content-addressed chunks: what is put together from them is, byte for byte, what was cut. No torch here.

Which arrays a tensor has: :mod:`subnet.numerics.state_arrays`. An empty tuple of chunks stands for zeros: snapshot 0 has
weights only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
from blake3 import blake3

from subnet.errors import HashMismatch, InputError
from subnet.model.plan import ModelPlan
from subnet.numerics.layout import TensorSpec
from subnet.numerics.state_arrays import ARRAYS, LIMIT_BEFORE, MOMENTS, SCALES, ordered
from subnet.words import BlobHash

CHUNK_BYTES = 32 << 20
"""Bytes of a chunk at most; all but an array's last have exactly this many."""

KINDS = ("weight", *MOMENTS, *SCALES)
"""The arrays of a tensor under AdamW, in the order in which its leaf hashes them; the last two have one number per block."""

ALL_KINDS = (*KINDS, LIMIT_BEFORE)
_ALWAYS = frozenset(("weight", *SCALES))

LIMIT_MANIFEST_BYTES = 32 << 20


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    hash: BlobHash
    size_bytes: int


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    shape: tuple[int, ...]
    arrays: dict[str, tuple[ChunkRef, ...]]
    leaf: bytes
    """BLAKE3 leaf of the tensor's whole state: what the state root is made of."""


class SnapshotManifest(msgspec.Struct, frozen=True):
    """State after ``step`` updates (0: initial) of some or all tensors, in canonical order."""

    step: int
    entries: tuple[TensorEntry, ...]
    version: int = 1

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @property
    def chunks(self) -> tuple[ChunkRef, ...]:
        """Every chunk, each once."""
        refs = (ref for entry in self.entries for kind in kinds_of(entry) for ref in entry.arrays[kind])
        return tuple(dict.fromkeys(refs))


def kinds_of(entry: TensorEntry) -> tuple[str, ...]:
    """The arrays that an entry has, in the order of its leaf."""
    return ordered(entry.arrays)


class BlobSink(Protocol):
    """Takes a chunk; the view is only valid during the call."""

    def __call__(self, blob: BlobHash, data: memoryview) -> None: ...


class BlobSource(Protocol):
    """Gives a chunk's bytes back; they are checked here."""

    def __call__(self, ref: ChunkRef) -> bytes | bytearray | memoryview: ...


def array_bytes(spec: TensorSpec, kind: str) -> int:
    """Bytes of a tensor's array."""
    return ARRAYS[kind].num_bytes(spec)


def cut_array(data: memoryview, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[ChunkRef, memoryview]]:
    """Chunks of an array, in order; views, not copies."""
    flat = data.cast("B")
    for start in range(0, len(flat), chunk_bytes):
        part = flat[start : start + chunk_bytes]
        yield ChunkRef(BlobHash(blake3(part).hexdigest()), len(part)), part


def store_tensor(
    spec: TensorSpec, arrays: Mapping[str, memoryview | None], leaf: bytes, put: BlobSink, *, frozen: bool = False
) -> TensorEntry:
    """Hand every chunk to ``put`` and describe the tensor; None stands for zeros, and so do AdamW's arrays where only the
    weights are given. A ``frozen`` tensor has nothing but weights."""
    refs: dict[str, tuple[ChunkRef, ...]] = {}
    for kind in KINDS if set(arrays) == {"weight"} and not frozen else ordered(arrays):
        data = arrays.get(kind)
        chunks: list[ChunkRef] = []
        if data is not None:
            if data.nbytes != array_bytes(spec, kind):
                raise ValueError(f"{spec.name}.{kind} has {data.nbytes} bytes instead of {array_bytes(spec, kind)}")
            for ref, part in cut_array(data):
                put(ref.hash, part)
                chunks.append(ref)
        refs[kind] = tuple(chunks)
    return TensorEntry(spec.name, spec.shape, refs, leaf)


def fill_array(refs: Sequence[ChunkRef], target: memoryview, get: BlobSource, *, what: str = "array") -> None:
    """Put an array together in ``target`` (writable), each chunk's size and hash checked before it is written."""
    flat = target.cast("B")
    if not refs:
        flat[:] = bytes(len(flat))
        return
    if sum(ref.size_bytes for ref in refs) != len(flat):
        raise InputError(f"{what}: chunks have {sum(ref.size_bytes for ref in refs)} bytes instead of {len(flat)}")
    start = 0
    for ref in refs:
        data = memoryview(get(ref)).cast("B")
        if len(data) != ref.size_bytes or blake3(data).hexdigest() != ref.hash:
            raise HashMismatch(f"{what}: chunk {ref.hash[:10]} is not what its hash says")
        flat[start : start + len(data)] = data
        start += len(data)


def decode_manifest(data: bytes | memoryview) -> SnapshotManifest:
    """Foreign bytes to a manifest whose shape is sound; :func:`check_manifest` holds it against the plan."""
    if len(data) > LIMIT_MANIFEST_BYTES:
        raise InputError(f"a snapshot manifest of {len(data)} bytes is too large")
    try:
        manifest = msgspec.msgpack.decode(data, type=SnapshotManifest)
    except msgspec.MsgspecError as error:
        raise InputError(f"not a snapshot manifest: {error}") from error
    if manifest.version != 1:
        raise InputError(f"snapshot manifest version {manifest.version} is unknown")
    return manifest


def check_manifest(manifest: SnapshotManifest, specs: Iterable[TensorSpec]) -> dict[str, TensorEntry]:
    """Entries by name; raises unless exactly these tensors are there, in this order, each array of the right size."""
    specs = list(specs)
    if [entry.name for entry in manifest.entries] != [spec.name for spec in specs]:
        raise InputError("the snapshot's tensors are not those of the plan, in canonical order")
    for entry, spec in zip(manifest.entries, specs, strict=True):
        known = set(entry.arrays) == set(kinds_of(entry))
        known = known and (set(entry.arrays) >= _ALWAYS or set(entry.arrays) == {"weight"})  # a frozen one
        if entry.shape != spec.shape or not known or len(entry.leaf) != 32:
            raise InputError(f"the snapshot's entry {spec.name} doesn't fit the plan")
        for kind, refs in entry.arrays.items():
            if refs and sum(ref.size_bytes for ref in refs) != array_bytes(spec, kind):
                raise InputError(f"{spec.name}.{kind}: wrong size in the snapshot")
            if any(not 0 < ref.size_bytes <= CHUNK_BYTES for ref in refs):
                raise InputError(f"{spec.name}.{kind}: a chunk is empty or above {CHUNK_BYTES} bytes")
    return {entry.name: entry for entry in manifest.entries}


def join_manifests(plan: ModelPlan, manifests: Sequence[SnapshotManifest]) -> SnapshotManifest:
    """The whole model's manifest from those of all stages; a tensor two stages hold must be equal in both."""
    steps = {manifest.step for manifest in manifests}
    if len(steps) != 1 or len(manifests) != plan.num_stages:
        raise InputError(f"one manifest a stage of one step is needed, not {len(manifests)} of steps {sorted(steps)}")
    found: dict[str, TensorEntry] = {}
    for stage, manifest in enumerate(manifests):
        for name, entry in check_manifest(manifest, plan.stage_tensors[stage]).items():
            if found.setdefault(name, entry).leaf != entry.leaf:
                raise InputError(f"two stages disagree about {name}")
    return SnapshotManifest(steps.pop(), tuple(found[spec.name] for spec in plan.canonical))


def select_entries(manifest: SnapshotManifest, specs: Iterable[TensorSpec]) -> SnapshotManifest:
    """The part of a manifest that covers these tensors."""
    by_name = {entry.name: entry for entry in manifest.entries}
    try:
        return SnapshotManifest(manifest.step, tuple(by_name[spec.name] for spec in specs))
    except KeyError as error:
        raise InputError(f"the snapshot lacks {error.args[0]}") from error
