"""A run's state as a Hugging Face directory: each chunk, leaf and the run root checked, written whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from iota.export_adapter import adapter_specs, base_specs, merged_tensor, write_adapter
from iota.export_check import CheckedLogits, check_adapter_logits, check_logits
from iota.export_replay import replayed_snapshots
from iota.remote import Remote
from subnet.errors import ConfigError, HashMismatch, InputError, NotFound
from subnet.model.checkpoints import LIMIT_CARRIED_BYTES, write_pretrained
from subnet.model.model_card import model_card
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.model.snapshots import (
    ChunkRef,
    SnapshotManifest,
    TensorEntry,
    array_bytes,
    decode_manifest,
    fill_array,
    kinds_of,
)
from subnet.numerics.layout import TensorSpec
from subnet.numerics.roots import leaf_hash, run_root, stage_root
from subnet.protocol.api import ExportInfo
from subnet.protocol.wire import decode
from subnet.run.config import RunConfig
from subnet.store.disk import atomic_write, full_disk_is_ours
from subnet.timing import Deadline
from subnet.words import BlobHash

Say = Callable[[str], None]
_BATCH_BYTES = 64 << 20
_SIZE_UNKNOWN = 0


@dataclass(frozen=True)
class Exported:
    """What was written where."""

    directory: Path
    step: int
    root: str
    num_parameters: int
    checked: CheckedLogits | None = None
    """With ``check``: logits that are equal in plain ``transformers`` and in the swarm's stages."""


def export_run(
    remote: Remote,
    name: str,
    out_dir: Path,
    *,
    step: int | None = None,
    check: bool = False,
    merged: bool = False,
    deadline: Deadline,
    say: Say = lambda _: None,
) -> Exported:
    """Fetch the state after ``step`` updates (None: the newest snapshot of all stages) and write it to ``out_dir``.

    A step without a snapshot is made from the one before it and the log of merged gradients. Of a run that trains adapters
    they are written, as ``peft`` loads them, or with ``merged`` the model that they are added into. With ``check`` the
    logits of the export are compared with the stages' (:mod:`iota.export_check`).
    """
    out_dir = out_dir.expanduser().absolute()
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir} exists and is not an empty directory", hint="choose a new directory")
    info = remote.export_info(name, step, deadline)
    config = decode(info.config, RunConfig, limit_bytes=1 << 20, what="the run's config")
    lora = config.trainable.kind == "lora"
    _check_wishes(lora, merged, check)
    architecture = load_architecture(info.model_config)
    plan = plan_model(config, architecture, info.cuts)
    with full_disk_is_ours(str(out_dir.parent)):
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.fetch.", dir=out_dir.parent))
    try:
        fetch = _Fetcher(remote, name, scratch, deadline)
        entries = _checked_entries(fetch, info, plan, say)
        specs = plan.canonical
        missing = [spec.name for spec in specs if spec.name not in entries]
        if missing:
            raise NotFound(f"the snapshots of step {info.step} lack {missing[0]}", hint="export another step")
        fetched = adapter_specs(plan) if lora and not merged and not check else specs
        chunks = [ref for spec in fetched for ref in _refs(entries[spec.name])]
        say(f"{len(chunks)} chunks, {sum(ref.size_bytes for ref in chunks) / 1e6:.1f} MB")
        fetch.all(chunks)
        for spec in fetched:
            _check_leaf(spec, entries[spec.name], fetch)
        root = run_root(info.step, [entries[spec.name].leaf for spec in specs]).hex()
        if info.run_root is not None and info.run_root != root:
            raise HashMismatch(
                f"the run root is {root}, the validator says {info.run_root}", hint="export another step"
            )
        tokenizer = scratch / "tokenizer.json"
        atomic_write(tokenizer, fetch.small(info.tokenizer), durable=False)
        written = adapter_specs(plan) if lora and not merged else base_specs(plan)
        count = sum(spec.num_elements for spec in written)
        described: dict[str, Any] = {
            "step": info.step,
            "root": root,
            "num_parameters": count,
            "adapter": lora and not merged,
        }
        card = model_card(config, architecture.model_config, **described)
        beside: dict[str, Any] = {"tokenizer": tokenizer, "carried": _carried(fetch, info), "card": card}

        def read(spec: TensorSpec) -> torch.Tensor:
            return _tensor(spec, entries[spec.name], fetch)

        if lora and not merged:
            write_adapter(out_dir, plan, read, **beside)
        else:
            write_pretrained(
                out_dir, info.model_config, written, lambda spec: merged_tensor(plan, spec, read), **beside
            )
        checked = None
        if check:
            checked = (check_adapter_logits if lora else check_logits)(out_dir, plan, read)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Exported(out_dir, info.step, root, count, checked)


def _check_wishes(lora: bool, merged: bool, check: bool) -> None:
    if merged and not lora:
        raise ConfigError(
            "--merged is for runs that train adapters", hint="leave it out: this export is the whole model"
        )
    if merged and check:
        raise ConfigError(
            "--check doesn't go with --merged: adding adapters into the weights rounds them, so logits differ a little",
            hint="check the adapter (without --merged), then export merged",
        )


def _carried(fetch: _Fetcher, info: ExportInfo) -> dict[str, bytes]:
    if not info.carried:
        return {}
    return decode(
        fetch.small(info.carried), dict[str, bytes], limit_bytes=2 * LIMIT_CARRIED_BYTES, what="carried files"
    )


def _checked_entries(fetch: _Fetcher, info: ExportInfo, plan: ModelPlan, say: Say) -> dict[str, TensorEntry]:
    """The entries of all tensors by name; a tensor that two stages hold must be the same in both."""
    found: dict[str, TensorEntry] = {}
    if info.states:
        for manifest in replayed_snapshots(plan, info.step, info.states, fetch.small, fetch.directory, say):
            _take(manifest, found)
    for snapshot in info.snapshots:
        manifest: SnapshotManifest = decode_manifest(fetch.small(snapshot.manifest))
        if manifest.step != info.step:
            raise InputError(f"the snapshot of stage {snapshot.stage} is of step {manifest.step}, not {info.step}")
        if snapshot.root and info.step > 0:
            root = stage_root(info.step, [entry.leaf for entry in manifest.entries]).hex()
            if root != snapshot.root:
                raise HashMismatch(f"the snapshot of stage {snapshot.stage} has root {root}, not {snapshot.root}")
        _take(manifest, found)
    return found


def _take(manifest: SnapshotManifest, found: dict[str, TensorEntry]) -> None:
    for entry in manifest.entries:
        if found.setdefault(entry.name, entry).leaf != entry.leaf:
            raise HashMismatch(f"two stages disagree about {entry.name}", hint="export another step")


def _refs(entry: TensorEntry) -> list[ChunkRef]:
    return [ref for kind in kinds_of(entry) for ref in entry.arrays[kind]]


def _array(spec: TensorSpec, kind: str, entry: TensorEntry, fetch: _Fetcher) -> bytearray:
    data = bytearray(array_bytes(spec, kind))
    fill_array(entry.arrays[kind], memoryview(data), fetch.chunk, what=f"{spec.name}.{kind}")
    return data


def _check_leaf(spec: TensorSpec, entry: TensorEntry, fetch: _Fetcher) -> None:
    if entry.shape != spec.shape:
        raise InputError(f"{spec.name} is {entry.shape} in the snapshot, not {spec.shape}")
    arrays = [_array(spec, kind, entry, fetch) for kind in kinds_of(entry)]
    if leaf_hash(spec.name, spec.shape, *arrays) != entry.leaf:
        raise HashMismatch(f"{spec.name} fails its leaf hash", hint="export another step")


def _tensor(spec: TensorSpec, entry: TensorEntry, fetch: _Fetcher) -> torch.Tensor:
    data = _array(spec, "weight", entry, fetch)
    return torch.frombuffer(data, dtype=torch.float32).reshape(spec.shape)


@dataclass(frozen=True)
class Parent:
    """A state of a run as files of a scratch directory, every leaf checked; what another run may begin from."""

    info: ExportInfo
    config: RunConfig
    plan: ModelPlan
    entries: dict[str, TensorEntry]
    _fetch: _Fetcher

    @property
    def directory(self) -> Path:
        """The scratch directory."""
        return self._fetch.directory

    def small(self, blob: str) -> bytes:
        """A blob of the run, checked."""
        return self._fetch.small(blob)

    def array(self, spec: TensorSpec, kind: str) -> bytearray:
        """One array of a tensor's state."""
        return _array(spec, kind, self.entries[spec.name], self._fetch)


@contextmanager
def open_parent(
    remote: Remote, name: str, step: int | None, near: Path, deadline: Deadline, say: Say = lambda _: None
) -> Generator[Parent]:
    """The state after ``step`` updates (None: the newest snapshot) of a run, fetched beside ``near``; gone afterwards."""
    info = remote.export_info(name, step, deadline)
    config = decode(info.config, RunConfig, limit_bytes=1 << 20, what="the run's config")
    plan = plan_model(config, load_architecture(info.model_config), info.cuts)
    with full_disk_is_ours(str(near)):
        near.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".state.", dir=near))
    try:
        fetch = _Fetcher(remote, name, scratch, deadline)
        entries = _checked_entries(fetch, info, plan, say)
        missing = [spec.name for spec in plan.canonical if spec.name not in entries]
        if missing:
            raise NotFound(f"the snapshots of step {info.step} lack {missing[0]}", hint="name another step")
        fetch.all([ref for spec in plan.canonical for ref in _refs(entries[spec.name])])
        for spec in plan.canonical:
            _check_leaf(spec, entries[spec.name], fetch)
        yield Parent(info, config, plan, entries, fetch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Fetcher:
    """Blobs of the run, kept in a scratch directory until the export has ended."""

    def __init__(self, remote: Remote, run: str, directory: Path, deadline: Deadline) -> None:
        self._remote, self._run, self.directory, self._deadline = remote, run, directory, deadline

    def small(self, blob: str) -> bytes:
        """A blob whose size isn't known beforehand, checked."""
        data = bytes(self._remote.get(self._run, [(blob, _SIZE_UNKNOWN)], self._deadline)[0])
        if blake3(data).hexdigest() != blob:
            raise HashMismatch(f"blob {blob[:10]} is not what its hash says")
        return data

    def all(self, refs: list[ChunkRef]) -> None:
        todo = [ref for ref in dict.fromkeys(refs) if not (self.directory / ref.hash).exists()]
        while todo:
            size_bytes, count = 0, 0
            while count < len(todo) and (count == 0 or size_bytes + todo[count].size_bytes <= _BATCH_BYTES):
                size_bytes += todo[count].size_bytes
                count += 1
            batch, todo = todo[:count], todo[count:]
            pairs: list[tuple[str, int]] = [(ref.hash, ref.size_bytes) for ref in batch]
            for ref, data in zip(batch, self._remote.get(self._run, pairs, self._deadline), strict=True):
                atomic_write(self.directory / ref.hash, data, durable=False)

    def chunk(self, ref: ChunkRef) -> bytes:
        """The chunk's bytes; whoever takes them checks their hash."""
        return (self.directory / BlobHash(ref.hash)).read_bytes()
