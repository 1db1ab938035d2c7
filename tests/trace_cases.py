"""A run folded event by event with a real store behind it: members whose slices, sums and words a test can falsify."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from blake3 import blake3

from subnet.model.plan import ModelPlan
from subnet.model.snapshots import KINDS, LIMIT_BEFORE, SnapshotManifest, store_tensor
from subnet.numerics import fixed_point
from subnet.numerics.fingerprint import slice_fingerprint
from subnet.numerics.layout import Section, build_layout, stage_names
from subnet.numerics.packing import pack_slice
from subnet.numerics.roots import leaf_hash, stage_root
from subnet.numerics.slices import encode_arrays, merge_slices, parse_slice, sum_bits
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.apply import apply
from subnet.run.schedule import norm_and_coefficient, step_scalars
from subnet.store.base import Hold
from subnet.store.embedded import EmbeddedStore
from subnet.timing import Deadline
from subnet.words import BlobHash, Commitment, GroupShape, Member
from validator.decision import TraceVerdict

SEED = "5e" * 32
LOG, EVIDENCE = Hold("log", "run", 0), Hold("evidence", "run", 0)


def soon() -> Deadline:
    return Deadline.after(30)


def cut_small(plan: ModelPlan, partitions: int = 3) -> ModelPlan:
    """The same plan with several partitions a section, small as it is."""
    tied = plan.units.tied
    own = [tuple(spec for spec in held if tied is None or spec.name != tied.name) for held in plan.stage_tensors]
    qmax = plan.config.qmax
    layout = build_layout(own, tied=tied, qmax=qmax, target_partitions=partitions, min_partition_elements=1)
    plan.__dict__["layout"] = layout
    return plan


@dataclass
class Lies:
    """What to falsify of one group's merge; each is called with what honesty gives."""

    slice: Callable[[Member, int, bytes], bytes] = lambda _m, _p, data: data
    """What is committed to and stored; the fingerprint is of the honest slice."""
    print: Callable[[Member, int, tuple[int, ...]], tuple[int, ...]] = lambda _m, _p, value: value
    merged: Callable[[int, bytes, int], tuple[bytes, int]] = lambda _p, data, squares: (data, squares)
    blob: Callable[[int, bytes], bytes] = lambda _p, data: data
    """What is stored under the merged partition's hash."""
    withhold: Callable[[Member, int], bool] = lambda _m, _p: False
    checks: Callable[[Member], bool] = lambda _: True


@dataclass
class World:
    plan: ModelPlan
    store: EmbeddedStore
    replicas: int = 2
    state: st.RunState = field(default_factory=st.new_state)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))
    scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """(decayed, limit) by section, as a replica has them."""
    limits_before: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of the state before, which the sums of the open step are in where steps overlap."""
    puts: list[tuple[bytes, Hold]] = field(default_factory=list)

    def emit(self, event: ev.AnyEvent) -> None:
        apply(self.state, event)

    def begin(self) -> None:
        plan, layout = self.plan, self.plan.layout
        groups = tuple(
            GroupShape(group.stages, tuple(layout.sections[p.section].stages for p in group.partitions))
            for group in layout.groups
        )
        units = plan.units
        self.emit(
            ev.RunPlanned(
                run_id="run",
                config=plan.config,
                model_config=dict(plan.model_config),
                unit_tensors=(),
                unit_flops_per_token=units.unit_flops_per_token,
                tied=None,
                cuts=plan.cuts,
                groups=groups,
                data="",
                snapshot="",
                tokenizer="",
                submitter="",
            )
        )
        self.emit(ev.TermStarted(1, "validator", "nonce"))
        for stage in range(plan.num_stages):
            for replica in range(self.replicas):
                key = Member(f"miner-{stage}-{replica}", 1, self.state.num_joined + 1)
                self.emit(ev.Joined(key, f"cold-{replica}", stage, "boot", "127.0.0.1", 1))

    def members(self, stage: int) -> list[Member]:
        return st.members_of(self.state, stage)

    def open_step(self) -> None:
        """Everybody up to date, every item of the next step done."""
        step = self.state.next_step
        for member, info in sorted(self.state.members.items()):
            if info.version != step:
                self.emit(ev.Updated(member, step, f"root-{info.stage}"))
        count = self.plan.config.pipeline.microbatches
        self.emit(ev.StepPlanned(step, count, 0, None if step < 0 else step_scalars(self.plan.config, step)))
        for stage in range(self.plan.num_stages):
            keys = self.members(stage)
            for m in range(count):
                # unevenly, so that widths differ
                key = keys[0] if m < count - 1 else keys[-1]
                self.emit(ev.Leased(step, m, stage, key, 1))
                self.emit(ev.Backwarded(step, m, stage, 1, "", 0 if stage == self.plan.num_stages - 1 else None))

    def exponents(self, section: Section) -> np.ndarray | None:
        if section.index not in self.scales:
            return None
        delayed = self.plan.config.pipeline.update_delay
        limit = self.limits_before[section.index] if delayed else self.scales[section.index][1]
        return fixed_point.exponents(limit, section.leaf_qmax).numpy()

    def honest_slice(self, section: Section, partition, num_items: int) -> bytes:
        bound = num_items * (section.item_bound // len(section.stages))
        values = self.rng.integers(-bound, bound + 1, partition.num_elements)
        maxima = (10.0 ** self.rng.uniform(-9, 1, partition.num_blocks)).astype(np.float32)
        given = None if self.state.next_step < 0 else values
        return bytes(encode_arrays(section, partition, num_items, given, maxima))

    def put(self, data: bytes, hold: Hold) -> str:
        """Stored by the end of the step's merge."""
        self.puts.append((data, hold))
        return blake3(data).hexdigest()

    async def flush(self) -> None:
        puts, self.puts = self.puts, []
        await asyncio.gather(*(self.store.put_blob(data, hold, deadline=soon()) for data, hold in puts))

    async def merge(self, group: int, lies: Lies | None = None, *, packed: bool = False) -> TraceVerdict:
        """Up to the checks; with a trace started if one of them isn't OK."""
        lies, layout, step = lies or Lies(), self.plan.layout, self.state.next_step
        count = self.plan.config.pipeline.microbatches
        self.emit(ev.Frozen(step, group, 1))
        honest: dict[tuple[Member, int], bytes] = {}
        stored: dict[tuple[Member, int], bytes] = {}
        entries: list[Commitment] = []
        for member in sorted(st.holders(self.state, group)):
            stage, done = self.state.members[member].stage, st.done_set(self.state, member)
            hashes: list[tuple[int, str]] = []
            for p in st.partitions_of(self.state, group, stage):
                partition = layout.groups[group].partitions[p]
                data = honest[member, p] = self.honest_slice(layout.sections[partition.section], partition, len(done))
                stored[member, p] = lies.slice(member, p, data)
                hashes.append((p, blake3(stored[member, p]).hexdigest()))
                if not lies.withhold(member, p):
                    self.put(stored[member, p], EVIDENCE)
            entries.append(Commitment(member, stage, done, tuple(hashes)))
            self.emit(ev.Committed(step, group, 1, entries[-1]))
        shape = st.group_shape(self.state, group)
        owners = tuple(
            st.ready(self.state, stages[p % len(stages)])[p % self.replicas]
            for p, stages in enumerate(shape.partitions)
        )
        self.emit(ev.ReduceOrdered(step, group, 1, tuple(entries), owners))
        prints: dict[Member, list[tuple[int, tuple[int, ...]]]] = {entry.member: [] for entry in entries}
        for partition in layout.groups[group].partitions:
            section, p = layout.sections[partition.section], partition.index
            slices = [(honest[e.member, p], len(e.microbatches)) for e in entries if (e.member, p) in honest]
            data, squares, _ = merge_slices(
                section, partition, slices, total_items=count, exponents=self.exponents(section)
            )
            said, squares = lies.merged(p, bytes(data), squares)
            form = bytes(pack_slice(section, partition, said, count)) if packed and step >= 0 else said
            blob_bytes = lies.blob(p, form)
            blob = self.put(blob_bytes, LOG)
            event = ev.PartitionMerged(
                step, group, 1, p, blake3(said).hexdigest(), blob, len(blob_bytes), format(squares, "x")
            )
            self.emit(event)
            width = sum_bits(count, section.item_bound)
            for e in entries:
                if (e.member, p) not in honest:
                    continue
                values, maxima = parse_slice(
                    section, partition, honest[e.member, p], len(e.microbatches), calibration=step < 0
                )
                value: tuple[int, ...] = ()
                if values is not None:
                    value = slice_fingerprint(values, maxima, bytes.fromhex(SEED), width, p)
                prints[e.member].append((p, lies.print(e.member, p, value)))
        await self.flush()
        self.emit(ev.SeedRevealed(step, group, 1, SEED))
        for e in entries:
            self.emit(ev.Fingerprinted(step, group, 1, e.member, e.stage, tuple(prints[e.member])))
        for stage in shape.stages:
            for member in st.ready(self.state, stage):
                self.emit(ev.Checked(step, group, 1, member, lies.checks(member)))
        merge = st.merge_of(self.state, step, group)
        assert merge is not None
        if not all(merge.checks.values()):
            self.emit(ev.TraceStarted(step, group, 1))
        return TraceVerdict(step, group, 1, patient=False)

    async def seal_step(self, *, packed: bool = False) -> None:
        """An honest step to its end, and every replica's scales after it."""
        self.open_step()
        step, layout, squares = self.state.next_step, self.plan.layout, 0
        maxima: dict[int, torch.Tensor] = {}
        for group in layout.groups:
            await self.merge(group.index, packed=packed)
            merge = st.merge_of(self.state, step, group.index)
            assert merge is not None
            parts = [merge.merged[p.index] for p in group.partitions]
            squares += sum(int(part.squares, 16) for part in parts)
            self.emit(
                ev.StageSealed(
                    step=step,
                    group=group.index,
                    version=1,
                    entries=merge.entries,
                    hashes=tuple(part.hash for part in parts),
                    blobs=tuple((part.blob, part.size_bytes) for part in parts),
                    squares="0",
                )
            )
            for partition, part in zip(group.partitions, parts, strict=True):
                data = await self.store.get_blob(BlobHash(part.blob), part.size_bytes, deadline=soon())
                tail = torch.frombuffer(data[-4 * partition.num_blocks :], dtype=torch.float32)
                section = layout.sections[partition.section]
                whole = maxima.setdefault(section.index, torch.zeros(section.num_blocks))
                whole[partition.block_start : partition.block_end] = tail
        count = self.plan.config.pipeline.microbatches
        _, coefficient = norm_and_coefficient(squares, count, 1.0)
        self.emit(ev.StepSealed(step, count, 0, coefficient, 0, 1))
        for section in layout.sections:
            empty = torch.zeros(section.num_blocks)
            decayed, limit = self.scales.get(section.index, (empty, empty))
            self.scales[section.index] = fixed_point.update_scales(
                section, decayed, limit, maxima[section.index], first=step < 0
            )
            self.limits_before[section.index] = self.scales[section.index][1] if step < 0 else limit

    async def store_snapshot(self, stage: int, falsify: Callable[[str, np.ndarray], np.ndarray] | None = None) -> None:
        """Stored by the first replica and verified by the second; ``falsify`` gets kind and array, after its leaf."""
        layout, step = self.plan.layout, self.state.next_step
        chunks: list[bytes] = []
        entries, leaves = [], []
        located = {span.spec.name: (s, span) for s in layout.sections for span in s.tensors}
        for name in stage_names(layout, stage):
            section, span = located[name]
            blocks = slice(span.block_start, span.block_start + span.num_blocks)
            decayed, limit = (scale[blocks].numpy().copy() for scale in self.scales[section.index])
            elements = [self.rng.standard_normal(span.num_elements).astype(np.float32) for _ in range(3)]
            arrays = dict(zip(KINDS, [*elements, decayed, limit], strict=True))
            if self.plan.config.pipeline.update_delay:
                arrays[LIMIT_BEFORE] = self.limits_before[section.index][blocks].numpy().copy()
            leaf = leaf_hash(name, span.spec.shape, *(array.data for array in arrays.values()))
            if falsify is not None:
                arrays = {kind: falsify(kind, array) for kind, array in arrays.items()}
            views = {kind: array.data for kind, array in arrays.items()}
            entries.append(store_tensor(span.spec, views, leaf, lambda _, data: chunks.append(bytes(data))))
            leaves.append(leaf)
        for chunk in chunks:
            self.put(chunk, LOG)
        manifest = self.put(SnapshotManifest(step, tuple(entries)).encode(), LOG)
        await self.flush()
        root = stage_root(step, leaves).hex()
        first, second = self.members(stage)[:2]
        self.emit(ev.Updated(first, step, root))
        self.emit(ev.SnapshotStored(step, stage, first, manifest, root))
        self.emit(ev.Updated(second, step, root))
