"""A new run that begins where another one was: weights, and by choice moments, of a sealed step of it, with changed settings.

What is taken over is checked as an export is. Scales are calibrated anew, so a fork with nothing changed is the run it comes
from up to rounding, not to the bit.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from iota.export import Parent, open_parent
from iota.remote import Remote
from iota.submission import check_tokenizers, initial_kinds
from subnet.errors import ConfigError
from subnet.model.plan import ModelPlan
from subnet.model.snapshots import BlobSink, SnapshotManifest, TensorEntry, array_bytes, store_tensor
from subnet.numerics.layout import TensorSpec
from subnet.numerics.roots import leaf_hash
from subnet.numerics.state_arrays import SCALES
from subnet.run.config import ModelSection, RunConfig
from subnet.store.disk import atomic_write
from subnet.timing import Deadline
from subnet.words import BlobHash


@dataclass(frozen=True)
class Fork:
    """Where a run begins: the state after ``step`` updates of ``name``; ``weights_only``: with new moments, from step 0."""

    name: str
    step: int | None = None
    weights_only: bool = False

    @contextmanager
    def open(self, remote: Remote, near: Path, deadline: Deadline) -> Generator[Start]:
        """Its state, fetched into a directory beside ``near`` that is gone afterwards. NotFound where there is none."""
        with open_parent(remote, self.name, self.step, near, deadline) as parent:
            yield Start(parent, self.weights_only)


class Start:
    """What a fork takes over from its parent."""

    def __init__(self, parent: Parent, weights_only: bool) -> None:
        self.parent, self.weights_only = parent, weights_only

    def settings(self, config: RunConfig, directory: Path) -> RunConfig:
        """The fork's run file with the parent's model, its tokenizer and, where it goes on, its place in data and schedule."""
        parent = self.parent
        if config.run.name == parent.config.run.name:
            raise ConfigError(
                f"run.name = {config.run.name!r} is the name of the run itself", hint="give the fork its own"
            )
        model = ModelSection(config=dict(parent.info.model_config), attention=config.model.attention)
        first = 0 if self.weights_only else parent.config.run.first_step + parent.info.step
        data = config.data
        if not data.tokenizer:
            path = directory / "tokenizers" / f"{parent.info.tokenizer}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                atomic_write(path, parent.small(parent.info.tokenizer))
            data = msgspec.structs.replace(data, tokenizer=str(path))
        run = msgspec.structs.replace(config.run, first_step=first)
        return msgspec.structs.replace(config, run=run, model=model, data=data)

    def check(self, plan: ModelPlan, tokenizer: Path) -> None:
        """Raises ConfigError unless the fork's tensors, state and tokenizer are the parent's."""
        own = {spec.name: spec.shape for spec in plan.canonical}
        theirs = {spec.name: spec.shape for spec in self.parent.plan.canonical}
        odd = min((name for name in {**own, **theirs} if own.get(name) != theirs.get(name)), default=None)
        if odd is not None:
            shapes = f"{own.get(odd, 'missing')} here, {theirs.get(odd, 'missing')} in {self.parent.config.run.name}"
            raise ConfigError(f"the fork trains other tensors: {odd} is {shapes}", hint="keep [model] and [trainable]")
        ours, parents = initial_kinds(plan.config), initial_kinds(self.parent.config)
        if not self.weights_only and ours != parents:
            raise ConfigError(
                f"the fork's optimizer keeps {', '.join(ours)}, the run's {', '.join(parents)}",
                hint="keep optimizer.state_bits (and [lanes]), or take the weights only: --weights-only",
            )
        known = self.parent.directory / "tokenizer.parent.json"
        atomic_write(known, self.parent.small(self.parent.info.tokenizer), durable=False)
        check_tokenizers(tokenizer, known)

    def write(self, plan: ModelPlan, directory: Path) -> SnapshotManifest:
        """Snapshot 0 of the fork, its chunks as files of ``directory``."""

        def put(blob: BlobHash, data: memoryview) -> None:
            if not (directory / blob).exists():
                atomic_write(directory / blob, data, durable=False)

        return SnapshotManifest(0, tuple(self._entry(plan, spec, put) for spec in plan.canonical))

    def _entry(self, plan: ModelPlan, spec: TensorSpec, put: BlobSink) -> TensorEntry:
        frozen = not plan.is_trainable(spec.name)
        kinds = ("weight",) if frozen else initial_kinds(plan.config)
        taken = ("weight",) if self.weights_only else tuple(kind for kind in kinds if kind not in SCALES)
        there = self.parent.entries[spec.name].arrays
        arrays: dict[str, memoryview | None] = dict.fromkeys(kinds)
        for kind in taken:
            if kind in there:
                arrays[kind] = memoryview(self.parent.array(spec, kind))
        hashed = (arrays[kind] or memoryview(bytes(array_bytes(spec, kind))) for kind in kinds)
        leaf = leaf_hash(spec.name, spec.shape, *hashed)
        return store_tensor(spec, arrays, leaf, put, frozen=frozen)
